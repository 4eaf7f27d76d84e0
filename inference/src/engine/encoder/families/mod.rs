//! The families of models that the encoder runs: one reader for each makes a plain [`Spec`] of its `config.json`.
//!
//! The layer loop, the plans and the loaders use a `Spec` and know no family. A new family needs a new reader: the names of the
//! sizes in its configuration, the names of the tensors in its checkpoint, and checks for features that this engine does not
//! support.

mod any_config;
mod bert;
mod classifier;
mod design;
mod distilbert;
mod gemma;
mod gte;
mod layer_kinds;
mod mlm;
mod modernbert;
mod mpnet;
mod nomic;
mod positions;
mod qwen3;
mod roberta;
mod rotary;

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::config::Dims;
use super::forward::{Linear, Norm};
use super::{LoadError, json};
use any_config::AnyConfig;

pub(super) use classifier::{
    Activation, Classifier, HeadDense, HeadDesign, HeadNorm, SCORE_MODULES, ScoreFunction,
};
pub(super) use design::{Attention, Design, FeedForward, Gate, NormKind, Norms, Sees};
pub(super) use mlm::MlmHead;
pub(super) use positions::{Positions, RelativeBias};
pub(super) use rotary::Rotary;

/// All that loading and running a model depends on, whatever its family.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// As `config.json` has it.
    pub model_type: String,
    /// The class of the tokenizer, if `config.json` names one: it counts where `tokenizer_config.json` names none.
    pub tokenizer_class: Option<String>,
    pub dims: Dims,
    pub norm_eps: f32,
    pub design: Design,
    pub positions: Positions,
    pub relative: Option<RelativeBias>,
    /// What the words' embeddings are multiplied with.
    pub words_scale: f32,
    pub names: &'static Names,
    /// `None`: the model makes embeddings.
    pub classifier: Option<Classifier>,
    /// `None`: vectors are not sparse.
    pub mlm: Option<&'static MlmHead>,
    /// The architecture that the file names, if that generates text: Qwen3-Reranker and chat models have the layers of embedding models.
    pub generates: Option<String>,
}

/// The tokens of one item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence<'a> {
    pub ids: &'a [u32],
    /// The first of them that is of the second token type; how many there are, if none is.
    pub second_from: usize,
}

impl Spec {
    /// A model as most are, for embeddings: without a relative bias, and with words' embeddings as they are.
    fn new(dims: Dims, norm_eps: f64, design: Design, positions: Positions, names: &'static Names) -> Self {
        let norm_eps = norm_eps as f32;
        Self {
            model_type: String::new(),
            tokenizer_class: None,
            dims,
            norm_eps,
            design,
            positions,
            relative: None,
            words_scale: 1.0,
            names,
            classifier: None,
            mlm: None,
            generates: None,
        }
    }

    /// Makes it a model of sparse vectors, by this head.
    pub fn set_mlm(&mut self, head: &'static MlmHead) {
        self.mlm = Some(head);
        self.dims.is_sparse = true;
        self.classifier = None;
    }

    /// Token types that items may have: a second one for pairs of texts, which only classifiers take.
    pub fn segments(&self) -> usize {
        if self.classifier.is_some() && self.dims.token_types > 1 { 2 } else { 1 }
    }

    /// The row of that table that each token of an item takes, in order.
    pub fn rows_of(&self, sequence: Sequence<'_>) -> impl Iterator<Item = u32> {
        let second_type = match self.segments() {
            1 => 0,
            _ => self.positions.rows(self.dims.positions) as u32,
        };
        let rows = self.positions.of(sequence.ids).enumerate();
        rows.map(move |(at, row)| if at < sequence.second_from { row } else { row + second_type })
    }

    /// Rows of the table that is added to the words' embeddings: one for each position of each token type.
    pub fn table_rows(&self) -> usize {
        self.segments() * self.positions.rows(self.dims.positions)
    }

    /// How many distances two tokens of a text can have, in both directions; zero without a relative bias.
    pub fn distances(&self) -> usize {
        self.relative.map_or(0, |_| 2 * self.dims.positions - 1)
    }
}

