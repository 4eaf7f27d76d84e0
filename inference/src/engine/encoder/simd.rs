//! Vectors of f32 at the widths that CPUs have, and the choice among them at run time.

use std::fmt;

/// A vector unit. Kernels are written once over this trait and compiled once for each implementation.
///
/// # Safety
/// All functions: the CPU has the unit's instructions. Only [`Level::run`] ensures that.
/// Those that take a pointer: it is valid for the lanes that are read or written; no alignment is needed.
pub(super) trait Simd: Copy {
    type V: Copy;
    /// f32 in a vector.
    const LANES: usize;
    /// The register tile of a matrix product: rows, and vectors across. Chosen so that the accumulators, one row
    /// of the right side and a splat fill the registers, and the products keep both multiply-add units busy.
    const TILE_ROWS: usize;
    const TILE_VECTORS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// The first `lanes` (fewer than [`LANES`](Self::LANES)) elements; zero in the others.
    unsafe fn load_part(from: *const f32, lanes: usize) -> Self::V;
    unsafe fn store_part(to: *mut f32, v: Self::V, lanes: usize);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once, or twice where the unit cannot.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The smaller; `b` if `b` is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` if `b` is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number. |v| < 2^22.
    unsafe fn round(v: Self::V) -> Self::V;
    /// `v * 2^n` for whole `n` in -126..=127; anything for NaN.
    unsafe fn scale(v: Self::V, n: Self::V) -> Self::V;
    /// All lanes added up.
    unsafe fn sum(v: Self::V) -> f32;
    /// The largest lane.
    unsafe fn largest(v: Self::V) -> f32;

    /// Transposes a block of [`LANES`](Self::LANES) by [`LANES`](Self::LANES); rows are `stride` elements apart.
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..Self::LANES {
            for column in 0..Self::LANES {
                // SAFETY: by this function's contract: both blocks are valid.
                unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) };
            }
        }
    }
}

/// Work that is written for any [`Simd`] unit.
pub(super) trait Kernel {
    /// Must be `#[inline(always)]`, and so must everything that it calls with vectors. The code uses the unit's instructions only
    /// if it is inlined into a function with the unit's target features.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`, and what the kernel itself asks of its fields.
    unsafe fn run<S: Simd>(&self);
}

/// A vector unit that this CPU has. Only [`Level::available`] creates values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Level(Unit);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Level {
    /// The units of this CPU, best first. The last is plain Rust.
    pub fn available() -> Vec<Self> {
        let mut units = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                units.push(Unit::Avx512);
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                units.push(Unit::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            units.push(Unit::Neon);
        }
        units.push(Unit::Portable);
        units.into_iter().map(Self).collect()
    }

    /// The best unit of this CPU.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// Columns in a panel of packed weights: the width of the register tile.
    pub(super) fn panel_columns(self) -> usize {
        fn of<S: Simd>() -> usize {
            S::LANES * S::TILE_VECTORS
        }
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => of::<super::simd_x86::Avx512>(),
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => of::<super::simd_x86::Avx2>(),
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => of::<super::simd_neon::Neon>(),
            Unit::Portable => of::<Portable>(),
        }
    }

    /// f32 in a vector.
    pub(super) fn lanes(self) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => super::simd_x86::Avx512::LANES,
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => super::simd_x86::Avx2::LANES,
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => super::simd_neon::Neon::LANES,
            Unit::Portable => Portable::LANES,
        }
    }

    /// Runs a kernel on this unit.
    ///
    /// # Safety
    /// What the kernel asks of its fields.
    pub(super) unsafe fn run<K: Kernel>(self, kernel: &K) {
        match self.0 {
            // SAFETY: a `Level` is only made by `available`, which found the feature; the rest is this function's contract.
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => unsafe { super::simd_x86::run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => unsafe { super::simd_x86::run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => unsafe { super::simd_neon::run_neon(kernel) },
            // SAFETY: needs no instructions but the target's own; the rest is this function's contract.
            Unit::Portable => unsafe { kernel.run::<Portable>() },
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Unit::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Unit::Avx2 => "AVX2 with FMA",
            #[cfg(target_arch = "aarch64")]
            Unit::Neon => "NEON",
            Unit::Portable => "the processor's base instructions",
        })
    }
}

