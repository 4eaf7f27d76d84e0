//! Classifiers and rerankers against transformers and sentence-transformers, on the CPU device: alone and in one pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{Encoder, Level, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Output, Params};

/// Logits here are up to about 3, and sums of some hundred products apart by this.
const CLOSE: f64 = 2e-5;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load(folder: &Path, level: Level) -> Encoder {
    Encoder::load_at(&Source::Folder(folder.into()), CpuDevice::new(1 << 30, 2).unwrap(), level).unwrap()
}

fn params(raw: bool) -> Params {
    let mut params = Params::default();
    params.0.insert("raw_scores".into(), raw.into());
    params
}

/// A fixture: pairs and lone texts with their tokens and logits, and the scores of the pairs.
struct Reference {
    inputs: Vec<Vec<String>>,
    tokens: Vec<Vec<u32>>,
    logits: Vec<Vec<f32>>,
    /// As `CrossEncoder.predict` makes them by default, of the pairs, which come first.
    scores: Vec<Vec<f32>>,
}

impl Reference {
    fn read(name: &str) -> Self {
        let read = |file: &str| fs::read(folder(name).join(file)).unwrap();
        let inputs: Vec<Vec<String>> = serde_json::from_slice(&read("pairs.json")).unwrap();
        let numbers = |file: &str, rows: usize| -> Vec<Vec<f32>> {
            let bytes = read(file);
            let all: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            all.chunks(all.len() / rows).map(<[f32]>::to_vec).collect()
        };
        let pairs = inputs.iter().filter(|texts| texts.len() == 2).count();
        Self {
            tokens: serde_json::from_slice(&read("pair-tokens.json")).unwrap(),
            logits: numbers("logits.f32", inputs.len()),
            scores: numbers("scores.f32", pairs),
            inputs,
        }
    }

    fn items(&self, encoder: &Encoder, raw: bool) -> Vec<Item> {
        let item = |texts: &Vec<String>| match &texts[..] {
            [query, document] => {
                let pair = json!({"query": query, "document": document});
                encoder.prepare(&[Input::Json(pair.into())], &params(raw)).unwrap()
            }
            [text] => encoder.prepare(&[Input::Text(text.clone())], &params(raw)).unwrap(),
            _ => panic!("{texts:?} are no pair"),
        };
        self.inputs.iter().flat_map(item).collect()
    }
}

/// The scores of an output, in the order of the labels.
fn scores(output: &Output, labels: usize) -> Vec<f64> {
    let Output::Json(value) = output else { panic!("{output:?} is not JSON") };
    if labels == 1 {
        return vec![value["score"].as_f64().unwrap()];
    }
    let sorted = value["labels"].as_array().unwrap();
    assert_eq!(sorted.len(), labels);
    assert!(sorted.is_sorted_by(|a, b| a["score"].as_f64() >= b["score"].as_f64()), "{value}");
    let score =
        |at| sorted.iter().find(|label| label["label"] == format!("LABEL_{at}")).unwrap()["score"].as_f64();
    (0..labels).map(|at| score(at).unwrap()).collect()
}

fn close(found: &[f64], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - f64::from(*expected)).abs() <= CLOSE, "{what}: {found}, not {expected}");
    }
}

fn agrees(name: &str, labels: usize) -> Reference {
    let reference = Reference::read(name);
    for level in Level::available() {
        let encoder = load(&folder(name), level);
        let items = reference.items(&encoder, true);
        for (item, expected) in items.iter().zip(&reference.tokens) {
            let Item::Scored(item) = item else { panic!("{item:?}") };
            assert_eq!(*item.ids, *expected.as_slice(), "{name}: tokens");
        }
        let packed = encoder.run(&items).unwrap();
        for (at, expected) in reference.logits.iter().enumerate() {
            let what = format!("{name} on {level:?}, {:?}", reference.inputs[at]);
            close(&scores(&packed[at], labels), expected, &what);
            let alone = encoder.run(&items[at..=at]).unwrap();
            close(&scores(&alone[0], labels), expected, &format!("{what}, alone"));
        }
    }
    reference
}

/// Logits, and the scores that sentence-transformers makes of them.
fn reranks_as_sentence_transformers_does(name: &str) {
    let reference = agrees(name, 1);
    let encoder = load(&folder(name), Level::best());
    let outputs = encoder.run(&reference.items(&encoder, false)).unwrap();
    for (at, expected) in reference.scores.iter().enumerate() {
        close(&scores(&outputs[at], 1), expected, &format!("{name}, {:?}", reference.inputs[at]));
    }
}

#[test]
fn bert_reranks_with_token_types() {
    reranks_as_sentence_transformers_does("tiny-bert-reranker");
}

