//! Configurations of published models, and configurations that the encoder refuses.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{Encoder, Source};
use vramq_schemas::{Input, Params};

use crate::{CLOSE, Change, Reference, copy_of, cpu, ids, replace, spoiled};

/// Configurations of published models that are older than these families in transformers.
#[test]
fn configurations_of_published_models_mean_the_same() {
    let cases = [
        (
            "tiny-nomic",
            r#"{"model_type": "nomic_bert", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 64, "n_positions": 514,
                "layer_norm_epsilon": 1e-12, "activation_function": "swiglu", "vocab_size": 273, "type_vocab_size": 2,
                "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": false,
                "rotary_emb_scale_base": null, "rotary_scaling_factor": null, "prenorm": false, "causal": false,
                "qkv_proj_bias": false, "mlp_fc1_bias": false, "mlp_fc2_bias": false, "use_rms_norm": false}"#,
        ),
        (
            "tiny-gte",
            r#"{"model_type": "new", "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
                "intermediate_size": 100, "max_position_embeddings": 514, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
                "vocab_size": 302, "type_vocab_size": 1, "rope_theta": 160000, "rope_scaling": null,
                "position_embedding_type": "rope", "pack_qkv": true, "layer_norm_type": "layer_norm"}"#,
        ),
        (
            "tiny-modernbert",
            r#"{"model_type": "modernbert", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
                "intermediate_size": 64, "max_position_embeddings": 514, "norm_eps": 1e-6, "vocab_size": 420,
                "hidden_activation": "gelu", "local_attention": 18, "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "norm_bias": false}"#,
        ),
        (
            "tiny-qwen3",
            r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 36, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 100,
                "max_position_embeddings": 514, "rms_norm_eps": 1e-6, "hidden_act": "silu", "vocab_size": 418,
                "rope_theta": 1000000, "rope_scaling": null, "sliding_window": null, "use_sliding_window": false}"#,
        ),
        (
            "tiny-gemma",
            r#"{"sliding_window_pattern": 2, "architectures": ["Gemma3TextModel"], "attention_bias": false,
                "attn_logit_softcapping": null, "final_logit_softcapping": null, "head_dim": 12,
                "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 36, "intermediate_size": 100,
                "max_position_embeddings": 514, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 3,
                "num_key_value_heads": 1, "query_pre_attn_scalar": 20, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
                "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 18, "use_bidirectional_attention": true,
                "vocab_size": 521}"#,
        ),
    ];
    for (name, config) in cases {
        let folder = copy_of(name);
        fs::write(folder.path().join("config.json"), config).unwrap();
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(2)).unwrap();
        let reference = Reference::read(name);
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        reference.check(0, &encoder.run(&items).unwrap(), CLOSE, &format!("{name} as published"));
    }
}

