//! Whole matrix products on tiles, and the feed-forward of a layer as one.

use super::super::families::{FeedForward, Gate};
use super::super::math::{gelu, load_at, store_at};
use super::super::matmul::Product;
use super::super::simd::{Kernel, Simd};
use super::super::token_ops::gated;
use super::Tiles;
use super::pack::{pack_left, pack_step, packed_bytes};
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
        let Product { a, a_stride, b, rows, inner, .. } = self.product;
        if inner == 0 || rows == 0 {
            return;
        }
        let _configured = self.tiles.unit.configure();
        let rows_at_once = self.tiles.rows_at_once(rows, inner);
        for first in (0..rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(rows - first);
            let left = Left { tiles: self.tiles, packed: self.scratch, rows, inner };
            // SAFETY: by this function's contract; `scratch` has room for the rows at once.
            unsafe {
                left.pack(a.add(first * a_stride), a_stride);
                left.times::<S, 1>(
                    b.cast(),
                    [0],
                    self.product.columns,
                    &Rows { product: &self.product, first },
                );
            }
        }
    }
}

/// The lower map of what GELU or the gate makes of the upper one, some rows at a time, so that their hidden elements stay in the cache. A block
/// of these is written as the tiles that the lower map takes. The result is bit for bit that of one operation after the other. It may lie in
/// the place of `from`, because rows are packed before their results are written.
pub(in super::super) struct TileFeedForward {
    pub tiles: Tiles,
    /// One that [`Tiles::has_in_one`] says.
    pub between: FeedForward,
    /// Its `c` is not used.
    pub up: Product,
    /// Its `a` is not used.
    pub down: Product,
    /// [`Tiles::feed_forward_scratch_bytes`], aligned to 2.
    pub scratch: *mut u8,
}

impl Kernel for TileFeedForward {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let (up, down, tiles) = (&self.up, &self.down, self.tiles);
        if up.rows == 0 {
            return;
        }
        let rows_at_once = tiles.rows_at_once(up.rows, down.inner);
        let _configured = tiles.unit.configure();
        for first in (0..up.rows).step_by(rows_at_once) {
            let rows = rows_at_once.min(up.rows - first);
            let from = Left { tiles, packed: self.scratch, rows, inner: up.inner };
            let hidden = Left { packed: self.scratch.wrapping_add(from.bytes()), inner: down.inner, ..from };
            // SAFETY: by this function's contract; `scratch` has room for both left sides of the rows at once.
            unsafe {
                from.pack(up.a.add(first * up.a_stride), up.a_stride);
                match self.between {
                    FeedForward::Gelu => {
                        from.times::<S, 1>(
                            up.b.cast(),
                            [0],
                            up.columns,
                            &Hidden { product: up, to: &hidden },
                        );
                    }
                    FeedForward::Gated { gate, of_second } => {
                        let halves = if of_second { [down.inner, 0] } else { [0, down.inner] };
                        let to = GatedHidden { product: up, to: &hidden, gate, halves };
                        from.times::<S, 2>(up.b.cast(), halves, down.inner, &to);
                    }
                }
                hidden.times::<S, 1>(down.b.cast(), [0], down.columns, &Rows { product: down, first });
            }
        }
    }
}

/// Rows of a left side, packed block after block.
#[derive(Clone, Copy)]
struct Left {
    tiles: Tiles,
    packed: *mut u8,
    rows: usize,
    /// At least 1.
    inner: usize,
}

impl Left {
    fn block_bytes(&self) -> usize {
        packed_bytes(self.inner, self.tiles.parts)
    }

    fn bytes(&self) -> usize {
        self.rows.div_ceil(BLOCK) * self.block_bytes()
    }

    /// The block that begins at a row.
    fn block(&self, row: usize) -> *mut u8 {
        self.packed.wrapping_add(row / BLOCK * self.block_bytes())
    }

    /// # Safety
    /// `from` is valid for so many rows, `stride` elements apart; `packed` for [`bytes`](Self::bytes).
    #[inline(always)]
    unsafe fn pack(&self, from: *const f32, stride: usize) {
        for row in (0..self.rows).step_by(BLOCK) {
            let size = (BLOCK.min(self.rows - row), self.inner);
            // SAFETY: by this function's contract.
            unsafe { pack_left(self.block(row), (from.add(row * stride), stride), size, self.tiles.parts) };
        }
    }

    /// Multiplies the rows by `N` ranges of columns of a right side, each of so many columns from one of `ranges` on, which is the first
    /// column of a block. `to` takes the sums, block after block, those of all ranges together.
    ///
    /// # Safety
    /// The unit is configured; the CPU has `S`; `packed` holds the rows and `right` the columns; `to` may write them.
    #[inline(always)]
    unsafe fn times<S: Simd, const N: usize>(
        &self,
        right: *const u8,
        ranges: [usize; N],
        columns: usize,
        to: &impl Blocks<N>,
    ) {
        let (steps, parts) = (self.inner.div_ceil(DEPTH), self.tiles.parts);
        let mut sums = [Sums::ZERO; N];
        for column in (0..columns).step_by(BLOCK) {
            for row in (0..self.rows).step_by(BLOCK) {
                // SAFETY: all blocks are packed, and `steps` steps long.
                unsafe {
                    for (range, sums) in ranges.iter().zip(&mut sums) {
                        let right = right.add((range + column) / BLOCK * self.block_bytes());
                        self.tiles.unit.block(parts, self.block(row), right, steps, sums);
                    }
                    to.take::<S>(&sums, row, BLOCK.min(self.rows - row), column);
                }
            }
        }
    }
}

