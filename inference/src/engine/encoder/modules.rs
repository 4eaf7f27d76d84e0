//! Reads a folder's `modules.json`: whether the model computes embeddings or scores, and how it pools tokens.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::LoadError;
use super::config::{optional, required, unsupported};

/// The file that lists a model's modules.
pub(super) const MODULES: &str = "modules.json";

/// An entry of that file.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Module {
    #[serde(rename = "type")]
    pub class: String,
    pub path: String,
}

impl Module {
    /// The modules that a file lists; `None` if there is no such file.
    ///
    /// # Errors
    /// The file is malformed, or a module is not inside the model's folder: sentence-transformers refuses such a model, too, and a
    /// downloaded file must not choose which other files of the machine are read.
    pub fn list(file: &Path) -> Result<Option<Vec<Self>>, LoadError> {
        let modules: Option<Vec<Self>> = optional(file)?;
        match modules.iter().flatten().find(|module| !module.is_inside()) {
            None => Ok(modules),
            Some(module) => {
                let found = format!("a module with the path `{}`", module.path);
                Err(unsupported(file, found, "paths inside the model's folder"))
            }
        }
    }

    fn is_inside(&self) -> bool {
        Path::new(&self.path)
            .components()
            .all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    }

    /// Whether it is the model's transformer.
    pub fn is_transformer(&self) -> bool {
        matches!(self.kind(), "Transformer" | MLM_TRANSFORMER)
    }

    /// Whether it makes one vector of those of the tokens.
    pub fn is_pooling(&self) -> bool {
        matches!(self.kind(), "Pooling" | SPLADE_POOLING)
    }

    /// The class without its package, which differs between versions. A class of another package may do anything, so it keeps its
    /// whole name, and is refused by that name.
    pub fn kind(&self) -> &str {
        match self.class.strip_prefix(PACKAGE) {
            Some(class) => class.rsplit('.').next().unwrap_or_default(),
            None => &self.class,
        }
    }
}

/// What the names of all classes of sentence-transformers begin with.
const PACKAGE: &str = "sentence_transformers.";

/// The transformer of a masked language model, as sentence-transformers 5 calls it. Later versions say so in the transformer's own file.
const MLM_TRANSFORMER: &str = "MLMTransformer";

/// What makes a sparse vector of scores of the vocabulary.
const SPLADE_POOLING: &str = "SpladePooling";

/// What makes vectors of length 1, and the file that says which.
pub(super) const NORMALIZE: &str = "Normalize";
pub(super) const NORMALIZE_CONFIG: &str = "config.json";

/// What sentence-transformers calls a text's vector.
pub(super) const VECTOR: &str = "sentence_embedding";

/// Refuses a module that normalizes anything but a text's vector, or puts the result elsewhere.
fn check_normalize(path: &Path) -> Result<(), LoadError> {
    let config: HashMap<String, Value> = optional(path)?.unwrap_or_default();
    for key in ["module_input_name", "module_output_name"] {
        if let Some(name) = config.get(key).filter(|name| !name.is_null() && *name != VECTOR) {
            return Err(unsupported(path, format!("{key} {name}"), &format!("`{VECTOR}`")));
        }
    }
    Ok(())
}

/// What a model is for.
pub(super) enum Task {
    /// There is no `modules.json`: the model is a classifier if `config.json` says so, else for embeddings.
    Unsaid,
    Embed {
        /// The file that says how tokens become a vector.
        pooling: PathBuf,
        /// The name and the folder of each layer behind that.
        dense: Vec<(String, PathBuf)>,
        normalize: bool,
    },
    /// Sparse vectors, by the head of a masked language model.
    Sparse {
        /// The file that says how scores of the vocabulary become a vector.
        pooling: PathBuf,
        /// The module says by its class that the transformer has such a head.
        says_so: bool,
    },
    Score,
}

/// The lists of modules that this engine takes.
pub(super) const MODULES_TAKEN: &str = "Transformer, Pooling, any number of Dense and at most a Normalize, in this order; the \
                                        Transformer of a masked language model and SpladePooling; or the \
                                        Transformer of a classifier alone; all of them classes of sentence-transformers";