/// Changes keys of a JSON file, or puts them there.
fn set(file: &Path, keys: &[(&str, Value)]) {
    let mut all: Map<String, Value> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    all.extend(keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    fs::write(file, serde_json::to_vec(&all).unwrap()).unwrap();
}

/// Some tools write all keys, and `null` for unset ones. In `rope_parameters`, transformers itself takes a kind that is `null` as
/// missing (`Gemma3TextConfig.convert_rope_params_to_dict`, 5.23).
#[test]
fn keys_that_are_null_mean_the_same_as_keys_that_are_not_there() {
    let own = |keys: &[&'static str]| keys.iter().map(|key| (*key, Value::Null)).collect::<Vec<_>>();
    let all = [
        "text_config",
        "is_decoder",
        "add_cross_attention",
        "architectures",
        "attention_bias",
        "id2label",
        "problem_type",
    ];
    let texts = ["do_lower_case", "transformer_task", "processor_kwargs", "tokenizer_args", "query_length"];
    let tokenizer =
        ["model_max_length", "truncation_side", "do_lower_case", "strip_accents", "add_prefix_space"];
    let gemma = ["attn_logit_softcapping", "rope_scaling", "rope_theta", "rope_local_base_freq"];
    let qwen =
        ["use_sliding_window", "is_causal", "use_bidirectional_attention", "rope_scaling", "rope_theta"];
    let no_rotation_of_windows =
        json!({"full_attention": {"rope_theta": 1000000.0, "rope_type": null}, "sliding_attention": null});
    let cases = [
        ("tiny-gemma", [own(&gemma), vec![("rope_parameters", no_rotation_of_windows)]].concat()),
        ("tiny-qwen3", own(&qwen)),
    ];
    for (name, keys) in cases {
        let folder = copy_of(name);
        set(&folder.path().join("config.json"), &[own(&all), keys].concat());
        set(&folder.path().join("sentence_bert_config.json"), &own(&texts));
        set(&folder.path().join("tokenizer_config.json"), &own(&tokenizer));
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(2)).unwrap();
        let reference = Reference::read(name);
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        for (item, expected) in items.iter().zip(&reference.tokens) {
            assert_eq!(ids(item), expected, "{name} with nulls");
        }
        reference.check(0, &encoder.run(&items).unwrap(), CLOSE, &format!("{name} with nulls"));
    }
}

/// As transformers 5.23 reads them. An architecture with a head has the same layers, and the head has no part in a vector.
#[test]
fn keys_that_say_nothing_of_vectors_change_none() {
    let cases = [
        ("tiny-qwen3", vec![("use_sliding_window", json!(true)), ("sliding_window", json!(4))]),
        (
            "tiny-qwen3",
            vec![
                ("layer_types", Value::Null),
                ("use_sliding_window", json!(true)),
                ("max_window_layers", json!(2)),
                ("sliding_window", json!(4)),
            ],
        ),
        ("tiny-nomic", vec![("architectures", json!(["NomicBertForSequenceClassification"]))]),
        ("tiny-nomic", vec![("type_vocab_size", Value::Null)]),
        ("tiny-mean", vec![("pad_token_id", json!(-1))]),
        ("tiny-gte", vec![("pad_token_id", json!(-1))]),
        ("tiny-gemma", vec![("architectures", json!(["Gemma3TextForSequenceClassification"]))]),
        ("tiny-gemma", vec![("architectures", json!(["Gemma3ForCausalLM"]))]),
    ];
    for (name, keys) in cases {
        let folder = copy_of(name);
        set(&folder.path().join("config.json"), &keys);
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(2)).unwrap();
        let reference = Reference::read(name);
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        reference.check(0, &encoder.run(&items).unwrap(), CLOSE, &format!("{name} with {keys:?}"));
    }
    // Without pooling the head would count.
    let folder = copy_of("tiny-nomic");
    let head = ("architectures", json!(["NomicBertForSequenceClassification"]));
    set(&folder.path().join("config.json"), &[head]);
    fs::remove_file(folder.path().join("modules.json")).unwrap();
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    let expected = "the head NomicBertForSequenceClassification of `nomic_bert`; this engine takes embedding models of this family, and \
                    heads of `bert`, `camembert`, `distilbert`, `gte`, `modernbert`, `mpnet`, `new`, `qwen3`, `roberta`, `xlm-roberta`";
    assert!(error.contains(expected), "{error}");
}

/// In transformers 5.23 the older key replaces the other one, even if it says nothing.
#[test]
fn an_older_rotation_without_a_theta_replaces_the_newer_one() {
    let vectors = |keys: &[(&str, Value)]| {
        let folder = copy_of("tiny-qwen3");
        set(&folder.path().join("config.json"), keys);
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
        let items =
            encoder.prepare(&[Input::Text("the city of the war".into())], &Params::default()).unwrap();
        crate::numbers(&encoder.run(&items).unwrap()[0])
    };
    let newer = |theta: f64| ("rope_parameters", json!({"rope_theta": theta, "rope_type": "default"}));
    let both = [newer(1e6), ("rope_scaling", json!({"mscale": 1.0}))];
    assert_eq!(vectors(&both), vectors(&[newer(1e4)]));
    assert_ne!(vectors(&both), vectors(&[newer(1e6)]));
}

/// Changes to the configuration of a model are refused, with these words in the error.
fn assert_refused(cases: &[(&str, &Change, &str)]) {
    for &(name, change, expected) in cases {
        let (_folder, error) = spoiled(name, "config.json", change);
        assert!(error.to_string().contains(expected), "{name}: {error}, not {expected}");
    }
}

