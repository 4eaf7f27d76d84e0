//! Reads `config_sentence_transformers.json`, what sentence-transformers saves of a model as a whole: prompts, and how outputs are cut.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::LoadError;
use super::config::{optional, unsupported};
use crate::engine::InvalidInput;

/// The file's name. A folder need not have it.
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";

/// What sentence-transformers calls a classifier or reranker.
const CROSS_ENCODER: &str = "CrossEncoder";

/// The prompts that sentence-transformers gives to every model of vectors, dense or sparse. They are empty where the folder has none.
pub(super) const OF_VECTORS: [&str; 2] = ["query", "document"];

/// The file's content, and where it is.
pub(super) struct SavedConfig {
    pub path: PathBuf,
    keys: Keys,
}

#[derive(Default, Deserialize)]
struct Keys {
    /// sentence-transformers takes a prompt that is `null` as an empty one.
    #[serde(default)]
    prompts: BTreeMap<String, Option<String>>,
    default_prompt_name: Option<String>,
    /// Of a reranker, as sentence-transformers 6 writes it.
    activation_fn: Option<String>,
    /// What the folder was saved as, from version 5 on.
    model_type: Option<String>,
    /// Of a model of sparse vectors: the most elements that one has.
    max_active_dims: Option<NonZeroU32>,
    /// Of a model for embeddings: how many elements of a vector are kept.
    truncate_dim: Option<NonZeroUsize>,
}

impl SavedConfig {
    /// Reads the file of a folder. Missing keys, or a missing file, mean the defaults.
    ///
    /// # Errors
    /// The file is malformed.
    pub fn read(folder: &Path) -> Result<Self, LoadError> {
        let path = folder.join(PROMPTS);
        Ok(Self { keys: optional(&path)?.unwrap_or_default(), path })
    }

    /// That of a folder in which the file does not count.
    pub fn absent(folder: &Path) -> Self {
        Self { path: folder.join(PROMPTS), keys: Keys::default() }
    }

    pub fn is_cross_encoder(&self) -> bool {
        self.keys.model_type.as_deref() == Some(CROSS_ENCODER)
    }

    pub fn has_prompts(&self) -> bool {
        self.keys.prompts.values().flatten().any(|prompt| !prompt.is_empty())
    }

    /// The function behind the logits, by the name of a PyTorch module.
    pub fn activation(&self) -> Option<&str> {
        self.keys.activation_fn.as_deref()
    }

    /// The most elements that a sparse vector has.
    pub fn elements_max(&self) -> Option<u32> {
        self.keys.max_active_dims.map(NonZeroU32::get)
    }

    /// How many elements of an embedding are kept, if not all.
    pub fn kept(&self) -> Option<NonZeroUsize> {
        self.keys.truncate_dim
    }

    /// The folder's prompts, and the names in `always`, whose prompts are empty if the folder has none. The default prompt goes
    /// before every text, as in sentence-transformers.
    ///
    /// # Errors
    /// The default prompt is none of the prompts, which sentence-transformers refuses, too.
    pub fn prompts(self, always: &[&str]) -> Result<Prompts, LoadError> {
        let always = always.iter().map(|name| ((*name).to_owned(), String::new()));
        let saved = self.keys.prompts.into_iter().map(|(name, prompt)| (name, prompt.unwrap_or_default()));
        let by_name: BTreeMap<String, String> = always.chain(saved).collect();
        let default = match self.keys.default_prompt_name {
            None => String::new(),
            Some(name) => match by_name.get(&name) {
                Some(prompt) => prompt.clone(),
                None => {
                    let found = format!("the default prompt `{name}`");
                    return Err(unsupported(&self.path, found, "one of `prompts`"));
                }
            },
        };
        Ok(Prompts { by_name, default })
    }
}

/// What a model wants before its texts, by name.
#[derive(Clone, Debug, Default)]
pub(super) struct Prompts {
    by_name: BTreeMap<String, String>,
    /// Where a job names none.
    default: String,
}

impl Prompts {
    /// The prompt that a job names, or the default one.
    ///
    /// # Errors
    /// There is no such prompt.
    pub fn of(&self, name: Option<&Value>) -> Result<&str, InvalidInput> {
        let Some(name) = name else { return Ok(&self.default) };
        let found = name.as_str().and_then(|name| self.by_name.get(name));
        found.map(String::as_str).ok_or_else(|| {
            let names: Vec<String> = self.by_name.keys().map(|name| format!("`{name}`")).collect();
            let names = if names.is_empty() { "no prompts".to_owned() } else { names.join(", ") };
            InvalidInput(format!("params.prompt_name is {name}; this model has {names}"))
        })
    }
}
