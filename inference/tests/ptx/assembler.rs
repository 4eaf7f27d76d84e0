//! Assembles the embedded PTX for every architecture with NVIDIA's assembler, and checks the machine code with its disassembler:
//! registers and shared memory of each kernel, no spills, tensor core instructions, and the number of other instructions in the
//! hot loops.
//!
//! Drivers have the compiler of their own version. So assemblers of older and newer versions of CUDA have to take the texts, too.
//!
//! `ceilings.txt` has the figures that no kernel may exceed. `VRAMQ_TEST_WRITE_CEILINGS=1` writes it again: after a change of the
//! kernels, review the difference before you commit it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use vramq_inference::engine::encoder::cuda::compile::usage;

use super::harness::unpack;

const CEILINGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ptx/ceilings.txt");

/// The tools that `scripts/setup cuda-tools` fetched.
pub fn tools() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/cuda-tools");
    std::env::var_os("VRAMQ_TEST_CUDA_TOOLS").map_or_else(default, PathBuf::from)
}

/// Runs a tool. Returns what it printed on both outputs.
fn run(tool: &str, arguments: &[&str], file: &Path) -> (String, String) {
    let path = tools().join("bin").join(tool);
    let mut command = Command::new(&path);
    let output = command.args(arguments).arg(file).output();
    let output =
        output.unwrap_or_else(|error| panic!("{}: {error}: run scripts/setup cuda-tools", path.display()));
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{tool} {arguments:?} {}: {err}", file.display());
    (out, err)
}

/// What a kernel is made of on an architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    registers: u32,
    shared_bytes: u32,
    /// Tensor core instructions, and loads of their factors from shared memory, in the whole kernel.
    hmma: u32,
    ldsm: u32,
    /// Of the innermost loop with the most tensor core instructions: its instructions, and how many of them are for tensor cores.
    /// All paths through the loop count, even those that a launch does not take. In linear maps these are the copies of rows that
    /// are no whole chunks.
    pub loop_instructions: u32,
    pub loop_hmma: u32,
}

/// By text, architecture and kernel.
pub type Table = BTreeMap<(String, String, String), Figures>;

/// What `ceilings.txt` has.
pub fn ceilings() -> Table {
    from_text(&std::fs::read_to_string(CEILINGS).unwrap_or_default())
}

const HEAD: &str = "# Of each kernel: registers, bytes of shared memory, HMMA, LDSM, and instructions and HMMA of its hottest loop.\n\
                    # Written by the tests in assembler.rs; see there.\n";

fn to_text(table: &Table) -> String {
    let mut text = HEAD.to_owned();
    for ((file, architecture, kernel), figures) in table {
        let Figures { registers, shared_bytes, hmma, ldsm, loop_instructions, loop_hmma } = figures;
        let counts = format!("{hmma} {ldsm} {loop_instructions} {loop_hmma}");
        writeln!(text, "{file} {architecture} {kernel} {registers} {shared_bytes} {counts}").unwrap();
    }
    text
}

fn from_text(text: &str) -> Table {
    let mut table = Table::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [file, architecture, kernel, figures @ ..] = &words[..] else { panic!("{line}") };
        let numbers: Vec<u32> = figures.iter().map(|figure| figure.parse().unwrap()).collect();
        let [registers, shared_bytes, hmma, ldsm, loop_instructions, loop_hmma] = numbers[..] else {
            panic!("{line}")
        };
        let key = [file, architecture, kernel].map(|word| (*word).to_owned());
        table.insert(
            key.into(),
            Figures { registers, shared_bytes, hmma, ldsm, loop_instructions, loop_hmma },
        );
    }
    table
}

/// Assembles a text, and reads what came of it.
fn figures_of(file: &str, architecture: &str) -> Table {
    let folder = tempfile::tempdir().unwrap();
    let (ptx, cubin) = (folder.path().join("kernels.ptx"), folder.path().join("kernels.cubin"));
    std::fs::write(&ptx, unpack(file)).unwrap();
    let arch = format!("-arch={architecture}");
    let (_, log) = run("ptxas", &["-v", &arch, "-o", cubin.to_str().unwrap()], &ptx);
    let (code, _) = run("nvdisasm", &["-c"], &cubin);
    let mut table = Table::new();
    for kernel in usage(&log) {
        assert_eq!(kernel.spilled_bytes, 0, "{file} for {architecture}: {kernel:?}");
        let section = format!(".text.{}:", kernel.name);
        let body = code.split(&section).nth(1).unwrap_or_else(|| panic!("no {section} in the machine code"));
        let figures = Figures {
            registers: kernel.registers,
            shared_bytes: kernel.shared_bytes,
            ..of_code(body.split(".text.").next().unwrap_or(body))
        };
        table.insert((file.to_owned(), architecture.to_owned(), kernel.name), figures);
    }
    table
}

