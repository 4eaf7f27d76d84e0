//! Qwen3-Embedding (Zhang et al. 2025): a language model's layers, in which a token sees those before it; the vector is
//! that of the last one. Also classifiers of these layers, as which Qwen3-Reranker is converted.

use serde::Deserialize;

use super::rotary::RotaryConfig;
use super::{
    Attention, ConfigFile, Design, FeedForward, Gate, HeadDesign, Names, NormKind, Norms, Positions, Sees,
    Spec, bert,
};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::{Dims, null_as_default};
use crate::engine::encoder::forward::{Linear, Norm};
use crate::engine::encoder::modules::Pooling;

pub(super) const NAMES: Names = Names {
    prefixes: &["model."],
    words: "embed_tokens",
    token_types: None,
    embedding_norm: "layers.0.input_layernorm",
    layers: "layers",
    linears: [
        (Linear::Qkv, &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        (Linear::AttentionOut, &["self_attn.o_proj"]),
        (Linear::Up, &["mlp.gate_proj", "mlp.up_proj"]),
        (Linear::Down, &["mlp.down_proj"]),
    ],
    norms: [(Norm::Attention, "post_attention_layernorm"), (Norm::Output, "input_layernorm")],
    last_norm: Some("norm"),
    head_norms: Some(["self_attn.q_norm", "self_attn.k_norm"]),
    ..bert::NAMES
};

/// Where a configuration does not say, as in the reference.
const THETA: f64 = 10_000.0;
const HEAD: usize = 128;

/// Other architectures of this `model_type` have other masks, or layers behind the last.
const ARCHITECTURES: [&str; 3] = ["Qwen3Model", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"];

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "super::silu")]
    hidden_act: String,
    max_position_embeddings: usize,
    #[serde(default = "super::rms_eps")]
    rms_norm_eps: f64,
    #[serde(default, deserialize_with = "null_as_default")]
    attention_bias: bool,
    /// The kind of each layer. Where it is there, the next three keys do not count.
    layer_types: Option<Vec<String>>,
    #[serde(default, deserialize_with = "null_as_default")]
    use_sliding_window: bool,
    #[serde(default = "window")]
    sliding_window: Option<u64>,
    /// Layers from this one on have a window.
    max_window_layers: Option<usize>,
    #[serde(default, deserialize_with = "null_as_default")]
    architectures: Vec<String>,
    /// Both make tokens see those behind them, too: the first is transformers' key, the second text-embeddings-inference's.
    is_causal: Option<bool>,
    #[serde(default, deserialize_with = "null_as_default")]
    use_bidirectional_attention: bool,
    #[serde(flatten)]
    rotary: RotaryConfig,
}

/// Where a configuration does not say, as in transformers.
fn window() -> Option<u64> {
    Some(4096)
}

const FULL_LAYERS: usize = 28;

impl Config {
    /// The keys by which a layer has a window, if one has.
    fn window(&self) -> Option<String> {
        const FULL: &str = "full_attention";
        match &self.layer_types {
            Some(types) => {
                types.iter().find(|kind| *kind != FULL).map(|kind| format!("layers of the type `{kind}`"))
            }
            None => {
                let full = self.max_window_layers.unwrap_or(FULL_LAYERS);
                let has_windows = self.use_sliding_window && self.sliding_window.is_some();
                (has_windows && full < self.num_hidden_layers).then(|| {
                    format!("use_sliding_window, from layer {full} of {} on", self.num_hidden_layers)
                })
            }
        }
    }
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    if let Some(found) = config.window() {
        return file.refuse(found, "layers in which a token sees all before it");
    }
    if config.is_causal == Some(false) || config.use_bidirectional_attention {
        let found = "attention to the tokens behind (is_causal, use_bidirectional_attention)".into();
        return file.refuse(found, "layers in which a token sees all before it");
    }
    if let Some(other) = config.architectures.iter().find(|name| !ARCHITECTURES.contains(&name.as_str())) {
        let known = ARCHITECTURES.map(|name| format!("`{name}`")).join(", ");
        return file.refuse(format!("the architecture `{other}`"), &known);
    }
    let gate = Gate::read(file, &config.hidden_act)?;
    let dims = Dims {
        layers: config.num_hidden_layers,
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads.unwrap_or(config.num_attention_heads),
        head: config.head_dim.unwrap_or(HEAD),
        feed_forward: config.intermediate_size,
        is_gated: true,
        vocabulary: config.vocab_size,
        positions: config.max_position_embeddings,
        token_types: 0,
        is_sparse: false,
    };
    let design = Design {
        norms: Norms::Before,
        norm_kind: NormKind::RootMeanSquare,
        norm_bias: false,
        feed_forward: FeedForward::Gated { gate, of_second: false },
        biases: [config.attention_bias, config.attention_bias, false, false],
        attention: vec![Attention { sees: Sees::Before, rotary: Some(0) }],
        rotary: vec![config.rotary.read(file, THETA, false)?],
        ..Design::bert()
    };
    Ok(Spec::new(dims, config.rms_norm_eps, design, Positions::Rotary, &NAMES))
}

/// What a configuration says of the head of a classifier.
#[derive(Deserialize)]
struct HeadConfig {
    /// Negative where there is none.
    pad_token_id: Option<i64>,
}

/// The head of `Qwen3ForSequenceClassification`: a linear map of the vector of the last token that is not padding.
pub(super) fn head(file: &ConfigFile<'_>) -> Result<HeadDesign, LoadError> {
    let config: HeadConfig = file.parse()?;
    let padding = config.pad_token_id.and_then(|id| u32::try_from(id).ok());
    Ok(HeadDesign { pooling: Pooling::Last, padding, out_bias: false, ..HeadDesign::of_first_token("score") })
}
