//! The encoder on an emulated GPU, and on the CPU, against the references of sentence-transformers and transformers.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::device::cuda::{CudaDevice, Lock, Options, Which};
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};
use vramq_inference::engine::encoder::{Encoder, LoadError, Source};
use vramq_inference::engine::{Engine as _, Item, SparseItem};
use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

use crate::bert::{fixture, logits, reference};
use crate::lengths::{Lengths, VOCABULARY_MAX};
use crate::programs::root;
use crate::setup::full;

/// The bytes of a text that is compared in every run.
const TEXT_SHORT: usize = 600;

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

/// Vectors of items of these lengths, of any of the model's tokens, are those that transformers made of them ([`as_referred`]): on this
/// CPU's best vector unit, and on CUDA. A model is a fixture or a BERT of a shape, as [`Lengths::read`] takes it.
///
/// # Errors
/// They are not.
pub fn lengths_agree(model: &str, elements: &[ElementType], lengths: &[usize]) -> Result<()> {
    let reference = Lengths::read(model)?;
    let (items, expected) = reference.of(lengths)?;
    let cpu = Encoder::load_f32(&reference.source, CpuDevice::new(1 << 30, 2)?)?;
    let on_cpu = vectors(&cpu.run(&items)?)?;
    all_as_referred(ElementType::F32, &on_cpu, &expected).with_context(|| format!("{model} on the CPU"))?;
    for element in elements {
        let what = || format!("{model} in {element}");
        let encoder = cuda_encoder(&reference.source, *element, Some(cache()?))?;
        let (items, expected) = (compared_in(*element, &items), compared_in(*element, &expected));
        let found = packed_and_alone(&encoder, &items, vectors).with_context(what)?;
        all_as_referred(*element, &found, &expected).with_context(what)?;
    }
    Ok(())
}

/// Whether a fixture's text at a place, of so many bytes, is compared on CUDA: all are in `make nightly`. Otherwise every fourth that is not
/// of very many tokens, the longest of which are several tiles of keys. The CPU's tests compare all of them.
fn is_in_every_run(at: usize, bytes: usize) -> bool {
    full() || (at.is_multiple_of(4) && bytes <= TEXT_SHORT)
}

/// What a type of elements is compared with: all in `make nightly`. Otherwise bf16, whose kernels are the source of f16's with other
/// conversions, with every third and the last.
fn compared_in<T: Clone>(element: ElementType, all: &[T]) -> Vec<T> {
    let step = if full() || element != ElementType::Bf16 { 1 } else { 3 };
    all.iter().skip(all.len().saturating_sub(1) % step).step_by(step).cloned().collect()
}

/// [`vectors_agree`] for the texts of a fixture that has its weights, as [`is_in_every_run`] chooses them.
///
/// # Errors
/// As for [`vectors_agree`].
pub fn texts_agree(name: &str, elements: &[ElementType]) -> Result<()> {
    let (texts, vectors) = reference(name)?;
    let all = texts.into_iter().zip(vectors).enumerate();
    let compared = all.filter(|(at, (text, _))| is_in_every_run(*at, text.len())).map(|(_, of)| of).unzip();
    vectors_agree(&fixture(name), compared, elements)
}

/// Vectors of a reference's texts are those that sentence-transformers made of them: in f32 as near as the CPU's have to be.
///
/// # Errors
/// They are not.
pub fn vectors_agree(
    source: &Source,
    (texts, mut expected): (Vec<String>, Vec<Vec<f32>>),
    elements: &[ElementType],
) -> Result<()> {
    let inputs: Vec<Input> = texts.into_iter().map(Input::Text).collect();
    for element in elements {
        let encoder = cuda_encoder(source, *element, Some(cache()?))?;
        if encoder.dims().is_sparse {
            expected.iter_mut().for_each(|vector| vector.resize(VOCABULARY_MAX, 0.0));
        }
        let items = encoder.prepare(&compared_in(*element, &inputs), &Params::default())?;
        let expected = compared_in(*element, &expected);
        let found =
            packed_and_alone(&encoder, &items, vectors).with_context(|| format!("{source} in {element}"))?;
        all_as_referred(*element, &found, &expected).with_context(|| format!("{source} in {element}"))?;
    }
    Ok(())
}

