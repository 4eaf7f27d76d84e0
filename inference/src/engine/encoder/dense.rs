//! Layers behind pooling, the `Dense` modules of Sentence-Transformers: each is a linear map and an activation.
//!
//! They process one vector per text, not per token. They run on the host's threads in f32, whatever the device, and their weights
//! are in host memory: 18 MiB for EmbeddingGemma's two. Each vector takes as many multiplications as the layers have weights: 4.7
//! million for EmbeddingGemma, whose encoder takes some 100 million per token. On the CPU that is little. With a fast GPU a pass
//! of many short texts waits for it: 1,000 vectors take 4.7 billion multiplications.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Deserialize;

use super::LoadError;
use super::config::{required, unsupported};
use super::families::Activation;
use super::modules::VECTOR;
use super::shards::WEIGHTS;
use super::simd::Level;
use super::tensors::TensorFile;
use super::token_ops::Gelu;

/// What a layer's own `config.json` says.
#[derive(Clone, Debug)]
pub(super) struct DenseConfig {
    folder: PathBuf,
    inner: usize,
    /// Elements of the vectors that it makes.
    pub outputs: usize,
    bias: bool,
    activation: Activation,
}

/// The widest vector that a layer may make: eight times the widest of any published model.
const OUTPUTS_MAX: usize = 65_536;

/// What a layer computes behind its linear map where its file does not say, as in sentence-transformers.
const ACTIVATION: &str = "torch.nn.modules.activation.Tanh";

const CONFIG: &str = "config.json";

/// The tensor of a layer's bias.
const BIAS: &str = "linear.bias";

#[derive(Deserialize)]
struct File {
    in_features: usize,
    out_features: usize,
    bias: Option<bool>,
    activation_function: Option<String>,
    module_input_name: Option<String>,
    module_output_name: Option<String>,
    #[serde(default)]
    use_residual: bool,
}

impl DenseConfig {
    /// Reads the file in a layer's folder. `inner`: elements of the vectors that the layer gets.
    ///
    /// # Errors
    /// Names what in it is missing, malformed, or not supported.
    pub fn read(folder: &Path, inner: usize) -> Result<Self, LoadError> {
        let path = folder.join(CONFIG);
        let file: File = required(&path)?;
        let refuse = |found: String, takes: &str| Err(unsupported(&path, found, takes));
        if file.in_features != inner {
            return refuse(format!("in_features {}", file.in_features), &inner.to_string());
        }
        if !(1..=OUTPUTS_MAX).contains(&file.out_features) {
            return refuse(format!("out_features {}", file.out_features), &format!("1 to {OUTPUTS_MAX}"));
        }
        if file.use_residual {
            return refuse("use_residual".into(), "layers without it");
        }
        let names = [&file.module_input_name, &file.module_output_name];
        if let Some(name) = names.into_iter().flatten().find(|name| *name != VECTOR) {
            return refuse(format!("a layer of `{name}`"), &format!("`{VECTOR}`"));
        }
        let module = file.activation_function.as_deref().unwrap_or(ACTIVATION);
        // sentence-transformers takes no class of another package, whatever its name is.
        let activation = match module.strip_prefix("torch.").and_then(|class| class.rsplit('.').next()) {
            Some("Identity") => Activation::Identity,
            Some("Tanh") => Activation::Tanh,
            Some("ReLU") => Activation::Relu,
            _ => return refuse(format!("the activation function `{module}`"), "Identity, Tanh, ReLU"),
        };
        Ok(Self {
            folder: folder.to_owned(),
            inner,
            outputs: file.out_features,
            bias: file.bias.unwrap_or(true),
            activation,
        })
    }

