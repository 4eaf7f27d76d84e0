//! AMX, Intel's tile unit: whether this process may use it, and its instructions.
//!
//! Stable Rust has neither intrinsics nor detection for AMX, so this module has its own.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::io;

use super::AmxAbsent;
use super::program::{BLOCK, Parts, Sums, TILE_ROW_BYTES, TILE_ROWS, begin, end, step_rounded, step_split};

/// An instruction list as assembly.
macro_rules! assembly {
    (() $([$($instruction:tt)*])*) => { concat!($(assembly!(@ $($instruction)*)),*) };
    (@ zero $tile:literal) => { concat!("tilezero tmm", $tile, "\n") };
    (@ load $tile:literal left $at:literal) => {
        concat!("tileloadd tmm", $tile, ", [{left} + {row} + ", $at, "]\n")
    };
    (@ load $tile:literal right $at:literal) => {
        concat!("tileloadd tmm", $tile, ", [{right} + {row} + ", $at, "]\n")
    };
    (@ dot $sums:literal $left:literal $right:literal) => {
        concat!("tdpbf16ps tmm", $sums, ", tmm", $left, ", tmm", $right, "\n")
    };
    (@ store $tile:literal $at:literal) => {
        concat!("tilestored [{sums} + {line} + ", $at, "], tmm", $tile, "\n")
    };
}

/// Zeroes the sums, runs a step's program over the whole depth, stores the sums.
macro_rules! run_block {
    ($step:ident, $step_bytes:literal, $left:ident, $right:ident, $steps:ident, $sums:ident) => {
        asm!(
            begin!(assembly ()),
            "2:",
            $step!(assembly ()),
            concat!("add {left}, ", $step_bytes),
            concat!("add {right}, ", $step_bytes),
            "sub {steps}, 1",
            "jnz 2b",
            end!(assembly ()),
            left = inout(reg) $left => _,
            right = inout(reg) $right => _,
            steps = inout(reg) $steps => _,
            sums = in(reg) std::ptr::from_mut($sums),
            // Bytes from a row of a tile to the next, of both sides and of the sums.
            row = in(reg) TILE_ROW_BYTES,
            line = in(reg) BLOCK * 4,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

const _: () = assert!(Parts::Split.step_bytes() == 4096 && Parts::Rounded.step_bytes() == 2048);

/// AMX that this process may use. Only [`Amx::find`] creates a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Amx(());

/// CPUID leaf 1, ECX: `xgetbv` may be called.
const OSXSAVE: u32 = 1 << 27;
/// CPUID leaf 7, EDX.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
/// CPUID leaf 1Dh: the palette that [`TileConfig`] asks for.
const PALETTE: u32 = 1;
/// XCR0: the system saves and restores the tile configuration and the tiles.
const XCR0_TILES: u64 = 0b11 << 17;
/// `arch_prctl(2)`: asks for a state component that is off until a process asks.
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
/// The component: the tiles.
const XFEATURE_XTILEDATA: libc::c_long = 18;

impl Amx {
    /// Looks at the CPU, then asks the system for permission, once for the process and all its threads.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn find() -> Result<Self, AmxAbsent> {
        if __cpuid(0).eax < 0x1d {
            return Err(AmxAbsent::NoInstructions("amx-tile"));
        }
        let features = __cpuid_count(7, 0).edx;
        for (bit, name) in [(AMX_TILE, "amx-tile"), (AMX_BF16, "amx-bf16")] {
            if features & bit == 0 {
                return Err(AmxAbsent::NoInstructions(name));
            }
        }
        // SAFETY: the system has enabled XSAVE, so that the instruction is there.
        let enabled = __cpuid(1).ecx & OSXSAVE != 0 && unsafe { _xgetbv(0) } & XCR0_TILES == XCR0_TILES;
        if !enabled {
            return Err(AmxAbsent::NotEnabled);
        }
        // EBX: bytes per row, and registers in the upper half; ECX: rows.
        let palette = __cpuid_count(0x1d, PALETTE);
        if palette.ebx != (8 << 16 | TILE_ROW_BYTES as u32) || palette.ecx & 0xffff != TILE_ROWS as u32 {
            return Err(AmxAbsent::OtherTiles);
        }
        // SAFETY: the call takes two numbers and no memory.
        match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } {
            0 => Ok(Self(())),
            _ => Err(AmxAbsent::NotPermitted(io::Error::last_os_error())),
        }
    }

    /// For tests that emulate the instructions.
    #[cfg(test)]
    pub(super) fn untested() -> Self {
        Self(())
    }

    /// Configures this thread's tiles.
    pub(super) fn configure(self) -> Configured {
        // SAFETY: the CPU has the instruction and the process the permission, by `find`; the configuration is one of
        // palette 1, and 64 bytes.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                config = in(reg) &ALL_TILES_FULL,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack, preserves_flags),
            );
        }
        Configured(())
    }

    /// Computes a block in one piece of assembly, so that no other code depends on what is in the tiles.
    ///
    /// # Safety
    /// This thread's tiles are configured. `left` and `right` are valid for reads of `steps` times
    /// [`Parts::step_bytes`]; `steps` is at least 1.
    #[inline(always)]
    pub(super) unsafe fn block(
        self,
        parts: Parts,
        left: *const u8,
        right: *const u8,
        steps: usize,
        sums: &mut Sums,
    ) {
        debug_assert!(steps > 0);
        match parts {
            // SAFETY: by this function's contract. Loads stay within a step's bytes of both sides, stores within the sums.
            Parts::Split => unsafe { run_block!(step_split, 4096, left, right, steps, sums) },
            // SAFETY: as above.
            Parts::Rounded => unsafe { run_block!(step_rounded, 2048, left, right, steps, sums) },
        }
    }
}

/// A thread whose tiles are configured; dropped, they are released, so that the system need not save them.
pub(super) struct Configured(());

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: only `Amx::configure` makes a value, so the CPU has the instruction.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight registers at their full size.
static ALL_TILES_FULL: TileConfig = {
    let mut config = TileConfig {
        palette: PALETTE as u8,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = TILE_ROW_BYTES as u16;
        config.rows[tile] = TILE_ROWS as u8;
        tile += 1;
    }
    config
};

const _: () = assert!(size_of::<TileConfig>() == 64);
