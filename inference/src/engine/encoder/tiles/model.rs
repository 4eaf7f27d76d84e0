//! The tile instructions of AMX in plain Rust: a slow reference for the unit.
//!
//! Follows the pseudocode of Intel's Software Developer's Manual, volume 2, for `TILELOADD`, `TILESTORED`, `TILEZERO` and
//! `TDPBF16PS`, with all registers configured to 16 rows of 64 bytes.

use super::program::{BLOCK, Parts, Sums, TILE_ROW_BYTES, TILE_ROWS, begin, end, step_rounded, step_split};

/// Elements of 32 bits in a row of a tile.
pub(super) const ROW: usize = TILE_ROW_BYTES / 4;

pub(super) type Tile = [[u32; ROW]; TILE_ROWS];

/// The eight tile registers.
pub(super) struct Registers(pub [Tile; 8]);

/// Runs an instruction list on registers.
macro_rules! run {
    (($registers:ident $left:ident $right:ident $sums:ident) $([$($instruction:tt)*])*) => {
        { $(run!(@ $registers $left $right $sums $($instruction)*);)* }
    };
    (@ $registers:ident $left:ident $right:ident $sums:ident zero $tile:literal) => {
        $registers.0[$tile] = [[0; ROW]; TILE_ROWS]
    };
    (@ $registers:ident $left:ident $right:ident $sums:ident load $tile:literal left $at:literal) => {
        // SAFETY: a step's bytes of the left side are valid; the program stays within them.
        $registers.0[$tile] = unsafe { load($left.add($at)) }
    };
    (@ $registers:ident $left:ident $right:ident $sums:ident load $tile:literal right $at:literal) => {
        // SAFETY: as above, of the right side.
        $registers.0[$tile] = unsafe { load($right.add($at)) }
    };
    (@ $registers:ident $left:ident $right:ident $sums:ident dot $tile:literal $a:literal $b:literal) => {
        $registers.dot($tile, $a, $b)
    };
    (@ $registers:ident $left:ident $right:ident $sums:ident store $tile:literal $at:literal) => {
        store(&$registers.0[$tile], $sums, $at)
    };
}

/// Computes a block.
///
/// # Safety
/// `left` and `right` are valid for `steps` times [`Parts::step_bytes`].
#[inline(always)]
pub(super) unsafe fn block(
    parts: Parts,
    mut left: *const u8,
    mut right: *const u8,
    steps: usize,
    sums: &mut Sums,
) {
    let mut registers = Registers::ZERO;
    begin!(run (registers left right sums));
    for _ in 0..steps {
        match parts {
            Parts::Split => step_split!(run (registers left right sums)),
            Parts::Rounded => step_rounded!(run (registers left right sums)),
        }
        left = left.wrapping_add(parts.step_bytes());
        right = right.wrapping_add(parts.step_bytes());
    }
    end!(run (registers left right sums));
}

/// # Safety
/// `from` is valid for the bytes of a tile.
#[inline(always)]
unsafe fn load(from: *const u8) -> Tile {
    // SAFETY: by this function's contract. Rows follow each other without gaps, as the program's stride of 64 says.
    unsafe { from.cast::<Tile>().read_unaligned() }
}

/// Writes a tile's rows, which lie a row of sums apart from byte `at` on.
#[inline(always)]
fn store(tile: &Tile, sums: &mut Sums, at: usize) {
    let (first, column) = (at / (BLOCK * 4), at % (BLOCK * 4) / 4);
    for (row, to) in tile.iter().zip(&mut sums.0[first..]) {
        for (bits, to) in row.iter().zip(&mut to[column..]) {
            *to = f32::from_bits(*bits);
        }
    }
}

/// Replaces a denormal by zero of the same sign: tile instructions neither read nor write denormals.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0_f32.copysign(x) } else { x }
}

/// The bf16 with these bits.
#[inline(always)]
fn bf16(bits: u32) -> f64 {
    f64::from(flushed(f32::from_bits(bits << 16)))
}

impl Registers {
    pub const ZERO: Self = Self([[[0; ROW]; TILE_ROWS]; 8]);

