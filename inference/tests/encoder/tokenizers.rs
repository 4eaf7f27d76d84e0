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
    ids: Vec<Vec<u32>>,
}

/// Sets keys of a file, and removes those that are `null`. Without any keys, removes the file.
fn change(folder: &Path, name: &str, keys: Option<&Map<String, Value>>) {
    let path = folder.join(name);
    let Some(keys) = keys else { return fs::remove_file(path).unwrap() };
    let mut content: Map<String, Value> = match fs::read(&path) {
        Ok(bytes) if !keys.is_empty() => serde_json::from_slice(&bytes).unwrap(),
        _ => Map::new(),
    };
    content.extend(keys.clone());
    content.retain(|_, value| !value.is_null());
    fs::write(path, Value::Object(content).to_string()).unwrap();
}

#[test]
fn ids_are_those_of_transformers_whatever_file_decides() {
    let all = fs::read(fixtures().join("tokenizer-cases.json")).unwrap();
    let Cases { texts, cases } = serde_json::from_slice(&all).unwrap();
    let inputs: Vec<Input> = texts.iter().cloned().map(Input::Text).collect();
    assert!(cases.len() > 25, "cases are missing");
    for case in cases {
        let folder = copy_of(&case.fixture);
        for (name, keys) in &case.files {
            change(folder.path(), name, keys.as_ref());
        }
        let what = format!("{} with {:?}", case.fixture, case.files);
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1));
        let encoder = encoder.unwrap_or_else(|error| panic!("{what}: {error}"));
        let items = encoder.prepare(&inputs, &Params::default()).unwrap();
        for (at, item) in items.iter().enumerate() {
            assert_eq!(ids(item), case.ids[at], "{what}: {:?}", texts[at]);
        }
    }
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

/// Texts with such a token have other ids in transformers: seen with 5.23.
#[test]
fn texts_with_tokens_of_older_files_and_of_the_class_are_rejected() {
    let folder = copy_of("tiny-mean");
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["added_tokens"] = Value::Array(Vec::new());
    fs::write(path, tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    fs::write(folder.path().join("special_tokens_map.json"), r#"{"mask_token": "<q>"}"#).unwrap();
    fs::write(folder.path().join("added_tokens.json"), r#"{"<Doc>": 40}"#).unwrap();
    let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
    let cases = [
        ("<q> a cat", "in special_tokens_map.json"),
        ("a <doc>", "in added_tokens.json"),
        ("a cat[SEP]", "one of transformers' class BertTokenizer"),
    ];
    for (text, expected) in cases {
        let error = encoder.prepare(&[Input::Text(text.into())], &Params::default()).unwrap_err().0;
        assert!(error.contains(expected), "{error}");
    }
    let named_otherwise = [Input::Text("a [MASK]".into())];
    encoder.prepare(&named_otherwise, &Params::default()).expect("its mask has another name");
}

#[test]
fn a_tokenizer_that_splits_special_tokens_is_refused() {
    let change = replace(r#""trim_offsets": true"#, r#""trim_offsets": true, "split_special_tokens": true"#);
    let (_folder, error) = spoiled("tiny-roberta", "tokenizer_config.json", change);
    assert!(error.to_string().contains("`split_special_tokens`"), "{error}");
}
