//! EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3's layers, in which each token sees those on both sides.

use serde::Deserialize;

use super::layer_kinds::{LayerKinds, attentions};
use super::{ConfigFile, Design, FeedForward, Gate, Names, NormKind, Norms, Positions, Spec, qwen3};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::{Dims, null_as_default};
use crate::engine::encoder::forward::Norm;

const NAMES: Names = Names {
    norms: [(Norm::Attention, "pre_feedforward_layernorm"), (Norm::Output, "input_layernorm")],
    block_norms: Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
    ..qwen3::NAMES
};

/// The rotations' theta where a configuration does not say: of layers that see all, and of the others.
const THETAS: [f64; 2] = [1_000_000.0, 10_000.0];

/// Where a configuration does not say, one layer in this many sees the whole text.
const PATTERN: usize = 6;

/// The model, and the same with a head, which is not read. Other architectures of this `model_type` have other layers or names.
const ARCHITECTURES: [&str; 3] =
    ["Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"];

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    #[serde(default = "gelu")]
    hidden_activation: String,
    max_position_embeddings: usize,
    #[serde(default = "super::rms_eps")]
    rms_norm_eps: f64,
    #[serde(default, deserialize_with = "null_as_default")]
    attention_bias: bool,
    /// Attention divides scores by the root of this number.
    query_pre_attn_scalar: f64,
    attn_logit_softcapping: Option<f64>,
    /// Tokens that a token sees in layers with a window, on both sides together.
    sliding_window: usize,
    use_bidirectional_attention: Option<bool>,
    #[serde(default, deserialize_with = "null_as_default")]
    architectures: Vec<String>,
    #[serde(flatten)]
    kinds: LayerKinds,
    sliding_window_pattern: Option<usize>,
    /// As transformers 4 and the published model write it. transformers 5 does not read it.
    #[serde(rename = "_sliding_window_pattern")]
    older_pattern: Option<usize>,
    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
}

/// Where a configuration does not say, as in transformers.
fn gelu() -> String {
    "gelu_pytorch_tanh".to_owned()
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    if config.use_bidirectional_attention != Some(true) {
        let found = "layers in which a token sees those before it (no `use_bidirectional_attention`)".into();
        return file.refuse(found, "EmbeddingGemma's, in which it sees both sides");
    }
    if config.attn_logit_softcapping.is_some() {
        return file.refuse("`attn_logit_softcapping`".into(), "attention without it");
    }
    if let Some(other) = config.architectures.iter().find(|name| !ARCHITECTURES.contains(&name.as_str())) {
        let known = ARCHITECTURES.map(|name| format!("`{name}`")).join(", ");
        return file.refuse(format!("the architecture `{other}`"), &known);
    }
    let scalar = config.query_pre_attn_scalar;
    if !(scalar.is_finite() && scalar > 0.0) {
        return file.refuse(format!("query_pre_attn_scalar {scalar}"), "a positive number");
    }
    let dims = Dims {
        layers: config.num_hidden_layers,
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
        head: config.head_dim,
        feed_forward: config.intermediate_size,
        is_gated: true,
        vocabulary: config.vocab_size,
        positions: config.max_position_embeddings,
        token_types: 0,
        is_sparse: false,
    };
    let gate = Gate::read(file, &config.hidden_activation)?;
    let thetas = [config.rope_theta, config.rope_local_base_freq];
    let [all, window] = attentions(config.sliding_window / 2);
    let has_kinds = config.kinds.are_listed() || config.sliding_window_pattern.is_some();
    if let Some(older) = config.older_pattern
        && !has_kinds
        && older != PATTERN
    {
        let takes =
            format!("{PATTERN}, which transformers takes without `layer_types` and `sliding_window_pattern`");
        return file.refuse(format!("_sliding_window_pattern {older}"), &takes);
    }
    let attention = match config.kinds.attention(file, dims.layers, [all, window])? {
        Some(listed) => listed,
        None => match config.sliding_window_pattern.unwrap_or(PATTERN) {
            0 => return file.refuse("a sliding_window_pattern of 0".into(), "1 and more"),
            every => (1..=dims.layers.min(every)).map(|at| if at == every { all } else { window }).collect(),
        },
    };
    let (bias, scale) = (config.attention_bias, (dims.head as f64 / scalar).sqrt());
    let design = Design {
        norms: Norms::Before,
        norm_kind: NormKind::RootMeanSquare,
        norm_bias: false,
        norm_plus_one: true,
        feed_forward: FeedForward::Gated { gate, of_second: false },
        biases: [bias, bias, false, false],
        attention,
        rotary: config.kinds.rotary(file, [0, 1].map(|kind| thetas[kind].unwrap_or(THETAS[kind])))?,
        query_scale: scale as f32,
    };
    let spec = Spec::new(dims, config.rms_norm_eps, design, Positions::Rotary, &NAMES);
    Ok(Spec { words_scale: (dims.hidden as f64).sqrt() as f32, ..spec })
}