/// Counts the instructions of a kernel in the disassembler's text, such as `/*0a10*/  @P0 BRA `(.L_x_3) ;`, with `.L_x_3:` before
/// the branch's target.
fn of_code(body: &str) -> Figures {
    let mut labels = BTreeMap::new();
    // For each instruction: whether it is HMMA, and whether it is LDSM.
    let mut code: Vec<(bool, bool)> = Vec::new();
    let mut loops = Vec::new();
    for line in body.lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, code.len());
        }
        let Some((_, instruction)) = line.split_once("*/").filter(|_| line.starts_with("/*")) else {
            continue;
        };
        let words: Vec<&str> = instruction.split_whitespace().collect();
        let Some(name) = words.iter().find(|word| !word.starts_with('@')) else { continue };
        if !name.starts_with(|c: char| c.is_ascii_uppercase()) {
            continue;
        }
        code.push((name.starts_with("HMMA"), name.starts_with("LDSM")));
        let target = instruction.split("`(").nth(1).and_then(|rest| rest.split(')').next());
        if let Some(start) = target.and_then(|target| labels.get(target))
            && name.starts_with("BRA")
        {
            loops.push(*start..code.len());
        }
    }
    let count = |range: std::ops::Range<usize>| code[range].iter().filter(|(hmma, _)| *hmma).count() as u32;
    loops.retain(|range| count(range.clone()) > 0);
    // With tensor core instructions, and no other such loop inside.
    let innermost = loops
        .iter()
        .filter(|outer| !loops.iter().any(|inner| outer.start < inner.start && inner.end <= outer.end));
    let hottest = innermost.max_by_key(|range| (count((*range).clone()), std::cmp::Reverse(range.len())));
    let hottest = hottest.cloned().unwrap_or(0..0);
    Figures {
        hmma: count(0..code.len()),
        ldsm: code.iter().filter(|(_, ldsm)| *ldsm).count() as u32,
        loop_instructions: hottest.len() as u32,
        loop_hmma: count(hottest),
        ..Figures::default()
    }
}