#[test]
fn roberta_reranks() {
    reranks_as_sentence_transformers_does("tiny-roberta-reranker");
}

#[test]
fn mpnet_reranks() {
    reranks_as_sentence_transformers_does("tiny-mpnet-reranker");
}

#[test]
fn distilbert_classifies_to_shares_of_one() {
    let reference = agrees("tiny-distilbert-classifier", 3);
    let encoder = load(&folder("tiny-distilbert-classifier"), Level::best());
    let outputs = encoder.run(&reference.items(&encoder, false)).unwrap();
    for (output, logits) in outputs.iter().zip(&reference.logits) {
        let sum: f32 = logits.iter().map(|x| x.exp()).sum();
        let expected: Vec<f32> = logits.iter().map(|x| x.exp() / sum).collect();
        close(&scores(output, 3), &expected, "softmax");
    }
}

#[test]
fn camembert_classifies_with_several_labels_at_once() {
    let reference = agrees("tiny-camembert-classifier", 4);
    let encoder = load(&folder("tiny-camembert-classifier"), Level::best());
    let outputs = encoder.run(&reference.items(&encoder, false)).unwrap();
    for (output, logits) in outputs.iter().zip(&reference.logits) {
        let expected: Vec<f32> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        close(&scores(output, 4), &expected, "sigmoid");
    }
}

#[test]
fn what_a_classifier_does_not_take_is_named() {
    let encoder = load(&folder("tiny-bert-reranker"), Level::best());
    let refused = |values: &[Value], params: &Params| {
        let inputs: Vec<_> = values.iter().map(|value| Input::Json(value.into())).collect();
        let error = encoder.check(&inputs, params).unwrap_err().0;
        assert_eq!(encoder.prepare(&inputs, params).unwrap_err().0, error);
        error
    };
    let pair = json!({"query": "a", "document": "b"});
    let none = Params::default();
    assert!(refused(&[pair.clone(), json!("a")], &none).starts_with("inputs[1]: "));
    assert!(refused(&[json!({"query": "a", "document": 1})], &none).contains("document"));
    let mut odd = Params::default();
    odd.0.insert("dtype".into(), "f16".into());
    assert_eq!(refused(&[pair], &odd), "params.dtype is unknown; there is `raw_scores`");
    odd.0.insert("raw_scores".into(), "yes".into());
    odd.0.remove("dtype");
    assert_eq!(
        encoder.prepare(&[Input::Text("a".into())], &odd).unwrap_err().0,
        "params.raw_scores is \"yes\"; use true or false"
    );
    // A model for embeddings takes no pairs, and items of the one kind are not for the other.
    let embeds = load(&folder("tiny-mean"), Level::best());
    let pair = [Input::Json(json!({"query": "a", "document": "b"}).into())];
    assert_eq!(embeds.prepare(&pair, &none).unwrap_err().0, "inputs[0] is json; this model takes text");
    let text = [Input::Text("a".into())];
    assert!(encoder.run(&embeds.prepare(&text, &none).unwrap()).is_err());
    assert!(embeds.run(&encoder.prepare(&text, &none).unwrap()).is_err());
}

/// Folders as sentence-transformers saves rerankers: `modules.json` with the transformer alone, and the function beside it.
#[test]
fn the_function_of_the_scores_is_the_folders_own() {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(folder("tiny-bert-reranker").join(file), copy.path().join(file)).unwrap();
    }
    let score = || {
        let encoder = load(copy.path(), Level::best());
        let pair = json!({"query": "a cat", "document": "the cat sat"});
        let items = encoder.prepare(&[Input::Json(pair.into())], &Params::default());
        scores(&encoder.run(&items.unwrap()).unwrap()[0], 1)[0]
    };
    let sigmoid = score();
    let modules = json!([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]);
    fs::write(copy.path().join("modules.json"), modules.to_string()).unwrap();
    let own = |module: &str| {
        let text = json!({"activation_fn": format!("torch.nn.modules.{module}")}).to_string();
        fs::write(copy.path().join("config_sentence_transformers.json"), text).unwrap();
    };
    own("activation.Sigmoid");
    assert_eq!(score(), sigmoid);
    own("linear.Identity");
    assert!((1.0 / (1.0 + (-score()).exp()) - sigmoid).abs() < 1e-6);
    own("activation.GELU");
    let device = CpuDevice::new(1 << 30, 1).unwrap();
    let refused = Encoder::load(&Source::Folder(copy.path().into()), device).unwrap_err().to_string();
    assert!(refused.contains("GELU") && refused.contains("Sigmoid, Softmax, Identity"), "{refused}");
}
