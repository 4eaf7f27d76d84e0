//! Classifiers and rerankers against transformers and sentence-transformers, on the CPU device: alone and in one pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{CpuUnits, Encoder, Level, Source};
use vramq_inference::engine::{Engine, Item};
use vramq_schemas::{Input, Output, Params};

/// Logits here are up to about 5, and sums of some hundred products apart by this.
const CLOSE: f64 = 2e-5;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load(folder: &Path, level: Level) -> Encoder {
    Encoder::load_on_units(
        &Source::Folder(folder.into()),
        CpuDevice::new(1 << 30, 2).unwrap(),
        CpuUnits::vectors(level),
    )
    .unwrap()
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
    /// The scores of the pairs, which come first, as `CrossEncoder.predict` computes them by default.
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

/// transformers gives no token types where the tokenizer does not name them. Logits of sentence-transformers 6.2 and transformers 5.23 for
/// the fixture with this key.
#[test]
fn token_types_that_the_tokenizer_does_not_name_do_not_count() {
    let pairs = [
        ("a man is eating", "someone has a meal"),
        ("ab", "ba ab a"),
        ("what is it", "it is a cat and a dog"),
    ];
    let inputs =
        pairs.map(|(query, document)| Input::Json(json!({"query": query, "document": document}).into()));
    let names = json!({"model_input_names": ["input_ids", "attention_mask"]});
    let cases = [
        (json!({}), [0.153_656_94, 0.069_578_32, 0.552_457_63]),
        (names, [-0.077_291_906, -0.051_145_468, 0.776_716_9]),
    ];
    for (keys, expected) in cases {
        let copy = copy_of("tiny-bert-reranker");
        set(&copy.path().join("tokenizer_config.json"), &keys);
        let encoder = load(copy.path(), Level::best());
        let outputs = encoder.run(&encoder.prepare(&inputs, &params(true)).unwrap()).unwrap();
        for (output, expected) in outputs.iter().zip(expected) {
            close(&scores(output, 1), &[expected], &format!("{keys}"));
        }
    }
}

#[test]
fn roberta_reranks() {
    reranks_as_sentence_transformers_does("tiny-roberta-reranker");
}

/// As bge-reranker-v2-m3: two ends between the texts, and positions that count from 2.
#[test]
fn xlm_roberta_reranks() {
    reranks_as_sentence_transformers_does("tiny-xlm-roberta-reranker");
}

#[test]
fn mpnet_reranks() {
    reranks_as_sentence_transformers_does("tiny-mpnet-reranker");
}

#[test]
fn modernbert_reranks_by_the_mean_of_all_tokens() {
    reranks_as_sentence_transformers_does("tiny-modernbert-reranker");
}

#[test]
fn gte_reranks_with_token_types() {
    reranks_as_sentence_transformers_does("tiny-gte-reranker");
}

/// Its tokenizer puts nothing around texts, and the vector is that of the last token that is not padding.
#[test]
fn qwen3_reranks() {
    reranks_as_sentence_transformers_does("tiny-qwen3-reranker");
}

/// Logits, and the shares that a softmax makes of them.
fn classifies_to_shares_of_one(name: &str) {
    let reference = agrees(name, 3);
    let encoder = load(&folder(name), Level::best());
    let outputs = encoder.run(&reference.items(&encoder, false)).unwrap();
    for (output, logits) in outputs.iter().zip(&reference.logits) {
        let sum: f32 = logits.iter().map(|x| x.exp()).sum();
        let expected: Vec<f32> = logits.iter().map(|x| x.exp() / sum).collect();
        close(&scores(output, 3), &expected, "softmax");
    }
}

#[test]
fn distilbert_classifies_to_shares_of_one() {
    classifies_to_shares_of_one("tiny-distilbert-classifier");
}

/// By the first token, with biases in the head.
#[test]
fn modernbert_classifies_to_shares_of_one() {
    classifies_to_shares_of_one("tiny-modernbert-classifier");
}

/// Its tokenizer ends texts with the padding token.
#[test]
fn qwen3_classifies_to_shares_of_one() {
    classifies_to_shares_of_one("tiny-qwen3-classifier");
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
fn inputs_that_a_classifier_does_not_take_are_named() {
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
    assert_eq!(refused(&[pair], &odd), "params.dtype is unknown; there are `prompt_name` and `raw_scores`");
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

/// A copy of a fixture that can be changed.
fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(folder(name).join(file), copy.path().join(file)).unwrap();
    }
    copy
}

/// Sets keys of a copy's configuration; `null` removes a key.
fn configure(copy: &Path, keys: Value) {
    set(&copy.join("config.json"), &keys);
}

fn set(path: &Path, keys: &Value) {
    let mut config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        let all = config.as_object_mut().unwrap();
        match value {
            Value::Null => all.remove(key),
            value => all.insert(key.clone(), value.clone()),
        };
    }
    fs::write(path, config.to_string()).unwrap();
}

/// The score of a pair, with these parameters.
fn score(folder: &Path, query: &str, params: &Params) -> f64 {
    let encoder = load(folder, Level::best());
    let pair = json!({"query": query, "document": "the cat sat"});
    let items = encoder.prepare(&[Input::Json(pair.into())], params).unwrap();
    scores(&encoder.run(&items).unwrap()[0], 1)[0]
}

