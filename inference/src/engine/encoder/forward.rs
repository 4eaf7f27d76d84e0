//! The layer loop of a BERT encoder, written once over a small set of operations.

use super::config::Dims;
use super::plan::{Layout, Matrix};

/// A linear map of a layer. Queries, keys and values are one map, their weights joined at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linear {
    Qkv,
    AttentionOut,
    /// With GELU behind it.
    Up,
    Down,
}

/// A layer norm of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norm {
    Attention,
    Output,
}

/// What a device does for the layer loop, over one packed batch that it knows: token ids, `cu_seqlens`, weights, and
/// the arena that [`Matrix`] points into. An operation may return before it is done, as on a CUDA stream; the next
/// one sees its result.
pub(super) trait Ops {
    /// How an operation can fail; for a CUDA stream, anything.
    type Error;

    /// Norm of word, position and token type, for each token.
    fn embed(&mut self, to: Matrix) -> Result<(), Self::Error>;

    /// `to = from · weights + bias`; [`Linear::Up`] then takes GELU of it.
    fn linear(&mut self, layer: usize, which: Linear, from: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// Attention within each sequence, over the heads of `[q | k | v]` rows.
    fn attention(&mut self, qkv: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// `x = norm(x + add)`.
    fn add_norm(&mut self, layer: usize, which: Norm, x: Matrix, add: Matrix) -> Result<(), Self::Error>;

    /// Each sequence's tokens into its vector, as the model's own files say.
    fn pool(&mut self, from: Matrix) -> Result<(), Self::Error>;
}

/// Runs all layers: Devlin et al. 2018, the post-norm encoder.
pub(super) fn forward<O: Ops>(ops: &mut O, dims: &Dims, at: &Layout) -> Result<(), O::Error> {
    ops.embed(at.x)?;
    for layer in 0..dims.layers {
        ops.linear(layer, Linear::Qkv, at.x, at.qkv)?;
        ops.attention(at.qkv, at.context)?;
        ops.linear(layer, Linear::AttentionOut, at.context, at.y)?;
        ops.add_norm(layer, Norm::Attention, at.x, at.y)?;
        ops.linear(layer, Linear::Up, at.x, at.hidden)?;
        ops.linear(layer, Linear::Down, at.hidden, at.y)?;
        ops.add_norm(layer, Norm::Output, at.x, at.y)?;
    }
    ops.pool(at.x)
}