/// The texts, and the architectures whose drivers get them.
const F32: (&str, &[&str]) = ("f32-75", &["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]);
const F16_TURING: (&str, &[&str]) = ("f16-75", &["sm_75"]);
const F16: (&str, &[&str]) = ("f16-80", &["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]);
const BF16: (&str, &[&str]) = ("bf16-80", F16.1);

/// A text, within its ceilings.
fn assembles((file, architectures): (&str, &[&str])) {
    let found: Table = architectures.iter().flat_map(|architecture| figures_of(file, architecture)).collect();
    let kernels = unpack(file).matches(".entry ").count();
    assert_eq!(found.len(), kernels * architectures.len(), "{file}: kernels in the machine code");
    let mut table = ceilings();
    if std::env::var_os("VRAMQ_TEST_WRITE_CEILINGS").is_some() {
        table.retain(|(of, _, _), _| of != file);
        table.extend(found);
        std::fs::write(CEILINGS, to_text(&table)).unwrap();
        return;
    }
    let known: Vec<_> = table.keys().filter(|(of, _, _)| of == file).collect();
    assert_eq!(known, found.keys().collect::<Vec<_>>(), "ceilings.txt has other kernels");
    for (key, found) in &found {
        exceeds_nothing(key, *found, table[key]);
    }
}

fn exceeds_nothing(key: &(String, String, String), found: Figures, ceiling: Figures) {
    let what = format!("{key:?}: {found:?}, the ceiling is {ceiling:?}");
    assert!(found.registers <= ceiling.registers && found.shared_bytes <= ceiling.shared_bytes, "{what}");
    assert_eq!([found.hmma, found.ldsm], [ceiling.hmma, ceiling.ldsm], "{what}");
    // If no loop was found, no figure can exceed its ceiling.
    assert_eq!(found.loop_hmma > 0, ceiling.loop_hmma > 0, "{what}: a hot loop");
    // Compares instructions per HMMA, without a division.
    let [more, fewer] = [(found, ceiling), (ceiling, found)].map(|(a, b)| a.loop_instructions * b.loop_hmma);
    assert!(more <= fewer, "{what}");
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn f32_for_every_architecture() {
    assembles(F32);
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn f16_for_turing() {
    assembles(F16_TURING);
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn f16_since_ampere() {
    assembles(F16);
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn bf16_since_ampere() {
    assembles(BF16);
}

/// All texts, by the assembler of another version of CUDA, for those of their architectures that it knows. No kernel stores and loads more
/// bytes of registers than `spilled_max`.
fn another_assembles(assembler: &str, known: &[&str], spilled_max: u32) {
    let folder = tempfile::tempdir().unwrap();
    let (ptx, cubin) = (folder.path().join("kernels.ptx"), folder.path().join("kernels.cubin"));
    let ceilings = ceilings();
    for (file, architectures) in [F32, F16_TURING, F16, BF16] {
        std::fs::write(&ptx, unpack(file)).unwrap();
        for architecture in architectures.iter().filter(|architecture| known.contains(architecture)) {
            let arch = format!("-arch={architecture}");
            let (_, log) = run(assembler, &["-v", &arch, "-o", cubin.to_str().unwrap()], &ptx);
            let kernels = usage(&log);
            let what = format!("{assembler}, {file} for {architecture}");
            assert_eq!(kernels.len(), unpack(file).matches(".entry ").count(), "{what}");
            for kernel in kernels {
                assert!(kernel.spilled_bytes <= spilled_max, "{what}: {kernel:?}");
                // Registers are up to the assembler; shared memory is the kernel's own.
                let ceiling = ceilings[&(file.to_owned(), (*architecture).to_owned(), kernel.name.clone())];
                assert!(kernel.shared_bytes <= ceiling.shared_bytes, "{what}: {kernel:?}, {ceiling:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn the_assembler_of_cuda_11_7_takes_all_texts() {
    another_assembles("ptxas-11.7", &["sm_75", "sm_80", "sm_86"], 0);
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn the_assembler_of_cuda_11_8_takes_all_texts() {
    // For sm_90, the newest that it knows: 8 bytes, loaded three times, in attention with heads of 128 in 16 bits; 8, loaded once, in that with
    // heads of 32 in f32.
    another_assembles("ptxas-11.8", &["sm_75", "sm_80", "sm_86", "sm_89", "sm_90"], 32);
}

#[test]
#[ignore = "needs NVIDIA's assembler: scripts/setup cuda-tools"]
fn the_assembler_of_cuda_13_5_takes_all_texts() {
    another_assembles("ptxas-13.5", F32.1, 0);
}

#[test]
fn loops_are_found_in_machine_code() {
    let code = "\
        .L_x_1:\n\
        /*0000*/ MOV R1, R2 ;\n\
        /*0010*/ LDSM.16.M88.4 R4, [R8] ; /* 0x1 */\n\
        .L_x_0:\n\
        /*0020*/ HMMA.16816.F32 R4, R4, R8, R4 ;\n\
        /*0030*/ @P0 BRA `(.L_x_0) ;\n\
        /*0040*/ HMMA.16816.F32 R4, R4, R8, R4 ;\n\
        /*0050*/ @!P1 BRA `(.L_x_1) ;\n\
        /*0060*/ BRA `(.L_x_9) ;\n\
        .L_x_9:\n\
        /*0070*/ EXIT ;\n";
    let found = of_code(code);
    // The inner loop counts, although the outer one has more instructions.
    assert_eq!([found.hmma, found.ldsm, found.loop_instructions, found.loop_hmma], [2, 1, 2, 1]);
}

#[test]
fn a_kernel_above_its_ceiling_is_reported() {
    let key = ("f16-80".to_owned(), "sm_80".to_owned(), "k".to_owned());
    let ceiling =
        Figures { registers: 100, shared_bytes: 9, hmma: 4, ldsm: 2, loop_instructions: 40, loop_hmma: 4 };
    exceeds_nothing(&key, Figures { registers: 99, loop_instructions: 30, ..ceiling }, ceiling);
    for more in [
        Figures { registers: 101, ..ceiling },
        Figures { shared_bytes: 10, ..ceiling },
        Figures { hmma: 5, ..ceiling },
        Figures { loop_instructions: 41, ..ceiling },
        Figures { loop_instructions: 0, loop_hmma: 0, ..ceiling },
        Figures { loop_instructions: 50, loop_hmma: 0, ..ceiling },
    ] {
        let result = std::panic::catch_unwind(|| exceeds_nothing(&key, more, ceiling));
        assert!(result.is_err(), "{more:?}");
    }
    let table = Table::from([(key, ceiling)]);
    assert_eq!(from_text(&to_text(&table)), table);
}
