//! The encoder on an emulated GPU, beside the encoder on the CPU.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::device::cuda::{CudaDevice, Lock, Options, Which};
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, LoadError, Source};
use vramq_inference::engine::{Engine as _, Item, SparseItem};
use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

use crate::programs::root;

/// Makes a test of each body in the module `bodies`, by its own name or another, in a process of its own with these libraries and
/// settings, and poisoned memory.
#[macro_export]
macro_rules! with_libraries {
    (@ $test:ident) => { bodies::$test };
    (@ $test:ident $body:ident) => { bodies::$body };
    ($libraries:expr; $($test:ident $(= $body:ident)?: [$($name:literal = $value:expr),*];)+) => { $(
        #[test]
        fn $test() -> Result<(), $crate::setup::Failed> {
            Ok($crate::fake_cuda::alone(
                concat!(module_path!(), "::", stringify!($test)),
                &$libraries,
                &[("FAKE_CUDA_POISON", "1") $(, ($name, $value))*],
                $crate::with_libraries!(@ $test $($body)?),
            )?)
        }
    )+ };
}

/// The first device of the fake driver, with NVRTC if the tests have it.
///
/// # Errors
/// It does not open.
pub fn open() -> Result<Arc<CudaDevice>> {
    let libraries = std::env::var_os("VRAMQ_TEST_NVRTC").map(PathBuf::from);
    Ok(CudaDevice::open(&Options { which: Which::Index(0), cap: None, lock: Lock::None, libraries })?)
}

/// Waits until the thread that watches the device has reached a state.
///
/// # Errors
/// It has not in a long time.
pub fn until(device: &CudaDevice, is_so: impl Fn(&CudaDevice) -> bool) -> Result<()> {
    let deadline = std::time::Instant::now() + crate::wait::DEADLINE;
    while !is_so(device) {
        ensure!(std::time::Instant::now() < deadline, "{device:?}");
        std::thread::yield_now();
    }
    Ok(())
}

/// An encoder on it.
///
/// # Errors
/// It does not load.
pub fn cuda_encoder(
    source: &Source,
    element: ElementType,
    cache: Option<PathBuf>,
) -> Result<Encoder, LoadError> {
    let device = open().map_err(|error| LoadError::Tokenizer {
        path: PathBuf::from("the fake driver"),
        reason: error.to_string(),
    })?;
    Encoder::load_cuda(
        source,
        device,
        &CudaOptions { element: Some(element), cache, ..CudaOptions::default() },
        2,
    )
}

/// The real MiniLM.
///
/// # Errors
/// It is not there.
pub fn minilm() -> Result<Source> {
    let folder = root().join("models/all-MiniLM-L6-v2");
    let folder = std::env::var_os("VRAMQ_TEST_MODEL").map_or(folder, PathBuf::from);
    ensure!(
        folder.join("model.safetensors").exists(),
        "{} has no weights: run models/fetch",
        folder.display()
    );
    Ok(Source::Folder(folder))
}

/// Items of these lengths, of any of the model's tokens.
pub fn tokens(encoder: &Encoder, lengths: &[usize]) -> Vec<Item> {
    let vocabulary = encoder.dims().vocabulary as u32;
    // Any sequence without a short period.
    let mut state = 1_u32;
    let mut token = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocabulary
    };
    let is_sparse = encoder.dims().is_sparse;
    let item = |length: &usize| {
        let ids = (0..*length).map(|_| token()).collect();
        match is_sparse {
            true => Item::Sparse(SparseItem { ids, elements_max: None }),
            false => Item::Tokens { ids, format: EmbeddingFormat::default() },
        }
    };
    lengths.iter().map(item).collect()
}

/// [`agree`] for items of these lengths.
///
/// # Errors
/// As for [`agree`].
pub fn lengths_agree(source: &Source, elements: &[ElementType], lengths: &[usize]) -> Result<()> {
    agree(source, elements, |encoder| Ok(tokens(encoder, lengths)))
}

/// [`agree`] for the texts of a fixture.
///
/// # Errors
/// As for [`agree`].
pub fn texts_agree(source: &Source, elements: &[ElementType]) -> Result<()> {
    let Source::Folder(folder) = source else { anyhow::bail!("{source} is not a folder") };
    let texts: Vec<String> = serde_json::from_slice(&std::fs::read(folder.join("texts.json"))?)?;
    let inputs: Vec<Input> = texts.into_iter().map(Input::Text).collect();
    agree(source, elements, |encoder| Ok(encoder.prepare(&inputs, &Params::default())?))
}

