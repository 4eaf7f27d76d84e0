//! The head of a classifier or reranker: computes logits and scores from a text's vector.
//!
//! A head takes about a thousandth of the work of a pass, so it runs on the host's threads in f32, whatever the device. Its
//! weights are in host memory: 4 MiB for a model of 1,024 columns, or those of the last map alone where a family has no other.

use rayon::prelude::*;
use serde_json::json;
use vramq_schemas::Output;

use crate::engine::PassError;

use super::LoadError;
use super::checkpoint::Checkpoint;
use super::dense::Map;
use super::families::{Activation, Classifier, HeadDense, HeadNorm, ScoreFunction};

pub(super) struct Head {
    dense: Option<Dense>,
    out: Map,
    labels: Vec<String>,
    function: ScoreFunction,
}

/// What comes before the map to the labels.
struct Dense {
    map: Map,
    activation: Activation,
    norm: Option<Norm>,
}

/// A norm by mean and variance, of one vector.
struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

/// What a label takes in a reply besides its name: `{"label":"","score":-0.12345678901234567},`.
const LABEL_BYTES: usize = 64;

impl Head {
    /// Reads the head of a model.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or type, or a bias that `config.json` does not mention.
    pub fn load(file: &mut Checkpoint, classifier: &Classifier, hidden: usize) -> Result<Self, LoadError> {
        let head = &classifier.head;
        let dense = head.dense.as_ref().map(|dense| Dense::load(file, dense, hidden)).transpose()?;
        Ok(Self {
            dense,
            out: map(file, head.out, (hidden, classifier.labels.len()), head.out_bias)?,
            labels: classifier.labels.clone(),
            function: classifier.function,
        })
    }

    /// The most bytes of an item's output as JSON text.
    pub fn output_bytes_max(&self) -> u64 {
        self.labels.iter().map(|label| (label.len() + LABEL_BYTES) as u64).sum()
    }

    /// The output of each vector; `raw` says for each whether it is to be logits.
    ///
    /// # Errors
    /// A logit is infinite or NaN, which a score cannot express.
    pub fn outputs(
        &self,
        vectors: &[Vec<f32>],
        raw: &[bool],
        threads: &rayon::ThreadPool,
    ) -> Result<Vec<Output>, PassError> {
        let output = |(item, (vector, raw)): (usize, (&Vec<f32>, &bool))| {
            let logits = self.logits(vector);
            if let Some(label) = logits.iter().position(|logit| !logit.is_finite()) {
                let error = format!("logit {label} of item {item} is not a finite number");
                return Err(PassError::Failed(error));
            }
            Ok(self.output(if *raw { logits } else { self.function.scores(logits) }))
        };
        threads.install(|| vectors.par_iter().zip(raw).enumerate().map(output).collect())
    }

    fn logits(&self, vector: &[f32]) -> Vec<f32> {
        match &self.dense {
            None => self.out.apply(vector),
            Some(dense) => self.out.apply(&dense.apply(vector)),
        }
    }

    /// `{"score": …}` of a reranker; `{"labels": [{"label": …, "score": …}, …]}` of a classifier, the highest score first.
    fn output(&self, scores: Vec<f32>) -> Output {
        if let [score] = scores[..] {
            return Output::Json(json!({"score": score}));
        }
        let mut labels: Vec<(&String, f32)> = self.labels.iter().zip(scores).collect();
        labels.sort_by(|a, b| b.1.total_cmp(&a.1));
        let labels: Vec<_> =
            labels.into_iter().map(|(label, score)| json!({"label": label, "score": score})).collect();
        Output::Json(json!({"labels": labels}))
    }
}

impl Dense {
    fn load(file: &mut Checkpoint, dense: &HeadDense, hidden: usize) -> Result<Self, LoadError> {
        let name = if dense.is_of_model { file.of_model(dense.name) } else { dense.name.to_owned() };
        let map = map(file, &name, (hidden, hidden), dense.bias)?;
        let norm = dense.norm.as_ref().map(|norm| Norm::load(file, norm, hidden)).transpose()?;
        Ok(Self { map, activation: dense.activation, norm })
    }

    fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let mut made = self.map.apply(vector);
        self.activation.apply(&mut made);
        if let Some(norm) = &self.norm {
            norm.apply(&mut made);
        }
        made
    }
}

impl Norm {
    fn load(file: &mut Checkpoint, norm: &HeadNorm, hidden: usize) -> Result<Self, LoadError> {
        let mut weight = vec![0.0; hidden];
        file.read_head(&format!("{}.weight", norm.name), &[hidden], &mut weight)?;
        Ok(Self { weight, bias: bias(file, norm.name, hidden, norm.bias)?, eps: norm.eps })
    }

    /// Sums are in f64, so that they are as exact as the reference's in any order.
    fn apply(&self, vector: &mut [f32]) {
        let count = vector.len().max(1) as f64;
        let mean = vector.iter().map(|x| f64::from(*x)).sum::<f64>() / count;
        let variance = vector.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / count;
        let inverse = 1.0 / (variance + f64::from(self.eps)).sqrt();
        for (x, (weight, bias)) in vector.iter_mut().zip(self.weight.iter().zip(&self.bias)) {
            *x = ((f64::from(*x) - mean) * inverse) as f32 * weight + bias;
        }
    }
}

/// A linear map of so many inputs and outputs.
fn map(
    file: &mut Checkpoint,
    name: &str,
    (inner, outputs): (usize, usize),
    has_bias: bool,
) -> Result<Map, LoadError> {
    let mut rows = vec![0.0; outputs * inner];
    file.read_head(&format!("{name}.weight"), &[outputs, inner], &mut rows)?;
    Ok(Map { rows, bias: bias(file, name, outputs, has_bias)? })
}

/// The bias of a map or norm; zeros where the family has none.
fn bias(file: &mut Checkpoint, name: &str, elements: usize, is_there: bool) -> Result<Vec<f32>, LoadError> {
    let name = format!("{name}.bias");
    let mut bias = vec![0.0; elements];
    if is_there {
        file.read_head(&name, &[elements], &mut bias)?;
    } else if file.has_head(&name) {
        return Err(file.unmentioned_bias(&name));
    }
    Ok(bias)
}

impl ScoreFunction {
    fn scores(self, logits: Vec<f32>) -> Vec<f32> {
        match self {
            Self::Identity => logits,
            Self::Sigmoid => logits.into_iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            Self::Softmax => {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let exponentials: Vec<f32> = logits.into_iter().map(|x| (x - largest).exp()).collect();
                let sum: f32 = exponentials.iter().sum();
                exponentials.into_iter().map(|x| x / sum).collect()
            }
        }
    }
}
