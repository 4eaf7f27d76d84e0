//! A model folder's own description: what to load, and every reason not to.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::LoadError;
use crate::revision::RevisionHash;

/// The sizes that the forward pass depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub feed_forward: usize,
    pub vocabulary: usize,
    pub positions: usize,
    pub token_types: usize,
}

impl Dims {
    /// Elements of one head.
    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }
}

/// How a sequence's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    Mean,
    Cls,
    Max,
}

/// All of a model folder but weights and vocabulary.
#[derive(Clone, Debug)]
pub(super) struct ModelConfig {
    /// Where `config.json`, `model.safetensors` and `tokenizer.json` are.
    pub transformer: PathBuf,
    pub dims: Dims,
    pub norm_eps: f32,
    pub pooling: Pooling,
    pub normalize: bool,
    /// The most tokens of one item, special tokens included.
    pub tokens_max: usize,
    pub lowercase: bool,
    /// Put before every text.
    pub prompt: String,
}

/// Files that a folder may have and that are read where they are; besides those in the transformer's folder.
pub(super) const MODULES: &str = "modules.json";
pub(super) const PROMPTS: &str = "config_sentence_transformers.json";

#[derive(Deserialize)]
struct BertConfig {
    model_type: Option<String>,
    hidden_act: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    type_vocab_size: usize,
    layer_norm_eps: f64,
    position_embedding_type: Option<String>,
    #[serde(default)]
    is_decoder: bool,
    #[serde(default)]
    add_cross_attention: bool,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Module {
    #[serde(rename = "type")]
    pub class: String,
    pub path: String,
}

impl Module {
    /// The class without its package, which differs between versions.
    pub fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }
}

#[derive(Default, Deserialize)]
struct SentenceBert {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    /// Written as a float of 1e30 when unlimited.
    model_max_length: Option<f64>,
    truncation_side: Option<String>,
}

#[derive(Default, Deserialize)]
struct Prompts {
    #[serde(default)]
    prompts: HashMap<String, String>,
    default_prompt_name: Option<String>,
}

impl ModelConfig {
    /// Reads a folder in the Sentence-Transformers layout. One without `modules.json` is taken as
    /// sentence-transformers takes it: mean pooling over the transformer's tokens, and no normalisation.
    ///
    /// # Errors
    /// Names the file and what in it is missing, malformed, or not supported.
    pub fn read(folder: &Path) -> Result<Self, LoadError> {
        let modules: Option<Vec<Module>> = optional(&folder.join(MODULES))?;
        let (transformer, pooling, normalize) = match &modules {
            None => (folder.to_owned(), Pooling::Mean, false),
            Some(modules) => read_modules(folder, modules)?,
        };
        let path = transformer.join("config.json");
        let bert: BertConfig = required(&path)?;
        check_bert(&bert, &path)?;
        let sentence: SentenceBert =
            optional(&transformer.join("sentence_bert_config.json"))?.unwrap_or_default();
        let tokenizer: TokenizerConfig =
            optional(&transformer.join("tokenizer_config.json"))?.unwrap_or_default();
        if let Some(side) = tokenizer.truncation_side.filter(|side| side != "right") {
            return Err(unsupported(
                &transformer.join("tokenizer_config.json"),
                format!("truncation_side `{side}`"),
                "`right`",
            ));
        }
        let positions = bert.max_position_embeddings;
        // The cast saturates, which is what "unlimited" should do.
        let tokens_max = sentence
            .max_seq_length
            .or(tokenizer.model_max_length.map(|tokens| tokens as usize))
            .map_or(positions, |tokens| tokens.min(positions));
        Ok(Self {
            dims: Dims {
                layers: bert.num_hidden_layers,
                hidden: bert.hidden_size,
                heads: bert.num_attention_heads,
                feed_forward: bert.intermediate_size,
                vocabulary: bert.vocab_size,
                positions,
                token_types: bert.type_vocab_size,
            },
            norm_eps: bert.layer_norm_eps as f32,
            pooling: read_pooling(pooling_file(folder, modules.as_deref()), pooling, bert.hidden_size)?,
            normalize,
            tokens_max,
            lowercase: sentence.do_lower_case,
            prompt: read_prompt(folder)?,
            transformer,
        })
    }

    /// The model's revision: its weights, its tokenizer, what is done with them, and the type that it computes in.
    ///
    /// # Errors
    /// Weights or tokenizer cannot be read.
    pub fn revision(&self, element: &str) -> Result<String, LoadError> {
        let Self { dims, norm_eps, pooling, normalize, tokens_max, lowercase, prompt, transformer } = self;
        let mut hash = RevisionHash::default();
        for name in ["model.safetensors", "tokenizer.json"] {
            let path = transformer.join(name);
            hash.add_file(name, &path).map_err(|source| LoadError::Read { path, source })?;
        }
        hash.add("dims", format!("{dims:?}").as_bytes());
        hash.add("norm_eps", &norm_eps.to_le_bytes());
        hash.add("pooling", format!("{pooling:?}").as_bytes());
        hash.add("flags", &[u8::from(*normalize), u8::from(*lowercase)]);
        hash.add("tokens_max", &(*tokens_max as u64).to_le_bytes());
        hash.add("prompt", prompt.as_bytes());
        Ok(hash.finish(element))
    }
}