    /// `TDPBF16PS`: adds products of pairs. The even elements of all pairs have one sum and the odd ones another, both starting at
    /// zero. The two are added before they are added to the tile. Each addition of a product is a fused multiply-add.
    #[inline(always)]
    pub fn dot(&mut self, sums: usize, a: usize, b: usize) {
        let [a, b] = [self.0[a], self.0[b]];
        let even: [[f64; ROW]; TILE_ROWS] = b.map(|row| row.map(|pair| bf16(pair & 0xffff)));
        let odd: [[f64; ROW]; TILE_ROWS] = b.map(|row| row.map(|pair| bf16(pair >> 16)));
        for (left, sums) in a.iter().zip(&mut self.0[sums]) {
            let (mut evens, mut odds) = ([0.0_f32; ROW], [0.0_f32; ROW]);
            for (pair, (even, odd)) in left.iter().zip(even.iter().zip(&odd)) {
                let (left_even, left_odd) = (bf16(pair & 0xffff), bf16(pair >> 16));
                for n in 0..ROW {
                    evens[n] = fused(left_even, even[n], evens[n]);
                    odds[n] = fused(left_odd, odd[n], odds[n]);
                }
            }
            for ((even, odd), sum) in evens.iter().zip(&odds).zip(sums) {
                *sum = flushed(flushed(f32::from_bits(*sum)) + flushed(even + odd)).to_bits();
            }
        }
    }
}

/// `a · b + c`, rounded once. A product of two bf16 is exact in f64, and a sum that is rounded to 53 bits and then to
/// 24 is the sum that is rounded to 24 at once (Figueroa 1995: 53 is at least 2 · 24 + 2).
#[inline(always)]
fn fused(a: f64, b: f64, c: f32) -> f32 {
    flushed((a * b + f64::from(c)) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(even: f32, odd: f32) -> u32 {
        even.to_bits() >> 16 | odd.to_bits() & 0xffff_0000
    }

    /// Registers whose sums are `start`, after one multiplication.
    fn dotted(left: u32, right: u32, start: f32) -> f32 {
        let mut registers = Registers::ZERO;
        registers.0[0][3][5] = start.to_bits();
        registers.0[4][3][7] = left;
        registers.0[6][7][5] = right;
        registers.dot(0, 4, 6);
        if f32::from_bits(left << 16).is_finite() {
            let reached = registers.0[0].iter().flatten().filter(|bits| **bits != 0).count();
            assert!(reached <= 1, "a product reached {reached} sums");
        }
        f32::from_bits(registers.0[0][3][5])
    }

    #[test]
    fn a_product_of_pairs_reaches_its_sum() {
        assert_eq!(dotted(pair(2.0, 3.0), pair(5.0, -7.0), 100.0), 89.0);
    }

    #[test]
    fn denormals_are_zero_as_operands_as_sums_and_as_results() {
        let denormal = f32::from_bits(0x0040_0000);
        assert_eq!(dotted(pair(denormal, 0.0), pair(1e30, 0.0), 1.0), 1.0);
        assert_eq!(dotted(pair(1.0, 0.0), pair(1.0, 0.0), denormal), 1.0);
        assert_eq!(dotted(pair(1e-30, 0.0), pair(1e-10, 0.0), 0.0), 0.0);
    }

    #[test]
    fn products_are_added_up_before_they_meet_the_sum() {
        // 2^24 takes 2 but not 1 twice.
        assert_eq!(dotted(pair(1.0, 1.0), pair(1.0, 1.0), 16_777_216.0), 16_777_218.0);
    }

    #[test]
    fn infinities_and_nan_stay() {
        assert_eq!(dotted(pair(f32::INFINITY, 0.0), pair(2.0, 0.0), 1.0), f32::INFINITY);
        assert!(dotted(pair(f32::INFINITY, 0.0), pair(0.0, 0.0), 1.0).is_nan());
        assert!(dotted(pair(f32::NAN, 0.0), pair(1.0, 0.0), 1.0).is_nan());
    }
}
