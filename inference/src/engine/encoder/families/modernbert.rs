//! ModernBERT (Warner et al. 2024): rotary positions, a gated feed-forward, norms before blocks, few layers that see all.

use std::collections::HashMap;

use serde::Deserialize;

use super::rotary::Parameters;
use super::{
    Attention, ConfigFile, Design, FeedForward, Gate, Names, NormKind, Norms, Positions, Rotary, Sees, Spec,
    bert,
};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::Dims;
use crate::engine::encoder::forward::{Linear, Norm};

const NAMES: Names = Names {
    prefix: "model.",
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
    head: None,
    ..bert::NAMES
};

/// The rotations' theta where a configuration does not say: of layers that see all, and of the others.
const THETAS: [f64; 2] = [160_000.0, 10_000.0];

/// Layers from one that sees all to the next, where a configuration does not say.
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
    hidden_activation: String,
    max_position_embeddings: usize,
    norm_eps: f64,
    #[serde(default)]
    norm_bias: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    /// Tokens that a token of the other layers sees, of both sides.
    local_attention: usize,
    /// As transformers 5 writes it: a kind for each layer, and for each kind a theta.
    layer_types: Option<Vec<String>>,
    rope_parameters: Option<HashMap<String, Parameters>>,
    /// As transformers 4 writes it, and the published models have it.
    global_attn_every_n_layers: Option<usize>,
    global_rope_theta: Option<f64>,
    local_rope_theta: Option<f64>,
}

/// What the configuration calls the two kinds of layers.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    let gate = Gate::read(file, &config.hidden_activation)?;
    let head = file.head(config.hidden_size, config.num_attention_heads)?;
    let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
    Ok(Spec {
        dims: Dims {
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
        },
        norm_eps: config.norm_eps as f32,
        design: Design {
            norms: Norms::BeforeButFirst,
            norm_kind: NormKind::Layer,
            norm_bias: config.norm_bias,
            feed_forward: FeedForward::Gated { gate, of_second: false },
            biases: [attention_bias, attention_bias, mlp_bias, mlp_bias],
            attention: config.attention(file)?,
            rotary: config.rotary(file)?,
        },
        positions: Positions::Rotary,
        relative: None,
        names: &NAMES,
        classifier: None,
    })
}

impl Config {
    /// The attention of each layer, or of those that come before it is the same again.
    fn attention(&self, file: &ConfigFile<'_>) -> Result<Vec<Attention>, LoadError> {
        let of_kind = |kind: usize| Attention {
            sees: if kind == 0 { Sees::All } else { Sees::Near(self.local_attention / 2) },
            rotary: Some(kind),
        };
        if let Some(types) = &self.layer_types {
            if types.len() != self.num_hidden_layers {
                let found = format!("{} kinds of {} layers", types.len(), self.num_hidden_layers);
                return file.refuse(found, "a kind for each layer");
            }
            let kind = |name: &String| match KINDS.iter().position(|kind| kind == name) {
                Some(kind) => Ok(of_kind(kind)),
                None => file.refuse(format!("layers of the type `{name}`"), &KINDS.join(", ")),
            };
            return types.iter().map(kind).collect();
        }
        match self.global_attn_every_n_layers.unwrap_or(GLOBAL_EVERY) {
            every @ 1..=GLOBAL_EVERY_MAX => Ok((0..every).map(|at| of_kind(at.min(1))).collect()),
            every => file.refuse(format!("global_attn_every_n_layers {every}"), "1 to 1024"),
        }
    }

    /// Of both kinds of layers.
    fn rotary(&self, file: &ConfigFile<'_>) -> Result<Vec<Rotary>, LoadError> {
        let own = [self.global_rope_theta, self.local_rope_theta];
        let of_kind = |kind: usize| {
            let theta = own[kind].unwrap_or(THETAS[kind]);
            match self.rope_parameters.as_ref().and_then(|all| all.get(KINDS[kind])) {
                Some(parameters) => parameters.read(file, theta),
                None => Rotary::new(file, theta, 1.0),
            }
        };
        Ok(vec![of_kind(0)?, of_kind(1)?])
    }
}