#[test]
fn rotary_positions_that_this_engine_does_not_compute_are_refused_by_name() {
    let cases: [(&str, &Change, &str); 6] = [
        (
            "tiny-qwen3",
            &replace(r#""model_type": "qwen3""#, r#""model_type": "qwen3", "rope_scaling": {"factor": 2.0}"#),
            "rotary positions with a factor of 2 and without a type that takes one",
        ),
        (
            "tiny-modernbert",
            &replace(
                r#""rope_parameters": {"#,
                r#""rope_scaling": {"rope_theta": 77.0}, "rope_parameters": {"#,
            ),
            "rope_scaling.rope_theta",
        ),
        (
            "tiny-modernbert",
            &replace(
                r#""rope_parameters": {"#,
                r#""rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"#,
            ),
            "rotary positions of the type `linear`; this engine takes `default`",
        ),
        (
            "tiny-qwen3",
            &replace(r#""rope_type": "default""#, r#""rope_type": "yarn""#),
            "rotary positions of the type `yarn`; this engine takes `default`",
        ),
        ("tiny-modernbert", &replace(r#""rope_theta": 160000.0"#, r#""rope_theta": -1"#), "a theta of -1"),
        (
            "tiny-gte-ntk",
            &replace(r#""type": "ntk""#, r#""type": "dynamic""#),
            "`dynamic`; this engine takes `default`, `ntk` with a factor",
        ),
    ];
    assert_refused(&cases);
}

#[test]
fn unsupported_settings_of_a_family_are_refused_by_name() {
    let cases: [(&str, &Change, &str); 13] = [
        (
            "tiny-mean",
            &replace(r#""model_type": "bert""#, r#""model_type": "bert", "is_causal": true"#),
            "is_causal true; this engine takes this family without that key",
        ),
        (
            "tiny-mpnet",
            &replace(r#""relative_attention_num_buckets": 32"#, r#""relative_attention_num_buckets": 64"#),
            "64 buckets of relative positions; this engine takes 32, as transformers computes",
        ),
        (
            "tiny-qwen3",
            &replace(r#""use_sliding_window": false"#, r#""use_sliding_window": false, "is_causal": false"#),
            "attention to the tokens behind",
        ),
        (
            "tiny-qwen3",
            &replace(
                r#""use_sliding_window": false"#,
                r#""use_sliding_window": false, "use_bidirectional_attention": true"#,
            ),
            "attention to the tokens behind",
        ),
        (
            "tiny-roberta",
            &replace(r#""pad_token_id": 1"#, r#""pad_token_id": -1"#),
            "pad_token_id -1; this engine takes the id of a token",
        ),
        (
            "tiny-roberta",
            &|bytes| {
                let bytes = replace(r#""pad_token_id": 1"#, r#""pad_token_id": 4000000000"#)(bytes)?;
                let positions = r#""max_position_embeddings": 42"#;
                replace(positions, r#""max_position_embeddings": 4000000042"#)(bytes)
            },
            "the padding token's is number 4000000000",
        ),
        (
            "tiny-qwen3",
            &|bytes| {
                let mut all: Value = serde_json::from_slice(&bytes).unwrap();
                all["layer_types"][1] = json!("sliding_attention");
                Some(serde_json::to_vec(&all).unwrap())
            },
            "layers of the type `sliding_attention`",
        ),
        (
            "tiny-qwen3",
            &|bytes| {
                let bytes = replace(r#""layer_types""#, r#""kinds""#)(bytes)?;
                let bytes = replace(r#""max_window_layers": 28"#, r#""max_window_layers": 1"#)(bytes)?;
                let bytes = replace(r#""sliding_window": null"#, r#""sliding_window": 4"#)(bytes)?;
                replace(r#""use_sliding_window": false"#, r#""use_sliding_window": true"#)(bytes)
            },
            "use_sliding_window, from layer 1 of 2 on",
        ),
        ("tiny-qwen3", &replace(r#""head_dim": 10"#, r#""head_dim": 9"#), "heads of 9 elements"),
        (
            "tiny-qwen3",
            &replace(r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#),
            "4 heads that share 3 of keys and values",
        ),
        (
            "tiny-qwen3",
            &replace(r#""Qwen3Model""#, r#""Qwen3ForTokenClassification""#),
            "the architecture `Qwen3ForTokenClassification`; this engine takes `Qwen3Model`, `Qwen3ForCausalLM`, \
             `Qwen3ForSequenceClassification`",
        ),
        (
            "tiny-modernbert",
            &replace(r#""hidden_activation": "gelu""#, r#""hidden_activation": "relu""#),
            "activation function `relu`; this engine takes `gelu`, `silu`",
        ),
        ("tiny-nomic", &replace(r#""head_dim": 8"#, r#""moe_every_n_layers": 2"#), "`moe_every_n_layers`"),
    ];
    assert_refused(&cases);
}

#[test]
fn unsupported_settings_of_gemma_are_refused_by_name() {
    let cases: [(&str, &Change, &str); 9] = [
        (
            "tiny-gemma",
            &|bytes| {
                let pattern = r#""_sliding_window_pattern": 6"#;
                let bytes = replace(pattern, r#""_sliding_window_pattern": 2"#)(bytes)?;
                replace(r#""layer_types""#, r#""kinds""#)(bytes)
            },
            "_sliding_window_pattern 2; this engine takes 6, which transformers takes",
        ),
        (
            "tiny-gemma",
            &replace(r#""model_type": "gemma3_text""#, r#""model_type": "gemma3_text", "is_causal": false"#),
            "is_causal false",
        ),
        (
            // The model of texts and pictures, whose layers for texts are in an object of their own.
            "tiny-gemma",
            &replace(
                r#""model_type": "gemma3_text""#,
                r#""model_type": "gemma3", "text_config": {"model_type": null, "head_dim": null}"#,
            ),
            "the architecture `gemma3`; this engine takes `bert`",
        ),
        (
            "tiny-gemma",
            &replace(r#""use_bidirectional_attention": true"#, r#""use_bidirectional_attention": false"#),
            "layers in which a token sees those before it",
        ),
        (
            "tiny-gemma",
            &replace(r#""attn_logit_softcapping": null"#, r#""attn_logit_softcapping": 50.0"#),
            "`attn_logit_softcapping`",
        ),
        (
            "tiny-gemma",
            &replace(r#""Gemma3TextModel""#, r#""Gemma3ForSequenceClassification""#),
            "the architecture `Gemma3ForSequenceClassification`; this engine takes `Gemma3TextModel`, `Gemma3ForCausalLM`",
        ),
        (
            "tiny-gemma",
            &replace(r#""query_pre_attn_scalar": 20"#, r#""query_pre_attn_scalar": 0"#),
            "query_pre_attn_scalar 0",
        ),
        (
            "tiny-gemma",
            &replace(r#""sliding_attention","#, r#""chunked_attention","#),
            "layers of the type `chunked_attention`; this engine takes full_attention, sliding_attention",
        ),
        (
            "tiny-gemma",
            &replace(
                r#""hidden_size": 36"#,
                r#""hidden_size": 36, "rope_scaling": {"rope_type": "linear", "factor": 8.0}"#,
            ),
            "rotary positions of the type `linear`",
        ),
    ];
    assert_refused(&cases);
}

/// transformers adds them, too, with ids for which the model has no embeddings.
#[test]
fn texts_with_tokens_that_no_embedding_is_of_are_rejected() {
    let keys = [
        ("additional_special_tokens", json!(["<q>", "<doc>"])),
        ("extra_special_tokens", json!({"query": "<q>"})),
        (
            "added_tokens_decoder",
            json!({"7": {"content": "<q>", "special": true}, "8": {"content": "<doc>"}}),
        ),
        ("mask_token", json!("<q>")),
    ];
    for (key, value) in keys {
        let folder = copy_of("tiny-nomic");
        set(&folder.path().join("tokenizer_config.json"), &[(key, value.clone())]);
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
        let reference = Reference::read("tiny-nomic");
        let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
        for (item, expected) in items.iter().zip(&reference.tokens) {
            assert_eq!(ids(item), expected, "{key}");
        }
        let with = [Input::Text("a cat".into()), Input::Text("<q> a cat".into())];
        let error = encoder.prepare(&with, &Params::default()).unwrap_err().0;
        assert_eq!(error, "inputs[1]: the model has no embedding of the token `<q>`", "{key}");
    }
}

/// Published code assumes biases where a configuration does not mention them. So a file with such a bias is refused, not computed
/// without it.
#[test]
fn a_bias_that_the_configuration_does_not_mention_is_refused_by_name() {
    let cases = [
        ("mlp_bias", "layers.0.mlp.Wi.bias"),
        ("attention_bias", "layers.0.attn.Wqkv.bias"),
        ("norm_bias", "layers.0.mlp_norm.bias"),
    ];
    for (key, tensor) in cases {
        let (yes, no) = (format!(r#""{key}": true"#), format!(r#""{key}": false"#));
        let change = |bytes: Vec<u8>| {
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains(&yes), "{yes} is not in the file");
            Some(text.replace(&yes, &no).into_bytes())
        };
        let (_folder, error) = spoiled("tiny-modernbert-bias", "config.json", change);
        assert!(error.to_string().contains(&format!("has the tensor `{tensor}`")), "{error}");
    }
}

/// The layers with a window then use the global theta, not the default for a missing key.
#[test]
fn a_local_theta_that_is_null_is_the_global_one() {
    let vectors = |local: &str| {
        let folder = copy_of("tiny-modernbert");
        let config = format!(
            r#"{{"model_type": "modernbert", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
                "intermediate_size": 64, "max_position_embeddings": 514, "norm_eps": 1e-6, "vocab_size": 420,
                "hidden_activation": "gelu", "local_attention": 18, "global_rope_theta": 160000.0{local}}}"#
        );
        fs::write(folder.path().join("config.json"), config).unwrap();
        let encoder = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap();
        let items = encoder.prepare(&Reference::read("tiny-modernbert").inputs, &Params::default()).unwrap();
        encoder.run(&items).unwrap()
    };
    let none = vectors(r#", "local_rope_theta": null"#);
    assert_eq!(none, vectors(r#", "local_rope_theta": 160000.0"#));
    let unsaid = vectors("");
    assert_eq!(unsaid, vectors(r#", "local_rope_theta": 10000.0"#));
    assert_ne!(none, unsaid);
}
