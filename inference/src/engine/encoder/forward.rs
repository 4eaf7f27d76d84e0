//! The layer loop of an encoder, written once over a small set of operations.

use super::families::{FeedForward, Norms, Spec};
use super::plan::{Layout, Matrix};

/// A linear map of a layer. Queries, keys and values are one map, their weights joined at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linear {
    Qkv,
    AttentionOut,
    /// With GELU behind it, if the feed-forward is not gated.
    Up,
    Down,
}

/// A norm of a layer: of the sum behind its attention, or behind its feed-forward.
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

    /// The sum of each token's word, position and type embeddings to `sum`, and its norm to `to`. If both are one matrix, it holds
    /// the norm.
    fn embed(&mut self, sum: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// `to = from · weights + bias`; [`Linear::Up`] then takes GELU of it, if the feed-forward is not gated.
    fn linear(&mut self, layer: usize, which: Linear, from: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// Norms of the heads of queries and keys, if the model has them, and their rotation by the token's place.
    fn rotate(&mut self, layer: usize, qkv: Matrix) -> Result<(), Self::Error>;

    /// Attention within each sequence, over the heads of `[q | k | v]` rows.
    fn attention(&mut self, layer: usize, qkv: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// `x = x + add`, `to = norm(x)`. `to` is one of the two; where it is `x`, the norm stays.
    fn add_norm(
        &mut self,
        layer: usize,
        which: Norm,
        x: Matrix,
        add: Matrix,
        to: Matrix,
    ) -> Result<(), Self::Error>;

    /// `x = norm(x)`: the norm of what attention or the feed-forward made, in models that apply one before the residual sum.
    fn norm_block(&mut self, layer: usize, which: Norm, x: Matrix) -> Result<(), Self::Error>;

    /// The gate's function of one half of each row, times the other half.
    fn gate(&mut self, halves: Matrix, to: Matrix) -> Result<(), Self::Error>;

    /// The feed-forward of a layer, from `from` to `at.y`. `at.up` and `at.hidden` are free for what is between its maps.
    fn feed_forward(
        &mut self,
        layer: usize,
        spec: &Spec,
        from: Matrix,
        at: &Layout,
    ) -> Result<(), Self::Error>
    where
        Self: Sized,
    {
        map_by_map(self, layer, spec, from, at)
    }

    /// Each sequence's tokens into its vector, as the model's own files say.
    fn pool(&mut self, from: Matrix) -> Result<(), Self::Error>;
}

/// Runs all layers, and makes a vector of each sequence.
pub(super) fn forward<O: Ops>(ops: &mut O, spec: &Spec, at: &Layout) -> Result<(), O::Error> {
    let last = layers(ops, spec, at)?;
    ops.pool(last)
}

/// Runs all layers, and returns the matrix of their result. With norms behind blocks (Devlin et al. 2018) every block reads `x`.
/// With norms before blocks (Xiong et al. 2020) `x` is the sum of all blocks so far, and the next block reads `y`.
pub(super) fn layers<O: Ops>(ops: &mut O, spec: &Spec, at: &Layout) -> Result<Matrix, O::Error> {
    let design = &spec.design;
    let (first, normed) = match design.norms {
        Norms::After => (at.x, at.x),
        Norms::Before => (at.y, at.y),
        Norms::BeforeButFirst => (at.x, at.y),
    };
    let norms_blocks = spec.names.block_norms.is_some();
    ops.embed(at.x, first)?;
    let mut input = first;
    for layer in 0..spec.dims.layers {
        ops.linear(layer, Linear::Qkv, input, at.qkv)?;
        if design.attention_of(layer).rotary.is_some() {
            ops.rotate(layer, at.qkv)?;
        }
        ops.attention(layer, at.qkv, at.context)?;
        ops.linear(layer, Linear::AttentionOut, at.context, at.y)?;
        if norms_blocks {
            ops.norm_block(layer, Norm::Attention, at.y)?;
        }
        ops.add_norm(layer, Norm::Attention, at.x, at.y, normed)?;
        ops.feed_forward(layer, spec, normed, at)?;
        if norms_blocks {
            ops.norm_block(layer, Norm::Output, at.y)?;
        }
        ops.add_norm(layer, Norm::Output, at.x, at.y, normed)?;
        input = normed;
    }
    Ok(normed)
}

/// A feed-forward as one operation after the other.
pub(super) fn map_by_map<O: Ops>(
    ops: &mut O,
    layer: usize,
    spec: &Spec,
    from: Matrix,
    at: &Layout,
) -> Result<(), O::Error> {
    ops.linear(layer, Linear::Up, from, at.up)?;
    if spec.design.feed_forward != FeedForward::Gelu {
        ops.gate(at.up, at.hidden)?;
    }
    ops.linear(layer, Linear::Down, at.hidden, at.y)
}