/// As the published rerankers are: another `model_type`, and names of tensors that begin with that of their own code.
#[test]
fn gte_under_the_names_of_its_publishers_means_the_same() {
    let copy = copy_of("tiny-gte-reranker");
    configure(copy.path(), json!({"model_type": "new", "architectures": ["NewForSequenceClassification"]}));
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (theirs, ours) = (br#""gte."#, br#""new."#);
    let places: Vec<usize> =
        (0..bytes.len() - ours.len()).filter(|at| bytes[*at..].starts_with(theirs)).collect();
    assert!(places.len() > 20, "{places:?}");
    places.iter().for_each(|at| bytes[*at..at + ours.len()].copy_from_slice(ours));
    fs::write(&path, bytes).unwrap();
    let none = Params::default();
    assert_eq!(score(copy.path(), "a cat", &none), score(&folder("tiny-gte-reranker"), "a cat", &none));
}

#[test]
fn unsupported_settings_of_a_head_are_refused_by_name() {
    let cases = [
        (
            "classifier_activation",
            json!("hardswish"),
            "activation function `hardswish`; this engine takes `gelu`",
        ),
        ("classifier_pooling", json!("max"), "classifier_pooling `max`; this engine takes `cls`, `mean`"),
        (
            "classifier_bias",
            json!(false),
            "the tensor `head.dense.bias`; this engine takes such a map or norm without",
        ),
    ];
    for (key, value, expected) in cases {
        let copy = copy_of("tiny-modernbert-classifier");
        configure(copy.path(), json!({key: value}));
        let device = CpuDevice::new(1 << 30, 1).unwrap();
        let error = Encoder::load_f32(&Source::Folder(copy.path().into()), device).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}: {error}, not {expected}");
    }
}

/// Missing keys mean transformers' defaults.
#[test]
fn missing_settings_of_a_head_have_the_defaults_of_transformers() {
    let none = Params::default();
    let copy = copy_of("tiny-modernbert-reranker");
    configure(
        copy.path(),
        json!({"classifier_activation": null, "classifier_bias": null, "id2label": null, "num_labels": 1}),
    );
    assert_eq!(
        score(copy.path(), "a cat", &none),
        score(&folder("tiny-modernbert-reranker"), "a cat", &none)
    );
    configure(copy.path(), json!({"classifier_pooling": null}));
    let unsaid = score(copy.path(), "a cat", &none);
    configure(copy.path(), json!({"classifier_pooling": "cls"}));
    assert_eq!(score(copy.path(), "a cat", &none), unsaid);
    assert_ne!(score(&folder("tiny-modernbert-reranker"), "a cat", &none), unsaid);
}

#[test]
fn a_text_without_tokens_is_refused() {
    let encoder = load(&folder("tiny-qwen3-reranker"), Level::best());
    let refused = |input: Input| encoder.prepare(&[Input::Text("a".into()), input], &Params::default());
    let empty = "inputs[1]: there are no tokens to score";
    assert_eq!(refused(Input::Text(String::new())).unwrap_err().0, empty);
    assert_eq!(refused(Input::Json(json!({"query": "", "document": ""}).into())).unwrap_err().0, empty);
    refused(Input::Json(json!({"query": "", "document": "a"}).into())).expect("one of the two is enough");
}

/// JSON has no such numbers: the score would be `null`.
#[test]
fn a_logit_that_is_no_number_fails_the_pass() {
    let copy = copy_of("tiny-bert-reranker");
    let path = copy.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let (header, tensors) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let first = 8 + header + tensors.info("classifier.bias").unwrap().data_offsets.0;
    bytes[first..first + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let encoder = load(copy.path(), Level::best());
    let items = encoder.prepare(&[Input::Text("a".into())], &Params::default()).unwrap();
    let error = encoder.run(&items).unwrap_err().to_string();
    assert!(error.contains("logit 0 of item 0 is not a finite number"), "{error}");
}

/// `CrossEncoder` of sentence-transformers 6 puts them before queries, if it has saved the folder.
#[test]
fn prompts_go_before_queries_as_sentence_transformers_puts_them() {
    let copy = copy_of("tiny-bert-reranker");
    let none = Params::default();
    let modules = json!([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]);
    fs::write(copy.path().join("modules.json"), modules.to_string()).unwrap();
    let own = |keys: Value| {
        fs::write(copy.path().join("config_sentence_transformers.json"), keys.to_string()).unwrap();
    };
    let (plain, prompted) = (score(copy.path(), "a cat", &none), score(copy.path(), "the a cat", &none));
    assert_ne!(plain, prompted);

    own(
        json!({"model_type": "CrossEncoder", "prompts": {"query": "the ", "bare": ""}, "default_prompt_name": "query"}),
    );
    assert_eq!(score(copy.path(), "a cat", &none), prompted);
    let named = |name: &str| Params([("prompt_name".to_owned(), name.into())].into_iter().collect());
    assert_eq!(score(copy.path(), "a cat", &named("bare")), plain);
    let encoder = load(copy.path(), Level::best());
    let unknown = encoder.prepare(&[Input::Text("a".into())], &named("other")).unwrap_err().0;
    assert_eq!(unknown, "params.prompt_name is \"other\"; this model has `bare`, `query`");

    own(
        json!({"model_type": "SentenceTransformer", "prompts": {"query": "the "}, "default_prompt_name": "query"}),
    );
    assert_eq!(score(copy.path(), "a cat", &none), plain);
}

/// Folders as sentence-transformers saves rerankers: `modules.json` with the transformer alone, and the function beside it.
#[test]
fn the_function_of_the_scores_is_the_folders_own() {
    let copy = copy_of("tiny-bert-reranker");
    let score = || score(copy.path(), "a cat", &Params::default());
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
    let refused = Encoder::load_f32(&Source::Folder(copy.path().into()), device).unwrap_err().to_string();
    assert!(refused.contains("GELU") && refused.contains("Sigmoid, Softmax, Identity"), "{refused}");
}
