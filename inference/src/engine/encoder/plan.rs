//! The bytes of a pass, exact: what its one allocation holds, and where.

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

/// The activations of a shard: X, then BIG (queries, keys, values and attention's output, later the feed-forward's
/// hidden layer, which needs them no more), then Y.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub x: Matrix,
    pub qkv: Matrix,
    pub context: Matrix,
    pub hidden: Matrix,
    pub y: Matrix,
}

/// Elements of activations per token: `2H + max(4H, F)`, whatever the sequences' lengths.
pub(super) fn activations_per_token(dims: &Dims) -> usize {
    2 * dims.hidden + (4 * dims.hidden).max(dims.feed_forward)
}

impl Layout {
    pub fn new(dims: &Dims, tokens: usize) -> Self {
        let width = dims.hidden;
        let big = tokens * width;
        let at = |offset, columns| Matrix { offset, columns };
        Self {
            x: at(0, width),
            qkv: at(big, 3 * width),
            context: at(big + 3 * tokens * width, width),
            hidden: at(big, dims.feed_forward),
            y: at(big + tokens * (4 * width).max(dims.feed_forward), width),
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
        // A thread attends or multiplies, one after the other, and multiplies all of the pass's rows at most.
        let attention = attention::scratch_len(shape.longest, dims.head(), units.vectors) * 4;
        // The deeper map need not be the one that packs more: it packs fewer rows at once.
        let product =
            [dims.hidden, dims.feed_forward].map(|inner| units.product_scratch_bytes(shape.cost, inner));
        let product = product[0].max(product[1]);
        let scratch_stride = attention.max(product).next_multiple_of(REGION_ALIGNMENT);
        Self {
            ids: region(shape.cost),
            rows: region(shape.cost),
            cu_seqlens: region(shape.items + 1),
            activations: region(shape.cost * activations_per_token(dims)),
            scratch: region(threads * scratch_stride / 4),
            scratch_stride,
            vectors: region(shape.items * dims.hidden),
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
        let bytes = vectors + aligned(shape.items * dims.hidden * 4);
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
        feed_forward: 1536,
        vocabulary: 30_522,
        positions: 512,
        token_types: 2,
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
