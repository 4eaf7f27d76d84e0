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
        ("model.safetensors", &|b| Some(b[..5].to_vec()), "not a safetensors file"),
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

/// sentence-transformers refuses them, too (6.2, `_validate_relative_path`).
#[test]
fn modules_outside_of_the_folder_are_refused() {
    for path in ["..", "../1_Pooling", "/1_Pooling", "1_Pooling/../../1_Pooling"] {
        let (_folder, error) = spoiled("tiny-mean", "modules.json", replace("1_Pooling", path));
        let expected =
            format!("a module with the path `{path}`; this engine takes paths inside the model's folder");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

#[test]
fn a_plain_bert_folder_is_mean_pooled_and_not_normalised() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixtures().join("tiny-mean");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"model_max_length": 24}"#).unwrap();
    agrees_with("tiny-mean", &Source::Folder(folder.path().into()));
    // sentence-transformers reads none of these files then (6.2, `SentenceTransformer._load_default_modules`).
    let revision = || Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap().revision();
    let plain = revision();
    for (file, content) in [
        (
            "sentence_bert_config.json",
            r#"{"max_seq_length": 5, "do_lower_case": true, "config_args": {"x": 1}}"#,
        ),
        ("sentence_roberta_config.json", r#"{"max_seq_length": 6}"#),
        (
            "config_sentence_transformers.json",
            r#"{"prompts": {"query": "the "}, "default_prompt_name": "query", "truncate_dim": 3}"#,
        ),
    ] {
        fs::write(folder.path().join(file), content).unwrap();
    }
    agrees_with("tiny-mean", &Source::Folder(folder.path().into()));
    assert_eq!(revision(), plain);
}

/// The folder's weights alone are those of another model. transformers would add the adapter's, or refuse without the package
/// `peft`.
#[test]
fn an_adapter_is_refused_before_all_else() {
    let folder = copy_of("tiny-mean");
    fs::write(folder.path().join("adapter_config.json"), r#"{"peft_type": "LORA"}"#).unwrap();
    let load = || Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    let expected =
        "adapter_config.json has an adapter (LoRA); this engine takes weights in which the adapter is merged";
    assert!(load().contains(expected), "{}", load());
    // As sentence-transformers saves a model with one.
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    assert!(load().contains(expected), "{}", load());
}

/// A folder's own code may compute anything from the same tensors, and quantised weights are no numbers by themselves.
#[test]
fn models_with_code_of_their_own_and_quantised_ones_are_refused_by_name() {
    let cases: [(&str, &Change, &str); 5] = [
        (
            "tiny-mean",
            &replace(r#""BertModel""#, r#""HF_ColBERT""#),
            "the architecture `HF_ColBERT`, a vector for each token; this engine takes models with one vector",
        ),
        (
            "tiny-mean",
            &replace(
                r#""model_type": "bert""#,
                r#""model_type": "bert", "auto_map": {"AutoModel": "x--modeling_bert.JinaBertModel"}"#,
            ),
            "code of its own for a `bert` (auto_map); this engine takes models that transformers computes without",
        ),
        (
            "tiny-xlm-roberta",
            &replace(
                r#""model_type": "xlm-roberta""#,
                r#""model_type": "xlm-roberta", "auto_map": {"AutoModelForSequenceClassification": "m.X"}"#,
            ),
            "code of its own for a `xlm-roberta` (auto_map)",
        ),
        (
            "tiny-qwen3",
            &replace(
                r#""model_type": "qwen3""#,
                r#""model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}"#,
            ),
            "weights that are quantised by `fp8` (quantization_config); this engine takes weights as F32",
        ),
        (
            "tiny-mean",
            &replace(r#""model_type": "bert""#, r#""model_type": "bert", "quantization_config": {}"#),
            "quantised by `(none)`",
        ),
    ];
    for (name, change, expected) in cases {
        let (_folder, error) = spoiled(name, "config.json", change);
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
    }
    // Families that were published with code of their own, and classes of other parts.
    let harmless = [
        ("tiny-nomic", "nomic_bert", r#"{"AutoModel": "modeling.NomicBertModel"}"#),
        ("tiny-gte", "gte", r#"{"AutoModel": "modeling.NewModel", "AutoConfig": "configuration.NewConfig"}"#),
        ("tiny-mean", "bert", r#"{"AutoConfig": "configuration.MyConfig"}"#),
        ("tiny-mean", "bert", "null"),
    ];
    for (name, family, map) in harmless {
        let folder = copy_of(name);
        let path = folder.path().join("config.json");
        let text = fs::read_to_string(&path).unwrap();
        let key = format!(r#""model_type": "{family}""#);
        assert!(text.contains(&key), "{key} is not in the file");
        let keys = format!(r#"{key}, "auto_map": {map}, "quantization_config": null"#);
        fs::write(&path, text.replace(&key, &keys)).unwrap();
        Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).expect(name);
    }
}

#[test]
fn a_folder_without_tokenizer_json_says_how_to_make_one() {
    let (_folder, error) = spoiled("tiny-mean", "tokenizer.json", |_| None);
    let error = error.to_string();
    assert!(error.contains("tokenizer.json: there is no such file"), "{error}");
    assert!(error.contains("AutoTokenizer.from_pretrained"), "{error}");
}

/// A class of this name may do anything: jina-embeddings-v3 has a `custom_st.Transformer` with adapters.
#[test]
fn modules_of_other_packages_are_refused_by_their_whole_names() {
    let cases = [
        (
            "sentence_transformers.models.Transformer",
            "the modules custom_st.Transformer, Pooling; this engine takes",
        ),
        (
            "sentence_transformers.models.Pooling",
            "the modules Transformer, custom_st.Pooling; this engine takes",
        ),
    ];
    for (class, expected) in cases {
        let own = class.replace("sentence_transformers.models", "custom_st");
        let change = |bytes: Vec<u8>| {
            let text = String::from_utf8(bytes).unwrap();
            assert!(text.contains(class), "{class} is not in the file");
            Some(text.replace(class, &own).into_bytes())
        };
        let (_folder, error) = spoiled("tiny-mean", "modules.json", change);
        assert!(error.to_string().contains(expected), "{error}, not {expected}");
    }
}

/// As version 6 has them: the mode by its name, several in a list.
#[test]
fn pooling_has_one_mode() {
    let (mean, flags) = (r#""pooling_mode_mean_tokens": true"#, r#""pooling_mode": ["mean", "cls"]"#);
    let (_folder, error) = spoiled("tiny-mean", "1_Pooling/config.json", replace(mean, flags));
    assert!(error.to_string().contains("the pooling modes [cls, mean]; this engine takes one of"), "{error}");
    let folder = copy_of("tiny-mean");
    fs::write(folder.path().join("1_Pooling/config.json"), r#"{"pooling_mode": ["mean"]}"#).unwrap();
    agrees_with("tiny-mean", &Source::Folder(folder.path().into()));
}

/// Workers of 0.2.0 did not count these files, and in most folders they repeat what others say.
#[test]
fn older_files_of_tokens_count_for_the_revision_if_they_say_more() {
    let folder = copy_of("tiny-mean");
    let revision =
        || Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap().revision().unwrap();
    let plain = revision();
    let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
    write(
        "special_tokens_map.json",
        r#"{"cls_token": "[CLS]", "mask_token": {"content": "[MASK]", "lstrip": false}}"#,
    );
    assert_eq!(revision(), plain);
    write("special_tokens_map.json", r#"{"mask_token": "war"}"#);
    let other_mask = revision();
    write("added_tokens.json", r#"{"[FOO]": 273}"#);
    let mut all = vec![plain, other_mask, revision()];
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 3);
}

/// Every file that is read counts: a copy of a model has the same revision, another pooling file gives another.
#[test]
fn a_revision_is_that_of_the_files() {
    let moved = copy_of("tiny-mean");
    let revision =
        |folder: PathBuf| Encoder::load_f32(&Source::Folder(folder), cpu(1)).unwrap().revision().unwrap();
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
    let cases: [(&str, &Change, &str); 10] = [
        (
            config,
            &replace("torch.nn.modules.linear.Identity", "my.Identity"),
            "the activation function `my.Identity`; this engine takes Identity, Tanh, ReLU",
        ),
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

/// A model that generates text is not an embedding model, even if its layers could be.
#[test]
fn a_language_model_without_modules_is_refused_by_name() {
    let folder = copy_of("tiny-qwen3");
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("Qwen3Model", "Qwen3ForCausalLM")).unwrap();
    Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1))
        .expect("its modules.json says what it is");
    fs::remove_file(folder.path().join("modules.json")).unwrap();
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    let found = "the architecture `Qwen3ForCausalLM`, which generates text, and no modules.json";
    assert!(error.contains(found) && error.contains("Qwen3-Reranker"), "{error}");
}

/// sentence-transformers 6 puts texts into the template then, seen with 6.2. With `modules.json` it takes them as they are.
#[test]
fn a_chat_template_without_modules_is_refused() {
    let cases = [
        ("chat_template.jinja", "{{ messages[0].content }}", "chat_template.jinja has a chat template"),
        ("chat_template.jinja", "", "chat_template.jinja has a chat template"),
        (
            "tokenizer_config.json",
            r#"{"chat_template": "{{ messages[0].content }}"}"#,
            "tokenizer_config.json has a `chat_template`",
        ),
        (
            "tokenizer_config.json",
            r#"{"chat_template": [{"name": "default", "template": "x"}]}"#,
            "tokenizer_config.json has a `chat_template`",
        ),
    ];
    for fixture in ["tiny-qwen3", "tiny-mean"] {
        for (file, content, expected) in cases {
            let folder = copy_of(fixture);
            let load = || Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1));
            fs::write(folder.path().join(file), content).unwrap();
            load().expect("its modules.json says how it takes texts");
            fs::remove_file(folder.path().join("modules.json")).unwrap();
            let error = load().unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("trained on texts as they are"), "{error}");
            fs::remove_file(folder.path().join(file)).unwrap();
            fs::write(folder.path().join("tokenizer_config.json"), r#"{"chat_template": null}"#).unwrap();
            load().expect("there is no template");
        }
    }
}

/// Callers put a template's text around query and document themselves.
#[test]
fn a_classifier_with_a_chat_template_takes_pairs_as_they_are() {
    let folder = copy_of("tiny-qwen3-reranker");
    fs::write(folder.path().join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).expect("docs/models.md says so");
}

#[test]
fn weights_as_a_pickle_are_refused_before_all_else() {
    let folder = copy_of("tiny-mean");
    fs::rename(folder.path().join("model.safetensors"), folder.path().join("pytorch_model.bin")).unwrap();
    fs::write(folder.path().join("config.json"), r#"{"model_type": "none of ours"}"#).unwrap();
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    assert!(error.contains("pytorch_model.bin has weights as a pickle"), "{error}");
    assert!(error.contains("takes model.safetensors. Convert it once in Python"), "{error}");
    // Older models store the weights of a layer in this way.
    let folder = copy_of("tiny-gemma");
    let layer = folder.path().join("2_Dense");
    fs::rename(layer.join("model.safetensors"), layer.join("pytorch_model.bin")).unwrap();
    let error = Encoder::load_f32(&Source::Folder(folder.path().into()), cpu(1)).unwrap_err().to_string();
    assert!(error.contains("2_Dense/pytorch_model.bin has weights as a pickle"), "{error}");
}

/// The same file with other names of tensors.
fn renamed(file: &[u8], name: impl Fn(&str) -> String) -> Vec<u8> {
    let (length, rest) = file.split_first_chunk().unwrap();
    let (header, tensors) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).unwrap();
    let header = header.into_iter().map(|(tensor, place)| (name(&tensor), place));
    let mut text = serde_json::Value::Object(header.collect()).to_string();
    // The tensors after it begin at a multiple of eight.
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes(), tensors].concat()
}

/// As checkpoints that came from TensorFlow have them.
#[test]
fn older_names_of_norms_mean_the_same() {
    let folder = copy_of("tiny-mean");
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let other = renamed(&file, |name| {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    });
    assert_ne!(file, other);
    fs::write(&path, other).unwrap();
    agrees_with("tiny-mean", &Source::Folder(folder.path().into()));
}

#[test]
fn missing_settings_have_the_defaults_of_transformers() {
    let cases: [(&str, &[&str]); 4] = [
        ("tiny-mean", &["layer_norm_eps", "hidden_act", "type_vocab_size"]),
        ("tiny-distilbert", &["activation"]),
        ("tiny-qwen3", &["rms_norm_eps", "hidden_act"]),
        ("tiny-gemma", &["rms_norm_eps", "hidden_activation"]),
    ];
    for (fixture, keys) in cases {
        let folder = copy_of(fixture);
        let path = folder.path().join("config.json");
        let text = fs::read(&path).unwrap();
        let mut config: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&text).unwrap();
        for key in keys {
            assert!(config.remove(*key).is_some(), "{fixture} has no {key}");
        }
        fs::write(&path, serde_json::Value::Object(config).to_string()).unwrap();
        agrees_with(fixture, &Source::Folder(folder.path().into()));
    }
}
