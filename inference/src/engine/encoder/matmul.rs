//! Matrix product with the right side packed beforehand: weights once at load, keys and values per head.
//!
//! Why no library: weights never change, so packing them at every call is waste, and a library that packs allocates memory during
//! a pass. Here a product needs no workspace, bias and GELU are applied to the accumulators in registers, and the tile is the one
//! of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): `TILE_ROWS` rows of the left side, splat
//! element by element, times a panel that lies in the order in which it is read.

#![allow(
    clippy::needless_range_loop,
    reason = "tiles are walked by index: only loops of constant bounds unroll into registers"
)]

use super::math::{gelu, load_at, store_at};
use super::simd::{Kernel, Simd};

/// Rows of the left side that go through all panels before the next rows. With `INNER_BLOCK` columns of f32 they take 360 KiB,
/// which leaves room for a panel and the result in a second-level cache of 1 MiB.
const ROW_BLOCK: usize = 240;
/// Depth of one sweep: a panel of this depth is 72 KiB at most and stays in the second-level cache.
const INNER_BLOCK: usize = 384;

/// The largest tile of any vector unit.
pub(super) const TILE_ROWS_MAX: usize = 8;
const TILE_VECTORS_MAX: usize = 3;

/// `c = a · b + bias`, then GELU if asked for.
pub(super) struct Product {
    /// `rows` × `inner`, row-major, `a_stride` elements apart.
    pub a: *const f32,
    pub a_stride: usize,
    /// `inner` × `columns`, packed as [`pack`] does.
    pub b: *const f32,
    /// `columns` elements, rounded up to whole vectors; or null.
    pub bias: *const f32,
    /// `rows` × `columns`, `c_stride` elements apart.
    pub c: *mut f32,
    pub c_stride: usize,
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub gelu: bool,
}

/// Elements that `inner` × `columns` take once packed: columns are rounded up to whole vectors.
pub(super) fn packed_len(inner: usize, columns: usize, lanes: usize) -> usize {
    inner * columns.next_multiple_of(lanes)
}

/// Writes `inner` × `columns` packed: panel after panel of `panel` columns, the last one narrower but of whole
/// vectors, zero beyond `columns`; in a panel row after row. `source(row, column)` gives the elements.
#[inline(always)]
pub(super) fn pack(
    to: &mut [f32],
    (inner, columns): (usize, usize),
    (panel, lanes): (usize, usize),
    source: impl Fn(usize, usize) -> f32,
) {
    let mut to = to.iter_mut();
    for first in (0..columns).step_by(panel) {
        let width = panel.min((columns - first).next_multiple_of(lanes));
        for row in 0..inner {
            for (column, to) in (first..first + width).zip(&mut to) {
                *to = if column < columns { source(row, column) } else { 0.0 };
            }
        }
    }
}

impl Kernel for Product {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        // SAFETY: by this function's contract.
        unsafe { self.compute::<S>() };
    }
}

impl Product {
    /// # Safety
    /// The CPU has `S`; `a`, `b`, `bias` and `c` are valid for what their fields say, and `c` overlaps none of them.
    #[inline(always)]
    pub(super) unsafe fn compute<S: Simd>(&self) {
        let panel = S::LANES * S::TILE_VECTORS;
        for row_block in (0..self.rows).step_by(ROW_BLOCK) {
            let rows_end = self.rows.min(row_block + ROW_BLOCK);
            for depth in (0..self.inner).step_by(INNER_BLOCK) {
                for column in (0..self.columns).step_by(panel) {
                    for row in (row_block..rows_end).step_by(S::TILE_ROWS) {
                        let rows = S::TILE_ROWS.min(rows_end - row);
                        let width = (self.columns - column).min(panel);
                        // SAFETY: the tile is within the matrices; this function's contract covers them.
                        unsafe {
                            match width.div_ceil(S::LANES) {
                                1 => self.tile::<S, 1>(row, rows, column, depth),
                                2 => self.tile::<S, 2>(row, rows, column, depth),
                                _ => self.tile::<S, 3>(row, rows, column, depth),
                            }
                        }
                    }
                }
            }
        }
    }

    /// Adds one block of depth to one tile: `rows` (at most `TILE_ROWS`) × `VECTORS` vectors at `row`, `column`.
    ///
    /// # Safety
    /// As for [`compute`](Self::compute), and the tile is within the matrices.
    #[inline(always)]
    unsafe fn tile<S: Simd, const VECTORS: usize>(
        &self,
        row: usize,
        rows: usize,
        column: usize,
        depth: usize,
    ) {
        let block = INNER_BLOCK.min(self.inner - depth);
        let width = VECTORS * S::LANES;
        // SAFETY: rows past the end read the last row instead, so every read of `a` is within it; a panel starts at
        // `inner * column` because all panels before it are full. Stores are bounded in `finish`.
        unsafe {
            let a = self.a.add(row * self.a_stride + depth);
            let a: [*const f32; TILE_ROWS_MAX] =
                std::array::from_fn(|i| a.add(i.min(rows - 1) * self.a_stride));
            let mut b = self.b.add(self.inner * column + depth * width);
            let mut sums = self.start::<S, VECTORS>(row, rows, column, depth);
            for at in 0..block {
                let mut right = [S::splat(0.0); VECTORS];
                for (j, right) in right.iter_mut().enumerate() {
                    *right = S::load(b.add(j * S::LANES));
                }
                for i in 0..S::TILE_ROWS {
                    let left = S::splat(*a[i].add(at));
                    for j in 0..VECTORS {
                        sums[i][j] = S::mul_add(left, right[j], sums[i][j]);
                    }
                }
                b = b.add(width);
            }
            self.finish::<S, VECTORS>(row, rows, column, &sums);
            if self.gelu && depth + block == self.inner {
                self.gelu_tile::<S>(row, rows, column, width);
            }
        }
    }

