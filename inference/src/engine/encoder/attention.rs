//! Attention of one head over one sequence, on the CPU.

use super::math::{load_at, softmax, store_at};
use super::matmul::{Product, packed_len};
use super::simd::{Kernel, Level, Simd};

/// Queries whose scores are held at once: a multiple of every unit's tile rows (8, 6, 4), and so few that their
/// scores against 512 keys take 48 KiB and stay in cache.
const QUERY_BLOCK: usize = 24;

/// softmax((Q Kᵀ + B) / √d) V for one head of one sequence.
pub(super) struct HeadAttention {
    /// The head's query of the sequence's first token; keys and values lie `hidden` and `2 hidden` elements on,
    /// and the next token's `stride` elements on.
    pub qkv: *const f32,
    pub hidden: usize,
    pub stride: usize,
    /// Where the head's part of the first token goes; the next token's lies `hidden` elements on.
    pub to: *mut f32,
    pub tokens: usize,
    pub head: usize,
    /// What is added to the score of a token and itself; that of a key `n` tokens after its query lies `n` elements on.
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
        // SAFETY: the caller's word.
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
        let width = tokens.next_multiple_of(S::LANES);
        let scale = 1.0 / (head as f32).sqrt();
        for first in (0..tokens).step_by(QUERY_BLOCK) {
            let rows = QUERY_BLOCK.min(tokens - first);
            // SAFETY: `rows` rows of queries, of scores (`width` apart) and of `to` from `first` on are within
            // theirs; scores beyond `tokens` are filled before softmax reads them. The bias has an element for every distance
            // between two tokens of a sequence.
            unsafe {
                let weights = Product {
                    a: self.qkv.add(first * self.stride),
                    a_stride: self.stride,
                    b: keys,
                    bias: std::ptr::null(),
                    c: scores,
                    c_stride: width,
                    rows,
                    inner: head,
                    columns: tokens,
                    gelu: false,
                };
                weights.compute::<S>();
                let mut shares = [0.0; QUERY_BLOCK];
                for (row, share) in shares.iter_mut().enumerate().take(rows) {
                    let query = first + row;
                    let row = scores.add(row * width);
                    if let Some(bias) = self.bias {
                        let bias = bias.sub(query);
                        for at in (0..tokens).step_by(S::LANES) {
                            let biased =
                                S::add(load_at::<S>(row, at, tokens), load_at::<S>(bias, at, tokens));
                            store_at::<S>(row, at, tokens, biased);
                        }
                    }
                    for at in tokens..width {
                        // Far below any score, so that its share is nothing, but no infinity that could turn NaN.
                        *row.add(at) = f32::MIN;
                    }
                    *share = softmax::<S>(row, width, scale);
                }
                let mixed = Product {
                    a: scores,
                    a_stride: width,
                    b: values,
                    bias: std::ptr::null(),
                    c: self.to.add(first * self.hidden),
                    c_stride: self.hidden,
                    rows,
                    inner: tokens,
                    columns: head,
                    gelu: false,
                };
                mixed.compute::<S>();
                for (row, share) in shares.iter().enumerate().take(rows) {
                    let to = self.to.add((first + row) * self.hidden);
                    for at in (0..head).step_by(S::LANES) {
                        let mixed = S::mul(load_at::<S>(to, at, head), S::splat(*share));
                        store_at::<S>(to, at, head, mixed);
                    }
                }
            }
        }
    }

    /// Keys, transposed, as [`pack`](super::matmul::pack) would: with vectors, because per head and sequence it is no
    /// small part of the work.
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
                    let from = self.qkv.add(self.hidden + column * self.stride);
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
                        let from = self.qkv.add(2 * self.hidden + row * self.stride);
                        let to = to.add(self.tokens * first + row * width + column - first);
                        S::store(to, load_at::<S>(from, column, self.head));
                    }
                }
            }
        }
    }
}