/// What becomes of the sums of a product's blocks, of `N` ranges of its columns at a time.
trait Blocks<const N: usize> {
    /// Takes the sums of the blocks at `row` and, in each range, at `column`. `rows` of their rows are rows of the product.
    ///
    /// # Safety
    /// The CPU has `S`; what the implementation writes to has room for the blocks.
    unsafe fn take<S: Simd>(&self, sums: &[Sums; N], row: usize, rows: usize, column: usize);
}

/// The product's result, in f32, from row `first` on.
struct Rows<'a> {
    product: &'a Product,
    first: usize,
}

impl Blocks<1> for Rows<'_> {
    #[inline(always)]
    unsafe fn take<S: Simd>(&self, [sums]: &[Sums; 1], row: usize, rows: usize, column: usize) {
        let Product { c, c_stride, columns, .. } = *self.product;
        let width = BLOCK.min(columns - column);
        for (at, sums) in sums.0.iter().enumerate().take(rows) {
            // SAFETY: a row of `c`; all accesses stop at `columns`.
            unsafe {
                let c = c.add((self.first + row + at) * c_stride + column);
                finish::<S>(self.product, sums, column, width, c);
            }
        }
    }
}

const _: () = assert!(BLOCK == DEPTH, "the columns of a block are the depth of a step");

/// GELU of the sums, as the left side of the product behind: a block of columns is a step of its depth.
struct Hidden<'a> {
    product: &'a Product,
    to: &'a Left,
}

impl Blocks<1> for Hidden<'_> {
    #[inline(always)]
    unsafe fn take<S: Simd>(&self, [sums]: &[Sums; 1], row: usize, _rows: usize, column: usize) {
        let width = BLOCK.min(self.product.columns - column);
        let product = Product { gelu: true, ..*self.product };
        for (at, sums) in sums.0.iter().enumerate() {
            let mut elements = [0.0; DEPTH];
            // SAFETY: `elements` has the block's width; the step is within the left side's block.
            unsafe {
                finish::<S>(&product, sums, column, width, elements.as_mut_ptr());
                pack_step(self.to.block(row), column / DEPTH, at, &elements, self.to.tiles.parts);
            }
        }
    }
}

/// The gate's function of one half of the sums times the other half, as the left side of the product behind.
struct GatedHidden<'a> {
    product: &'a Product,
    to: &'a Left,
    gate: Gate,
    /// The first columns of the half that the function is of, and of the other one.
    halves: [usize; 2],
}

impl Blocks<2> for GatedHidden<'_> {
    #[inline(always)]
    unsafe fn take<S: Simd>(&self, sums: &[Sums; 2], row: usize, _rows: usize, column: usize) {
        for at in 0..BLOCK {
            let mut halves = [[0.0; DEPTH]; 2];
            // SAFETY: both halves have whole blocks; the step is within the left side's block.
            unsafe {
                for ((to, sums), first) in halves.iter_mut().zip(sums).zip(self.halves) {
                    finish::<S>(self.product, &sums.0[at], first + column, BLOCK, to.as_mut_ptr());
                }
                let [x, other] = &mut halves;
                for lane in (0..DEPTH).step_by(S::LANES) {
                    let half = load_at::<S>(other.as_ptr(), lane, DEPTH);
                    let product = gated::<S>(self.gate, load_at::<S>(x.as_ptr(), lane, DEPTH), half);
                    store_at::<S>(x.as_mut_ptr(), lane, DEPTH, product);
                }
                pack_step(self.to.block(row), column / DEPTH, at, x, self.to.tiles.parts);
            }
        }
    }
}

/// Adds the bias to a row of a block's sums, takes GELU if the product does, and writes the first `width` of them.
///
/// # Safety
/// The CPU has `S`; `to` is valid for `width` elements, the bias for those from `column` on.
#[inline(always)]
unsafe fn finish<S: Simd>(product: &Product, sums: &[f32; BLOCK], column: usize, width: usize, to: *mut f32) {
    for at in (0..width).step_by(S::LANES) {
        // SAFETY: by this function's contract.
        unsafe {
            let mut x = load_at::<S>(sums.as_ptr(), at, width);
            if !product.bias.is_null() {
                x = S::add(x, load_at::<S>(product.bias.add(column), at, width));
            }
            store_at::<S>(to, at, width, if product.gelu { gelu::<S>(x) } else { x });
        }
    }
}
