//! BERT (Devlin et al. 2018): also E5, BGE and MiniLM models in English.

use super::{Activation, BertLike, ConfigFile, Design, HeadDense, HeadDesign, Names, Positions, Spec};
use crate::engine::encoder::LoadError;
use crate::engine::encoder::forward::{Linear, Norm};

pub(super) const NAMES: Names = Names {
    prefixes: &["bert."],
    words: "embeddings.word_embeddings",
    positions: "embeddings.position_embeddings",
    token_types: Some("embeddings.token_type_embeddings"),
    embedding_norm: "embeddings.LayerNorm",
    relative: "",
    layers: "encoder.layer",
    linears: [
        (Linear::Qkv, &["attention.self.query", "attention.self.key", "attention.self.value"]),
        (Linear::AttentionOut, &["attention.output.dense"]),
        (Linear::Up, &["intermediate.dense"]),
        (Linear::Down, &["output.dense"]),
    ],
    norms: [(Norm::Attention, "attention.output.LayerNorm"), (Norm::Output, "output.LayerNorm")],
    block_norms: None,
    last_norm: None,
    head_norms: None,
};

/// With the pooler, which is a part of the model and not of the task's head.
pub(super) const HEAD: HeadDesign = HeadDesign {
    dense: Some(HeadDense { is_of_model: true, ..HeadDense::new("pooler.dense", Activation::Tanh) }),
    ..HeadDesign::of_first_token("classifier")
};

/// Where a configuration does not say, as in transformers.
pub(super) const TOKEN_TYPES: usize = 2;

pub(super) fn read(file: &ConfigFile<'_>) -> Result<Spec, LoadError> {
    let config = BertLike::read(file)?;
    let dims = config.dims(file, config.max_position_embeddings, TOKEN_TYPES)?;
    Ok(Spec::new(dims, config.layer_norm_eps, Design::bert(), Positions::Place, &NAMES))
}
