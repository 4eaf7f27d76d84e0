//! ModernBERT (Warner et al. 2024): rotary positions, a gated feed-forward, norms before blocks, few layers that see all.

use serde::{Deserialize, Deserializer};

use super::layer_kinds::{LayerKinds, attentions};
use super::{
    Activation, Attention, ConfigFile, Design, FeedForward, Gate, HeadDense, HeadDesign, HeadNorm, Names,
    Norms, Positions, Rotary, Spec, bert,
};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::{Dims, null_as_default};
use crate::engine::encoder::forward::{Linear, Norm};
use crate::engine::encoder::modules::Pooling;

const NAMES: Names = Names {
    prefixes: &["model."],
    words: "embeddings.tok_embeddings",
    token_types: None,
    embedding_norm: "embeddings.norm",
    layers: "layers",
    linears: [
        (Linear::Qkv, &["attn.Wqkv"]),
        (Linear::AttentionOut, &["attn.Wo"]),
        (Linear::Up, &["mlp.Wi"]),
        (Linear::Down, &["mlp.Wo"]),
    ],
    norms: [(Norm::Attention, "mlp_norm"), (Norm::Output, "attn_norm")],
    last_norm: Some("final_norm"),
    ..bert::NAMES
};

/// The rotations' theta where a configuration does not say: of layers that see all, and of the others.
const THETAS: [f64; 2] = [160_000.0, 10_000.0];

/// Where a configuration does not say, one layer in this many sees the whole text.
const GLOBAL_EVERY: usize = 3;

/// More than any model has layers: the list of kinds of layers has so many entries at most.
const GLOBAL_EVERY_MAX: usize = 1024;

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    #[serde(default = "super::gelu")]
    hidden_activation: String,
    max_position_embeddings: usize,
    #[serde(default = "norm_eps")]
    norm_eps: f64,
    #[serde(default, deserialize_with = "null_as_default")]
    norm_bias: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    attention_bias: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    mlp_bias: bool,
    /// Tokens that a token of the other layers sees, of both sides.
    #[serde(default = "local_attention")]
    local_attention: usize,
    #[serde(flatten)]
    kinds: LayerKinds,
    /// As transformers 4 writes it, and the published models have it.
    global_attn_every_n_layers: Option<usize>,
    global_rope_theta: Option<f64>,
    #[serde(default, deserialize_with = "given")]
    local_rope_theta: Option<Option<f64>>,
}

/// What a configuration says of the head of a classifier.
#[derive(Deserialize)]
struct HeadConfig {
    classifier_pooling: Option<String>,
    classifier_activation: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    classifier_bias: bool,
    #[serde(default, deserialize_with = "null_as_default")]
    norm_bias: bool,
    #[serde(default = "norm_eps")]
    norm_eps: f64,
}

/// Where a configuration does not say, as in transformers.
fn norm_eps() -> f64 {
    1e-5
}

fn local_attention() -> usize {
    128
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    let gate = Gate::read(file, &config.hidden_activation)?;
    let head = file.head(config.hidden_size, config.num_attention_heads)?;
    let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
    let dims = Dims {
        layers: config.num_hidden_layers,
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_attention_heads,
        head,
        feed_forward: config.intermediate_size,
        is_gated: true,
        vocabulary: config.vocab_size,
        positions: config.max_position_embeddings,
        token_types: 0,
        is_sparse: false,
    };
    let design = Design {
        norms: Norms::BeforeButFirst,
        norm_bias: config.norm_bias,
        feed_forward: FeedForward::Gated { gate, of_second: false },
        biases: [attention_bias, attention_bias, mlp_bias, mlp_bias],
        attention: config.attention(file)?,
        rotary: config.rotary(file)?,
        ..Design::bert()
    };
    Ok(Spec::new(dims, config.norm_eps, design, Positions::Rotary, &NAMES))
}

impl Config {
    /// The attention of each layer, or the pattern that the layers repeat.
    fn attention(&self, file: &ConfigFile<'_>) -> Result<Vec<Attention>, LoadError> {
        let [all, window] = attentions(self.local_attention / 2);
        if let Some(listed) = self.kinds.attention(file, self.num_hidden_layers, [all, window])? {
            return Ok(listed);
        }
        match self.global_attn_every_n_layers.unwrap_or(GLOBAL_EVERY) {
            every @ 1..=GLOBAL_EVERY_MAX => Ok([vec![all], vec![window; every - 1]].concat()),
            every => file.refuse(format!("global_attn_every_n_layers {every}"), "1 to 1024"),
        }
    }

    /// Of both kinds of layers.
    fn rotary(&self, file: &ConfigFile<'_>) -> Result<Vec<Rotary>, LoadError> {
        let global = self.global_rope_theta.unwrap_or(THETAS[0]);
        let local = match self.local_rope_theta {
            None => THETAS[1],
            // `null` means that all layers rotate alike.
            Some(None) => global,
            Some(Some(theta)) => theta,
        };
        self.kinds.rotary(file, [global, local])
    }
}

/// The head of `ModernBertForSequenceClassification`.
pub(super) fn head(file: &ConfigFile<'_>) -> Result<HeadDesign, LoadError> {
    let config: HeadConfig = file.parse()?;
    let pooling = match config.classifier_pooling.as_deref() {
        None | Some("cls") => Pooling::Cls,
        Some("mean") => Pooling::Mean,
        Some(other) => return file.refuse(format!("classifier_pooling `{other}`"), "`cls`, `mean`"),
    };
    let activation = match config.classifier_activation.as_deref() {
        None => Activation::Gelu,
        Some(name) => Activation::read(file, name)?,
    };
    let norm = HeadNorm { name: "head.norm", bias: config.norm_bias, eps: config.norm_eps as f32 };
    let dense = HeadDense {
        bias: config.classifier_bias,
        norm: Some(norm),
        ..HeadDense::new("head.dense", activation)
    };
    Ok(HeadDesign { pooling, dense: Some(dense), ..HeadDesign::of_first_token("classifier") })
}

/// Keeps a key that is `null` apart from a missing key, which gets the default.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}
