//! The encoder on the CPU device: against sentence-transformers, with faulty model folders, and with the parameters of jobs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod agreement;
mod configurations;
mod folders;
mod lengths;
mod modules;
mod outputs;
mod random_folders;
mod resaved;
mod shards;
mod sparse;
mod tokenizers;
mod units;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use vramq_inference::device::Device as _;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{CpuUnits, Encoder, Level, LoadError, Parts, Source};
use vramq_inference::engine::{Engine as _, Item, SparseItem};
use vramq_schemas::{Input, Output, Params};
use vramq_testkit::not_run::not_run;

/// Room for any model of these tests.
const PLENTY: u64 = 1 << 30;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The real model. `make test` fetches it and sets its path; a bare `cargo test` runs without it.
fn minilm() -> Option<Source> {
    fetched(std::env::var_os("VRAMQ_TEST_MODEL").map(PathBuf::from), "all-MiniLM-L6-v2", "model.safetensors")
        .map(Source::Folder)
}

/// The folder of a model that models/fetch gets: `needed` if it is set, else the default place.
fn fetched(needed: Option<PathBuf>, name: &str, file: &str) -> Option<PathBuf> {
    let is_needed = needed.is_some();
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models").join(name);
    let folder = needed.unwrap_or_else(default);
    if folder.join(file).exists() {
        return Some(folder);
    }
    let missing = format!("{} is not there: run models/fetch --model {name}", folder.display());
    assert!(!is_needed, "{missing}");
    not_run(missing);
    None
}

/// A model that `make test` fetches besides [`minilm`], into the folder beside it.
fn small(name: &str, file: &str) -> Option<PathBuf> {
    let needed = std::env::var_os("VRAMQ_TEST_MODEL").map(|minilm| Path::new(&minilm).with_file_name(name));
    fetched(needed, name, file)
}

fn tiny(name: &str) -> Source {
    Source::Folder(fixtures().join(name))
}

fn cpu(threads: usize) -> Arc<CpuDevice> {
    CpuDevice::new(PLENTY, threads).unwrap()
}

/// A fixture's texts, their token ids, and the reference's vectors.
struct Reference {
    inputs: Vec<Input>,
    tokens: Vec<Vec<u32>>,
    vectors: Vec<Vec<f32>>,
    /// Of a model of random weights that takes next to no time.
    is_tiny: bool,
}

impl Reference {
    fn read(name: &str) -> Self {
        let folder = fixtures().join(name);
        let numbers = floats(&folder.join("vectors.f32"));
        let (inputs, tokens) = texts_and_tokens(&folder);
        let width = numbers.len() / inputs.len();
        let vectors = numbers.chunks(width).map(<[f32]>::to_vec).collect();
        Self { inputs, tokens, vectors, is_tiny: name.starts_with("tiny-") }
    }

    /// Checks outputs for the texts from `first` on. An element may differ by `close`, or by that part of the vector's largest
    /// element if that is above 1.
    fn check(&self, first: usize, outputs: &[Output], close: f32, what: &str) {
        for (at, output) in outputs.iter().enumerate() {
            let expected = &self.vectors[first + at];
            let vector = numbers_of(output, expected.len());
            let cosine = cosine(&vector, expected);
            let largest = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
            let off = vector.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let text = &self.inputs[first + at];
            assert!(cosine >= 0.99999, "{what}: cosine {cosine} for {text:?}");
            assert!(off <= close * largest, "{what}: off by {off} for {text:?}");
        }
    }
}

/// A fixture's texts, and their token ids.
fn texts_and_tokens(folder: &Path) -> (Vec<Input>, Vec<Vec<u32>>) {
    let texts: Vec<String> = json(&folder.join("texts.json"));
    (texts.into_iter().map(Input::Text).collect(), json(&folder.join("tokens.json")))
}

