//! Classifiers and rerankers: reads the description of the head that computes scores from the first token's vector.

use std::collections::HashMap;

use serde::Deserialize;

use super::ConfigFile;
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::null_as_default;

/// A head: a linear map, an activation, and a linear map with a row for each label.
#[derive(Clone, Debug)]
pub(in crate::engine::encoder) struct Classifier {
    pub names: &'static HeadNames,
    /// In the order of the logits. A single one is a reranker's.
    pub labels: Vec<String>,
    pub function: ScoreFunction,
}

/// What a family's checkpoint calls the two linear maps of a head, and what is between them.
#[derive(Debug)]
pub(in crate::engine::encoder) struct HeadNames {
    pub dense: &'static str,
    pub activation: Activation,
    pub out: &'static str,
}

/// The function behind a linear map of a head, or of a layer behind pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine::encoder) enum Activation {
    Identity,
    Tanh,
    Relu,
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

/// Most labels: more are those of no classifier, and a job's replies would be mostly labels.
const LABELS_MAX: usize = 4096;

/// What a configuration without labels means: the two that transformers gives a head by default.
const LABELS_DEFAULT: usize = 2;

#[derive(Deserialize)]
struct Config {
    #[serde(default, deserialize_with = "null_as_default")]
    architectures: Vec<String>,
    id2label: Option<HashMap<usize, String>>,
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
pub(super) fn read(
    file: &ConfigFile<'_>,
    names: Option<&'static HeadNames>,
) -> Result<Option<Classifier>, LoadError> {
    let config: Config = file.parse()?;
    if !config.architectures.iter().any(|name| name.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let Some(names) = names else {
        return file.refuse(
            format!("the head {}", config.architectures.join(", ")),
            "models of this family for embeddings",
        );
    };
    let count = config.id2label.as_ref().map_or(LABELS_DEFAULT, HashMap::len);
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
    Ok(Some(Classifier { names, labels, function }))
}
