//! The keys of a `config.json` that mean the same in every family, and what is refused whatever the family.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

use super::ConfigFile;
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::null_as_default;

/// What every family's file may say.
#[derive(Deserialize)]
pub(super) struct AnyConfig {
    pub model_type: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    is_decoder: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    add_cross_attention: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    pub architectures: Vec<String>,
    /// Classes in the folder's own code, by the name of the transformers class that each replaces.
    #[serde(default, deserialize_with = "null_as_default")]
    auto_map: HashMap<String, Value>,
    quantization_config: Option<Value>,
    is_causal: Option<bool>,
    pub tokenizer_class: Option<String>,
}

/// Families that were published with code of their own before transformers had them. Their readers know what that code can do besides.
const PUBLISHED_WITH_CODE: [&str; 3] = ["gte", "new", "nomic_bert"];

impl AnyConfig {
    /// Refuses settings that make another model of tensors with the same names.
    pub fn check(&self, file: &ConfigFile<'_>, model_type: &str) -> Result<(), LoadError> {
        if self.is_decoder || self.add_cross_attention {
            return file.refuse("a decoder".into(), "an encoder");
        }
        // transformers hands this key to the attention of any family but MPNet. The reader of Qwen3 looks at it itself.
        let changes = match model_type {
            "mpnet" | "qwen3" => None,
            "gemma3_text" => Some(false),
            _ => Some(true),
        };
        if let Some(own) = self.is_causal
            && changes == Some(own)
        {
            return file.refuse(format!("is_causal {own}"), "this family without that key");
        }
        if let Some(own) = &self.quantization_config {
            let method = own["quant_method"].as_str().unwrap_or("(none)");
            let found = format!("weights that are quantised by `{method}` (quantization_config)");
            return file.refuse(found, "weights as F32, F16 or BF16");
        }
        let has_own_model = self.auto_map.keys().any(|class| class.starts_with("AutoModel"));
        if has_own_model && !PUBLISHED_WITH_CODE.contains(&model_type) {
            let takes = "models that transformers computes without code of theirs. If they compute the same without it, remove \
                         `auto_map` from the file";
            return file.refuse(format!("code of its own for a `{model_type}` (auto_map)"), takes);
        }
        // Its map behind the transformer, and its masks, would be left out. transformers has no such class.
        if let Some(class) = self.architectures.iter().find(|class| class.contains("ColBERT")) {
            let takes = "models with one vector for each text. If pooling its tokens is meant, name transformers' class instead";
            return file.refuse(format!("the architecture `{class}`, a vector for each token"), takes);
        }
        Ok(())
    }
}
