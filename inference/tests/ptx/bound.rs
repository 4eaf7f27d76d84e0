//! Computes the least time that a pass can take on a GPU. In this model only the counts in `ceilings.txt` and NVIDIA's figures of the GPU
//! limit a pass. docs/gpu-kernels.md has the table, and says what the model leaves out.
//!
//! `VRAMQ_TEST_WRITE_BOUNDS=1` writes the table again: after a change of the kernels, review the difference before you commit it.

use std::path::Path;

use super::assembler::{Figures, ceilings};

/// What a GPU does at best, at the clock of NVIDIA's peak figures.
struct Gpu {
    name: &'static str,
    architecture: &'static str,
    multiprocessors: f64,
    hertz: f64,
    bytes_per_second: f64,
    /// Cycles of a quarter of a multiprocessor for an HMMA of 16x8x16, whose sums are in f32.
    hmma_cycles: f64,
    /// Instructions of a warp in one round of a linear map with large tiles, by the shortest way that makes all copies of aligned
    /// rows. `ceilings.txt` counts all ways.
    linear_instructions: u32,
}

const GPUS: [Gpu; 2] = [
    Gpu {
        name: "A100 (80 GB)",
        architecture: "sm_80",
        multiprocessors: 108.0,
        hertz: 1.41e9,
        bytes_per_second: 2.039e12,
        hmma_cycles: 8.0,
        linear_instructions: 165,
    },
    Gpu {
        name: "H200",
        architecture: "sm_90",
        multiprocessors: 132.0,
        hertz: 1.83e9,
        bytes_per_second: 4.8e12,
        hmma_cycles: 4.0,
        linear_instructions: 173,
    },
];

/// A BERT, and a pass of it.
struct Pass {
    name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    feed_forward: usize,
    tokens: usize,
}

const PASSES: [Pass; 3] = [
    Pass { name: "MiniLM", layers: 6, hidden: 384, heads: 12, feed_forward: 1536, tokens: 32_768 },
    Pass { name: "BERT base", layers: 12, hidden: 768, heads: 12, feed_forward: 3072, tokens: 16_384 },
    Pass { name: "BERT large", layers: 24, hidden: 1024, heads: 16, feed_forward: 4096, tokens: 8192 },
];

/// Tokens of each text.
const TEXT: usize = 128;

/// As in kernels/linear.cu, with large tiles: rows and columns of a tile, elements along the inner dimension of a round, warps.
const TILE: usize = 128;
const STEP: usize = 32;
const LINEAR_WARPS: usize = 8;

/// As in kernels/attention.cu: queries of a block, keys of a round, warps.
const QUERIES: usize = 64;
const KEYS: usize = 64;
const ATTENTION_WARPS: usize = 4;

/// A warp's exponentials in a round of attention, and the cycles that a quarter of a multiprocessor takes for each.
const EXPONENTIALS: f64 = 34.0;
const EXPONENTIAL_CYCLES: f64 = 8.0;

const ELEMENT_BYTES: usize = 2;

/// The least seconds of a kernel, by each resource that limits it.
#[derive(Clone, Copy)]
struct Kernel {
    issue: f64,
    tensor_cores: f64,
    exponentials: f64,
    /// All that it reads and writes, once, without any cache.
    memory: f64,
}

impl Kernel {
    fn arithmetic(&self) -> f64 {
        self.issue.max(self.tensor_cores).max(self.exponentials)
    }
}

impl Gpu {
    fn figures(&self, kernel: &str) -> Figures {
        let key = ("f16-80".to_owned(), self.architecture.to_owned(), format!("{kernel}_f16"));
        ceilings()[&key]
    }

    /// A kernel of so many rounds of a warp, each with so many cycles, which reads and writes so many elements.
    fn kernel(&self, rounds: usize, cycles: [f64; 3], elements: usize) -> Kernel {
        let seconds = |cycles: f64| rounds as f64 * cycles / (4.0 * self.multiprocessors * self.hertz);
        let [issue, tensor_cores, exponentials] = cycles.map(seconds);
        let memory = (elements * ELEMENT_BYTES) as f64 / self.bytes_per_second;
        Kernel { issue, tensor_cores, exponentials, memory }
    }

    fn linear(&self, rows: usize, inner: usize, columns: usize) -> Kernel {
        let figures = self.figures("linear_large");
        let tiles = rows.div_ceil(TILE) * columns.div_ceil(TILE);
        let cycles =
            [f64::from(self.linear_instructions), f64::from(figures.loop_hmma) * self.hmma_cycles, 0.0];
        let elements = rows * inner + inner * columns + rows * columns;
        self.kernel(tiles * LINEAR_WARPS * inner.div_ceil(STEP), cycles, elements)
    }

    fn attention(&self, pass: &Pass) -> Kernel {
        let figures = self.figures(&format!("attention_{}", pass.hidden / pass.heads));
        let warps = pass.tokens / TEXT * pass.heads * TEXT.div_ceil(QUERIES) * ATTENTION_WARPS;
        let cycles = [
            f64::from(figures.loop_instructions),
            f64::from(figures.loop_hmma) * self.hmma_cycles,
            EXPONENTIALS * EXPONENTIAL_CYCLES,
        ];
        self.kernel(warps * TEXT.div_ceil(KEYS), cycles, 4 * pass.tokens * pass.hidden)
    }

    /// A kernel without a loop on tensor cores: only its memory counts.
    fn of_memory(&self, elements: usize) -> Kernel {
        self.kernel(0, [0.0; 3], elements)
    }

