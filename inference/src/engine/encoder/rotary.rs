//! Rotary positions on the CPU: rotates queries and keys, head by head.

use super::math::{inverse_rms, load_at, store_at};
use super::simd::{Kernel, Simd};

/// Rotates the queries and keys of consecutive tokens of a text (Su et al. 2021). Element `i` of a head and element `i` of its
/// second half form a point, which turns by the token's place times its own frequency. The heads' norms, if the model has them,
/// come first.
pub(super) struct Rotate {
    /// The first token's queries; its keys lie behind them, and the next token's `stride` elements on.
    pub qkv: *mut f32,
    pub stride: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    /// Elements of a head, an even number.
    pub head: usize,
    pub norms: Option<HeadNorms>,
    /// The first token's row of [`Rotary::table`](super::families::Rotary::table); the next token's lies behind it.
    pub table: *const f32,
}

/// The norms of queries and keys: [`inverse_rms`] of each head, times a weight for each of its elements.
#[derive(Clone, Copy)]
pub(super) struct HeadNorms {
    pub queries: *const f32,
    pub keys: *const f32,
    pub eps: f32,
}

impl Kernel for Rotate {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for token in 0..self.tokens {
            // SAFETY: by this function's contract: a row of `heads + 2 kv_heads` heads for each token, and one of `head` elements of
            // the table.
            unsafe {
                let row = self.qkv.add(token * self.stride);
                let table = self.table.add(token * self.head);
                for at in 0..self.heads + self.kv_heads {
                    let weight =
                        self.norms.map(|norms| if at < self.heads { norms.queries } else { norms.keys });
                    self.head::<S>(row.add(at * self.head), weight, table);
                }
            }
        }
    }
}

impl Rotate {
    /// # Safety
    /// The CPU has `S`; `x`, `weight` and `table` are valid for `head` elements.
    #[inline(always)]
    unsafe fn head<S: Simd>(&self, x: *mut f32, weight: Option<*const f32>, table: *const f32) {
        let half = self.head / 2;
        // SAFETY: by this function's contract; `load_at` and `store_at` stay below `half`, in both halves.
        unsafe {
            let scale = match (weight, self.norms) {
                (Some(_), Some(norms)) => S::splat(inverse_rms::<S>(x, self.head, norms.eps)),
                _ => S::splat(1.0),
            };
            for at in (0..half).step_by(S::LANES) {
                let mut first = load_at::<S>(x, at, half);
                let mut second = load_at::<S>(x.add(half), at, half);
                if let Some(weight) = weight {
                    first = S::mul(S::mul(first, scale), load_at::<S>(weight, at, half));
                    second = S::mul(S::mul(second, scale), load_at::<S>(weight.add(half), at, half));
                }
                let cosine = load_at::<S>(table, at, half);
                let sine = load_at::<S>(table.add(half), at, half);
                let turned = S::sub(S::mul(first, cosine), S::mul(second, sine));
                store_at::<S>(x.add(half), at, half, S::mul_add(second, cosine, S::mul(first, sine)));
                store_at::<S>(x, at, half, turned);
            }
        }
    }
}