/// Logits that the GPU makes of pairs are those of the CPU, within what the type of elements can tell.
///
/// # Errors
/// They are not.
pub fn pairs_agree(source: &Source, elements: &[ElementType]) -> Result<()> {
    let pairs = [
        json!({"query": "the first year of the war", "document": "the city was part of the state"}),
        json!({"query": "", "document": ""}),
        json!({"query": "of and to ".repeat(30), "document": "the ".repeat(50)}),
    ];
    let mut params = Params::default();
    params.0.insert("raw_scores".into(), true.into());
    let cpu = Encoder::load(source, CpuDevice::new(1 << 30, 2)?)?;
    // A tokenizer that puts nothing around texts makes no tokens of the second one.
    let has_tokens = |pair: &Input| cpu.prepare(std::slice::from_ref(pair), &params).is_ok();
    let pairs: Vec<Input> =
        pairs.into_iter().map(|pair| Input::Json(pair.into())).filter(has_tokens).collect();
    ensure!(pairs.len() > 1, "{source} takes {} pair", pairs.len());
    let logits = |encoder: &Encoder| -> Result<Vec<f64>> {
        let outputs = encoder.run(&encoder.prepare(&pairs, &params)?)?;
        let logit = |output: &Output| match output {
            Output::Json(value) => value["score"].as_f64().context("no score"),
            other => anyhow::bail!("{other:?} is no score"),
        };
        outputs.iter().map(logit).collect()
    };
    let expected = logits(&cpu)?;
    let largest = expected.iter().fold(1.0_f64, |most, logit| most.max(logit.abs()));
    for element in elements {
        // For logits of up to 1. Larger ones are off by as much more.
        let within = largest
            * match element {
                ElementType::F32 => 1e-4,
                // f16 keeps eleven bits of each number, bf16 eight.
                ElementType::F16 => 2e-2,
                ElementType::Bf16 => 1e-1,
            };
        let found = logits(&cuda_encoder(source, *element, Some(cache()?))?)?;
        ensure!(found.len() == expected.len(), "{source} in {element}: {} logits", found.len());
        for (found, expected) in found.iter().zip(&expected) {
            ensure!((found - expected).abs() <= within, "{source} in {element}: {found}, not {expected}");
        }
    }
    Ok(())
}

/// Vectors of the GPU are those of the CPU, within what the type of elements can tell; and to the bit the same whether an
/// item is alone in its pass or not.
///
/// # Errors
/// They are not.
pub fn agree(
    source: &Source,
    elements: &[ElementType],
    items: impl Fn(&Encoder) -> Result<Vec<Item>>,
) -> Result<()> {
    let cpu = Encoder::load(source, CpuDevice::new(1 << 30, 2)?)?;
    let items = items(&cpu)?;
    let expected = vectors(&cpu.run(&items)?)?;
    for element in elements {
        let encoder = cuda_encoder(source, *element, Some(cache()?))?;
        let packed = vectors(&encoder.run(&items)?)?;
        for (at, (found, expected)) in packed.iter().zip(&expected).enumerate() {
            let what = format!("{source} in {element}, item {at} of {} tokens", items[at].cost());
            close(*element, found, expected).context(what)?;
        }
        for at in 0..items.len() {
            let alone = vectors(&encoder.run(&items[at..=at])?)?;
            ensure!(alone[0] == packed[at], "{source} in {element}: item {at} is another one alone");
        }
    }
    Ok(())
}

/// Compiled kernels, kept between runs of the tests.
///
/// # Errors
/// Tests do not run from a target folder.
pub fn cache() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests run from a target folder")?.join("fake_cuda/kernels"))
}

/// The most tokens that a vocabulary of the tests' models of sparse vectors has.
const VOCABULARY_MAX: usize = 1 << 15;

/// The numbers of embeddings. Sparse vectors are as long as the largest vocabulary, with their zeros.
///
/// # Errors
/// Something else is among them.
pub fn vectors(outputs: &[Output]) -> Result<Vec<Vec<f32>>> {
    let vector = |output: &Output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        Output::Sparse(sparse) => {
            let mut numbers = vec![0.0; VOCABULARY_MAX];
            for (index, value) in sparse.indices().iter().zip(sparse.values()) {
                let number = numbers.get_mut(*index as usize).context("a larger vocabulary")?;
                *number = *value;
            }
            Ok(numbers)
        }
        other => anyhow::bail!("{other:?} is no vector"),
    };
    outputs.iter().map(vector).collect()
}

/// ‖Δ‖/‖ref‖ ≤ 1e-5 in f32, cosine ≥ 0.9999 in f16. bf16 keeps eight bits of each number, and these small models have few
/// numbers to average over: NumPy, rounding after the same steps, gets the same cosines down to 0.9996. So there it is 0.999;
/// MiniLM has to keep to 0.9999.
fn close(element: ElementType, found: &[f32], expected: &[f32]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} numbers", found.len());
    let delta: Vec<f32> = found.iter().zip(expected).map(|(x, y)| x - y).collect();
    let (off, size) = (dot(&delta, &delta).sqrt(), dot(expected, expected).sqrt());
    if size == 0.0 {
        ensure!(off == 0.0, "{off} instead of zeros");
        return Ok(());
    }
    let cosine = cosine(found, expected);
    let is_close = match element {
        ElementType::F32 => off / size <= 1e-5,
        ElementType::F16 => cosine >= 0.9999,
        ElementType::Bf16 => cosine >= 0.999,
    };
    ensure!(is_close, "relative error {}, cosine {cosine}", off / size);
    Ok(())
}

/// Each of these vectors is as expected, as far as `close` tells them apart, and none is missing.
///
/// # Errors
/// They are farther apart, or one is missing.
pub fn all_close(element: ElementType, found: &[Vec<f32>], expected: &[Vec<f32>]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} vectors, not {}", found.len(), expected.len());
    found.iter().zip(expected).try_for_each(|(found, expected)| close(element, found, expected))
}

/// Of the angle between two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
