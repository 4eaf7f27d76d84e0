//! The encoder on the device against the encoder on the CPU, and how fast it is.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use vramq_schemas::{EmbeddingFormat, Output};
use vramq_tests::random::Random;
use vramq_worker::device::Device as _;
use vramq_worker::device::cpu::CpuDevice;
use vramq_worker::device::cuda::CudaDevice;
use vramq_worker::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_worker::engine::encoder::{Encoder, Source};
use vramq_worker::engine::{Engine as _, Item};

use crate::model::{SHAPES, draw};

/// How far vectors may be from the CPU's, in f32: the norm of the difference by that of the vector.
const OFF_MAX: f64 = 1e-5;

/// How near vectors have to be to the CPU's, in 16 bits.
const COSINE_MIN: f64 = 0.9999;

/// Of the random model's tokeniser, which all models here have at least.
const VOCABULARY: usize = 273;

const LONGEST: usize = 512;

/// Of random lengths, besides the shortest and the longest ones.
const SEQUENCES: usize = 24;

/// Tokens of a pass whose time is taken, and for how long.
const PASS_TOKENS: &[usize] = &[2048, 8192, 32_768];
const MEASURED: Duration = Duration::from_secs(3);

/// What of the device's figures is no model: below it nobody can tell whose it is.
const NOISE: u64 = 64 << 20;

/// For the CPU's weights and arenas: only what is used is allocated.
const CPU_BYTES: u64 = 64 << 30;

/// Compares and measures models: names of shapes, drawn at random, or folders. Prints a table; whether all are near enough.
pub fn run(device: &Arc<CudaDevice>, models: &[&str], measures: bool) -> Result<bool> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let mut random = Random::new(u64::from(seed));
    println!("Random lengths, ids and weights by seed {seed}.\n");
    println!(
        "| model | elements | holds | against the CPU, worst of {} | alone and packed |",
        SEQUENCES + EDGES.len()
    );
    println!("|---|---|---|---|---|");
    let mut all = true;
    let mut rates = Vec::new();
    for model in models {
        let drawn = SHAPES.iter().find(|shape| shape.name == *model).map(|shape| draw(*shape, &mut random));
        let drawn = drawn.transpose()?;
        let folder = drawn.as_ref().map_or(Path::new(model), |folder| folder.path());
        let source = Source::Folder(folder.to_owned());
        let items = sequences(&mut random);
        let cpu = Encoder::load(&source, CpuDevice::new(CPU_BYTES, cores())?)?;
        let expected = vectors(&cpu, &items)?;
        drop(cpu);
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            let row = match compare(device, &source, element, &items, &expected) {
                Ok(row) => row,
                Err(error) => format!("**no** | {} |", format!("{error:#}").replace(['|', '\n'], " ")),
            };
            all &= row.starts_with("yes");
            println!("| {model} | {} | {row}", element.as_str());
            if measures {
                rates.extend(
                    rate(device, &source, element, &mut random)
                        .map(|row| format!("| {model} | {} |{row}", element.as_str())),
                );
            }
        }
    }
    if measures {
        let heads: Vec<_> = PASS_TOKENS.iter().map(|tokens| format!(" passes of {tokens} |")).collect();
        println!("\nTokens a second, in sequences of 1 to {LONGEST}, without tokenising:\n");
        println!("| model | elements |{}\n|---|---|{}", heads.concat(), "---|".repeat(PASS_TOKENS.len()));
        rates.iter().for_each(|row| println!("{row}"));
    }
    device.check()?;
    Ok(all)
}

/// Lengths at which kernels go wrong if they do: one token, one less and one more than a tile, the longest.
const EDGES: &[usize] = &[1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, LONGEST];

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn sequence(length: usize, random: &mut Random) -> Item {
    let ids = (0..length).map(|_| random.below(VOCABULARY) as u32).collect();
    Item::Tokens { ids, format: EmbeddingFormat::default() }
}

fn sequences(random: &mut Random) -> Vec<Item> {
    let drawn: Vec<_> = (0..SEQUENCES).map(|_| 1 + random.below(LONGEST)).collect();
    EDGES.iter().chain(&drawn).map(|length| sequence(*length, random)).collect()
}

