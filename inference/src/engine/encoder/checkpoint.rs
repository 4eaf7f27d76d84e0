//! What a BERT checkpoint calls its tensors, and what of it has to be put together: the same for every device.

use super::LoadError;
use super::config::Dims;
use super::forward::{Linear, Norm};
use super::tensors::TensorFile;

pub(super) const WORDS: &str = "embeddings.word_embeddings.weight";
pub(super) const POSITIONS: &str = "embeddings.position_embeddings.weight";
const TOKEN_TYPES: &str = "embeddings.token_type_embeddings.weight";
pub(super) const EMBEDDING_NORM: &str = "embeddings.LayerNorm";

/// The linear maps of a layer, each with the maps of the checkpoint whose rows of outputs follow each other in it.
pub(super) const LINEARS: [(Linear, &[&str]); 4] = [
    (Linear::Qkv, &["attention.self.query", "attention.self.key", "attention.self.value"]),
    (Linear::AttentionOut, &["attention.output.dense"]),
    (Linear::Up, &["intermediate.dense"]),
    (Linear::Down, &["output.dense"]),
];

/// The norms of a layer.
pub(super) const NORMS: [(Norm, &str); 2] =
    [(Norm::Attention, "attention.output.LayerNorm"), (Norm::Output, "output.LayerNorm")];

/// A part of a layer, without `.weight` or `.bias`.
pub(super) fn of_layer(layer: usize, part: &str) -> String {
    format!("encoder.layer.{layer}.{part}")
}

/// Position embeddings, `positions` rows of `hidden`, with the embedding of token type 0 added: a lone text has no other.
///
/// # Errors
/// A tensor that is missing, or of another shape or type.
pub(super) fn position_embeddings(file: &mut TensorFile, dims: &Dims) -> Result<Vec<f32>, LoadError> {
    let Dims { hidden, positions, token_types, .. } = *dims;
    let mut table = vec![0.0; positions * hidden];
    file.read(POSITIONS, &[positions, hidden], &mut table)?;
    let mut types = vec![0.0; token_types * hidden];
    file.read(TOKEN_TYPES, &[token_types, hidden], &mut types)?;
    for position in table.chunks_exact_mut(hidden) {
        for (position, token_type) in position.iter_mut().zip(&types) {
            *position += token_type;
        }
    }
    Ok(table)
}
