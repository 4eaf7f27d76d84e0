//! The head of a masked language model on a CUDA device: the largest scores that a text's tokens give those of the vocabulary.
//!
//! Scores of all tokens would take many times the memory of the layers. So a pass computes them a chunk of the vocabulary after the
//! other, each as wide as the memory allows that the layers no longer need, and pools each chunk over the tokens of every text. The
//! results lie chunk by chunk, each with a row for every text; the host puts them together.

use std::ops::Range;

use cudarc::driver::sys::CUdeviceptr;

use super::ops::CudaOps;
use super::weights::LinearAt;
use crate::device::cuda::CudaError;
use crate::engine::encoder::config::Dims;
use crate::engine::encoder::modules::Pooling;
use crate::engine::encoder::plan::{Layout, Matrix};

/// Columns of a chunk are a multiple of this but for the last one's: a tile of the linear maps, and more than kernels read at a time.
const TILE_COLUMNS: usize = 64;

/// The chunks of the vocabulary, in order.
fn chunks(dims: &Dims) -> impl Iterator<Item = Range<usize>> + use<> {
    let vocabulary = dims.vocabulary;
    // At least a tile: `plan` has room for one.
    let columns = (Layout::new(dims, 0).scores.columns / TILE_COLUMNS).max(1) * TILE_COLUMNS;
    (0..vocabulary).step_by(columns).map(move |first| first..vocabulary.min(first + columns))
}

impl CudaOps<'_> {
    /// For each sequence the largest score that any of its tokens gives each token of the vocabulary, chunk by chunk. The layers
    /// have left their result in `at.x`: the families that have such a head have their norms behind the blocks.
    pub fn pool_vocabulary(&self, at: &Layout) -> Result<(), CudaError> {
        let Some(head) = self.model.weights.mlm() else { return Ok(()) };
        self.own_linear(head.dense, true, at.x, at.y)?;
        // The sum of y and itself, whose variance is four times as large.
        self.norm_of_sum(head.norm, 4.0 * self.model.spec.norm_eps, (at.y, at.y), at.y)?;
        for chunk in chunks(&self.model.spec.dims) {
            let scores = Matrix { columns: chunk.len(), ..at.scores };
            let vectors = self.plan.vectors + chunk.start * self.shape.items * size_of::<f32>();
            self.own_linear(head.words.part(chunk, self.model.element.bytes()), false, at.y, scores)?;
            self.pool_to(scores, Pooling::Max, false, vectors)?;
        }
        Ok(())
    }
}

impl LinearAt {
    /// The map to some of the columns, which are rows of the weights. `element` is the size of one in bytes.
    fn part(self, columns: Range<usize>, element: usize) -> Self {
        let behind = |start: CUdeviceptr, bytes: usize| start + bytes as CUdeviceptr;
        Self {
            weights: behind(self.weights, columns.start * self.inner * element),
            bias: behind(self.bias, columns.start * size_of::<f32>()),
            // The head's kernels take a bias in f32 only.
            rounded_bias: behind(self.rounded_bias, columns.start * size_of::<f32>()),
            inner: self.inner,
            columns: columns.len(),
        }
    }
}

/// The largest scores of one of so many items, or zero where none is above zero, from what [`CudaOps::pool_vocabulary`] leaves.
pub(super) fn scores(results: &[[u8; 4]], dims: &Dims, items: usize, item: usize) -> Vec<f32> {
    let mut scores = Vec::with_capacity(dims.vocabulary);
    for chunk in chunks(dims) {
        let row = &results[chunk.start * items + item * chunk.len()..][..chunk.len()];
        scores.extend(row.iter().map(|score| at_least_zero(f32::from_ne_bytes(*score))));
    }
    scores
}

/// Zero for negative scores. A score that is not finite stays, so that it is found; minus infinity becomes NaN, as on the CPU. The
/// kernel has already replaced it where another token's score is larger.
fn at_least_zero(score: f32) -> f32 {
    match score {
        f32::NEG_INFINITY => f32::NAN,
        score if score < 0.0 => 0.0,
        score => score,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(vocabulary: usize, feed_forward: usize) -> Dims {
        Dims {
            layers: 1,
            hidden: 8,
            heads: 2,
            kv_heads: 2,
            head: 4,
            feed_forward,
            is_gated: false,
            vocabulary,
            positions: 512,
            token_types: 2,
            is_sparse: true,
        }
    }

    #[test]
    fn chunks_are_whole_tiles_but_the_last() {
        assert_eq!(chunks(&dims(130, 16)).collect::<Vec<_>>(), [0..64, 64..128, 128..130]);
        assert_eq!(chunks(&dims(300, 200)).collect::<Vec<_>>(), [0..192, 192..300]);
        assert_eq!(chunks(&dims(128, 16)).collect::<Vec<_>>(), [0..64, 64..128]);
    }

    #[test]
    fn scores_are_put_together_and_what_is_not_finite_stays() {
        let dims = dims(66, 16);
        // Two items: rows of 64 columns, then rows of two.
        let rows = [vec![1.0; 64], vec![2.0; 64], vec![-3.0, 4.0], vec![f32::NEG_INFINITY, f32::NAN]];
        let results: Vec<[u8; 4]> = rows.concat().into_iter().map(f32::to_ne_bytes).collect();
        assert_eq!(scores(&results, &dims, 2, 0), [vec![1.0; 64], vec![0.0, 4.0]].concat());
        let second = scores(&results, &dims, 2, 1);
        assert_eq!(second[..64], [2.0; 64]);
        assert!(second[64].is_nan() && second[65].is_nan(), "{second:?}");
        assert_eq!(at_least_zero(f32::INFINITY), f32::INFINITY);
    }
}
