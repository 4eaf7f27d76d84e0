//! Matrix products in bf16: on a tile unit, AMX; on AVX512-BF16; and on a model of the tile unit in plain Rust for checks and tests.
//!
//! `program` has the tile instructions of one block of a product. `amx` runs them on the unit, `model` in plain Rust,
//! and `check` compares the two when a worker starts. `dot` computes the same block from the same tiles in vector registers.
//! `pack` makes tiles of f32, `product` walks over a whole matrix.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod check;
#[cfg(target_arch = "x86_64")]
mod dot;
mod model;
mod pack;
mod product;
mod program;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod trap;

use std::fmt;
use std::io;

pub(super) use product::{TileFeedForward, TileProduct};
pub(super) use program::BLOCK;
pub use program::Parts;

use program::Sums;

/// The most bytes of packed rows that a product holds at once, unless [`BLOCK`] rows take more. Together with a block's columns and
/// the result they fit a second-level cache of 2 MiB, which CPUs with AMX have. AVX512-BF16 has the same size, also on CPUs whose cache
/// is smaller, such as Zen 4 with 1 MiB.
const LEFT_BYTES_MAX: usize = 1 << 20;

/// Why AMX is not used.
#[derive(Debug, thiserror::Error)]
pub enum AmxAbsent {
    #[error("the CPU has no {0}")]
    NoInstructions(&'static str),
    #[error("the system does not enable its registers")]
    NotEnabled,
    #[error("its tiles are not 8 of 16 rows of 64 bytes")]
    OtherTiles,
    #[error("the system does not permit it: {0}")]
    NotPermitted(io::Error),
    #[error("its self-check cannot run: {0}")]
    NotChecked(io::Error),
    /// From here on: the CPU has AMX, and AMX gives wrong results or faults.
    #[error("its self-check failed: {0}")]
    Failed(String),
}

impl AmxAbsent {
    /// Whether the CPU has an AMX unit that does not work. Operators should know of that.
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

/// What multiplies tiles. Only [`TileUnit::amx`] gives access to AMX.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TileUnit {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx(amx::Amx),
    #[cfg(target_arch = "x86_64")]
    Dot(dot::Dot),
    Model,
}

impl TileUnit {
    /// This CPU's AMX, after a child process has checked it against the model.
    ///
    /// # Errors
    /// Why there is none.
    pub fn amx() -> Result<Self, AmxAbsent> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        {
            let unit = Self::Amx(amx::Amx::find()?);
            check::compare_with_model(unit)?;
            Ok(unit)
        }
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        Err(AmxAbsent::NoInstructions("AMX"))
    }

    /// This CPU's AVX512-BF16, if it has that.
    pub fn avx512_bf16() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            dot::Dot::find().map(Self::Dot)
        }
        #[cfg(not(target_arch = "x86_64"))]
        None
    }

    /// Makes the unit's registers ready for [`block`](Self::block) on this thread, until the value is dropped.
    fn configure(self) -> Configured {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx(amx) => Configured { _amx: Some(amx.configure()) },
            _ => Configured {
                #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                _amx: None,
            },
        }
    }

    /// The sums of one block, from packed sides.
    ///
    /// # Safety
    /// This thread holds what [`configure`](Self::configure) gave. `left` and `right` are valid for reads of `steps`
    /// times [`Parts::step_bytes`]; `steps` is at least 1.
    #[inline(always)]
    unsafe fn block(self, parts: Parts, left: *const u8, right: *const u8, steps: usize, sums: &mut Sums) {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            // SAFETY: by this function's contract.
            Self::Amx(amx) => unsafe { amx.block(parts, left, right, steps, sums) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: by this function's contract.
            Self::Dot(dot) => unsafe { dot.block(parts, left, right, steps, sums) },
            // SAFETY: by this function's contract.
            Self::Model => unsafe { model::block(parts, left, right, steps, sums) },
        }
    }
}

impl fmt::Display for TileUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Self::Amx(_) => "AMX",
            #[cfg(target_arch = "x86_64")]
            Self::Dot(_) => "AVX512-BF16",
            Self::Model => "a model of AMX",
        })
    }
}

impl fmt::Debug for TileUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A thread whose tile registers are configured.
struct Configured {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    _amx: Option<amx::Configured>,
}

/// A unit, and what elements become on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    pub unit: TileUnit,
    pub parts: Parts,
}

impl Tiles {
    /// Bytes that `inner` × `columns` weights take once packed.
    pub fn packed_bytes(self, inner: usize, columns: usize) -> usize {
        columns.div_ceil(BLOCK) * pack::packed_bytes(inner, self.parts)
    }

    /// Packs weights into exactly [`packed_bytes`](Self::packed_bytes).
    pub fn pack(self, to: &mut [u8], (inner, columns): (usize, usize), source: impl Fn(usize, usize) -> f32) {
        pack::pack_right(to, (inner, columns), self.parts, source);
    }

    /// Rows of the left side that a product packs at once.
    fn rows_at_once(self, rows: usize, inner: usize) -> usize {
        let of_block = pack::packed_bytes(inner, self.parts).max(1);
        let blocks = (LEFT_BYTES_MAX / of_block).max(1);
        (blocks * BLOCK).min(rows.next_multiple_of(BLOCK))
    }

    /// Bytes that a product of `rows` × `inner` needs to pack its left side.
    pub fn scratch_bytes(self, rows: usize, inner: usize) -> usize {
        self.rows_at_once(rows, inner) / BLOCK * pack::packed_bytes(inner, self.parts)
    }

    /// Whether a feed-forward of so many hidden elements can be one operation: the halves of a gated one have to be whole blocks.
    pub fn has_in_one(is_gated: bool, hidden: usize) -> bool {
        !is_gated || hidden.is_multiple_of(BLOCK)
    }

    /// Bytes that a feed-forward of `rows` rows needs to pack the left sides of both its maps.
    pub fn feed_forward_scratch_bytes(self, rows: usize, inner: usize, hidden: usize) -> usize {
        let of_block = pack::packed_bytes(inner, self.parts) + pack::packed_bytes(hidden, self.parts);
        self.rows_at_once(rows, hidden) / BLOCK * of_block
    }
}