    /// What a tile's sums start from: the bias or zero at depth 0, then what the blocks before have left in `c`.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile).
    #[inline(always)]
    unsafe fn start<S: Simd, const VECTORS: usize>(
        &self,
        row: usize,
        rows: usize,
        column: usize,
        depth: usize,
    ) -> [[S::V; VECTORS]; TILE_ROWS_MAX] {
        // SAFETY: the bias is padded to whole vectors; reads of `c` stop at `columns`.
        unsafe {
            let mut sums = [[S::splat(0.0); VECTORS]; TILE_ROWS_MAX];
            if depth == 0 {
                if !self.bias.is_null() {
                    for j in 0..VECTORS {
                        let bias = S::load(self.bias.add(column + j * S::LANES));
                        for sums in &mut sums {
                            sums[j] = bias;
                        }
                    }
                }
                return sums;
            }
            for i in 0..S::TILE_ROWS {
                for j in 0..VECTORS {
                    let at = column + j * S::LANES;
                    let c = self.c.add((row + i.min(rows - 1)) * self.c_stride);
                    sums[i][j] = load_at::<S>(c, at, self.columns);
                }
            }
            sums
        }
    }

    /// GELU of a finished tile, which is still in the first-level cache. Not on the registers: so large a body is
    /// not unrolled, and a loop over the accumulators would force them into memory for the whole product.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile).
    #[inline(always)]
    unsafe fn gelu_tile<S: Simd>(&self, row: usize, rows: usize, column: usize, width: usize) {
        let end = self.columns.min(column + width);
        for row in row..row + rows {
            for at in (column..end).step_by(S::LANES) {
                // SAFETY: a row of `c`; both stop at `columns`.
                unsafe {
                    let c = self.c.add(row * self.c_stride);
                    let x = load_at::<S>(c, at, self.columns);
                    store_at::<S>(c, at, self.columns, gelu::<S>(x));
                }
            }
        }
    }

    /// # Safety
    /// As for [`tile`](Self::tile).
    #[inline(always)]
    unsafe fn finish<S: Simd, const VECTORS: usize>(
        &self,
        row: usize,
        rows: usize,
        column: usize,
        sums: &[[S::V; VECTORS]; TILE_ROWS_MAX],
    ) {
        for i in 0..S::TILE_ROWS {
            if i < rows {
                for j in 0..VECTORS {
                    // SAFETY: row + i is a row of `c`, and `store_at` stops at `columns`.
                    unsafe {
                        let c = self.c.add((row + i) * self.c_stride);
                        store_at::<S>(c, column + j * S::LANES, self.columns, sums[i][j]);
                    }
                }
            }
        }
    }
}

const _: () = assert!(TILE_VECTORS_MAX == 3, "`compute` has one arm per width");

#[cfg(test)]
mod tests {
    use super::super::simd::Level;
    use super::*;

    /// Numbers in -1..1 that differ for each seed.
    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn check(level: Level, rows: usize, inner: usize, columns: usize, with_bias: bool) {
        let (a, b) = (noise(rows * inner, 1), noise(inner * columns, 2));
        let (panel, lanes) = (level.panel_columns(), level.lanes());
        let mut packed = vec![f32::NAN; packed_len(inner, columns, lanes)];
        pack(&mut packed, (inner, columns), (panel, lanes), |k, n| b[k * columns + n]);
        let bias: Vec<f32> = noise(columns, 3).into_iter().chain([f32::NAN; 64]).collect();
        let stride = columns + 3;
        let mut c = vec![7.0; rows * stride];
        let product = Product {
            a: a.as_ptr(),
            a_stride: inner,
            b: packed.as_ptr(),
            bias: if with_bias { bias.as_ptr() } else { std::ptr::null() },
            c: c.as_mut_ptr(),
            c_stride: stride,
            rows,
            inner,
            columns,
            gelu: false,
        };
        // SAFETY: every matrix has the size that its fields say; the bias is longer by more than a vector.
        unsafe { level.run(&product) };
        for m in 0..rows {
            for n in 0..columns {
                let exact: f64 = (0..inner)
                    .map(|k| f64::from(a[m * inner + k]) * f64::from(b[k * columns + n]))
                    .sum::<f64>()
                    + if with_bias { f64::from(bias[n]) } else { 0.0 };
                let error = (f64::from(c[m * stride + n]) - exact).abs();
                assert!(error < 1e-4, "{level:?} {rows}x{inner}x{columns} at {m},{n}: off by {error}");
            }
            assert!(c[m * stride + columns..][..3].iter().all(|x| *x == 7.0), "wrote past a row");
        }
    }

    #[test]
    fn products_of_all_shapes_are_right_at_every_level() {
        for level in Level::available() {
            for rows in [1, 3, 8, 23, 241] {
                for inner in [1, 32, 385] {
                    for columns in [1, 4, 15, 16, 17, 31, 48, 50, 97] {
                        check(level, rows, inner, columns, columns % 2 == 0);
                    }
                }
            }
            check(level, 250, 1536, 384, true);
        }
    }
}