fn vectors(encoder: &Encoder, items: &[Item]) -> Result<Vec<Vec<f32>>> {
    let numbers = |output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        other => bail!("no embedding: {other:?}"),
    };
    encoder.run(items)?.into_iter().map(numbers).collect()
}

/// How far one vector is from another: the difference's norm by the norm, and the cosine.
fn distance(vector: &[f32], expected: &[f32]) -> (f64, f64) {
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        vector.iter().zip(expected).map(|(a, b)| of(f64::from(*a), f64::from(*b))).sum()
    };
    let norm = sum(&|_, b| b * b).sqrt();
    (sum(&|a, b| (a - b) * (a - b)).sqrt() / norm, sum(&|a, b| a * b) / (sum(&|a, _| a * a).sqrt() * norm))
}

/// The worst of all: the farthest, and the least cosine. Not a number is the worst there is.
fn worst(vectors: &[Vec<f32>], expected: &[Vec<f32>]) -> (f64, f64) {
    let distances = vectors.iter().zip(expected).map(|(vector, expected)| distance(vector, expected));
    distances.fold((0.0, 1.0), |(off, cosine), (next_off, next_cosine)| {
        let worse = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
        (worse(off, next_off), -worse(-cosine, -next_cosine))
    })
}

fn load(device: &Arc<CudaDevice>, source: &Source, element: ElementType) -> Result<Encoder> {
    let options = CudaOptions { element, cache: None };
    Ok(Encoder::load_cuda(source, Arc::clone(device), &options, 1)?)
}

/// Bytes that this process holds, but for code and the like.
fn held(device: &CudaDevice) -> u64 {
    device.memory().own().saturating_sub(device.overhead())
}

fn compare(
    device: &Arc<CudaDevice>,
    source: &Source,
    element: ElementType,
    items: &[Item],
    expected: &[Vec<f32>],
) -> Result<String> {
    let before = held(device);
    let encoder = load(device, source, element)?;
    let packed = vectors(&encoder, items)?;
    let near = |(off, cosine): (f64, f64)| match element {
        ElementType::F32 => off <= OFF_MAX,
        ElementType::F16 | ElementType::Bf16 => cosine >= COSINE_MIN,
    };
    let mut alone = Vec::new();
    for item in items {
        alone.extend(vectors(&encoder, std::slice::from_ref(item))?);
    }
    let (to_cpu, to_packed) = (worst(&packed, expected), worst(&alone, &packed));
    drop(encoder);
    ensure!(device.passing() == 0, "{} bytes of passes are left", device.passing());
    let left = held(device).saturating_sub(before);
    ensure!(left <= NOISE, "{left} bytes are left of the model");
    let told = |(off, cosine): (f64, f64)| format!("off by {off:.1e}, cosine {cosine:.7}");
    ensure!(near(to_cpu), "{} from the CPU's", told(to_cpu));
    ensure!(near(to_packed), "alone and packed are not the same: {}", told(to_packed));
    Ok(format!("yes | {} | {} |", told(to_cpu), told(to_packed)))
}

/// Tokens a second, for each size of pass; nothing where the model does not run.
fn rate(
    device: &Arc<CudaDevice>,
    source: &Source,
    element: ElementType,
    random: &mut Random,
) -> Option<String> {
    let encoder = load(device, source, element).ok()?;
    let mut row = String::new();
    for tokens in PASS_TOKENS {
        row += &match tokens_a_second(&encoder, *tokens, random) {
            Ok(rate) => format!(" {rate:.0} |"),
            Err(error) => format!(" {} |", format!("{error:#}").replace(['|', '\n'], " ")),
        };
    }
    Some(row)
}

fn tokens_a_second(encoder: &Encoder, tokens: usize, random: &mut Random) -> Result<f64> {
    let mut items = Vec::new();
    let mut left = tokens;
    while left > 0 {
        let length = (1 + random.below(LONGEST)).min(left);
        items.push(sequence(length, random));
        left -= length;
    }
    encoder.run(&items).context("warm up")?;
    let start = Instant::now();
    let mut passes = 0;
    while start.elapsed() < MEASURED {
        encoder.run(&items)?;
        passes += 1;
    }
    Ok((passes * tokens) as f64 / start.elapsed().as_secs_f64())
}
