//! Operations on single tokens on the CPU: embedding lookup, norms, gates, pooling.

use super::families::{Gate, NormKind};
use super::math::{add_norm, add_rms_norm, gelu, gelu_tanh, load_at, silu, store_at};
use super::modules::Pooling;
use super::simd::{Kernel, Simd};

/// Weight and bias of a norm, `hidden` elements each.
#[derive(Clone, Copy)]
pub(super) struct NormPointers {
    pub weight: *const f32,
    pub bias: *const f32,
    pub kind: NormKind,
    pub eps: f32,
}

impl NormPointers {
    /// The norm for a row that was added to itself. The result is the same to the bit: doubling is exact, and `eps` is scaled to
    /// the mean of squares, which is four times as large.
    pub fn of_doubled(self) -> Self {
        Self { eps: 4.0 * self.eps, ..self }
    }

    /// `a + b` to `sum`, and its norm to `to`.
    ///
    /// # Safety
    /// As for [`add_norm`]; weight and bias have `len` elements.
    #[inline(always)]
    unsafe fn of_sum<S: Simd>(
        self,
        (sum, to): (*mut f32, *mut f32),
        (a, b): (*const f32, *const f32),
        len: usize,
    ) {
        // SAFETY: by this function's contract.
        unsafe {
            match self.kind {
                NormKind::Layer => add_norm::<S>((sum, to), (a, b), (self.weight, self.bias), len, self.eps),
                NormKind::RootMeanSquare => add_rms_norm::<S>((sum, to), (a, b), self.weight, len, self.eps),
            }
        }
    }
}

/// Word + position for each token, and its norm.
pub(super) struct Embed<'a> {
    pub ids: &'a [u32],
    /// The row of `positions` that each token takes.
    pub rows: &'a [u32],
    pub words: *const f32,
    pub positions: *const f32,
    pub norm: NormPointers,
    pub hidden: usize,
    pub sum: *mut f32,
    /// May be `sum`.
    pub to: *mut f32,
}

impl Kernel for Embed<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for (at, (id, row)) in self.ids.iter().zip(self.rows).enumerate() {
            // SAFETY: by this function's contract: ids are below the vocabulary's size, rows below the table's, and `sum` and `to` have
            // a row for each token.
            unsafe {
                let word = self.words.add(*id as usize * self.hidden);
                let position = self.positions.add(*row as usize * self.hidden);
                let (sum, to) = (self.sum.add(at * self.hidden), self.to.add(at * self.hidden));
                self.norm.of_sum::<S>((sum, to), (word, position), self.hidden);
            }
        }
    }
}

/// `x = x + add`, `to = norm(x)`, row by row.
pub(super) struct AddNorm {
    pub x: *mut f32,
    pub add: *const f32,
    /// May be `x` or `add`.
    pub to: *mut f32,
    pub norm: NormPointers,
    pub rows: usize,
    pub hidden: usize,
}

impl Kernel for AddNorm {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..self.rows).map(|row| row * self.hidden) {
            // SAFETY: by this function's contract: all have `rows` rows of `hidden` elements.
            unsafe {
                let (x, add, to) = (self.x.add(row), self.add.add(row), self.to.add(row));
                self.norm.of_sum::<S>((x, to), (x, add), self.hidden);
            }
        }
    }
}

/// The gate's function of `x`, times `other`.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn gated<S: Simd>(gate: Gate, x: S::V, other: S::V) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        let x = match gate {
            Gate::Gelu => gelu::<S>(x),
            Gate::GeluTanh => gelu_tanh::<S>(x),
            Gate::Silu => silu::<S>(x),
        };
        S::mul(x, other)
    }
}

/// The gate's function of one half of each row, times the other half.
pub(super) struct Gated {
    /// Rows of twice `columns` elements.
    pub halves: *const f32,
    pub gate: Gate,
    /// The function is of the second half.
    pub of_second: bool,
    pub rows: usize,
    pub columns: usize,
    pub to: *mut f32,
}

