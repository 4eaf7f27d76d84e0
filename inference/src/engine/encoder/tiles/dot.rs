//! AVX512-BF16, the dot products of bf16 in vector registers, on CPUs that have these and no AMX.
//!
//! Works on the sides as they are packed for tiles: a row of a tile of the right side is a vector of pairs, and a pair of the left side
//! is spread over a vector.

use std::arch::x86_64::*;
use std::ops::Range;

use super::program::{BLOCK, Parts, Sums, TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS};

/// The proof that this CPU has AVX512-BF16: only [`Dot::find`] makes one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Dot(());

/// Rows of a block whose sums are in registers at once: two vectors each, so that 16 of the 32 registers hold sums, and as many products
/// are under way as the unit needs to be busy.
const ROWS: usize = 8;
const _: () = assert!(BLOCK.is_multiple_of(ROWS) && BLOCK == 2 * TILE_ROWS);

/// Pairs of elements in a row of a tile.
const PAIRS: usize = TILE_ROW_BYTES / 4;

/// Where a second part's tiles begin in a step of either side.
const LOW: usize = 2 * TILE_BYTES;

impl Dot {
    /// Looks at the CPU and the system.
    pub(super) fn find() -> Option<Self> {
        (is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16")).then_some(Self(()))
    }

    /// Computes a block.
    ///
    /// # Safety
    /// `left` and `right` are valid for reads of `steps` times [`Parts::step_bytes`].
    #[inline(always)]
    pub(super) unsafe fn block(
        self,
        parts: Parts,
        left: *const u8,
        right: *const u8,
        steps: usize,
        sums: &mut Sums,
    ) {
        for first in (0..BLOCK).step_by(ROWS) {
            // SAFETY: the CPU has the instructions, by `find`; the caller's word.
            unsafe { rows(parts, first..first + ROWS, (left, right), steps, sums) };
        }
    }
}

/// Where the tiles of each product of parts begin in a step of the left and of the right side, in the order of the tile program.
fn products(parts: Parts) -> &'static [(usize, usize)] {
    match parts {
        Parts::Split => &[(0, 0), (LOW, 0), (0, LOW)],
        Parts::Rounded => &[(0, 0)],
    }
}

/// Computes some rows of a block.
///
/// # Safety
/// The CPU has the instructions. Both sides are valid for reads of `steps` times [`Parts::step_bytes`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows(
    parts: Parts,
    rows: Range<usize>,
    (left, right): (*const u8, *const u8),
    steps: usize,
    sums: &mut Sums,
) {
    let mut totals = [[_mm512_setzero_ps(); 2]; ROWS];
    for step in (0..steps).map(|step| step * parts.step_bytes()) {
        for (of_left, of_right) in products(parts) {
            // The rows of both tiles of the left side follow each other.
            let left = left.wrapping_add(step + of_left + rows.start * TILE_ROW_BYTES);
            let right = right.wrapping_add(step + of_right);
            for pair in 0..PAIRS {
                // SAFETY: within the step's tiles, which the caller's word covers.
                let columns = unsafe {
                    let right = right.add(pair * TILE_ROW_BYTES);
                    [
                        as_pairs(_mm512_loadu_epi32(right.cast())),
                        as_pairs(_mm512_loadu_epi32(right.add(TILE_BYTES).cast())),
                    ]
                };
                for (row, totals) in totals.iter_mut().enumerate() {
                    // SAFETY: as above.
                    let spread =
                        unsafe { left.add(row * TILE_ROW_BYTES + pair * 4).cast::<i32>().read_unaligned() };
                    let spread = as_pairs(_mm512_set1_epi32(spread));
                    for (total, columns) in totals.iter_mut().zip(columns) {
                        *total = _mm512_dpbf16_ps(*total, spread, columns);
                    }
                }
            }
        }
    }
    for (totals, to) in totals.into_iter().zip(&mut sums.0[rows]) {
        for (total, to) in totals.into_iter().zip(to.as_chunks_mut::<TILE_ROWS>().0) {
            // SAFETY: as many elements as a vector has.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), total) };
        }
    }
}

#[inline(always)]
fn as_pairs(bits: __m512i) -> __m512bh {
    // SAFETY: 64 bytes of any value are both.
    unsafe { std::mem::transmute(bits) }
}
