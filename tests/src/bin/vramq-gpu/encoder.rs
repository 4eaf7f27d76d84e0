//! The encoder on the device against the encoder on the CPU, with each kind of matrix products.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use serde_json::json;
use vramq_inference::device::Device as _;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_inference::engine::{Engine as _, Item, shape_of};
use vramq_schemas::{EmbeddingFormat, Output};
use vramq_tests::random::Random;

use crate::Scale;
use crate::figures;
use crate::kind::Kind;
use crate::model::Named;

/// How far vectors may be from the CPU's, in f32: the norm of the difference by that of the vector.
const OFF_MAX: f64 = 1e-5;

/// How near vectors have to be to the CPU's, as a cosine. Random weights add up what bf16 rounds off, eight bits being left, over
/// the 24 layers of the largest model; those of trained models do not.
const COSINE_MIN_F16: f64 = 0.9999;
const COSINE_MIN_BF16: f64 = 0.999;

/// Of the random model's tokeniser, which all models here have at least.
const VOCABULARY: usize = 273;

/// Tokens of the longest sequence, for models that take so many.
pub const LONGEST: usize = 512;

/// Of random lengths, besides the shortest and the longest ones.
const SEQUENCES: usize = 24;

/// Device memory that may come and go by other causes: less than this does not show that something of a model is left.
const NOISE: u64 = 64 << 20;

/// For the CPU's weights and arenas: only what is used is allocated.
const CPU_BYTES: u64 = 64 << 30;

/// Compares models with the CPU's. Prints a table; whether all are near enough.
pub fn run(device: &Arc<CudaDevice>, models: &[&str], scale: Scale) -> Result<bool> {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos();
    let mut random = Random::new(u64::from(seed));
    println!("Random lengths, ids and weights by seed {seed}.\n");
    println!("| model | elements | products | holds | against the CPU, the worst | alone and packed |");
    println!("|---|---|---|---|---|---|");
    let mut all = true;
    for model in models {
        let named = Named::of(model, &mut random)?;
        let source = Source::Folder(named.path.clone());
        let cpu = Encoder::load_f32(&source, CpuDevice::new(CPU_BYTES, cores())?)?;
        let items = sequences(longest(&cpu), &mut random, scale);
        let expected = vectors(&cpu, &items)?;
        drop(cpu);
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            for kind in Kind::all(device) {
                let options = kind.options(element, items.iter().map(Item::cost).sum(), scale);
                let row = match compare(device, &source, &options, &items, &expected) {
                    Ok(row) => row,
                    Err(error) => format!("**no** | {} |", format!("{error:#}").replace(['|', '\n'], " ")),
                };
                let (products, holds) = (kind.name(), row.starts_with("yes"));
                all &= holds;
                println!("| {} | {element} | {products} | {row}", named.name);
                figures::put(&json!({
                    "figure": "agrees", "model": named.name, "element": element.as_str(), "products": products,
                    "holds": holds,
                }))?;
            }
        }
    }
    device.check()?;
    Ok(all)
}

/// Lengths at which kernels go wrong if they do: one token, one less and one more than a tile, the longest.
const EDGES: &[usize] = &[1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 511, LONGEST];
const EDGES_SHORT: &[usize] = &[1, 17, 65];

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub fn sequence(length: usize, random: &mut Random) -> Item {
    let ids = (0..length).map(|_| random.below(VOCABULARY) as u32).collect();
    Item::Tokens { ids, format: EmbeddingFormat::default() }
}

/// The most tokens of a sequence for this model.
pub fn longest(encoder: &Encoder) -> usize {
    encoder.item_cost_max().min(LONGEST)
}

/// Sequences of random lengths that have so many tokens together.
pub fn of_tokens(tokens: usize, longest: usize, random: &mut Random) -> Vec<Item> {
    let (mut items, mut left) = (Vec::new(), tokens);
    while left > 0 {
        let length = (1 + random.below(longest)).min(left);
        items.push(sequence(length, random));
        left -= length;
    }
    items
}

fn sequences(longest: usize, random: &mut Random, scale: Scale) -> Vec<Item> {
    let (edges, more) = if scale.is_short { (EDGES_SHORT, 0) } else { (EDGES, SEQUENCES) };
    let drawn: Vec<_> = (0..more).map(|_| 1 + random.below(longest)).collect();
    edges.iter().chain(&drawn).map(|length| sequence((*length).min(longest), random)).collect()
}

