//! The exact bytes of a pass: the layout of its one allocation.

use crate::engine::PassShape;

use super::attention;
use super::config::Dims;
use super::units::CpuUnits;

/// Every region starts at a multiple of this: what CUDA's allocator aligns to, and four cache lines.
const REGION_ALIGNMENT: usize = 256;

/// Rows of activations, one per token, `columns` elements each, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    /// Elements from the start of the shard's activations.
    pub offset: usize,
    pub columns: usize,
}

/// The activations of a shard: X, BIG, Y. BIG first holds queries, keys, values and attention's output. Then it holds the
/// feed-forward's hidden layer, and behind that, if the feed-forward is gated, the product of its halves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub x: Matrix,
    pub qkv: Matrix,
    pub context: Matrix,
    /// What the upper map of the feed-forward makes.
    pub up: Matrix,
    /// What the lower map takes: the same matrix, or the product of its halves.
    pub hidden: Matrix,
    pub y: Matrix,
    /// In models of sparse vectors, what tokens give a part of the vocabulary: the whole of BIG.
    pub scores: Matrix,
}

/// Elements of activations per token, whatever the sequences' lengths: `2H + max(4H, F)` where heads share the width and
/// the feed-forward is not gated.
pub(super) fn activations_per_token(dims: &Dims) -> usize {
    2 * dims.hidden + big_columns(dims)
}

/// Fewest columns of scores that models of sparse vectors have room for: more than a panel of any unit, which is 48 at most.
const SCORE_COLUMNS_MIN: usize = 64;

fn big_columns(dims: &Dims) -> usize {
    let scores = if dims.is_sparse { SCORE_COLUMNS_MIN } else { 0 };
    let product = if dims.is_gated { dims.feed_forward } else { 0 };
    (dims.qkv_columns() + dims.attention_columns()).max(dims.up_columns() + product).max(scores)
}

impl Layout {
    pub fn new(dims: &Dims, tokens: usize) -> Self {
        let big = tokens * dims.hidden;
        let at = |offset, columns| Matrix { offset, columns };
        let product = if dims.is_gated { big + tokens * dims.up_columns() } else { big };
        Self {
            x: at(0, dims.hidden),
            qkv: at(big, dims.qkv_columns()),
            context: at(big + tokens * dims.qkv_columns(), dims.attention_columns()),
            up: at(big, dims.up_columns()),
            hidden: at(product, dims.feed_forward),
            y: at(big + tokens * big_columns(dims), dims.hidden),
            scores: at(big, big_columns(dims)),
        }
    }
}

/// A pass on the CPU: where in its arena everything lies, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CpuPlan {
    /// u32 token ids, packed.
    pub ids: usize,
    /// u32, for each token the row of the position table that it takes.
    pub rows: usize,
    /// u32 starts of the packed sequences, and the end of the last.
    pub cu_seqlens: usize,
    /// f32, [`activations_per_token`] for each token; a shard's lie together.
    pub activations: usize,
    /// Working memory of attention and of products, one piece per thread.
    pub scratch: usize,
    /// Bytes from one thread's scratch to the next one's.
    pub scratch_stride: usize,
    /// f32, one vector per sequence.
    pub vectors: usize,
    /// Of all of it.
    pub bytes: usize,
}

impl CpuPlan {
    pub fn new(dims: &Dims, units: CpuUnits, threads: usize, shape: PassShape) -> Self {
        let mut end = 0;
        let mut region = |elements: usize| {
            let start = end;
            end += (elements * 4).next_multiple_of(REGION_ALIGNMENT);
            start
        };
        // A thread runs one operation at a time, so all of them share the scratch. A product has the pass's rows at most.
        let attention = attention::scratch_len(shape.longest, dims.head, units.vectors) * 4;
        // The deepest map may pack less than another one, because it packs fewer rows at once.
        let product = [dims.hidden, dims.feed_forward, dims.attention_columns()]
            .map(|inner| units.product_scratch_bytes(shape.cost, inner));
        let product = product.into_iter().max().unwrap_or(0);
        let feed_forward = units.feed_forward_scratch_bytes(shape.cost, dims);
        let scratch_stride = attention.max(product).max(feed_forward).next_multiple_of(REGION_ALIGNMENT);
        Self {
            ids: region(shape.cost),
            rows: region(shape.cost),
            cu_seqlens: region(shape.items + 1),
            activations: region(shape.cost * activations_per_token(dims)),
            scratch: region(threads * scratch_stride / 4),
            scratch_stride,
            vectors: region(shape.items * dims.vector_columns()),
            bytes: end,
        }
    }
}

