//! Packs f32 into tiles of bf16: the left side for each product, the right side once at load.
//!
//! Both sides lie step after step, and in a step part after part: the high parts' two tiles, then the low parts'. A
//! tile of the left side is 16 rows of 32 elements. A tile of the right side is 16 columns of 32 elements, as rows of
//! pairs: `[depth 0, depth 1]` of each column, then `[depth 2, depth 3]`, and so on.

use super::program::{BLOCK, DEPTH, Parts, TILE_BYTES, TILE_ROWS};

/// The nearest bf16, ties to even, as the upper half of an f32's bits. NaN stays NaN.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    if x.is_nan() { (bits | 0x0040_0000) & 0xffff_0000 } else { nearest }
}

/// An element's bf16 parts, high and low. What is lost is at most 2^-17 of the element: half a unit of the low part's
/// eight bits. The low part of an infinity is NaN.
#[inline(always)]
fn split(x: f32) -> (u16, u16) {
    let high = rounded(x);
    let low = rounded(x - f32::from_bits(high));
    ((high >> 16) as u16, (low >> 16) as u16)
}

/// Bytes of one side of [`BLOCK`] rows or columns, once packed.
pub(super) fn packed_bytes(inner: usize, parts: Parts) -> usize {
    inner.div_ceil(DEPTH) * parts.step_bytes()
}

/// Packs up to [`BLOCK`] rows of the left side, `stride` elements apart; the rest of the block, and of the last step's
/// depth, becomes zero.
///
/// # Safety
/// `from` is valid for `rows` rows of `inner` elements, `to` for [`packed_bytes`] and aligned to 2.
#[inline(always)]
pub(super) unsafe fn pack_left(
    to: *mut u8,
    (from, stride): (*const f32, usize),
    (rows, inner): (usize, usize),
    parts: Parts,
) {
    // Row after row, because the processor fetches memory ahead where reads follow each other.
    for row in 0..BLOCK {
        for (step, first) in (0..inner).step_by(DEPTH).enumerate() {
            let depth = DEPTH.min(inner - first);
            let mut elements = [0.0_f32; DEPTH];
            if row < rows {
                // SAFETY: the row and so many of its elements are within `from`; no array overlaps it.
                unsafe {
                    let from = from.add(row * stride + first);
                    if depth == DEPTH {
                        elements = from.cast::<[f32; DEPTH]>().read_unaligned();
                    } else {
                        elements.as_mut_ptr().copy_from_nonoverlapping(from, depth);
                    }
                }
            }
            // SAFETY: the step is within `to`.
            unsafe { pack_step(to, step, row, &elements, parts) };
        }
    }
}

/// Writes a row's elements of one step into a block of the left side.
///
/// # Safety
/// `to` is a block of more than `step` steps, aligned to 2; `row` is below [`BLOCK`].
#[inline(always)]
pub(super) unsafe fn pack_step(to: *mut u8, step: usize, row: usize, elements: &[f32; DEPTH], parts: Parts) {
    // SAFETY: by this function's contract. A row of a block's two tiles lies so far in them, since one tile follows the other.
    unsafe {
        let to = to.add(step * parts.step_bytes() + row * DEPTH * 2);
        to.cast::<[u16; DEPTH]>().write(elements.map(|x| split(x).0));
        if parts == Parts::Split {
            to.add(2 * TILE_BYTES).cast::<[u16; DEPTH]>().write(elements.map(|x| split(x).1));
        }
    }
}

/// Packs the right side, `inner` × `columns`: block after block of [`BLOCK`] columns, zero beyond `columns` and
/// `inner`. `source(row, column)` gives the elements.
pub(super) fn pack_right(
    to: &mut [u8],
    (inner, columns): (usize, usize),
    parts: Parts,
    source: impl Fn(usize, usize) -> f32,
) {
    let block_bytes = packed_bytes(inner, parts);
    for (first, block) in (0..columns).step_by(BLOCK).zip(to.chunks_exact_mut(block_bytes)) {
        for (step, tiles) in block.chunks_exact_mut(parts.step_bytes()).enumerate() {
            for depth in 0..DEPTH {
                for column in 0..BLOCK {
                    let (row, at) = (step * DEPTH + depth, first + column);
                    let x = if row < inner && at < columns { source(row, at) } else { 0.0 };
                    let tile = column / TILE_ROWS * TILE_BYTES;
                    let byte = tile + (depth / 2 * TILE_ROWS + column % TILE_ROWS) * 4 + depth % 2 * 2;
                    let (high, low) = split(x);
                    tiles[byte..byte + 2].copy_from_slice(&high.to_le_bytes());
                    if parts == Parts::Split {
                        tiles[2 * TILE_BYTES + byte..][..2].copy_from_slice(&low.to_le_bytes());
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Numbers of all sizes, and those at which rounding turns.
    fn numbers() -> impl Iterator<Item = f32> {
        let patterns = (0..1_u32 << 20).map(|n| n.wrapping_mul(0x9E37_79B9));
        let ties = (0..256_u32).map(|n| 0x3f80_8000 + (n << 16));
        patterns.chain(ties).map(f32::from_bits)
    }

    #[test]
    fn high_parts_are_the_nearest_bf16() {
        for x in numbers() {
            let (high, _) = split(x);
            let nearest = bf16::from_f32(x);
            assert!(high == nearest.to_bits() || x.is_nan() && bf16::from_bits(high).is_nan(), "{x}");
        }
    }

    #[test]
    fn both_parts_together_lose_at_most_the_seventeenth_bit() {
        for x in numbers().filter(|x| x.is_normal() && x.abs() < 1e38 && x.abs() > 1e-30) {
            let (high, low) = split(x);
            let both = bf16::from_bits(high).to_f64() + bf16::from_bits(low).to_f64();
            assert!((both - f64::from(x)).abs() <= f64::from(x).abs() * 2.0_f64.powi(-17), "{x}");
        }
    }
}