impl Task {
    /// The transformer's folder, and what it is for.
    ///
    /// # Errors
    /// Modules that this engine does not have, or not in this order.
    pub fn read(folder: &Path, modules: &[Module]) -> Result<(PathBuf, Self), LoadError> {
        let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
        let refuse = || {
            let found = format!("the modules {}", kinds.join(", "));
            Err(unsupported(&folder.join(MODULES), found, MODULES_TAKEN))
        };
        let [transformer, behind @ ..] = modules else { return refuse() };
        if !transformer.is_transformer() {
            return refuse();
        }
        let transformer_folder = folder.join(&transformer.path);
        let is_mlm = transformer.kind() == MLM_TRANSFORMER;
        let [pooling, behind @ ..] = behind else {
            return if is_mlm { refuse() } else { Ok((transformer_folder, Self::Score)) };
        };
        let pooling_file = folder.join(&pooling.path).join("config.json");
        if pooling.kind() == SPLADE_POOLING && behind.is_empty() {
            return Ok((transformer_folder, Self::Sparse { pooling: pooling_file, says_so: is_mlm }));
        }
        let (dense, normalize) = match behind {
            [dense @ .., last] if last.kind() == NORMALIZE => {
                check_normalize(&folder.join(&last.path).join(NORMALIZE_CONFIG))?;
                (dense, true)
            }
            dense => (dense, false),
        };
        if is_mlm || pooling.kind() != "Pooling" || dense.iter().any(|module| module.kind() != "Dense") {
            return refuse();
        }
        let dense = dense.iter().map(|module| (module.path.clone(), folder.join(&module.path))).collect();
        Ok((transformer_folder, Self::Embed { pooling: pooling_file, dense, normalize }))
    }

    /// Whether pooling is to leave out the tokens of the prompt.
    ///
    /// # Errors
    /// Pooling's own file is missing or malformed.
    pub fn leaves_prompts_out(&self) -> Result<bool, LoadError> {
        let Self::Embed { pooling, .. } = self else { return Ok(false) };
        let config: HashMap<String, Value> = required(pooling)?;
        Ok(config.get("include_prompt") == Some(&Value::Bool(false)))
    }
}

/// How a sequence's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    Mean,
    Cls,
    Max,
    Last,
}

impl Pooling {
    /// As pooling's own file says, for tokens of so many elements.
    ///
    /// # Errors
    /// Another width, or a way of pooling that this engine does not have.
    pub(super) fn read(path: &Path, hidden: usize) -> Result<Self, LoadError> {
        let config: HashMap<String, Value> = required(path)?;
        let width = config.get("word_embedding_dimension").or(config.get("embedding_dimension"));
        if let Some(width) = width
            && width.as_u64() != Some(hidden as u64)
        {
            return Err(unsupported(path, format!("a width of {width}"), &hidden.to_string()));
        }
        // Up to version 5 there is a switch per mode, from 6 on a name.
        let mut modes: Vec<&str> = match config.get("pooling_mode") {
            // One mode in a list is that mode.
            Some(Value::Array(modes)) => modes.iter().map(|mode| mode.as_str().unwrap_or("?")).collect(),
            Some(mode) => vec![mode.as_str().unwrap_or("?")],
            None => Self::switched_on(path, &config)?,
        };
        modes.sort_unstable();
        match modes[..] {
            ["mean" | "mean_tokens"] => Ok(Self::Mean),
            // Where no switch is on, as in the library.
            [] if !config.contains_key("pooling_mode") => Ok(Self::Mean),
            ["cls" | "cls_token"] => Ok(Self::Cls),
            ["max" | "max_tokens"] => Ok(Self::Max),
            ["lasttoken"] => Ok(Self::Last),
            _ => Err(unsupported(
                path,
                format!("the pooling modes [{}]", modes.join(", ")),
                "one of mean, cls, max, lasttoken",
            )),
        }
    }

    /// The modes whose switch is on.
    fn switched_on<'a>(path: &Path, config: &'a HashMap<String, Value>) -> Result<Vec<&'a str>, LoadError> {
        let mut modes = Vec::new();
        for (key, on) in config {
            let Some(mode) = key.strip_prefix("pooling_mode_") else { continue };
            match on {
                Value::Bool(true) => modes.push(mode),
                Value::Bool(false) | Value::Null => {}
                other => return Err(unsupported(path, format!("{key} {other}"), "true, false")),
            }
        }
        Ok(modes)
    }
}