/// A pass on a CUDA device: where in its arena everything lies, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CudaPlan {
    /// u32, for each token the row of the position table that it takes. Before them, from the arena's start, u32 token ids.
    pub rows: usize,
    /// u32 starts of the packed sequences, and the end of the last.
    pub cu_seqlens: usize,
    /// Elements, [`activations_per_token`] for each token.
    pub activations: usize,
    /// f32, one vector per sequence.
    pub vectors: usize,
    /// Of all of it.
    pub bytes: usize,
}

impl CudaPlan {
    /// `element` is the size of one in bytes. Attention keeps its scores in registers, so there is no scratch.
    pub fn new(dims: &Dims, element: usize, shape: PassShape) -> Self {
        let aligned = |bytes: usize| bytes.next_multiple_of(REGION_ALIGNMENT);
        let rows = aligned(shape.cost * 4);
        let cu_seqlens = rows + aligned(shape.cost * 4);
        let activations = cu_seqlens + aligned((shape.items + 1) * 4);
        let vectors = activations + aligned(shape.cost * activations_per_token(dims) * element);
        let bytes = vectors + aligned(shape.items * dims.vector_columns() * 4);
        Self { rows, cu_seqlens, activations, vectors, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::super::tiles::Parts;
    use super::*;

    const MINILM: Dims = Dims {
        layers: 6,
        hidden: 384,
        heads: 12,
        kv_heads: 12,
        head: 32,
        feed_forward: 1536,
        is_gated: false,
        vocabulary: 30_522,
        positions: 512,
        token_types: 2,
        is_sparse: false,
    };

    fn shape(items: usize, cost: usize, longest: usize) -> PassShape {
        PassShape { items, cost, longest }
    }

    #[test]
    fn a_token_takes_what_the_formula_says() {
        assert_eq!(activations_per_token(&MINILM) * 4, 9_216);
        let layout = Layout::new(&MINILM, 10);
        assert_eq!(layout.y.offset + 10 * layout.y.columns, 10 * activations_per_token(&MINILM));
        assert_eq!(layout.context.offset + 10 * 384, layout.y.offset);
    }

    #[test]
    fn heads_of_their_own_width_and_gates_are_counted_in() {
        // Queries, keys, values and attention's output; then twice the feed-forward's width, and once for the product.
        let attention = Dims { kv_heads: 4, head: 64, is_gated: true, feed_forward: 200, ..MINILM };
        assert_eq!(activations_per_token(&attention), 2 * 384 + 2 * 768 + 2 * 256);
        let gated = Dims { feed_forward: 1152, is_gated: true, ..MINILM };
        assert_eq!(activations_per_token(&gated), 2 * 384 + 3 * 1152);
        for dims in [attention, gated] {
            let layout = Layout::new(&dims, 10);
            assert_eq!(layout.y.offset + 10 * layout.y.columns, 10 * activations_per_token(&dims));
            assert_eq!(layout.hidden.offset, layout.up.offset + 10 * layout.up.columns);
            assert!(layout.hidden.offset + 10 * layout.hidden.columns <= layout.y.offset);
            assert!(layout.context.offset + 10 * layout.context.columns <= layout.y.offset);
        }
    }

    #[test]
    fn a_sparse_vector_is_as_wide_as_the_vocabulary_and_scores_need_no_memory_of_their_own() {
        let sparse = Dims { is_sparse: true, ..MINILM };
        assert_eq!(activations_per_token(&sparse), activations_per_token(&MINILM));
        let units = CpuUnits::vectors(Level::best());
        let of = |dims: &Dims| CpuPlan::new(dims, units, 2, shape(7, 101, 33));
        let (plan, dense) = (of(&sparse), of(&MINILM));
        assert_eq!(plan.bytes - plan.vectors, (7 * 30_522 * 4_usize).next_multiple_of(256));
        assert_eq!(plan.vectors, dense.vectors);
        for dims in [sparse, Dims { hidden: 8, heads: 2, kv_heads: 2, head: 4, feed_forward: 16, ..sparse }] {
            let layout = Layout::new(&dims, 10);
            assert_eq!(layout.scores.offset + 10 * layout.scores.columns, layout.y.offset);
            for level in Level::available() {
                assert!(layout.scores.columns >= level.panel_columns(), "{level:?}");
            }
            let tiles = CpuUnits::tile_model(Level::best(), Parts::Split);
            assert!(layout.scores.columns >= tiles.panel_columns());
        }
    }

    #[test]
    fn activations_halve_with_the_tokens() {
        let units = CpuUnits::vectors(Level::best());
        let activations = |cost| {
            let plan = CpuPlan::new(&MINILM, units, 2, shape(8, cost, 64));
            plan.scratch - plan.activations
        };
        assert_eq!(activations(2048), 2 * activations(1024));
    }

    #[test]
    fn on_cuda_it_is_the_same_but_for_the_scratch_and_the_elements() {
        for shape in [shape(1, 1, 1), shape(7, 101, 33), shape(8, 2048, 512), shape(3, 0, 0)] {
            let cpu = CpuPlan::new(&MINILM, CpuUnits::vectors(Level::best()), 3, shape);
            let cuda = CudaPlan::new(&MINILM, 4, shape);
            assert_eq!(cuda.bytes, cpu.bytes - 3 * cpu.scratch_stride);
            assert_eq!(
                (cuda.rows, cuda.cu_seqlens, cuda.activations),
                (cpu.rows, cpu.cu_seqlens, cpu.activations)
            );
            let sparse = CudaPlan::new(&Dims { is_sparse: true, ..MINILM }, 4, shape);
            assert_eq!(sparse.vectors, cuda.vectors);
            assert_eq!(sparse.bytes - sparse.vectors, (shape.items * 30_522 * 4).next_multiple_of(256));
            let half = CudaPlan::new(&MINILM, 2, shape);
            assert_eq!(half.vectors - half.activations, (cuda.vectors - cuda.activations).div_ceil(2));
        }
    }

    #[test]
    fn there_is_scratch_for_the_products_of_every_map() {
        let units = CpuUnits::tile_model(Level::best(), Parts::Split);
        for cost in [1, 40, 333, 2048] {
            let plan = CpuPlan::new(&MINILM, units, 2, shape(1, cost, 1));
            for inner in [MINILM.hidden, MINILM.feed_forward] {
                for rows in 1..=cost {
                    assert!(
                        units.product_scratch_bytes(rows, inner) <= plan.scratch_stride,
                        "{rows} x {inner}"
                    );
                }
            }
            for rows in 1..=cost {
                assert!(
                    units.feed_forward_scratch_bytes(rows, &MINILM) <= plan.scratch_stride,
                    "{rows} rows"
                );
            }
        }
    }

    #[test]
    fn regions_follow_each_other_aligned() {
        let plan = CpuPlan::new(&MINILM, CpuUnits::vectors(Level::best()), 3, shape(7, 101, 33));
        let starts = [plan.ids, plan.rows, plan.cu_seqlens, plan.activations, plan.scratch, plan.vectors];
        assert!(starts.is_sorted() && starts.iter().all(|at| at % REGION_ALIGNMENT == 0));
        assert_eq!(plan.vectors - plan.scratch, 3 * plan.scratch_stride);
        assert_eq!(plan.bytes - plan.vectors, (7 * 384 * 4_usize).next_multiple_of(256));
    }
}
