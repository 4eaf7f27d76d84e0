//! Folders with random configurations, which models/random_folders.py makes: their outputs are those of transformers and
//! sentence-transformers.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Value, json};
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_schemas::{Input, Output, Params};

use crate::{CLOSE, cpu, json as read_json, numbers_of, params};

/// A vector or logits of each input; `None` where the libraries refuse it.
type Rows = Vec<Option<Vec<f32>>>;

/// What models/random_folders.py has written beside a folder.
#[derive(Deserialize)]
struct Case {
    task: String,
    /// Texts, and pairs of them.
    inputs: Vec<Value>,
    /// In f32. `None`: the libraries refuse the folder, or miss some of its weights.
    outputs: Option<Rows>,
    /// In f64.
    exact: Option<Rows>,
}

/// How many times the library's own error in f32 an output may be off from the one in f64 where [`CLOSE`] is too strict: with large scores of
/// attention, and norms of vectors that are nearly zero.
const ROUNDINGS: f32 = 6.0;

impl Case {
    /// Compares outputs, alone and all in one pass, of the inputs that neither side refuses. Returns how many these are.
    fn compare(&self, encoder: &Encoder, outputs: &[Option<Vec<f32>>], what: &str) -> usize {
        let is_scored = self.task == "score";
        let params = if is_scored { params("raw_scores", true) } else { Params::default() };
        let (mut items, mut expected) = (Vec::new(), Vec::new());
        for ((input, output), exact) in self.inputs.iter().zip(outputs).zip(self.exact.iter().flatten()) {
            let input = match input {
                Value::String(text) => Input::Text(text.clone()),
                pair => Input::Json(json!({"query": pair[0], "document": pair[1]}).into()),
            };
            let prepared = encoder.prepare(&[input], &params);
            if let (Ok(item), Some(output), Some(exact)) = (prepared, output, exact) {
                items.extend(item);
                expected.push(
                    [output, exact].map(|row| if is_scored { largest_first(row) } else { row.clone() }),
                );
            }
        }
        if items.is_empty() {
            return 0;
        }
        let together = encoder.run(&items).unwrap();
        for (at, [output, exact]) in expected.iter().enumerate() {
            let alone = encoder.run(&items[at..=at]).unwrap();
            for found in [&together[at], &alone[0]] {
                let found = elements(found, output.len());
                assert_eq!(found.len(), output.len(), "{what}");
                let (off, rounding) = (distance(&found, output), ROUNDINGS * distance(output, exact));
                assert!(
                    off <= CLOSE || distance(&found, exact) <= rounding,
                    "{what}: item {at} is off by {off}"
                );
            }
        }
        items.len()
    }
}

fn largest_first(row: &[f32]) -> Vec<f32> {
    let mut row = row.to_vec();
    row.sort_by(|a, b| b.total_cmp(a));
    row
}

/// The elements of a vector of so many, or all scores, the largest first.
fn elements(output: &Output, count: usize) -> Vec<f32> {
    let Output::Json(value) = output else { return numbers_of(output, count) };
    let score = |value: &Value| value["score"].as_f64().unwrap() as f32;
    match value["labels"].as_array() {
        None => vec![score(value)],
        Some(labels) => labels.iter().map(score).collect(),
    }
}

/// How far apart two vectors are, in parts of the largest element if that is above 1.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
}

/// Folders may be refused, by the libraries or by the encoder, but none has other outputs.
#[test]
#[ignore = "needs random folders: models/random_folders.py says how to make and compare them"]
fn random_folders_have_the_outputs_of_the_libraries() {
    let root = std::env::var_os("VRAMQ_TEST_RANDOM_FOLDERS").expect("VRAMQ_TEST_RANDOM_FOLDERS is not set");
    let files = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|kind| kind == "json")).collect();
    files.sort();
    let (mut readable, mut compared, mut rows) = (0, 0, 0);
    let mut refused = BTreeMap::<String, usize>::new();
    for file in &files {
        let case: Case = read_json(file);
        let Some(outputs) = &case.outputs else { continue };
        readable += 1;
        let folder = file.with_extension("");
        match Encoder::load_f32(&Source::Folder(folder.clone()), cpu(1)) {
            Ok(encoder) => {
                let count = case.compare(&encoder, outputs, &folder.display().to_string());
                compared += usize::from(count > 0);
                rows += count;
            }
            Err(error) => {
                let error = error.to_string().replace(&folder.display().to_string(), "");
                *refused.entry(error).or_default() += 1;
            }
        }
    }
    println!(
        "{compared} folders with {rows} inputs compared, of {readable} that the libraries read and {} in all; refused: {refused:#?}",
        files.len()
    );
    assert!(2 * compared > readable, "most folders are refused");
}
