//! The files of sentence-transformers' modules: what they may say, and what is refused.

use std::fs;

use serde_json::{Value, json};
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_schemas::Params;

use crate::{CLOSE, Reference, copy_of, cpu, replace, spoiled};

/// What changes the model, its configuration or the calls of its tokenizer.
#[test]
fn unsupported_modules_of_sentence_transformers_are_refused_by_name() {
    let message = json!({"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"});
    let cases = [
        // With these, texts become messages, and the chat template turns messages into texts.
        (
            json!({"modality_config": {"message": message}}),
            "modality_config.message, texts in a chat template",
        ),
        (json!({"config_kwargs": {"is_causal": false}}), "config_kwargs.is_causal false"),
        (
            json!({"tokenizer_name_or_path": "bert-base-uncased"}),
            "tokenizer_name_or_path \"bert-base-uncased\"",
        ),
        (json!({"query_expansion": {"length": 32}}), "query_expansion {\"length\":32}"),
        (json!({"transformer_task": "fill-mask"}), "transformer_task `fill-mask` before Pooling"),
        // transformers ignores this key in tokenizer_config.json, but not here (5.23).
        (json!({"processor_kwargs": {"add_eos_token": true}}), "processor_kwargs.add_eos_token true"),
        (json!({"config_args": {"rope_theta": 5}}), "config_args.rope_theta 5"),
        (json!({"max_seq_length": 600}), "a length of 600 tokens; this engine takes at most 514"),
        (
            json!({"modality_config": {"text": {"method_output_name": ["hidden_states", 0]}}}),
            "modality_config.text.method_output_name [\"hidden_states\",0]",
        ),
        (
            json!({"model_args": {"dtype": "auto", "rotary_scaling_factor": 2}}),
            "model_args.rotary_scaling_factor 2",
        ),
        (
            json!({"processing_kwargs": {"text": {"padding": true, "add_special_tokens": false}}}),
            "processing_kwargs.text.add_special_tokens false",
        ),
        (
            json!({"processing_kwargs": {"common": {"truncation": false}}}),
            "processing_kwargs.common.truncation false",
        ),
    ];
    for (own, expected) in cases {
        let change = |_| Some(serde_json::to_vec(&own).unwrap());
        let (_folder, error) = spoiled("tiny-qwen3", "sentence_bert_config.json", change);
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
    }
    let folder = copy_of("tiny-qwen3");
    let harmless = json!({
        "model_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"}, "config_kwargs": {"use_cache": false},
        "processing_kwargs": {"text": {"padding": true, "truncation": true}, "chat_template": {"add_generation_prompt": true}},
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    });
    fs::write(folder.path().join("sentence_bert_config.json"), harmless.to_string()).unwrap();
    Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).expect("nothing of it changes a vector");
}

#[test]
fn pooling_without_a_mode_is_the_mean() {
    let folder = copy_of("tiny-mean");
    let pooling = folder.path().join("1_Pooling/config.json");
    // In sentence-transformers before 6 the second one fails.
    for switches in [
        r#""pooling_mode_cls_token": false"#,
        r#""pooling_mode_cls_token": false, "pooling_mode_mean_tokens": false"#,
        r#""pooling_mode_mean_tokens": true, "pooling_mode_weightedmean_tokens": null"#,
    ] {
        fs::write(&pooling, format!(r#"{{"word_embedding_dimension": 32, {switches}}}"#)).unwrap();
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(2)).unwrap();
        let reference = Reference::read("tiny-mean");
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        reference.check(0, &encoder.run(&items).unwrap(), CLOSE, &format!("tiny-mean with {switches}"));
    }
    let (_folder, error) =
        spoiled("tiny-mean", "1_Pooling/config.json", |_| Some(br#"{"pooling_mode": []}"#.to_vec()));
    assert!(error.to_string().contains("the pooling modes []; this engine takes one of mean"), "{error}");
    let change = |_| Some(br#"{"pooling_mode_cls_token": 1}"#.to_vec());
    let (_folder, error) = spoiled("tiny-mean", "1_Pooling/config.json", change);
    assert!(error.to_string().contains("pooling_mode_cls_token 1; this engine takes true, false"), "{error}");
}

#[test]
fn a_normalize_module_of_something_else_is_refused_by_name() {
    let with = |config: &Value| {
        let folder = copy_of("tiny-cls-normalize");
        fs::create_dir_all(folder.path().join("2_Normalize")).unwrap();
        fs::write(folder.path().join("2_Normalize/config.json"), config.to_string()).unwrap();
        Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).map_err(|error| error.to_string())
    };
    let vector = "sentence_embedding";
    with(&json!({"module_input_name": vector, "module_output_name": vector})).unwrap();
    with(&json!({"module_output_name": null})).unwrap();
    for key in ["module_input_name", "module_output_name"] {
        let error = with(&json!({key: "token_embeddings"})).unwrap_err();
        let expected = format!("{key} \"token_embeddings\"; this engine takes `sentence_embedding`");
        assert!(error.contains(&expected), "{error}");
    }
}

/// sentence-transformers refuses it, too (6.2).
#[test]
fn a_bias_that_the_configuration_of_a_dense_layer_denies_is_refused_by_name() {
    let (_folder, error) =
        spoiled("tiny-dense", "2_Dense/config.json", replace(r#""bias": true"#, r#""bias": false"#));
    let expected = "has the tensor `linear.bias`; this engine takes a layer without a bias";
    assert!(error.to_string().contains(expected), "{error}");
}

/// Over some of these the library panics.
#[test]
fn a_template_with_a_token_that_it_does_not_list_is_refused() {
    let change = |bytes: Vec<u8>| {
        let mut all: Value = serde_json::from_slice(&bytes).unwrap();
        all["post_processor"] = json!({
            "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[NONE]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {},
        });
        Some(serde_json::to_vec(&all).unwrap())
    };
    let (folder, error) = spoiled("tiny-qwen3", "tokenizer.json", change);
    let text = error.to_string();
    assert!(text.contains(&folder.path().join("tokenizer.json").display().to_string()), "{text}");
}
