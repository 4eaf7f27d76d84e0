//! Model folders: faults, folders without `modules.json`, and revisions.

use std::fs;
use std::path::PathBuf;

use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};

use crate::{Change, agrees_with, copy_of, cpu, fixtures, replace, spoiled};

#[test]
fn faults_of_a_model_folder_are_named() {
    let cases: [(&str, &Change, &str); 12] = [
        ("model.safetensors", &|b| Some(b[..b.len() - 100].to_vec()), "truncated"),
        ("model.safetensors", &|b| Some(b[..5].to_vec()), "no safetensors file"),
        ("model.safetensors", &|b| Some(b[..500].to_vec()), "truncated"),
        ("model.safetensors", &|_| None, "model.safetensors"),
        ("tokenizer.json", &|_| None, "tokenizer.json"),
        ("tokenizer.json", &|_| Some(b"{}".to_vec()), "tokenizer.json"),
        ("config.json", &|_| None, "config.json"),
        (
            "config.json",
            &replace(r#""intermediate_size": 64"#, r#""intermediate_size": 60"#),
            "tensor `encoder.layer.0.intermediate.dense.weight` is [64, 32], but by config.json it is [60, 32]",
        ),
        (
            "config.json",
            &replace(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 3"#),
            "no tensor `encoder.layer.2.attention.self.query.weight`",
        ),
        ("config.json", &replace(r#""gelu""#, r#""gelu_new""#), "activation function `gelu_new`"),
        (
            "config.json",
            &replace(r#""model_type": "bert""#, r#""model_type": "t5""#),
            "architecture `t5`; this engine takes `bert`, `camembert`, `distilbert`, `gemma3_text`, `gte`, `modernbert`, \
             `mpnet`, `new`, `nomic_bert`, `qwen3`, `roberta`, `xlm-roberta`",
        ),
        (
            "modules.json",
            &replace("sentence_transformers.models.Pooling", "sentence_transformers.models.Dense"),
            "the modules Transformer, Dense; this engine takes Transformer, Pooling, any number of Dense",
        ),
    ];
    for (file, change, expected) in cases {
        let (_folder, error) = spoiled("tiny-mean", file, change);
        let said = error.to_string();
        assert!(said.contains(expected), "{file}: {said}, not {expected}");
    }
    let modes = r#""pooling_mode_mean_tokens": true"#;
    let weighted = r#""pooling_mode_weightedmean_tokens": true"#;
    let (_folder, error) = spoiled("tiny-mean", "1_Pooling/config.json", replace(modes, weighted));
    assert!(error.to_string().contains("weightedmean"), "{error}");
}

#[test]
fn a_plain_bert_folder_is_mean_pooled_and_not_normalised() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures().join("tiny-mean");
    for file in ["config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    agrees_with("tiny-mean", &Source::Folder(folder.path().into()));
}

/// Each file that is read counts: a copy of a model has its revision, and one whose pooling differs has another.
#[test]
fn a_revision_is_that_of_the_files() {
    let moved = copy_of("tiny-mean");
    let revision =
        |folder: PathBuf| Encoder::load(&Source::Folder(folder), cpu(1)).unwrap().revision().unwrap();
    let original = fixtures().join("tiny-mean");
    assert_eq!(revision(moved.path().into()), revision(original.clone()));
    let pooling = moved.path().join("1_Pooling/config.json");
    let text = fs::read_to_string(&pooling).unwrap();
    let other = text
        .replace("\"pooling_mode_mean_tokens\": true", "\"pooling_mode_mean_tokens\": false")
        .replace("\"pooling_mode_max_tokens\": false", "\"pooling_mode_max_tokens\": true");
    assert_ne!(text, other);
    fs::write(&pooling, other).unwrap();
    assert_ne!(revision(moved.path().into()), revision(original));
}

#[test]
fn faults_of_a_layer_behind_pooling_are_named() {
    let config = "2_Dense/config.json";
    let cases: [(&str, &Change, &str); 9] = [
        (
            config,
            &replace(r#""in_features": 36"#, r#""in_features": 32"#),
            "in_features 32; this engine takes 36",
        ),
        (config, &replace(r#""out_features": 52"#, r#""out_features": 0"#), "out_features 0"),
        (
            config,
            &replace(r#""out_features": 52"#, r#""out_features": 48"#),
            "in_features 52; this engine takes 48",
        ),
        (
            "3_Dense/config.json",
            &replace(r#""out_features": 28"#, r#""out_features": 65536"#),
            "tensor `linear.weight` is [28, 52], but by config.json it is [65536, 52]",
        ),
        (
            config,
            &replace("linear.Identity", "activation.SELU"),
            "SELU`; this engine takes Identity, Tanh, ReLU",
        ),
        (config, &replace(r#""bias": false"#, r#""bias": true"#), "no tensor `linear.bias`"),
        (config, &replace(r#""bias": false"#, r#""bias": false, "use_residual": true"#), "use_residual"),
        (config, &|_| None, "2_Dense/config.json"),
        ("3_Dense/model.safetensors", &|_| None, "3_Dense/model.safetensors"),
    ];
    for (file, change, expected) in cases {
        let (_folder, error) = spoiled("tiny-gemma", file, change);
        let said = error.to_string();
        assert!(said.contains(expected), "{file}: {said}, not {expected}");
    }
}