/// The transformer's folder, a first guess at pooling, and whether vectors are normalised.
fn read_modules(folder: &Path, modules: &[Module]) -> Result<(PathBuf, Pooling, bool), LoadError> {
    let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
    let normalize = match kinds[..] {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        _ => {
            return Err(unsupported(
                &folder.join(MODULES),
                format!("the modules {}", kinds.join(", ")),
                "Transformer, Pooling and at most a Normalize, in this order",
            ));
        }
    };
    Ok((folder.join(&modules[0].path), Pooling::Mean, normalize))
}

fn pooling_file(folder: &Path, modules: Option<&[Module]>) -> Option<PathBuf> {
    modules.map(|modules| folder.join(&modules[1].path).join("config.json"))
}

fn read_pooling(path: Option<PathBuf>, without: Pooling, hidden: usize) -> Result<Pooling, LoadError> {
    let Some(path) = path else { return Ok(without) };
    let config: HashMap<String, serde_json::Value> = required(&path)?;
    let width = config.get("word_embedding_dimension").or(config.get("embedding_dimension"));
    if let Some(width) = width
        && width.as_u64() != Some(hidden as u64)
    {
        return Err(unsupported(&path, format!("a width of {width}"), &hidden.to_string()));
    }
    // Up to version 5 there is a switch per mode, from 6 on a name.
    let mut modes: Vec<&str> = match config.get("pooling_mode") {
        Some(mode) => vec![mode.as_str().unwrap_or("?")],
        None => config
            .iter()
            .filter(|(_, on)| **on == serde_json::Value::Bool(true))
            .filter_map(|(key, _)| key.strip_prefix("pooling_mode_"))
            .collect(),
    };
    modes.sort_unstable();
    match modes[..] {
        ["mean" | "mean_tokens"] => Ok(Pooling::Mean),
        ["cls" | "cls_token"] => Ok(Pooling::Cls),
        ["max" | "max_tokens"] => Ok(Pooling::Max),
        _ => Err(unsupported(
            &path,
            format!("the pooling modes [{}]", modes.join(", ")),
            "one of mean, cls, max",
        )),
    }
}

/// sentence-transformers puts its default prompt before every text; so does this engine.
fn read_prompt(folder: &Path) -> Result<String, LoadError> {
    let path = folder.join(PROMPTS);
    let mut prompts: Prompts = optional(&path)?.unwrap_or_default();
    let Some(name) = prompts.default_prompt_name else {
        return Ok(String::new());
    };
    prompts
        .prompts
        .remove(&name)
        .ok_or_else(|| unsupported(&path, format!("the default prompt `{name}`"), "one of `prompts`"))
}

fn check_bert(bert: &BertConfig, path: &Path) -> Result<(), LoadError> {
    let refuse = |found: String, takes: &str| Err(unsupported(path, found, takes));
    let model_type = bert.model_type.as_deref().unwrap_or("(none)");
    if model_type != "bert" {
        return refuse(format!("the architecture `{model_type}`"), "`bert`");
    }
    if bert.hidden_act != "gelu" {
        return refuse(format!("the activation function `{}`", bert.hidden_act), "`gelu`");
    }
    if let Some(kind) = &bert.position_embedding_type
        && kind != "absolute"
    {
        return refuse(format!("position embeddings `{kind}`"), "`absolute`");
    }
    if bert.is_decoder || bert.add_cross_attention {
        return refuse("a decoder".into(), "an encoder");
    }
    let sizes = [
        bert.hidden_size,
        bert.num_hidden_layers,
        bert.num_attention_heads,
        bert.intermediate_size,
        bert.vocab_size,
        bert.max_position_embeddings,
        bert.type_vocab_size,
    ];
    // So large that no model comes near, so small that no product of three sizes overflows.
    if sizes.iter().any(|size| !(1..1 << 20).contains(size)) {
        return refuse("sizes of zero or beyond a million".into(), "those of a model");
    }
    if !bert.hidden_size.is_multiple_of(bert.num_attention_heads) {
        return refuse(
            format!("{} heads for a width of {}", bert.num_attention_heads, bert.hidden_size),
            "heads that divide the width",
        );
    }
    Ok(())
}

fn unsupported(path: &Path, found: String, takes: &str) -> LoadError {
    LoadError::Unsupported { path: path.to_owned(), found, takes: takes.to_owned() }
}

fn required<T: DeserializeOwned>(path: &Path) -> Result<T, LoadError> {
    let text = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| LoadError::Json { path: path.to_owned(), source })
}

/// `None` if there is no such file.
pub(super) fn optional<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LoadError> {
    match required(path) {
        Ok(value) => Ok(Some(value)),
        Err(LoadError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
