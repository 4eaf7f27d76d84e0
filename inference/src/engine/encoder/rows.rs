//! What is done token by token on the CPU: embedding lookup, layer norm, pooling.

use super::config::Pooling;
use super::math::{add_norm, load_at, store_at};
use super::simd::{Kernel, Simd};

/// Weight and bias of a layer norm, `hidden` elements each.
#[derive(Clone, Copy)]
pub(super) struct NormPointers {
    pub weight: *const f32,
    pub bias: *const f32,
    pub eps: f32,
}

/// Layer norm of word + position for each token.
pub(super) struct Embed<'a> {
    pub ids: &'a [u32],
    /// The row of `positions` that each token takes.
    pub rows: &'a [u32],
    pub words: *const f32,
    pub positions: *const f32,
    pub norm: NormPointers,
    pub hidden: usize,
    pub to: *mut f32,
}

impl Kernel for Embed<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for (at, (id, row)) in self.ids.iter().zip(self.rows).enumerate() {
            // SAFETY: the caller's word: ids are below the vocabulary's size, rows below the table's, and `to` has a row
            // for each token.
            unsafe {
                let word = self.words.add(*id as usize * self.hidden);
                let position = self.positions.add(*row as usize * self.hidden);
                let to = self.to.add(at * self.hidden);
                let NormPointers { weight, bias, eps } = self.norm;
                add_norm::<S>(to, (word, position), (weight, bias), self.hidden, eps);
            }
        }
    }
}

/// `x = norm(x + add)`, row by row.
pub(super) struct AddNorm {
    pub x: *mut f32,
    pub add: *const f32,
    pub norm: NormPointers,
    pub rows: usize,
    pub hidden: usize,
}

impl Kernel for AddNorm {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in 0..self.rows {
            // SAFETY: the caller's word: both have `rows` rows of `hidden` elements.
            unsafe {
                let x = self.x.add(row * self.hidden);
                let add = self.add.add(row * self.hidden);
                let NormPointers { weight, bias, eps } = self.norm;
                add_norm::<S>(x, (x, add), (weight, bias), self.hidden, eps);
            }
        }
    }
}

/// One sequence's tokens into one vector, of length 1 if asked for.
pub(super) struct Pool {
    pub x: *const f32,
    pub tokens: usize,
    pub hidden: usize,
    pub pooling: Pooling,
    pub normalize: bool,
    pub to: *mut f32,
}

impl Kernel for Pool {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        // No tokens give zeros, as the mean of nothing does in sentence-transformers.
        let rows = match self.pooling {
            Pooling::Cls => self.tokens.min(1),
            Pooling::Mean | Pooling::Max => self.tokens,
        };
        let share = match self.pooling {
            Pooling::Mean => 1.0 / rows.max(1) as f32,
            Pooling::Cls | Pooling::Max => 1.0,
        };
        let mut squares = 0.0;
        // SAFETY: the caller's word: `tokens` rows of `hidden` elements, and room for one in `to`.
        unsafe {
            for at in (0..self.hidden).step_by(S::LANES) {
                let mut pooled = S::splat(0.0);
                for row in 0..rows {
                    let x = load_at::<S>(self.x.add(row * self.hidden), at, self.hidden);
                    pooled = match self.pooling {
                        _ if row == 0 => x,
                        Pooling::Max => S::max(pooled, x),
                        Pooling::Mean | Pooling::Cls => S::add(pooled, x),
                    };
                }
                let pooled = S::mul(pooled, S::splat(share));
                // Lanes beyond `hidden` are zero in every row, so they add nothing.
                squares += S::sum(S::mul(pooled, pooled));
                store_at::<S>(self.to, at, self.hidden, pooled);
            }
            if self.normalize {
                // The floor is that of torch.nn.functional.normalize. `max` would swallow a NaN.
                let norm = squares.sqrt();
                let inverse = S::splat(1.0 / if norm < 1e-12 { 1e-12 } else { norm });
                for at in (0..self.hidden).step_by(S::LANES) {
                    let x = load_at::<S>(self.to, at, self.hidden);
                    store_at::<S>(self.to, at, self.hidden, S::mul(x, inverse));
                }
            }
        }
    }
}
