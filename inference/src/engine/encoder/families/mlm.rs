//! The head of a masked language model, which scores every token of the vocabulary: SPLADE models make sparse vectors of it.

use std::fs;
use std::path::Path;

use serde::Deserialize;

use super::ConfigFile;
use crate::engine::encoder::LoadError;

/// What a family's checkpoint calls the parts of the head, without `.weight` and `.bias`: a linear map with GELU behind it, a norm,
/// and a map to the vocabulary. The weights of that map are the words' embeddings.
#[derive(Debug)]
pub(in crate::engine::encoder) struct MlmHead {
    pub dense: &'static str,
    pub norm: &'static str,
    /// The full name of the last map's weights, which files need not have.
    pub decoder: &'static str,
    /// Full names of the last map's bias. The first one that a file has counts, as in transformers.
    pub biases: &'static [&'static str],
}

/// Every `model_type` whose head this engine runs.
static HEADS: [(&str, MlmHead); 2] = [
    (
        "bert",
        MlmHead {
            dense: "cls.predictions.transform.dense",
            norm: "cls.predictions.transform.LayerNorm",
            decoder: "cls.predictions.decoder.weight",
            biases: &["cls.predictions.decoder.bias", "cls.predictions.bias"],
        },
    ),
    (
        "distilbert",
        MlmHead {
            dense: "vocab_transform",
            norm: "vocab_layer_norm",
            decoder: "vocab_projector.weight",
            biases: &["vocab_projector.bias"],
        },
    ),
];

#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
    /// As transformers has it where a file does not say.
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
}

fn yes() -> bool {
    true
}

impl MlmHead {
    /// The head that the `model_type` of a `config.json` has.
    ///
    /// # Errors
    /// The file cannot be read, or the family's head is not among those that this engine runs.
    pub fn read(path: &Path) -> Result<&'static Self, LoadError> {
        let text = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
        let file = ConfigFile { path, text };
        let config: Config = file.parse()?;
        let model_type = config.model_type.as_deref().unwrap_or("(none)");
        let Some((_, head)) = HEADS.iter().find(|(name, _)| *name == model_type) else {
            let known: Vec<String> = HEADS.iter().map(|(name, _)| format!("`{name}`")).collect();
            let found = format!("the architecture `{model_type}` for sparse vectors");
            return file.refuse(found, &known.join(", "));
        };
        match config.tie_word_embeddings {
            true => Ok(head),
            false => file.refuse(
                "`tie_word_embeddings: false`".into(),
                "sparse vectors of models whose last map has the weights of the words' embeddings",
            ),
        }
    }
}
