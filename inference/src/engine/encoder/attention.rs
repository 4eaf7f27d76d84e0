//! Attention of one head over one sequence, on the CPU.

use std::ops::Range;

use super::families::Sees;
use super::math::{load_at, softmax, store_at};
use super::matmul::{Product, packed_len};
use super::simd::{Kernel, Level, Simd};

/// Queries whose scores are held at once: a multiple of every unit's tile rows (8, 6, 4), and so few that their
/// scores against 512 keys take 48 KiB and stay in cache.
const QUERY_BLOCK: usize = 24;

/// softmax((Q Kᵀ + B) / √d) V for one head of one sequence, for each query over the keys that it sees.
pub(super) struct HeadAttention {
    /// The head's query, key and value of the sequence's first token; the next token's lie `stride` elements on.
    pub queries: *const f32,
    pub keys: *const f32,
    pub values: *const f32,
    pub stride: usize,
    /// Where the head's part of the first token goes; the next token's lies `to_stride` elements on.
    pub to: *mut f32,
    pub to_stride: usize,
    pub tokens: usize,
    pub head: usize,
    pub sees: Sees,
    /// Added to the scores. This is the element for a token and itself; that for a key `n` tokens after the query lies `n` elements
    /// on.
    pub bias: Option<*const f32>,
    /// [`scratch_len`] elements.
    pub scratch: *mut f32,
}

/// Elements of scratch memory that one thread needs for sequences of up to `longest` tokens.
pub(super) fn scratch_len(longest: usize, head: usize, level: Level) -> usize {
    let lanes = level.lanes();
    packed_len(head, longest, lanes)
        + packed_len(longest, head, lanes)
        + QUERY_BLOCK * longest.next_multiple_of(lanes)
}

impl Kernel for HeadAttention {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        // SAFETY: by this function's contract.
        unsafe { self.compute::<S>() };
    }
}

impl HeadAttention {
    /// # Safety
    /// The CPU has `S`; the pointers are valid for what their fields say, and what is written overlaps nothing.
    #[inline(always)]
    unsafe fn compute<S: Simd>(&self) {
        let (tokens, head) = (self.tokens, self.head);
        let keys_len = packed_len(head, tokens, S::LANES);
        let values_len = packed_len(tokens, head, S::LANES);
        // SAFETY: `scratch` holds the three parts one after the other by `scratch_len`, which grows with its tokens.
        let (keys, values, scores) = unsafe {
            let keys = self.scratch;
            let values = keys.add(keys_len);
            self.pack_keys::<S>(keys);
            self.pack_values::<S>(values);
            (keys, values, values.add(values_len))
        };
        let scale = 1.0 / (head as f32).sqrt();
        for first in (0..tokens).step_by(QUERY_BLOCK) {
            let rows = QUERY_BLOCK.min(tokens - first);
            let Range { start, end } = self.seen_by::<S>(first..first + rows);
            let width = (end - start).next_multiple_of(S::LANES);
            // SAFETY: `rows` rows of queries, of scores (`width` apart) and of `to` from `first` on are within
            // theirs; scores beyond `end` are filled before softmax reads them. The bias has an element for every distance
            // between two tokens of a sequence. Panels of keys start at `head * start`, since `start` begins one.
            unsafe {
                let weights = Product {
                    a: self.queries.add(first * self.stride),
                    a_stride: self.stride,
                    b: keys.add(head * start),
                    bias: std::ptr::null(),
                    c: scores,
                    c_stride: width,
                    rows,
                    inner: head,
                    columns: end - start,
                    gelu: false,
                };
                weights.compute::<S>();
                let mut shares = [0.0; QUERY_BLOCK];
                for (row, share) in shares.iter_mut().enumerate().take(rows) {
                    let query = first + row;
                    let row = scores.add(row * width);
                    if let Some(bias) = self.bias {
                        let bias = bias.sub(query).add(start);
                        for at in (0..end - start).step_by(S::LANES) {
                            let biased = S::add(
                                load_at::<S>(row, at, end - start),
                                load_at::<S>(bias, at, end - start),
                            );
                            store_at::<S>(row, at, end - start, biased);
                        }
                    }
                    let seen = self.sees.keys(query, tokens);
                    for at in (0..seen.start - start).chain(seen.end - start..width) {
                        // Far below any score, so that its weight is zero. An infinity could become NaN.
                        *row.add(at) = f32::MIN;
                    }
                    *share = softmax::<S>(row, width, scale);
                }
                self.mix::<S>(scores, (start..end, width), values, first..first + rows);
                for (row, share) in shares.iter().enumerate().take(rows) {
                    let to = self.to.add((first + row) * self.to_stride);
                    for at in (0..head).step_by(S::LANES) {
                        let mixed = S::mul(load_at::<S>(to, at, head), S::splat(*share));
                        store_at::<S>(to, at, head, mixed);
                    }
                }
            }
        }
    }

