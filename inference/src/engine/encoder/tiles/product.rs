//! A whole matrix product on tiles.

use super::super::math::{gelu, load_at, store_at};
use super::super::matmul::Product;
use super::super::simd::{Kernel, Simd};
use super::Tiles;
use super::pack::{pack_left, packed_bytes};
use super::program::{BLOCK, DEPTH, Sums};

#[cfg(test)]
#[path = "product_tests.rs"]
mod tests;

/// A product whose right side is packed as [`Tiles::pack`] does. An element's value depends on its row of the left
/// side and its column of the right side alone: rows are padded to whole blocks, and every block is computed by the
/// same instructions.
pub(in super::super) struct TileProduct {
    pub tiles: Tiles,
    pub product: Product,
    /// [`Tiles::scratch_bytes`], aligned to 2.
    pub scratch: *mut u8,
}

impl Kernel for TileProduct {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        // SAFETY: by this function's contract.
        unsafe { self.compute::<S>() };
    }
}

impl TileProduct {
    /// # Safety
    /// The CPU has `S`; the pointers are valid for what their fields say, and what is written overlaps nothing.
    #[inline(always)]
    unsafe fn compute<S: Simd>(&self) {
        let Tiles { unit, parts } = self.tiles;
        let Product { a, a_stride, b, rows, inner, columns, .. } = self.product;
        let block_bytes = packed_bytes(inner, parts);
        let steps = inner.div_ceil(DEPTH);
        if steps == 0 || rows == 0 {
            return;
        }
        let _configured = unit.configure();
        let rows_at_once = self.tiles.rows_at_once(rows, inner);
        let mut sums = Sums::ZERO;
        for first in (0..rows).step_by(rows_at_once) {
            let end = rows.min(first + rows_at_once);
            for row in (first..end).step_by(BLOCK) {
                // SAFETY: `scratch` has a block for every `BLOCK` of the rows at once; the rows are within `a`.
                unsafe {
                    let to = self.scratch.add((row - first) / BLOCK * block_bytes);
                    let from = a.add(row * a_stride);
                    pack_left(to, (from, a_stride), (BLOCK.min(end - row), inner), parts);
                }
            }
            for column in (0..columns).step_by(BLOCK) {
                for row in (first..end).step_by(BLOCK) {
                    // SAFETY: both blocks are packed, and `steps` steps long; the tiles are configured. Rows and
                    // columns of the result are bounded in `finish`.
                    unsafe {
                        let left = self.scratch.add((row - first) / BLOCK * block_bytes);
                        let right = b.cast::<u8>().add(column / BLOCK * block_bytes);
                        unit.block(parts, left, right, steps, &mut sums);
                        self.finish::<S>(&sums, row, BLOCK.min(end - row), column);
                    }
                }
            }
        }
    }

    /// Adds the bias to a block's sums, takes GELU if asked for, and writes what of it is within the result.
    ///
    /// # Safety
    /// As for [`compute`](Self::compute); the block's rows are within the matrices.
    #[inline(always)]
    unsafe fn finish<S: Simd>(&self, sums: &Sums, row: usize, rows: usize, column: usize) {
        let Product { bias, c, c_stride, columns, gelu: with_gelu, .. } = self.product;
        let width = BLOCK.min(columns - column);
        for (at, sums) in sums.0.iter().enumerate().take(rows) {
            // SAFETY: a row of `c` and of the block; all accesses stop at `columns`, the block's width.
            unsafe {
                let c = c.add((row + at) * c_stride + column);
                for at in (0..width).step_by(S::LANES) {
                    let mut x = load_at::<S>(sums.as_ptr(), at, width);
                    if !bias.is_null() {
                        x = S::add(x, load_at::<S>(bias.add(column), at, width));
                    }
                    store_at::<S>(c, at, width, if with_gelu { gelu::<S>(x) } else { x });
                }
            }
        }
    }
}