/// What a family's checkpoint calls its tensors, without `.weight` and `.bias`.
#[derive(Debug)]
pub(super) struct Names {
    /// Prefixes of all names in files that also hold a task's head, of which such a file has one. Other files have none.
    pub prefixes: &'static [&'static str],
    pub words: &'static str,
    pub positions: &'static str,
    pub token_types: Option<&'static str>,
    pub embedding_norm: &'static str,
    /// The relative bias: a row for each bucket, a column for each head.
    pub relative: &'static str,
    /// A layer's names are `LAYERS.N.` and a part below.
    pub layers: &'static str,
    /// Each linear map, and the maps of the checkpoint whose output rows it joins in this order.
    pub linears: [(Linear, &'static [&'static str]); 4],
    /// Where norms come before blocks, the one behind a layer's feed-forward is the next layer's.
    pub norms: [(Norm, &'static str); 2],
    /// The norms of what attention and the feed-forward make, applied before the residual sum.
    pub block_norms: Option<[&'static str; 2]>,
    /// The norm behind the last layer, where norms come before blocks.
    pub last_norm: Option<&'static str>,
    /// The norms of each head's queries and keys.
    pub head_norms: Option<[&'static str; 2]>,
}

/// Makes a [`Spec`] of the text of a `config.json`.
type Reader = fn(&ConfigFile<'_>) -> Result<Spec, LoadError>;

/// Every `model_type` that runs, and its reader.
const READERS: [(&str, Reader); 12] = [
    ("bert", bert::read),
    ("camembert", roberta::read),
    ("distilbert", distilbert::read),
    ("gemma3_text", gemma::read),
    ("gte", gte::read),
    ("modernbert", modernbert::read),
    ("mpnet", mpnet::read),
    // What GTE's own code calls it.
    ("new", gte::read),
    ("nomic_bert", nomic::read),
    ("qwen3", qwen3::read),
    ("roberta", roberta::read),
    ("xlm-roberta", roberta::read),
];

/// Reads a `config.json` with the reader of its `model_type`. `with_head`: a classifier's head counts, if the file describes one.
///
/// # Errors
/// Names what in it is missing, malformed or not supported, with the list of what is.
pub(super) fn read(path: &Path, with_head: bool) -> Result<Spec, LoadError> {
    let text = fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    let file = ConfigFile { path, text };
    let config: AnyConfig = file.parse()?;
    let model_type = config.model_type.as_deref().unwrap_or("(none)");
    let Some((_, reader)) = READERS.iter().find(|(name, _)| *name == model_type) else {
        let known: Vec<String> = READERS.iter().map(|(name, _)| format!("`{name}`")).collect();
        return file.refuse(format!("the architecture `{model_type}`"), &known.join(", "));
    };
    config.check(&file, model_type)?;
    let mut spec = reader(&file)?;
    spec.model_type = model_type.to_owned();
    spec.generates = config.architectures.iter().find(|name| name.ends_with("ForCausalLM")).cloned();
    spec.tokenizer_class.clone_from(&config.tokenizer_class);
    check_sizes(&file, &spec)?;
    if with_head {
        spec.classifier = classifier::read(&file, model_type)?;
    }
    Ok(spec)
}

/// A `config.json` that has been read but not parsed.
struct ConfigFile<'a> {
    path: &'a Path,
    text: Vec<u8>,
}

impl ConfigFile<'_> {
    fn parse<T: DeserializeOwned>(&self) -> Result<T, LoadError> {
        json::parse(self.path, &self.text)
    }

    fn refuse<T>(&self, found: String, takes: &str) -> Result<T, LoadError> {
        Err(LoadError::Unsupported { path: self.path.to_owned(), found, takes: takes.to_owned() })
    }

    /// Elements of a head: the width divided by the number of heads.
    fn head(&self, hidden: usize, heads: usize) -> Result<usize, LoadError> {
        match hidden.checked_div(heads) {
            Some(head) if head * heads == hidden => Ok(head),
            _ => self.refuse(format!("{heads} heads for a width of {hidden}"), "heads that divide the width"),
        }
    }

    fn needs_gelu(&self, activation: &str) -> Result<(), LoadError> {
        match activation {
            "gelu" | "gelu_python" => Ok(()),
            other => self.refuse(format!("the activation function `{other}`"), "`gelu`"),
        }
    }
}

/// The keys that BERT and the families that grew from it share. What no tensor's shape can show has transformers' defaults.
#[derive(Deserialize)]
struct BertLike {
    #[serde(default = "gelu")]
    hidden_act: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    intermediate_size: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    #[serde(default = "bert_eps")]
    layer_norm_eps: f64,
    /// MPNet has none.
    type_vocab_size: Option<usize>,
    position_embedding_type: Option<String>,
    /// Negative where there is none.
    pad_token_id: Option<i64>,
    relative_attention_num_buckets: Option<usize>,
}

fn gelu() -> String {
    "gelu".to_owned()
}

fn silu() -> String {
    "silu".to_owned()
}

fn bert_eps() -> f64 {
    1e-12
}

/// What a norm of the root mean square adds.
fn rms_eps() -> f64 {
    1e-6
}

impl BertLike {
    /// Parses a file and checks what these families have in common.
    fn read(file: &ConfigFile<'_>) -> Result<Self, LoadError> {
        let config: Self = file.parse()?;
        file.needs_gelu(&config.hidden_act)?;
        match config.position_embedding_type.as_deref() {
            None | Some("absolute") => Ok(config),
            Some(kind) => file.refuse(format!("position embeddings `{kind}`"), "`absolute`"),
        }
    }

    /// `token_types`: how many there are where the file does not say.
    fn dims(&self, file: &ConfigFile<'_>, positions: usize, token_types: usize) -> Result<Dims, LoadError> {
        Ok(Dims {
            layers: self.num_hidden_layers,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_attention_heads,
            head: file.head(self.hidden_size, self.num_attention_heads)?,
            feed_forward: self.intermediate_size,
            is_gated: false,
            vocabulary: self.vocab_size,
            positions,
            token_types: self.type_vocab_size.unwrap_or(token_types),
            is_sparse: false,
        })
    }

    /// Positions as RoBERTa counts them: how many a text may have, and by what rule.
    fn positions_after_padding(
        &self,
        file: &ConfigFile<'_>,
        padding: u32,
    ) -> Result<(usize, Positions), LoadError> {
        match self.max_position_embeddings.checked_sub(padding as usize + 1) {
            Some(positions) if positions > 0 && self.max_position_embeddings < SIZE_END => {
                Ok((positions, Positions::SkipPadding { padding }))
            }
            _ => file.refuse(
                format!(
                    "{} position embeddings, the padding token's is number {padding}",
                    self.max_position_embeddings
                ),
                "more positions than that, and fewer than a million",
            ),
        }
    }
}

/// Sizes of one million and more are those of no model, and below them no product of three sizes overflows.
const SIZE_END: usize = 1 << 20;

/// Elements of one kind of map in all layers: four maps and four bytes an element overflow nothing.
const ELEMENTS_END: usize = 1 << 50;

fn check_sizes(file: &ConfigFile<'_>, spec: &Spec) -> Result<(), LoadError> {
    let dims = &spec.dims;
    let sizes = [
        dims.hidden,
        dims.layers,
        dims.heads,
        dims.kv_heads,
        dims.head,
        dims.feed_forward,
        dims.vocabulary,
        dims.positions,
        // None is allowed.
        dims.token_types.saturating_add(1),
    ];
    if sizes.iter().any(|size| !(1..SIZE_END).contains(size)) {
        return file.refuse("sizes of zero or beyond a million".into(), "those of a model");
    }
    // Heads have a width of their own, so that all layers' weights are a product of four sizes.
    let widest = dims.hidden.max(dims.feed_forward).max(dims.heads * dims.head);
    if dims.layers * dims.hidden > ELEMENTS_END / widest {
        return file.refuse("more weights than any machine has memory for".into(), "those of a model");
    }
    if !dims.heads.is_multiple_of(dims.kv_heads) {
        return file.refuse(
            format!("{} heads that share {} of keys and values", dims.heads, dims.kv_heads),
            "as many heads for each of keys and values",
        );
    }
    if !spec.design.rotary.is_empty() && !dims.head.is_multiple_of(2) {
        return file
            .refuse(format!("rotary positions for heads of {} elements", dims.head), "an even number");
    }
    Ok(())
}