/// Logits of a fixture's pairs and texts are those that transformers made of them, within what the type of elements can tell.
///
/// # Errors
/// They are not.
pub fn logits_agree(name: &str, elements: &[ElementType]) -> Result<()> {
    let (inputs, expected) = logits(name)?;
    let (inputs, expected): (Vec<_>, Vec<_>) = inputs
        .into_iter()
        .zip(expected)
        .enumerate()
        .filter(|(at, (input, _))| is_in_every_run(*at, input_bytes(input)))
        .map(|(_, of)| of)
        .unzip();
    let mut params = Params::default();
    params.0.insert("raw_scores".into(), true.into());
    let largest = expected.iter().flatten().fold(1.0_f32, |most, logit| most.max(logit.abs()));
    for element in elements {
        let within = match element {
            // As the CPU's, whatever their size.
            ElementType::F32 => 2e-5,
            // Eleven and eight bits of each number, for logits of up to 1. Larger ones are off by as much more.
            ElementType::F16 => 2e-2 * largest,
            ElementType::Bf16 => 1e-1 * largest,
        };
        let encoder = cuda_encoder(&fixture(name), *element, Some(cache()?))?;
        let (inputs, expected) = (compared_in(*element, &inputs), compared_in(*element, &expected));
        let items = encoder.prepare(&inputs, &params)?;
        let found =
            packed_and_alone(&encoder, &items, raw_scores).with_context(|| format!("{name} in {element}"))?;
        ensure!(found.len() == expected.len(), "{name} in {element}: logits of {} inputs", found.len());
        for ((found, expected), input) in found.iter().zip(&expected).zip(&inputs) {
            ensure!(
                found.len() == expected.len()
                    && found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() <= within),
                "{name} in {element}, {input:?}: {found:?}, not {expected:?}"
            );
        }
    }
    Ok(())
}

fn input_bytes(input: &Input) -> usize {
    match input {
        Input::Text(text) => text.len(),
        other => format!("{other:?}").len(),
    }
}

/// What an encoder makes of items in one pass, after it is seen to be the same to the bit for each item alone.
fn packed_and_alone(
    encoder: &Encoder,
    items: &[Item],
    numbers: impl Fn(&[Output]) -> Result<Vec<Vec<f32>>>,
) -> Result<Vec<Vec<f32>>> {
    let packed = numbers(&encoder.run(items)?)?;
    ensure!(packed.len() == items.len(), "{} outputs of {} items", packed.len(), items.len());
    for (at, packed) in packed.iter().enumerate() {
        let alone = numbers(&encoder.run(&items[at..=at])?)?;
        ensure!(alone[0] == *packed, "item {at} is another one alone");
    }
    Ok(packed)
}

/// Compiled kernels, kept between runs of the tests.
///
/// # Errors
/// Tests do not run from a target folder.
pub fn cache() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests run from a target folder")?.join("fake_cuda/kernels"))
}

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

/// The logits of scores, in the order of the labels.
fn raw_scores(outputs: &[Output]) -> Result<Vec<Vec<f32>>> {
    let score = |value: &Value| value["score"].as_f64().map(|score| score as f32).context("no score");
    let logits = |output: &Output| {
        let Output::Json(value) = output else { anyhow::bail!("{output:?} is no score") };
        let Some(labels) = value["labels"].as_array() else { return Ok(vec![score(value)?]) };
        let mut numbered = labels
            .iter()
            .map(|label| {
                let number =
                    label["label"].as_str().and_then(|name| name.strip_prefix("LABEL_")?.parse().ok());
                Ok((number.context("a label without a number")?, score(label)?))
            })
            .collect::<Result<Vec<(usize, f32)>>>()?;
        numbered.sort_by_key(|(number, _)| *number);
        Ok(numbered.into_iter().map(|(_, score)| score).collect())
    };
    outputs.iter().map(logits).collect()
}

/// A vector of a fixture's reference is found: in f32 within the bounds that inference/tests/encoder has for the CPU, an element to 1e-5
/// of the largest one if that is above 1, and a cosine of 0.99999; in 16 bits as [`close`] tells vectors apart.
fn as_referred(element: ElementType, found: &[f32], expected: &[f32]) -> Result<()> {
    if element != ElementType::F32 || expected.iter().all(|x| *x == 0.0) {
        return close(element, found, expected);
    }
    ensure!(found.len() == expected.len(), "{} numbers", found.len());
    let largest = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
    let off = found.iter().zip(expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    let cosine = cosine(found, expected);
    // In this form also false where something is NaN.
    ensure!(off <= 1e-5 * largest && cosine >= 0.99999, "off by {off} of {largest}, cosine {cosine}");
    Ok(())
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

/// Each of these vectors is that of a reference ([`as_referred`]), and none is missing.
///
/// # Errors
/// One is another or missing.
pub fn all_as_referred(element: ElementType, found: &[Vec<f32>], expected: &[Vec<f32>]) -> Result<()> {
    ensure!(found.len() == expected.len(), "{} vectors, not {}", found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        as_referred(element, found, expected).with_context(|| format!("item {at}"))?;
    }
    Ok(())
}

/// Of the angle between two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}