pub fn vectors(encoder: &Encoder, items: &[Item]) -> Result<Vec<Vec<f32>>> {
    numbers(encoder.run(items)?)
}

/// The vectors of outputs.
pub fn numbers(outputs: Vec<Output>) -> Result<Vec<Vec<f32>>> {
    let numbers = |output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        other => bail!("no embedding: {other:?}"),
    };
    outputs.into_iter().map(numbers).collect()
}

/// The vectors of a pass whose arena held nothing but NaN when it began, in any type: what no kernel writes shows. The pool gives
/// an arena what was freed last, if it fits.
fn poisoned(device: &Arc<CudaDevice>, encoder: &Encoder, items: &[Item]) -> Result<Vec<Vec<f32>>> {
    let bytes = usize::try_from(encoder.pass_bytes(shape_of(items)))?;
    let (arena, poison) = (device.alloc(bytes)?, vec![0xff; bytes]);
    // SAFETY: there is room for as many, which stay until the wait below.
    unsafe { device.copy_in("poison an arena", arena.start(), &poison) }?;
    device.synchronize()?;
    drop(arena);
    vectors(encoder, items)
}

/// How far one vector is from another: the difference's norm by the norm, and the cosine.
fn distance(vector: &[f32], expected: &[f32]) -> (f64, f64) {
    let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
        vector.iter().zip(expected).map(|(a, b)| of(f64::from(*a), f64::from(*b))).sum()
    };
    let norm = sum(&|_, b| b * b).sqrt();
    (sum(&|a, b| (a - b) * (a - b)).sqrt() / norm, sum(&|a, b| a * b) / (sum(&|a, _| a * a).sqrt() * norm))
}

/// The worst of all: the farthest, and the least cosine. Not a number is the worst there is, and so is a vector or a number that is
/// missing.
pub fn worst(vectors: &[Vec<f32>], expected: &[Vec<f32>]) -> (f64, f64) {
    if !vectors.iter().map(Vec::len).eq(expected.iter().map(Vec::len)) {
        return (f64::INFINITY, f64::NEG_INFINITY);
    }
    let distances = vectors.iter().zip(expected).map(|(vector, expected)| distance(vector, expected));
    distances.fold((0.0, 1.0), |(off, cosine), (next_off, next_cosine)| {
        let worse = |a: f64, b: f64| if b.is_nan() { f64::INFINITY } else { a.max(b) };
        (worse(off, next_off), -worse(-cosine, -next_cosine))
    })
}

/// Bytes that this process holds, but for code and the like.
fn held(device: &CudaDevice) -> u64 {
    device.memory().own().saturating_sub(device.overhead())
}

fn compare(
    device: &Arc<CudaDevice>,
    source: &Source,
    options: &CudaOptions,
    items: &[Item],
    expected: &[Vec<f32>],
) -> Result<String> {
    let before = held(device);
    let encoder = Encoder::load_cuda(source, Arc::clone(device), options, 1)?;
    let packed = poisoned(device, &encoder, items)?;
    let near = |(off, cosine): (f64, f64)| match options.element {
        Some(ElementType::F32) => off <= OFF_MAX,
        Some(ElementType::Bf16) => cosine >= COSINE_MIN_BF16,
        Some(ElementType::F16) | None => cosine >= COSINE_MIN_F16,
    };
    let mut alone = Vec::new();
    for item in items {
        alone.extend(poisoned(device, &encoder, std::slice::from_ref(item))?);
    }
    let (to_cpu, to_packed) = (worst(&packed, expected), worst(&alone, &packed));
    drop(encoder);
    ensure!(device.active_pass_bytes() == 0, "{} bytes of passes are left", device.active_pass_bytes());
    let left = held(device).saturating_sub(before);
    ensure!(left <= NOISE, "{left} bytes are left of the model");
    let difference = |(off, cosine): (f64, f64)| format!("off by {off:.1e}, cosine {cosine:.7}");
    ensure!(near(to_cpu), "{} from the CPU's", difference(to_cpu));
    ensure!(near(to_packed), "alone and packed are not the same: {}", difference(to_packed));
    Ok(format!("yes | {} | {} |", difference(to_cpu), difference(to_packed)))
}
