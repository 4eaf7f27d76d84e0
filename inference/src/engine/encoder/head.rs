//! The head of a classifier or reranker: computes logits and scores from a text's vector.
//!
//! A head takes about a thousandth of the work of a pass, so it runs on the host's threads in f32, whatever the device. Its
//! weights are in host memory: 4 MiB for a model of 1,024 columns.

use rayon::prelude::*;
use serde_json::json;
use vramq_schemas::Output;

use super::LoadError;
use super::checkpoint::Checkpoint;
use super::dense::Map;
use super::families::{Activation, Classifier, ScoreFunction};

pub(super) struct Head {
    dense: Map,
    activation: Activation,
    out: Map,
    labels: Vec<String>,
    function: ScoreFunction,
}

/// What a label takes in a reply besides its name: `{"label":"","score":-0.12345678901234567},`.
const LABEL_BYTES: usize = 64;

impl Head {
    /// Reads the head of a model.
    ///
    /// # Errors
    /// A tensor that is missing, or of another shape or type.
    pub fn load(file: &mut Checkpoint, classifier: &Classifier, hidden: usize) -> Result<Self, LoadError> {
        let names = classifier.names;
        let mut map = |name: &str, outputs: usize| -> Result<Map, LoadError> {
            let mut map = Map { rows: vec![0.0; outputs * hidden], bias: vec![0.0; outputs] };
            file.read_head(&format!("{name}.weight"), &[outputs, hidden], &mut map.rows)?;
            file.read_head(&format!("{name}.bias"), &[outputs], &mut map.bias)?;
            Ok(map)
        };
        Ok(Self {
            dense: map(names.dense, hidden)?,
            activation: names.activation,
            out: map(names.out, classifier.labels.len())?,
            labels: classifier.labels.clone(),
            function: classifier.function,
        })
    }

    /// The most bytes of an item's output as JSON text.
    pub fn output_bytes_max(&self) -> u64 {
        self.labels.iter().map(|label| (label.len() + LABEL_BYTES) as u64).sum()
    }

    /// The output of each vector; `raw` says for each whether it is to be logits.
    pub fn outputs(&self, vectors: &[Vec<f32>], raw: &[bool], threads: &rayon::ThreadPool) -> Vec<Output> {
        let output = |(vector, raw): (&Vec<f32>, &bool)| {
            let logits = self.logits(vector);
            self.output(if *raw { logits } else { self.function.scores(logits) })
        };
        threads.install(|| vectors.par_iter().zip(raw).map(output).collect())
    }

    fn logits(&self, vector: &[f32]) -> Vec<f32> {
        let mut inner = self.dense.apply(vector);
        self.activation.apply(&mut inner);
        self.out.apply(&inner)
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
