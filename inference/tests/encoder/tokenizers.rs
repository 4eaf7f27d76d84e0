//! Folders whose configuration files change what `tokenizer.json` says: their token ids are those of transformers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_schemas::{Input, Params};

use crate::{Change, copy_of, cpu, fixtures, ids, replace, spoiled};

/// What models/tokenizer_cases.py has written.
#[derive(Deserialize)]
struct Cases {
    texts: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    fixture: String,
    files: BTreeMap<String, Option<Map<String, Value>>>,
    /// One of each text; `None`: the model has no embedding of one of them. `None` for all: transformers cannot read the folder.
    ids: Option<Vec<Option<Vec<u32>>>>,
}

/// Sets keys of a file, and removes those that are `null`. A key may have one inside it behind a `/`. Without any keys, removes the file.
fn change(folder: &Path, name: &str, keys: Option<&Map<String, Value>>) {
    let path = folder.join(name);
    let Some(keys) = keys else { return fs::remove_file(path).unwrap() };
    let mut content: Map<String, Value> = match fs::read(&path) {
        Ok(bytes) if !keys.is_empty() => serde_json::from_slice(&bytes).unwrap(),
        _ => Map::new(),
    };
    for (key, value) in keys {
        match key.split_once('/') {
            Some((outer, inner)) => content[outer][inner] = value.clone(),
            None => drop(content.insert(key.clone(), value.clone())),
        }
    }
    content.retain(|_, value| !value.is_null());
    fs::write(path, Value::Object(content).to_string()).unwrap();
}

impl Case {
    fn loaded(&self) -> Result<Encoder, String> {
        let folder = copy_of(&self.fixture);
        for (name, keys) in &self.files {
            change(folder.path(), name, keys.as_ref());
        }
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1));
        // The folder's name is random.
        encoder.map_err(|error| error.to_string().replace(&folder.path().display().to_string(), ""))
    }

    /// Whether the encoder makes the ids of transformers.
    fn compare(&self, encoder: &Encoder, texts: &[String], expected: &[Option<Vec<u32>>]) {
        let what = format!("{} with {:?}", self.fixture, self.files);
        assert_eq!(texts.len(), expected.len(), "{what}");
        for (text, expected) in texts.iter().zip(expected) {
            let items = encoder.prepare(&[Input::Text(text.clone())], &Params::default());
            match expected {
                Some(expected) => assert_eq!(ids(&items.unwrap()[0]), expected, "{what}: {text:?}"),
                None => {
                    let error = items.unwrap_err().0;
                    assert!(error.contains("the model has no embedding of the token"), "{what}: {error}");
                }
            }
        }
    }
}

#[test]
fn ids_are_those_of_transformers_whatever_file_decides() {
    let all = fs::read(fixtures().join("tokenizer-cases.json")).unwrap();
    let Cases { texts, cases } = serde_json::from_slice(&all).unwrap();
    assert!(cases.len() > 90, "cases are missing");
    for case in cases {
        let encoder =
            case.loaded().unwrap_or_else(|error| panic!("{} with {:?}: {error}", case.fixture, case.files));
        case.compare(&encoder, &texts, case.ids.as_deref().expect("ids"));
    }
}

/// Folders may be refused, by transformers or by the encoder, but none has other ids.
#[test]
#[ignore = "needs a file of random folders: models/tokenizer_cases.py says how to make and compare one"]
fn random_folders_have_the_ids_of_transformers() {
    let file = std::env::var_os("VRAMQ_TEST_TOKENIZER_CASES").expect("VRAMQ_TEST_TOKENIZER_CASES is not set");
    let Cases { texts, cases } = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let mut compared = 0;
    let mut refused = BTreeMap::<String, usize>::new();
    for case in &cases {
        let Some(expected) = &case.ids else { continue };
        match case.loaded() {
            Ok(encoder) => {
                case.compare(&encoder, &texts, expected);
                compared += 1;
            }
            Err(error) => *refused.entry(error).or_default() += 1,
        }
    }
    println!("{compared} of {} folders compared; refused: {refused:#?}", cases.len());
    assert!(2 * compared > cases.len(), "most folders are refused");
}

