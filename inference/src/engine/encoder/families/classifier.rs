//! Classifiers and rerankers: reads the description of the head that computes scores from the vector of a text.

use std::collections::HashMap;

use serde::Deserialize;

use super::{ConfigFile, bert, distilbert, modernbert, qwen3, roberta};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::null_as_default;
use crate::engine::encoder::modules::Pooling;

/// A head, and what its logits mean.
#[derive(Clone, Debug)]
pub(in crate::engine::encoder) struct Classifier {
    pub head: HeadDesign,
    /// In the order of the logits. A single one is a reranker's.
    pub labels: Vec<String>,
    pub function: ScoreFunction,
}

/// How a family computes logits: of one vector of a text's tokens, by up to two linear maps. Names are those of the checkpoint's
/// tensors, without `.weight` and `.bias`.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::encoder) struct HeadDesign {
    /// How the tokens become a vector.
    pub pooling: Pooling,
    /// With pooling of the last token: these tokens do not count at the end of a text, unless it has no others. Only families whose
    /// tokens see just those before them use this, so that leaving the padding out does not change the vector.
    pub padding: Option<u32>,
    /// What the vector goes through before the last map.
    pub dense: Option<HeadDense>,
    /// The map with a row for each label.
    pub out: &'static str,
    pub out_bias: bool,
}

impl HeadDesign {
    /// One whose only map takes the first token's vector, and adds a bias.
    pub(super) const fn of_first_token(out: &'static str) -> Self {
        Self { pooling: Pooling::Cls, padding: None, dense: None, out, out_bias: true }
    }
}

/// A linear map, an activation, and a norm if there is one.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::encoder) struct HeadDense {
    pub name: &'static str,
    /// The map belongs to the model, so its name has the prefix of the model's tensors: BERT's pooler.
    pub is_of_model: bool,
    pub bias: bool,
    pub activation: Activation,
    pub norm: Option<HeadNorm>,
}

impl HeadDense {
    /// One with a bias and without a norm.
    pub(super) const fn new(name: &'static str, activation: Activation) -> Self {
        Self { name, is_of_model: false, bias: true, activation, norm: None }
    }
}

/// A norm by mean and variance.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine::encoder) struct HeadNorm {
    pub name: &'static str,
    pub bias: bool,
    pub eps: f32,
}

/// Reads what a configuration says of its family's head.
type HeadReader = fn(&ConfigFile<'_>) -> Result<HeadDesign, LoadError>;

/// Every `model_type` whose head this engine runs.
const HEADS: [(&str, HeadReader); 10] = [
    ("bert", |_| Ok(bert::HEAD)),
    ("camembert", |_| Ok(roberta::HEAD)),
    ("distilbert", |_| Ok(distilbert::HEAD)),
    ("gte", |_| Ok(bert::HEAD)),
    ("modernbert", modernbert::head),
    ("mpnet", |_| Ok(roberta::HEAD)),
    ("new", |_| Ok(bert::HEAD)),
    ("qwen3", qwen3::head),
    ("roberta", |_| Ok(roberta::HEAD)),
    ("xlm-roberta", |_| Ok(roberta::HEAD)),
];

/// The function behind a linear map of a head, or of a layer behind pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Activation {
    Identity,
    Tanh,
    Relu,
    Gelu,
}

impl Activation {
    /// By the name that transformers has for it.
    pub(super) fn read(file: &ConfigFile<'_>, name: &str) -> Result<Self, LoadError> {
        match name {
            "gelu" => Ok(Self::Gelu),
            "relu" => Ok(Self::Relu),
            "tanh" => Ok(Self::Tanh),
            other => {
                let found = format!("the head's activation function `{other}`");
                file.refuse(found, "`gelu`, `relu`, `tanh`")
            }
        }
    }
}

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum ScoreFunction {
    /// Each by itself, to 0..1.
    Sigmoid,
    /// All together, to a sum of 1.
    Softmax,
    /// They stay as they are.
    Identity,
}

impl ScoreFunction {
    /// By the name of a PyTorch module, as sentence-transformers writes it.
    pub fn of_module(path: &str) -> Option<Self> {
        match path.rsplit('.').next() {
            Some("Sigmoid") => Some(Self::Sigmoid),
            Some("Softmax") => Some(Self::Softmax),
            Some("Identity") => Some(Self::Identity),
            _ => None,
        }
    }
}

/// The modules that [`ScoreFunction::of_module`] knows.
pub(in crate::engine::encoder) const SCORE_MODULES: &str = "Sigmoid, Softmax, Identity";

/// Most labels. No classifier has more, and a job's replies would consist mostly of labels.
const LABELS_MAX: usize = 4096;

/// What a configuration without labels means: the two that transformers gives a head by default.
const LABELS_DEFAULT: usize = 2;

#[derive(Deserialize)]
struct Config {
    #[serde(default, deserialize_with = "null_as_default")]
    architectures: Vec<String>,
    id2label: Option<HashMap<usize, String>>,
    /// Counts where there are no labels.
    num_labels: Option<usize>,
    problem_type: Option<String>,
    /// As sentence-transformers 4 and 5 write it.
    sentence_transformers: Option<CrossEncoder>,
    /// As earlier versions write it.
    sbert_ce_default_activation_function: Option<String>,
}

#[derive(Deserialize)]
struct CrossEncoder {
    activation_fn: Option<String>,
}

/// The head that a `config.json` describes; `None` if the model has none.
pub(super) fn read(file: &ConfigFile<'_>, model_type: &str) -> Result<Option<Classifier>, LoadError> {
    let config: Config = file.parse()?;
    if !config.architectures.iter().any(|name| name.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let Some((_, reader)) = HEADS.iter().find(|(name, _)| *name == model_type) else {
        let known: Vec<String> = HEADS.iter().map(|(name, _)| format!("`{name}`")).collect();
        return file.refuse(
            format!("the head {} of `{model_type}`", config.architectures.join(", ")),
            &format!("embedding models of this family, and heads of {}", known.join(", ")),
        );
    };
    let head = reader(file)?;
    let count = match &config.id2label {
        Some(labels) => labels.len(),
        None => config.num_labels.unwrap_or(LABELS_DEFAULT),
    };
    if !(1..=LABELS_MAX).contains(&count) {
        return file.refuse(format!("{count} labels"), &format!("1 to {LABELS_MAX}"));
    }
    let mut named = config.id2label.unwrap_or_default();
    let label = |at| named.remove(&at).unwrap_or_else(|| format!("LABEL_{at}"));
    let labels: Vec<String> = (0..count).map(label).collect();
    let module = config.sentence_transformers.and_then(|own| own.activation_fn);
    let module = module.or(config.sbert_ce_default_activation_function);
    let function = match (module, config.problem_type.as_deref()) {
        (Some(module), _) => match ScoreFunction::of_module(&module) {
            Some(function) => function,
            None => return file.refuse(format!("the activation function `{module}`"), SCORE_MODULES),
        },
        (None, Some("regression")) => ScoreFunction::Identity,
        (None, Some("multi_label_classification")) => ScoreFunction::Sigmoid,
        (None, _) if labels.len() == 1 => ScoreFunction::Sigmoid,
        (None, _) => ScoreFunction::Softmax,
    };
    Ok(Some(Classifier { head, labels, function }))
}