fn json<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn floats(path: &Path) -> Vec<f32> {
    fs::read(path).unwrap().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// All elements of an output that is to have so many.
fn numbers_of(output: &Output, elements: usize) -> Vec<f32> {
    let Output::Sparse(sparse) = output else { return numbers(output) };
    let mut all = vec![0.0; elements];
    for (index, value) in sparse.indices().iter().zip(sparse.values()) {
        all[*index as usize] = *value;
    }
    all
}

fn numbers(output: &Output) -> Vec<f32> {
    match output {
        Output::Embedding(embedding) => embedding.values.to_f32(),
        other => panic!("no embedding: {other:?}"),
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn ids(item: &Item) -> &[u32] {
    match item {
        Item::Tokens { ids, .. } | Item::Sparse(SparseItem { ids, .. }) => ids,
        Item::Scored(_) | Item::Plain(_) | Item::Program(_) => panic!("not tokens"),
    }
}

/// As [`agrees`], with a fixture's reference and its bound for split bf16.
fn agrees_with(reference: &str, source: &Source) {
    let split = match reference {
        // Real weights keep the bound of f32. Random ones of width 32 have fewer terms whose errors would cancel out.
        "minilm" => CLOSE,
        "tiny-gte-no-types" => CLOSE_SPLIT_GATED,
        "tiny-dense" => CLOSE_SPLIT_DENSE,
        "tiny-splade" | "tiny-splade-distilbert" => CLOSE_SPLIT_SPARSE,
        _ => CLOSE_SPLIT,
    };
    agrees(Reference::read(reference), source, split);
}

/// Every text alone and all in one pass, at every level; at the best one with other numbers of threads; and by the tile model, to
/// the bound for split bf16. Models with trained weights, which take long, run texts alone on one thread at the best level; the tiny ones
/// show the rest, and `VRAMQ_TEST_FULL=1` all of it.
fn agrees(mut reference: Reference, source: &Source, split: f32) {
    let is_full = std::env::var_os("VRAMQ_TEST_FULL").is_some_and(|value| value == "1");
    let everywhere = reference.is_tiny || is_full;
    let best = [(Level::best(), 1), (Level::best(), 5)];
    let levels = Level::available().into_iter().map(|level| (level, 2)).chain(best);
    for (level, threads) in levels {
        let alone = everywhere || (level, threads) == best[0];
        let units = CpuUnits::vectors(level);
        agrees_on(&reference, source, &Run { units, threads, alone, close: CLOSE });
    }
    // The model is slow. One of these texts has 255 tokens.
    reference.inputs.truncate(TEXTS_ON_TILES);
    let units = CpuUnits::tile_model(Level::best(), Parts::Split);
    agrees_on(&reference, source, &Run { units, threads: 2, alone: everywhere, close: split });
}

/// Texts that run on the tile model.
const TEXTS_ON_TILES: usize = 15;

/// How far an element may be off in f32, and in split bf16.
const CLOSE: f32 = 1e-5;
const CLOSE_SPLIT: f32 = 5e-5;

/// The bound in split bf16 for a fixture with large vectors, whose feed-forward multiplies two maps. The same three products with
/// exact sums differ by 5.9e-5 there (models/split_bf16.py).
const CLOSE_SPLIT_GATED: f32 = 7e-5;

/// In split bf16 for the fixture with one more map, behind pooling: off by less than 5e-5 where the rest is computed on AVX-512, and by
/// 6.7e-5 where it is on AVX2 alone (AMD EPYC, 2026-11-23). The order of f32 sums decides how halves are rounded.
const CLOSE_SPLIT_DENSE: f32 = 8e-5;

/// In split bf16 for sparse vectors: one more map, whose scores are up to 15 here before the logarithm. The same three products with
/// exact sums are off by 7.5e-5 of the largest element of `tiny-splade` (models/split_bf16.py); with the logarithm taken twice the
/// largest element is half as large.
const CLOSE_SPLIT_SPARSE: f32 = 2e-4;

/// How an encoder runs a reference's texts: in one pass, and each alone if it is to; and how far an element may be off.
struct Run {
    units: CpuUnits,
    threads: usize,
    alone: bool,
    close: f32,
}

fn agrees_on(reference: &Reference, source: &Source, run: &Run) {
    let Run { units, threads, alone, close } = *run;
    let what = format!("{source} on {threads} threads, {units}");
    let encoder = Encoder::load_on_units(source, cpu(threads), units).unwrap();
    let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
    for (item, expected) in items.iter().zip(&reference.tokens) {
        assert_eq!(ids(item), expected, "{what}: tokens");
    }
    reference.check(0, &encoder.run(&items).unwrap(), close, &format!("{what}, in one pass"));
    for at in (0..items.len()).filter(|_| alone) {
        let outputs = encoder.run(&items[at..=at]).unwrap();
        reference.check(at, &outputs, close, &format!("{what}, alone"));
    }
}

/// A file's bytes to other bytes, or to no file.
type Change = dyn Fn(Vec<u8>) -> Option<Vec<u8>>;

/// Parameters of a job with this one.
fn params(key: &str, value: impl Into<serde_json::Value>) -> Params {
    let mut params = Params::default();
    params.0.insert(key.to_owned(), value.into());
    params
}

/// A copy of a fixture's folder, with the folders in it.
fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_into(&fixtures().join(name), copy.path());
    copy
}

fn copy_into(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for path in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_into(&path, &to),
            false => fs::copy(&path, to).map(drop).unwrap(),
        }
    }
}

/// A copy of a tiny model with one file changed.
fn spoiled(
    name: &str,
    file: &str,
    change: impl Fn(Vec<u8>) -> Option<Vec<u8>>,
) -> (tempfile::TempDir, LoadError) {
    let folder = copy_of(name);
    let path = folder.path().join(file);
    match change(fs::read(&path).unwrap_or_default()) {
        Some(bytes) => fs::write(path, bytes).unwrap(),
        None => fs::remove_file(path).unwrap(),
    }
    let device = cpu(1);
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), Arc::clone(&device)).unwrap_err();
    assert_eq!(device.memory().free, PLENTY, "a failed load keeps memory");
    (folder, error)
}

fn replace(from: &'static str, to: &'static str) -> impl Fn(Vec<u8>) -> Option<Vec<u8>> {
    move |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from), "{from} is not in the file");
        Some(text.replace(from, to).into_bytes())
    }
}
