//! Nomic Embed (Nussbaum et al. 2024): BERT with rotary positions, a gated feed-forward and few biases.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::rotary::RotaryConfig;
use super::{Attention, ConfigFile, Design, FeedForward, Gate, Names, Positions, Sees, Spec, bert};
use crate::engine::encoder::config::Dims;
use crate::engine::encoder::forward::{Linear, Norm};
use crate::engine::encoder::{LoadError, json};

const NAMES: Names = Names {
    prefixes: &["nomic_bert.", "bert."],
    embedding_norm: "emb_ln",
    layers: "encoder.layers",
    linears: [
        (Linear::Qkv, &["attn.Wqkv"]),
        (Linear::AttentionOut, &["attn.out_proj"]),
        // The gate's function is of `fc12`.
        (Linear::Up, &["mlp.fc12", "mlp.fc11"]),
        (Linear::Down, &["mlp.fc2"]),
    ],
    norms: [(Norm::Attention, "norm1"), (Norm::Output, "norm2")],
    ..bert::NAMES
};

/// Where a configuration does not say, as in the reference.
const THETA: f64 = 1_000.0;

/// The published models' own names, most of them GPT-2's, and transformers' names for the same. Where a file has both, transformers
/// has saved it again: then its own names count.
const OLDER_NAMES: [(&str, &str); 8] = [
    ("n_embd", "hidden_size"),
    ("n_inner", "intermediate_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("activation_function", "hidden_act"),
    ("n_positions", "max_position_embeddings"),
    ("layer_norm_epsilon", "layer_norm_eps"),
    ("rotary_emb_base", "rope_theta"),
];

#[derive(Deserialize)]
struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    #[serde(default = "super::silu")]
    hidden_act: String,
    max_position_embeddings: usize,
    #[serde(default = "super::bert_eps")]
    layer_norm_eps: f64,
    type_vocab_size: Option<usize>,
    #[serde(flatten)]
    rotary: RotaryConfig,
    #[serde(flatten)]
    variants: Variants,
}

/// Features that the published models' code has. Of the published embedding models only the mixture of experts uses one.
#[derive(Deserialize)]
#[serde(default)]
struct Variants {
    prenorm: bool,
    parallel_block: bool,
    use_rms_norm: bool,
    causal: bool,
    qkv_proj_bias: bool,
    mlp_fc1_bias: bool,
    mlp_fc2_bias: bool,
    rotary_emb_interleaved: bool,
    rotary_emb_fraction: f64,
    rotary_emb_scale_base: Option<f64>,
    rotary_scaling_factor: Option<f64>,
    moe_every_n_layers: usize,
}

impl Default for Variants {
    fn default() -> Self {
        Self {
            prenorm: false,
            parallel_block: false,
            use_rms_norm: false,
            causal: false,
            qkv_proj_bias: false,
            mlp_fc1_bias: false,
            mlp_fc2_bias: false,
            rotary_emb_interleaved: false,
            rotary_emb_fraction: 1.0,
            rotary_emb_scale_base: None,
            rotary_scaling_factor: None,
            moe_every_n_layers: 0,
        }
    }
}

impl Variants {
    fn check(&self, file: &ConfigFile<'_>) -> Result<(), LoadError> {
        let used = [
            ("prenorm", self.prenorm),
            ("parallel_block", self.parallel_block),
            ("use_rms_norm", self.use_rms_norm),
            ("causal", self.causal),
            ("qkv_proj_bias", self.qkv_proj_bias),
            ("mlp_fc1_bias", self.mlp_fc1_bias),
            ("mlp_fc2_bias", self.mlp_fc2_bias),
            ("rotary_emb_interleaved", self.rotary_emb_interleaved),
            ("rotary_emb_fraction", self.rotary_emb_fraction != 1.0),
            ("rotary_emb_scale_base", self.rotary_emb_scale_base.is_some()),
            ("rotary_scaling_factor", self.rotary_scaling_factor.is_some()),
            ("moe_every_n_layers", self.moe_every_n_layers > 0),
        ];
        match used.iter().find(|(_, is_used)| *is_used) {
            Some((name, _)) => file.refuse(format!("`{name}`"), "this architecture without it"),
            None => Ok(()),
        }
    }
}

impl Config {
    fn read(file: &ConfigFile<'_>) -> Result<Self, LoadError> {
        let mut keys: Map<String, Value> = file.parse()?;
        for (older, name) in OLDER_NAMES {
            if let Some(value) = keys.remove(older) {
                keys.entry(name).or_insert(value);
            }
        }
        json::of_keys(file.path, &keys)
    }
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config = Config::read(file)?;
    config.variants.check(file)?;
    let gate = Gate::read(file, &config.hidden_act)?;
    let dims = Dims {
        layers: config.num_hidden_layers,
        hidden: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads: config.num_attention_heads,
        head: file.head(config.hidden_size, config.num_attention_heads)?,
        feed_forward: config.intermediate_size,
        is_gated: true,
        vocabulary: config.vocab_size,
        positions: config.max_position_embeddings,
        token_types: config.type_vocab_size.unwrap_or(bert::TOKEN_TYPES),
        is_sparse: false,
    };
    let design = Design {
        feed_forward: FeedForward::Gated { gate, of_second: false },
        biases: [false; 4],
        attention: vec![Attention { sees: Sees::All, rotary: Some(0) }],
        rotary: vec![config.rotary.read(file, THETA, false)?],
        ..Design::bert()
    };
    Ok(Spec::new(dims, config.layer_norm_eps, design, Positions::Rotary, &NAMES))
}