    /// The files that the layer is made of, by their names.
    pub fn files(&self) -> [(&'static str, PathBuf); 2] {
        Self::FILES.map(|name| (name, self.folder.join(name)))
    }

    /// The names of these files.
    pub const FILES: [&str; 2] = [CONFIG, WEIGHTS];
}

/// All layers behind a model's pooling.
pub(super) struct Dense {
    layers: Vec<(Map, Activation)>,
    /// Vectors get the length 1 behind the last layer.
    normalize: bool,
}

impl Dense {
    /// Reads the weights; `None` if there are no layers.
    ///
    /// # Errors
    /// A file or a tensor that is missing, malformed, or of another shape or type; or a bias that a layer's `config.json` denies.
    pub fn load(layers: &[DenseConfig], normalize: bool) -> Result<Option<Self>, LoadError> {
        if layers.is_empty() {
            return Ok(None);
        }
        let load = |layer: &DenseConfig| -> Result<_, LoadError> {
            let mut file = TensorFile::open(&layer.folder.join(WEIGHTS))?;
            let mut rows = Vec::new();
            // In pieces: a file with another shape is refused before the memory for this one is allocated.
            file.read_pieces("linear.weight", &[layer.outputs, layer.inner], |piece| {
                rows.extend_from_slice(piece);
                Ok(())
            })?;
            let mut bias = vec![0.0; layer.outputs];
            if layer.bias {
                file.read(BIAS, &[layer.outputs], &mut bias)?;
            } else if file.has(BIAS) {
                let takes = "a layer without a bias, as its config.json describes it";
                return Err(unsupported(file.path(), format!("the tensor `{BIAS}`"), takes));
            }
            Ok((Map { rows, bias }, layer.activation))
        };
        Ok(Some(Self { layers: layers.iter().map(load).collect::<Result<_, _>>()?, normalize }))
    }

    /// What the layers make of vectors, in their order.
    pub fn apply(&self, mut vectors: Vec<Vec<f32>>, threads: &rayon::ThreadPool) -> Vec<Vec<f32>> {
        threads.install(|| vectors.par_iter_mut().for_each(|vector| self.apply_to(vector)));
        vectors
    }

    fn apply_to(&self, vector: &mut Vec<f32>) {
        for (map, activation) in &self.layers {
            *vector = map.apply(vector);
            activation.apply(vector);
        }
        if self.normalize {
            // The floor is that of torch.nn.functional.normalize. `max` would swallow a NaN.
            let length = dot(vector, vector).sqrt();
            let inverse = 1.0 / if length < 1e-12 { 1e-12 } else { length };
            vector.iter_mut().for_each(|x| *x *= inverse);
        }
    }
}

/// A linear map in host memory: a row of weights for each output, and its bias.
pub(super) struct Map {
    pub rows: Vec<f32>,
    pub bias: Vec<f32>,
}

/// Products that are summed apart, so that the compiler uses vector instructions.
const LANES: usize = 16;

impl Map {
    /// A vector of as many elements as the map has outputs.
    pub fn apply(&self, vector: &[f32]) -> Vec<f32> {
        let rows = self.rows.chunks_exact(vector.len().max(1));
        rows.zip(&self.bias).map(|(row, bias)| dot(row, vector) + bias).collect()
    }
}

impl Activation {
    /// Takes the function of each element.
    pub fn apply(self, vector: &mut [f32]) {
        match self {
            Self::Identity => {}
            Self::Tanh => vector.iter_mut().for_each(|x| *x = x.tanh()),
            // `max` would swallow a NaN.
            Self::Relu => vector.iter_mut().filter(|x| **x < 0.0).for_each(|x| *x = 0.0),
            Self::Gelu => {
                let kernel = Gelu { x: vector.as_mut_ptr(), len: vector.len() };
                // SAFETY: the kernel reads and writes this many elements, which are borrowed for it alone.
                unsafe { Level::best().run(&kernel) };
            }
        }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_stays_nan() {
        let mut vector = [-1.5, 0.0, 2.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        Activation::Relu.apply(&mut vector);
        assert_eq!(vector[..3], [0.0, 0.0, 2.5]);
        assert!(vector[3].is_nan(), "{vector:?}");
        assert_eq!(vector[4..], [f32::INFINITY, 0.0]);
        for activation in [Activation::Identity, Activation::Tanh, Activation::Gelu] {
            let mut vector = [f32::NAN];
            activation.apply(&mut vector);
            assert!(vector[0].is_nan(), "{activation:?}");
        }
    }
}