/// The class without lower case is also one of the cases above.
#[test]
fn the_class_may_be_in_the_configuration_of_the_model() {
    let all = fs::read(fixtures().join("tokenizer-cases.json")).unwrap();
    let Cases { texts, .. } = serde_json::from_slice(&all).unwrap();
    let inputs: Vec<Input> = texts.into_iter().map(Input::Text).collect();
    let ids_with = |of_tokenizer: &str, of_model: &str| -> Vec<Vec<u32>> {
        let folder = copy_of("tiny-mean");
        fs::write(folder.path().join("tokenizer_config.json"), of_tokenizer).unwrap();
        let keys: Map<String, Value> = serde_json::from_str(of_model).unwrap();
        if !keys.is_empty() {
            change(folder.path(), "config.json", Some(&keys));
        }
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
        let items = encoder.prepare(&inputs, &Params::default()).unwrap();
        items.iter().map(|item| ids(item).to_vec()).collect()
    };
    let as_it_is = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
    let expected =
        ids_with(r#"{"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": false}"#, "{}");
    let cased = r#"{"do_lower_case": false}"#;
    assert_eq!(ids_with(cased, as_it_is), expected);
    let of_bert = ids_with(cased, "{}");
    assert_ne!(of_bert, expected);
    // The tokenizer's own file overrides that of the model.
    let own = r#"{"tokenizer_class": "BertTokenizer", "do_lower_case": false}"#;
    assert_eq!(ids_with(own, as_it_is), of_bert);
}

#[test]
fn lengths_of_some_texts_only_are_refused_by_name() {
    let length = r#""max_seq_length": 24"#;
    let cases: [(&Change, &str); 5] = [
        (
            &replace(length, r#""max_seq_length": 24, "query_length": 8"#),
            "query_length 8; this engine takes one length",
        ),
        (&replace(length, r#""max_seq_length": 24, "document_length": 30"#), "document_length 30"),
        (
            &replace(length, r#""max_seq_length": 24, "processing_kwargs": {"text": {"max_length": 8}}"#),
            "processing_kwargs.text.max_length 8",
        ),
        (
            &replace(length, r#""max_seq_length": 24, "processing_kwargs": {"common": {"max_length": 8}}"#),
            "processing_kwargs.common.max_length 8",
        ),
        (
            &replace(length, r#""max_seq_length": 24, "tokenizer_args": {"truncation_side": "left"}"#),
            "truncation_side `left`",
        ),
    ];
    for (change, expected) in cases {
        let (_folder, error) = spoiled("tiny-mean", "sentence_bert_config.json", change);
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
    }
    let folder = copy_of("tiny-mean");
    let same =
        r#"{"max_seq_length": 24, "query_length": 24, "processing_kwargs": {"text": {"max_length": 24}}}"#;
    fs::write(folder.path().join("sentence_bert_config.json"), same).unwrap();
    Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
}

#[test]
fn a_tokenizer_that_does_not_fit_its_class_is_refused_by_name() {
    let set_class = |class: &str| format!(r#"{{"tokenizer_class": "{class}"}}"#);
    let cases = [
        (
            "tiny-roberta",
            set_class("BertTokenizer"),
            "none of the kind WordPiece, which the class BertTokenizer",
        ),
        ("tiny-mean", set_class("XLMRobertaTokenizerFast"), "none of the kind Unigram"),
        ("tiny-xlm-roberta", set_class("Qwen2Tokenizer"), "none of the kind BPE"),
        ("tiny-roberta", set_class("HerbertTokenizer"), "the suffix `</w>`"),
        (
            "tiny-mean",
            set_class("BertJapaneseTokenizer"),
            "the class `BertJapaneseTokenizer`; this engine takes",
        ),
        ("tiny-nomic", r#"{"sep_token": "$"}"#.into(), "its special token `$` begins with `$`"),
        ("tiny-nomic", r#"{"sep_token": null}"#.into(), "the class BertTokenizer needs a `sep_token`"),
        ("tiny-mean", r#"{"mask_token": {"content": "<q>"}}"#.into(), "mask_token has {"),
        ("tiny-mean", r#"{"added_tokens_decoder": {"x": {"content": "<q>"}}}"#.into(), "has the id `x`"),
    ];
    for (fixture, config, expected) in cases {
        let (_folder, error) =
            spoiled(fixture, "tokenizer_config.json", |_| Some(config.clone().into_bytes()));
        let error = error.to_string();
        assert!(error.contains(expected), "{error}, not {expected}");
    }
}

#[test]
fn truncation_on_the_left_is_refused_unless_the_other_file_says_right() {
    let truncation =
        r#"{"truncation": {"direction": "Left", "max_length": 12, "strategy": "LongestFirst", "stride": 0}}"#;
    let keys: Map<String, Value> = serde_json::from_str(truncation).unwrap();
    let folder = copy_of("tiny-mean");
    change(folder.path(), "tokenizer.json", Some(&keys));
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    assert!(error.contains(r#"`"truncation_side": "right"` in tokenizer_config.json"#), "{error}");
}

#[test]
fn a_tokenizer_that_splits_special_tokens_is_refused() {
    let change = replace(r#""trim_offsets": true"#, r#""trim_offsets": true, "split_special_tokens": true"#);
    let (_folder, error) = spoiled("tiny-roberta", "tokenizer_config.json", change);
    assert!(error.to_string().contains("`split_special_tokens`"), "{error}");
}
