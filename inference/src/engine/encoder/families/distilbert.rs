//! DistilBERT (Sanh et al. 2019): BERT without token types, under other names.

use serde::Deserialize;

use super::{Activation, ConfigFile, Design, HeadDense, HeadDesign, Names, Positions, Spec, bert};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::config::Dims;
use crate::engine::encoder::forward::{Linear, Norm};

const NAMES: Names = Names {
    prefixes: &["distilbert."],
    token_types: None,
    layers: "transformer.layer",
    linears: [
        (Linear::Qkv, &["attention.q_lin", "attention.k_lin", "attention.v_lin"]),
        (Linear::AttentionOut, &["attention.out_lin"]),
        (Linear::Up, &["ffn.lin1"]),
        (Linear::Down, &["ffn.lin2"]),
    ],
    norms: [(Norm::Attention, "sa_layer_norm"), (Norm::Output, "output_layer_norm")],
    ..bert::NAMES
};

pub(super) const HEAD: HeadDesign = HeadDesign {
    dense: Some(HeadDense::new("pre_classifier", Activation::Relu)),
    ..HeadDesign::of_first_token("classifier")
};

/// The reference has this number in its code.
const NORM_EPS: f64 = 1e-12;

#[derive(Deserialize)]
struct Config {
    #[serde(default = "super::gelu")]
    activation: String,
    dim: usize,
    hidden_dim: usize,
    max_position_embeddings: usize,
    n_heads: usize,
    n_layers: usize,
    vocab_size: usize,
}

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config: Config = file.parse()?;
    file.needs_gelu(&config.activation)?;
    let dims = Dims {
        layers: config.n_layers,
        hidden: config.dim,
        heads: config.n_heads,
        kv_heads: config.n_heads,
        head: file.head(config.dim, config.n_heads)?,
        feed_forward: config.hidden_dim,
        is_gated: false,
        vocabulary: config.vocab_size,
        positions: config.max_position_embeddings,
        token_types: 0,
        is_sparse: false,
    };
    Ok(Spec::new(dims, NORM_EPS, Design::bert(), Positions::Place, &NAMES))
}