impl Kernel for Gated {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let columns = self.columns;
        let (gate, other) = if self.of_second { (columns, 0) } else { (0, columns) };
        for row in 0..self.rows {
            // SAFETY: by this function's contract: `rows` rows of both; `load_at` and `store_at` stay below `columns`.
            unsafe {
                let from = self.halves.add(row * 2 * columns);
                let to = self.to.add(row * columns);
                for at in (0..columns).step_by(S::LANES) {
                    let x = load_at::<S>(from.add(gate), at, columns);
                    let x = gated::<S>(self.gate, x, load_at::<S>(from.add(other), at, columns));
                    store_at::<S>(to, at, columns, x);
                }
            }
        }
    }
}

/// GELU of each of so many numbers.
pub(super) struct Gelu {
    pub x: *mut f32,
    pub len: usize,
}

impl Kernel for Gelu {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for at in (0..self.len).step_by(S::LANES) {
            // SAFETY: by this function's contract: `x` has `len` elements; `load_at` and `store_at` stay below that.
            unsafe {
                let x = load_at::<S>(self.x, at, self.len);
                store_at::<S>(self.x, at, self.len, gelu::<S>(x));
            }
        }
    }
}

/// Tokens of a partial sum of [`Pooling::Mean`]. Adding thousands of tokens to one sum would round each to the precision of the whole sum.
/// About the square root of the longest text's tokens (8,192), so that a sum of either level has few additions.
const SUM_TOKENS: usize = 64;

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
            Pooling::Cls | Pooling::Last => self.tokens.min(1),
            Pooling::Mean | Pooling::Max => self.tokens,
        };
        let share = match self.pooling {
            Pooling::Mean => 1.0 / rows.max(1) as f32,
            Pooling::Cls | Pooling::Max | Pooling::Last => 1.0,
        };
        let first = if self.pooling == Pooling::Last { self.tokens.saturating_sub(1) } else { 0 };
        let block_rows = if self.pooling == Pooling::Mean { SUM_TOKENS } else { rows.max(1) };
        let mut squares = 0.0;
        // SAFETY: by this function's contract: `tokens` rows of `hidden` elements, and room for one in `to`.
        unsafe {
            let x = self.x.add(first * self.hidden);
            for at in (0..self.hidden).step_by(S::LANES) {
                let mut pooled = S::splat(0.0);
                for start in (0..rows).step_by(block_rows) {
                    let mut block = load_at::<S>(x.add(start * self.hidden), at, self.hidden);
                    for row in start + 1..rows.min(start + block_rows) {
                        let x = load_at::<S>(x.add(row * self.hidden), at, self.hidden);
                        block = match self.pooling {
                            Pooling::Max => S::max(block, x),
                            Pooling::Mean | Pooling::Cls | Pooling::Last => S::add(block, x),
                        };
                    }
                    pooled = if start == 0 { block } else { S::add(pooled, block) };
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

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;

    /// The mean of equal rows is the row.
    #[test]
    fn the_mean_of_many_tokens_is_as_exact_as_that_of_few() {
        const HIDDEN: usize = 29;
        let row: Vec<f32> = (0..HIDDEN).map(|at| at as f32 / 14.5 - 0.9987).collect();
        let largest = row.iter().fold(0.0_f64, |most, x| most.max(f64::from(x.abs())));
        for level in Level::available() {
            for tokens in [1, 63, 64, 65, 1000, 8191, 8192] {
                let rows = row.repeat(tokens);
                let mut mean = vec![0.0_f32; HIDDEN];
                let pool = Pool {
                    x: rows.as_ptr(),
                    tokens,
                    hidden: HIDDEN,
                    pooling: Pooling::Mean,
                    normalize: false,
                    to: mean.as_mut_ptr(),
                };
                // SAFETY: `rows` has `tokens` rows of `HIDDEN` elements, and `mean` has one.
                unsafe { level.run(&pool) };
                for (x, mean) in row.iter().zip(&mean) {
                    let error = (f64::from(*mean) - f64::from(*x)).abs() / largest;
                    assert!(error < 2e-6, "{level:?}, {tokens} tokens: {mean} for {x}, off by {error:e}");
                }
            }
        }
    }
}
