//! Configurations that transformers has saved again: its own keys beside those that it found, which have no meaning then.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use vramq_inference::engine::encoder::Source;

use crate::{agrees_with, copy_of};

/// Puts these keys into the configuration of a folder.
fn add_keys(folder: &Path, keys: Value) {
    let path = folder.join("config.json");
    let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let Value::Object(keys) = keys else { panic!("{keys} are no keys") };
    config.extend(keys);
    fs::write(path, Value::Object(config).to_string()).unwrap();
}

/// The names of GPT-2, which the published models have. The class of transformers knows none of them (`NomicBertConfig`, 5.23).
#[test]
fn the_sizes_of_a_nomic_are_those_under_the_names_of_transformers() {
    let folder = copy_of("tiny-nomic");
    let older = json!({
        "n_embd": 768, "n_inner": 3072, "n_layer": 12, "n_head": 12, "n_positions": 8192,
        "layer_norm_epsilon": 0.5, "activation_function": "relu", "rotary_emb_base": 5, "rotary_emb_fraction": 1.0,
    });
    add_keys(folder.path(), older);
    agrees_with("tiny-nomic", &Source::Folder(folder.path().into()));
}

/// It reads `sliding_window_pattern`, and writes `_sliding_window_pattern` beside `layer_types` (`Gemma3TextConfig`, 5.23).
#[test]
fn every_second_layer_of_a_gemma_may_see_all_by_another_key() {
    let folder = copy_of("tiny-gemma");
    let keys = json!({"layer_types": null, "_sliding_window_pattern": 6, "sliding_window_pattern": 2});
    add_keys(folder.path(), keys);
    agrees_with("tiny-gemma", &Source::Folder(folder.path().into()));
}

/// It adds `rope_type` and leaves the older `type` there (`standardize_rope_params`, 5.23).
#[test]
fn a_rotation_may_have_both_names_of_its_type() {
    let folder = copy_of("tiny-qwen3");
    let rotation = json!({"rope_theta": 1_000_000.0, "rope_type": "default", "type": "default"});
    add_keys(folder.path(), json!({"rope_parameters": rotation}));
    agrees_with("tiny-qwen3", &Source::Folder(folder.path().into()));
}
