//! AVX-512 and AVX2 as [`Simd`].

use std::arch::x86_64::*;

use super::simd::{Kernel, Simd};

/// Runs a kernel compiled for AVX-512.
///
/// # Safety
/// The CPU has `avx512f`, and what the kernel itself asks.
#[target_feature(enable = "avx512f,avx2,fma")]
pub(super) unsafe fn run_avx512<K: Kernel>(kernel: &K) {
    // SAFETY: by this function's contract. (No CPU has AVX-512 without AVX2 and FMA.)
    unsafe { kernel.run::<Avx512>() };
}

/// Runs a kernel compiled for AVX2 with FMA.
///
/// # Safety
/// The CPU has `avx2` and `fma`, and what the kernel itself asks.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel>(kernel: &K) {
    // SAFETY: by this function's contract.
    unsafe { kernel.run::<Avx2>() };
}

#[derive(Clone, Copy)]
pub(super) struct Avx512;

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

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    // 24 accumulators, 3 vectors of the right side, splats: 32 registers.
    const TILE_ROWS: usize = 8;
    const TILE_VECTORS: usize = 3;

    intrinsics! {
        splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        load(from: *const f32) -> __m512 { _mm512_loadu_ps(from) }
        store(to: *mut f32, v: __m512) -> () { _mm512_storeu_ps(to, v) }
        load_part(from: *const f32, lanes: usize) -> __m512 { _mm512_maskz_loadu_ps((1 << lanes) - 1, from) }
        store_part(to: *mut f32, v: __m512, lanes: usize) -> () { _mm512_mask_storeu_ps(to, (1 << lanes) - 1, v) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        round(v: __m512) -> __m512 { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
        scale(v: __m512, n: __m512) -> __m512 { _mm512_scalef_ps(v, n) }
        sum(v: __m512) -> f32 { _mm512_reduce_add_ps(v) }
        largest(v: __m512) -> f32 { _mm512_reduce_max_ps(v) }
        // Pairs of rows, pairs of pairs, then blocks of four columns: four stages of two-input shuffles.
        transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) -> () {{
            let r: [__m512; 16] = std::array::from_fn(|i| _mm512_loadu_ps(from.add(i * from_stride)));
            let pairs: [__m512; 16] = std::array::from_fn(|i| {
                let (a, b) = (r[i & !1], r[i | 1]);
                if i & 1 == 0 { _mm512_unpacklo_ps(a, b) } else { _mm512_unpackhi_ps(a, b) }
            });
            let fours: [__m512; 16] = std::array::from_fn(|i| {
                let (a, b) = (pairs[i & !3 | i >> 1 & 1], pairs[i & !3 | i >> 1 & 1 | 2]);
                if i & 1 == 0 { _mm512_shuffle_ps::<0x44>(a, b) } else { _mm512_shuffle_ps::<0xEE>(a, b) }
            });
            // fours[4g + c] holds column c of each block of four columns, for rows 4g..4g + 4.
            for c in 0..4 {
                let low = _mm512_shuffle_f32x4::<0x88>(fours[c], fours[4 + c]);
                let high = _mm512_shuffle_f32x4::<0xDD>(fours[c], fours[4 + c]);
                let low2 = _mm512_shuffle_f32x4::<0x88>(fours[8 + c], fours[12 + c]);
                let high2 = _mm512_shuffle_f32x4::<0xDD>(fours[8 + c], fours[12 + c]);
                _mm512_storeu_ps(to.add(c * to_stride), _mm512_shuffle_f32x4::<0x88>(low, low2));
                _mm512_storeu_ps(to.add((4 + c) * to_stride), _mm512_shuffle_f32x4::<0x88>(high, high2));
                _mm512_storeu_ps(to.add((8 + c) * to_stride), _mm512_shuffle_f32x4::<0xDD>(low, low2));
                _mm512_storeu_ps(to.add((12 + c) * to_stride), _mm512_shuffle_f32x4::<0xDD>(high, high2));
            }
        }}
    }
}

#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// The mask whose first `lanes` lanes are set.
#[inline(always)]
unsafe fn mask(lanes: usize) -> __m256i {
    const BITS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: AVX by the trait's terms; `lanes` <= 8, so the eight entries from 8 - lanes on are within the table.
    unsafe { _mm256_loadu_si256(BITS.as_ptr().add(8 - lanes).cast()) }
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    // 12 accumulators, 2 vectors of the right side, splats: 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 2;

    intrinsics! {
        splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        load(from: *const f32) -> __m256 { _mm256_loadu_ps(from) }
        store(to: *mut f32, v: __m256) -> () { _mm256_storeu_ps(to, v) }
        load_part(from: *const f32, lanes: usize) -> __m256 { _mm256_maskload_ps(from, mask(lanes)) }
        store_part(to: *mut f32, v: __m256, lanes: usize) -> () { _mm256_maskstore_ps(to, mask(lanes), v) }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        min(a: __m256, b: __m256) -> __m256 { _mm256_min_ps(a, b) }
        max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        round(v: __m256) -> __m256 { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v) }
        scale(v: __m256, n: __m256) -> __m256 {
            _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(
                _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)),
            )))
        }
        sum(v: __m256) -> f32 {{
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }}
        largest(v: __m256) -> f32 {{
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }}
    }
}