impl fmt::Debug for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// Plain Rust: the reference for the other units, and the unit of CPUs that have none of them. Four lanes, because 64-bit targets
/// have at least vectors of four, which the compiler then uses.
#[derive(Clone, Copy)]
pub(super) struct Portable;

const PORTABLE_LANES: usize = 4;

type Four = [f32; PORTABLE_LANES];

#[inline(always)]
fn each(a: Four, b: Four, f: impl Fn(f32, f32) -> f32) -> Four {
    std::array::from_fn(|at| f(a[at], b[at]))
}

impl Simd for Portable {
    type V = Four;
    const LANES: usize = PORTABLE_LANES;
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Four {
        [x; PORTABLE_LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Four {
        // SAFETY: by this function's contract: valid for all lanes. Arrays of f32 have f32's alignment.
        unsafe { from.cast::<Four>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Four) {
        // SAFETY: by this function's contract: valid for all lanes.
        unsafe { to.cast::<Four>().write_unaligned(v) };
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, lanes: usize) -> Four {
        let mut v = [0.0; PORTABLE_LANES];
        for (at, lane) in v.iter_mut().enumerate().take(lanes) {
            // SAFETY: by this function's contract: valid for the first `lanes`.
            *lane = unsafe { *from.add(at) };
        }
        v
    }

    #[inline(always)]
    unsafe fn store_part(to: *mut f32, v: Four, lanes: usize) {
        for (at, lane) in v.iter().enumerate().take(lanes) {
            // SAFETY: by this function's contract: valid for the first `lanes`.
            unsafe { *to.add(at) = *lane };
        }
    }

    #[inline(always)]
    unsafe fn add(a: Four, b: Four) -> Four {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: Four, b: Four) -> Four {
        each(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: Four, b: Four) -> Four {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: Four, b: Four) -> Four {
        each(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn mul_add(a: Four, b: Four, c: Four) -> Four {
        // Not `f32::mul_add`, which is a slow library call where the CPU has no such instruction.
        std::array::from_fn(|at| a[at] * b[at] + c[at])
    }

    #[inline(always)]
    unsafe fn min(a: Four, b: Four) -> Four {
        each(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn max(a: Four, b: Four) -> Four {
        each(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(v: Four) -> Four {
        // Adding and subtracting 1.5 * 2^23 rounds: the sum has no bits left for a fraction.
        const SHIFT: f32 = 12_582_912.0;
        v.map(|x| (x + SHIFT) - SHIFT)
    }

    #[inline(always)]
    unsafe fn scale(v: Four, n: Four) -> Four {
        // A cast of NaN is 0, and the sum cannot overflow for the range that the trait allows.
        each(v, n, |x, n| x * f32::from_bits(((n as i32).wrapping_add(127) << 23) as u32))
    }

    #[inline(always)]
    unsafe fn sum(v: Four) -> f32 {
        (v[0] + v[1]) + (v[2] + v[3])
    }

    #[inline(always)]
    unsafe fn largest(v: Four) -> f32 {
        v[0].max(v[1]).max(v[2].max(v[3]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Transpose {
        from: *const f32,
        to: *mut f32,
    }

    impl Kernel for Transpose {
        #[inline(always)]
        unsafe fn run<S: Simd>(&self) {
            // SAFETY: both hold 64 rows of 64.
            unsafe { S::transpose(self.from, 64, self.to, 64) };
        }
    }

    #[test]
    fn a_block_is_transposed_at_every_level() {
        let from: Vec<f32> = (0..64 * 64).map(|n| n as f32).collect();
        for level in Level::available() {
            let mut to = vec![-1.0; 64 * 64];
            let kernel = Transpose { from: from.as_ptr(), to: to.as_mut_ptr() };
            // SAFETY: the kernel's matrices are larger than any block.
            unsafe { level.run(&kernel) };
            for (at, x) in to.iter().enumerate() {
                let (row, column) = (at / 64, at % 64);
                let inside = row < level.lanes() && column < level.lanes();
                let expected = if inside { from[column * 64 + row] } else { -1.0 };
                assert_eq!(*x, expected, "{level:?} at {row}, {column}");
            }
        }
    }
}
