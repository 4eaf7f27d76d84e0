//! The tile instructions that compute a block of a matrix product: written once, run as assembly or by the model.
//!
//! A tile register holds 16 rows of 64 bytes. In this program registers 0 to 3 hold the block's sums (upper left, upper
//! right, lower left, lower right), 4 and 5 the left side's upper and lower rows, 6 and 7 the right side's left and
//! right columns. A step adds [`DEPTH`] elements of depth. Of split elements it adds three of the four products of
//! `(high + low)(high + low)`: low times low is below the rounding of the others.
//!
//! `step_split!(emit args)` expands to `emit! { args [instruction] … }`, and so do the other programs. Instructions:
//! `zero TILE`, `load TILE SIDE BYTE`, `dot SUMS LEFT RIGHT` and `store TILE BYTE`.

/// Rows of a tile register.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile register.
pub(super) const TILE_ROW_BYTES: usize = 64;
pub(super) const TILE_BYTES: usize = TILE_ROWS * TILE_ROW_BYTES;
/// Rows and columns of a block: two tiles of sums each way.
pub(in super::super) const BLOCK: usize = 2 * TILE_ROWS;
/// Elements of depth that a step adds: a row of a tile holds so many bf16.
pub(super) const DEPTH: usize = TILE_ROW_BYTES / 2;

/// The sums of a block, row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub(super) struct Sums(pub [[f32; BLOCK]; BLOCK]);

impl Sums {
    pub const ZERO: Self = Self([[0.0; BLOCK]; BLOCK]);
}

/// What an element becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parts {
    /// The sum of two bf16, high and low: 16 bits of precision, and products that differ from those of f32 by about
    /// 1e-5 of their sum's size.
    Split,
    /// The nearest bf16: 8 bits of precision.
    Rounded,
}

impl Parts {
    /// Tiles that an element's row lies in: one for each part.
    pub(super) const fn count(self) -> usize {
        match self {
            Self::Split => 2,
            Self::Rounded => 1,
        }
    }

    /// Bytes of one side of a block that a step takes: two tiles of each part.
    pub(super) const fn step_bytes(self) -> usize {
        2 * TILE_BYTES * self.count()
    }
}

macro_rules! begin {
    ($emit:ident $args:tt) => {
        $emit! { $args [zero 0] [zero 1] [zero 2] [zero 3] }
    };
}

macro_rules! step_split {
    ($emit:ident $args:tt) => {
        $emit! { $args
            // High times high.
            [load 4 left 0] [load 5 left 1024] [load 6 right 0] [load 7 right 1024]
            [dot 0 4 6] [dot 1 4 7] [dot 2 5 6] [dot 3 5 7]
            // Low times high.
            [load 4 left 2048] [load 5 left 3072]
            [dot 0 4 6] [dot 1 4 7] [dot 2 5 6] [dot 3 5 7]
            // High times low.
            [load 4 left 0] [load 5 left 1024] [load 6 right 2048] [load 7 right 3072]
            [dot 0 4 6] [dot 1 4 7] [dot 2 5 6] [dot 3 5 7]
        }
    };
}

macro_rules! step_rounded {
    ($emit:ident $args:tt) => {
        $emit! { $args
            [load 4 left 0] [load 5 left 1024] [load 6 right 0] [load 7 right 1024]
            [dot 0 4 6] [dot 1 4 7] [dot 2 5 6] [dot 3 5 7]
        }
    };
}

macro_rules! end {
    ($emit:ident $args:tt) => {
        $emit! { $args [store 0 0] [store 1 64] [store 2 2048] [store 3 2112] }
    };
}

pub(super) use {begin, end, step_rounded, step_split};
