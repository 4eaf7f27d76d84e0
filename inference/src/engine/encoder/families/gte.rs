//! GTE v1.5 and later (Zhang et al. 2024): BERT with rotary positions and a gated feed-forward.

use serde::Deserialize;

use super::rotary::RotaryConfig;
use super::{Attention, BertLike, ConfigFile, Design, FeedForward, Gate, Names, Positions, Sees, Spec, bert};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::{Dims, null_as_default};
use crate::engine::encoder::forward::{Linear, Norm};

const NAMES: Names = Names {
    // That of the published models' own code, and that of transformers.
    prefixes: &["new.", "gte."],
    layers: "encoder.layer",
    linears: [
        (Linear::Qkv, &["attention.qkv_proj"]),
        (Linear::AttentionOut, &["attention.o_proj"]),
        (Linear::Up, &["mlp.up_gate_proj"]),
        (Linear::Down, &["mlp.down_proj"]),
    ],
    norms: [(Norm::Attention, "attn_ln"), (Norm::Output, "mlp_ln")],
    ..bert::NAMES
};

/// Where a configuration does not say, as in the reference.
const THETA: f64 = 160_000.0;
const TOKEN_TYPES: usize = 1;

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    sizes: BertLike,
    #[serde(flatten)]
    rotary: RotaryConfig,
    /// Features that the published models' code has, and no published model uses.
    layer_norm_type: Option<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    logn_attention_scale: bool,
    pack_qkv: Option<bool>,
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    let sizes = &config.sizes;
    let gate = Gate::read(file, &sizes.hidden_act)?;
    if let Some(kind) = sizes.position_embedding_type.as_ref().filter(|kind| *kind != "rope") {
        return file.refuse(format!("position embeddings `{kind}`"), "`rope`");
    }
    if let Some(kind) = config.layer_norm_type.as_ref().filter(|kind| *kind != "layer_norm") {
        return file.refuse(format!("norms of the type `{kind}`"), "`layer_norm`");
    }
    if config.logn_attention_scale || config.pack_qkv == Some(false) {
        return file
            .refuse("`logn_attention_scale` or no `pack_qkv`".into(), "plain attention of joint weights");
    }
    let dims = Dims { is_gated: true, ..sizes.dims(file, sizes.max_position_embeddings, TOKEN_TYPES)? };
    let design = Design {
        // The gate's function is of the second half of `up_gate_proj`.
        feed_forward: FeedForward::Gated { gate, of_second: true },
        biases: [true, true, false, true],
        attention: vec![Attention { sees: Sees::All, rotary: Some(0) }],
        rotary: vec![config.rotary.read(file, THETA, true)?],
        ..Design::bert()
    };
    Ok(Spec::new(dims, sizes.layer_norm_eps, design, Positions::Rotary, &NAMES))
}
