//! NEON as [`Simd`].

use std::arch::aarch64::*;

use super::simd::{Kernel, Simd};

/// Runs a kernel compiled for NEON.
///
/// # Safety
/// The CPU has `neon`, and what the kernel itself asks.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run_neon<K: Kernel>(kernel: &K) {
    // SAFETY: by this function's contract.
    unsafe { kernel.run::<Neon>() };
}

#[derive(Clone, Copy)]
pub(super) struct Neon;

/// Defines a method that is one expression of intrinsics.
macro_rules! intrinsics {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $out:ty { $body:expr })*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $ty),*) -> $out {
            // SAFETY: the trait's terms: the CPU has the instructions, pointers are valid for the lanes touched.
            unsafe { $body }
        }
    )*};
}

impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    // 24 accumulators, 3 vectors of the right side, splats: 32 registers.
    const TILE_ROWS: usize = 8;
    const TILE_VECTORS: usize = 3;

    intrinsics! {
        splat(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        load(from: *const f32) -> float32x4_t { vld1q_f32(from) }
        store(to: *mut f32, v: float32x4_t) -> () { vst1q_f32(to, v) }
        load_part(from: *const f32, lanes: usize) -> float32x4_t {{
            let mut four = [0.0_f32; 4];
            std::ptr::copy_nonoverlapping(from, four.as_mut_ptr(), lanes);
            vld1q_f32(four.as_ptr())
        }}
        store_part(to: *mut f32, v: float32x4_t, lanes: usize) -> () {{
            let mut four = [0.0_f32; 4];
            vst1q_f32(four.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(four.as_ptr(), to, lanes);
        }}
        add(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        sub(a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        div(a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        mul_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        min(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcltq_f32(a, b), a, b) }
        max(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcgtq_f32(a, b), a, b) }
        round(v: float32x4_t) -> float32x4_t { vrndnq_f32(v) }
        scale(v: float32x4_t, n: float32x4_t) -> float32x4_t {
            vmulq_f32(v, vreinterpretq_f32_s32(vshlq_n_s32::<23>(
                vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)),
            )))
        }
        sum(v: float32x4_t) -> f32 { vaddvq_f32(v) }
        largest(v: float32x4_t) -> f32 { vmaxvq_f32(v) }
    }
}