    fn kernels(&self, pass: &Pass) -> Vec<Kernel> {
        let Pass { layers, hidden, feed_forward, tokens, .. } = *pass;
        let norm = self.of_memory(3 * tokens * hidden);
        let layer = [
            self.linear(tokens, hidden, 3 * hidden),
            self.attention(pass),
            self.linear(tokens, hidden, hidden),
            norm,
            self.linear(tokens, hidden, feed_forward),
            self.linear(tokens, feed_forward, hidden),
            norm,
        ];
        let embed = self.of_memory(2 * tokens * hidden);
        let pool = self.of_memory(tokens * hidden + 2 * tokens / TEXT * hidden);
        [vec![embed], layer.repeat(layers), vec![pool]].concat()
    }

    fn row(&self, pass: &Pass) -> String {
        let kernels = self.kernels(pass);
        let ms = |of: fn(&Kernel) -> f64| kernels.iter().map(of).sum::<f64>() * 1e3;
        let least = ms(Kernel::arithmetic);
        let million_tokens = pass.tokens as f64 / least / 1e3;
        format!(
            "| {} | {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {million_tokens:.1} |\n",
            pass.name,
            self.name,
            pass.tokens,
            ms(|kernel| kernel.issue),
            ms(|kernel| kernel.tensor_cores),
            ms(|kernel| kernel.memory),
            least,
            ms(|kernel| kernel.arithmetic().max(kernel.memory)),
        )
    }
}

const HEAD: &str = "| model, f16 | GPU | tokens of the pass | instructions | tensor cores | memory | at least | without caches | million \
                    tokens a second at most |\n|---|---|---|---|---|---|---|---|---|\n";

fn table() -> String {
    let rows = GPUS.iter().flat_map(|gpu| PASSES.iter().map(|pass| gpu.row(pass)));
    std::iter::once(HEAD.to_owned()).chain(rows).collect()
}

#[test]
fn the_least_times_in_the_docs_follow_from_the_counts() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu-kernels.md");
    let docs = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = docs.split_once(HEAD).expect("docs/gpu-kernels.md has no table of least times");
    let (found, after) = rest.split_once("\n\n").unwrap();
    let table = table();
    if std::env::var_os("VRAMQ_TEST_WRITE_BOUNDS").is_some() {
        std::fs::write(&path, format!("{before}{table}\n{after}")).unwrap();
        return;
    }
    assert_eq!(
        format!("{HEAD}{found}\n"),
        table,
        "VRAMQ_TEST_WRITE_BOUNDS=1 writes docs/gpu-kernels.md again"
    );
}

/// A kernel's row in the table of instruction counts: the name that begins it, the kernel, and a warp's exponentials in a round.
const COUNTED: [(&str, &str, f64); 5] = [
    ("attention, heads of 16", "attention_16", EXPONENTIALS),
    ("attention, heads of 32 (MiniLM)", "attention_32", EXPONENTIALS),
    ("attention, heads of 64 (BERT)", "attention_64", EXPONENTIALS),
    ("attention, heads of 128 (Qwen3)", "attention_128", 18.0),
    ("linear, large tiles", "linear_large", 0.0),
];

#[test]
fn the_counts_and_bounds_in_the_docs_are_those_of_the_code() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu-kernels.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    for (name, kernel, exponentials) in COUNTED {
        let row = docs.lines().find_map(|line| line.strip_prefix(&format!("| {name} | "))).unwrap();
        let cells: Vec<&str> = row.split(" | ").map(|cell| cell.trim_end_matches(" |")).collect();
        for (gpu, columns) in GPUS.iter().zip([&cells[1..3], &cells[3..5]]) {
            let Figures { loop_instructions, loop_hmma, .. } = gpu.figures(kernel);
            let instructions = match kernel {
                "linear_large" => gpu.linear_instructions,
                _ => loop_instructions,
            };
            let tensor_cores = f64::from(loop_hmma) * gpu.hmma_cycles;
            let cycles = tensor_cores.max(f64::from(instructions)).max(exponentials * EXPONENTIAL_CYCLES);
            let now = columns.iter().map(|cell| cell.split_once(" → ").unwrap().1);
            let expected = [instructions.to_string(), format!("{:.0} %", 100.0 * tensor_cores / cycles)];
            assert!(now.eq(expected.iter()), "{name}, {}: {columns:?}, not {expected:?}", gpu.architecture);
            assert_eq!(cells[0], loop_hmma.to_string(), "{name}");
        }
    }
}

#[test]
fn the_shortest_way_through_a_linear_maps_loop_is_one_of_those_that_are_counted() {
    for gpu in GPUS {
        for kernel in ["linear_large", "linear_large_gelu"] {
            let Figures { loop_instructions, loop_hmma, .. } = gpu.figures(kernel);
            let shortest = gpu.linear_instructions;
            assert!(loop_hmma < shortest && shortest <= loop_instructions, "{}: {kernel}", gpu.architecture);
        }
    }
}

/// Products at NVIDIA's peak take as long as the model says that tensor cores take for them.
#[test]
fn tensor_cores_reach_the_peak_and_no_more() {
    for (gpu, peak) in GPUS.iter().zip([312e12, 989e12]) {
        let (rows, inner, columns) = (8192, 1024, 4096);
        let seconds = gpu.linear(rows, inner, columns).tensor_cores;
        let reached = (2 * rows * inner * columns) as f64 / seconds;
        assert!((reached / peak - 1.0).abs() < 2e-3, "{}: {reached:e}", gpu.name);
    }
}