    /// The keys that some of the queries see, in whole panels.
    #[inline(always)]
    fn seen_by<S: Simd>(&self, queries: Range<usize>) -> Range<usize> {
        let panel = S::LANES * S::TILE_VECTORS;
        let start = self.sees.keys(queries.start, self.tokens).start;
        let end = self.sees.keys(queries.end - 1, self.tokens).end;
        start / panel * panel..end.next_multiple_of(panel).min(self.tokens)
    }

    /// Sums of values by weights that lie `width` apart: those of the keys `seen`, for these queries.
    ///
    /// # Safety
    /// As for [`compute`](Self::compute); `weights` has a row for each query, `values` are packed.
    #[inline(always)]
    unsafe fn mix<S: Simd>(
        &self,
        weights: *const f32,
        (seen, width): (Range<usize>, usize),
        values: *const f32,
        queries: Range<usize>,
    ) {
        let panel = S::LANES * S::TILE_VECTORS;
        // A panel at a time, because only within a panel do the values of neighbouring keys follow each other.
        for column in (0..self.head).step_by(panel) {
            let columns = panel.min(self.head - column);
            // SAFETY: a panel starts at `tokens * column` because all before it are full, and has a row of whole vectors for
            // each key.
            unsafe {
                let sums = Product {
                    a: weights,
                    a_stride: width,
                    b: values.add(self.tokens * column + seen.start * columns.next_multiple_of(S::LANES)),
                    bias: std::ptr::null(),
                    c: self.to.add(queries.start * self.to_stride + column),
                    c_stride: self.to_stride,
                    rows: queries.len(),
                    inner: seen.len(),
                    columns,
                    gelu: false,
                };
                sums.compute::<S>();
            }
        }
    }

    /// Packs keys, transposed, as [`pack`](super::matmul::pack) would. Uses vectors, because this is a noticeable part of the work
    /// of a head.
    ///
    /// # Safety
    /// As for [`compute`](Self::compute); `to` has room for them.
    #[inline(always)]
    unsafe fn pack_keys<S: Simd>(&self, to: *mut f32) {
        let panel = S::LANES * S::TILE_VECTORS;
        for first in (0..self.tokens).step_by(panel) {
            let width = panel.min((self.tokens - first).next_multiple_of(S::LANES));
            for column in (first..first + width).step_by(S::LANES) {
                // SAFETY: rows below `tokens`, columns below `head`; the panel starts at `head * first` because all
                // before it are full, and is `width` wide.
                unsafe {
                    let from = self.keys.add(column * self.stride);
                    let to = to.add(self.head * first + column - first);
                    let mut depth = 0;
                    if column + S::LANES <= self.tokens {
                        while depth + S::LANES <= self.head {
                            S::transpose(from.add(depth), self.stride, to.add(depth * width), width);
                            depth += S::LANES;
                        }
                    }
                    let keys = S::LANES.min(self.tokens - column);
                    for depth in depth..self.head {
                        let to = to.add(depth * width);
                        for key in 0..keys {
                            *to.add(key) = *from.add(key * self.stride + depth);
                        }
                        for pad in keys..S::LANES {
                            *to.add(pad) = 0.0;
                        }
                    }
                }
            }
        }
    }

    /// Values, as [`pack`](super::matmul::pack) would.
    ///
    /// # Safety
    /// As for [`compute`](Self::compute); `to` has room for them.
    #[inline(always)]
    unsafe fn pack_values<S: Simd>(&self, to: *mut f32) {
        let panel = S::LANES * S::TILE_VECTORS;
        for first in (0..self.head).step_by(panel) {
            let width = panel.min((self.head - first).next_multiple_of(S::LANES));
            for row in 0..self.tokens {
                for column in (first..first + width).step_by(S::LANES) {
                    // SAFETY: as for keys; `load_at` stops at `head` and gives zeros beyond.
                    unsafe {
                        let from = self.values.add(row * self.stride);
                        let to = to.add(self.tokens * first + row * width + column - first);
                        S::store(to, load_at::<S>(from, column, self.head));
                    }
                }
            }
        }
    }
}
