//! Functions of vectors: exponential, GELU, SiLU, softmax, norms. Each with its source and error bound.

use super::simd::Simd;

/// The first element that a loop over whole vectors and one partial one has not reached.
///
/// # Safety
/// The CPU has `S`; `from` is valid for reads of elements `at..min(at + LANES, len)`.
#[inline(always)]
pub(super) unsafe fn load_at<S: Simd>(from: *const f32, at: usize, len: usize) -> S::V {
    // SAFETY: this function's contract covers exactly the lanes that either branch reads.
    unsafe { if at + S::LANES <= len { S::load(from.add(at)) } else { S::load_part(from.add(at), len - at) } }
}

/// # Safety
/// The CPU has `S`; `to` is valid for writes of elements `at..min(at + LANES, len)`.
#[inline(always)]
pub(super) unsafe fn store_at<S: Simd>(to: *mut f32, at: usize, len: usize, v: S::V) {
    // SAFETY: this function's contract covers exactly the lanes that either branch writes.
    unsafe {
        if at + S::LANES <= len {
            S::store(to.add(at), v);
        } else {
            S::store_part(to.add(at), v, len - at);
        }
    }
}

/// `Σ c[i] x^i`, highest power first in `coefficients`, by Horner's rule.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn polynomial<S: Simd, const N: usize>(x: S::V, coefficients: [f32; N]) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        let mut value = S::splat(coefficients[0]);
        for c in &coefficients[1..] {
            value = S::mul_add(value, x, S::splat(*c));
        }
        value
    }
}

/// e^x for x ≤ 0, relative error below 2.5e-7; below -87 it stays at e^-87 ≈ 1.6e-38. NaN gives NaN.
///
/// Cephes `expf` (Moshier): x = n ln 2 + r with |r| ≤ ln 2 / 2, ln 2 in two parts so that n ln 2 is exact, and a
/// polynomial of degree 7 for e^r.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn exp_negative<S: Simd>(x: S::V) -> S::V {
    // SAFETY: by this function's contract; n is in -126..=0 by the clamp, as `scale` asks.
    unsafe {
        let x = S::max(S::splat(-87.0), x);
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::mul_add(n, S::splat(-0.693_359_4), x);
        let r = S::mul_add(n, S::splat(2.121_944_4e-4), r);
        let p = polynomial::<S, 6>(
            r,
            [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5],
        );
        let p = S::mul_add(S::mul(r, r), p, S::add(r, S::splat(1.0)));
        S::scale(p, n)
    }
}

/// x Φ(x), the exact GELU: x/2 (1 + erf(x/√2)). Absolute error below 4e-7 max(1, |x|). NaN gives NaN.
///
/// erf as in Eigen's `generic_fast_erf_float`: clamped to ±4, where it is 1 to the last bit of f32, and
/// z P(z²) / Q(z²) between.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn gelu<S: Simd>(x: S::V) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        let z = S::mul(x, S::splat(std::f32::consts::FRAC_1_SQRT_2));
        let z = S::min(S::splat(4.0), S::max(S::splat(-4.0), z));
        let square = S::mul(z, z);
        let p = polynomial::<S, 7>(
            square,
            [
                -2.726_142_3e-10,
                2.770_681_4e-8,
                -2.101_024e-6,
                -5.692_506_5e-5,
                -7.349_906_3e-4,
                -2.954_6e-3,
                -1.609_603_3e-2,
            ],
        );
        let q = polynomial::<S, 5>(
            square,
            [-1.456_607_2e-5, -2.133_740_6e-4, -1.682_827e-3, -7.373_329e-3, -1.426_473_9e-2],
        );
        let erf = S::div(S::mul(z, p), q);
        let half = S::mul(x, S::splat(0.5));
        S::mul_add(half, erf, half)
    }
}

/// x/2 (1 + tanh u) with u = √(2/π) (x + 0.044715 x³), the approximation of GELU by Hendrycks and Gimpel (2016), as
/// x / (1 + e^-2u). Absolute error below 1e-6 max(1, |x|). NaN gives NaN.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn gelu_tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        // 2 √(2/π), and 0.044715 times that.
        let inner = S::mul_add(S::mul(x, x), S::splat(0.071_354_814), S::splat(1.595_769));
        logistic_product::<S>(x, S::mul(x, inner))
    }
}

/// x / (1 + e^-x). Relative error below 1e-6. Below -87 the result is negligible, but not zero. NaN gives NaN.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn silu<S: Simd>(x: S::V) -> S::V {
    // SAFETY: by this function's contract.
    unsafe { logistic_product::<S>(x, x) }
}

/// x / (1 + e^-y), for numbers of the same sign.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
unsafe fn logistic_product<S: Simd>(x: S::V, y: S::V) -> S::V {
    // SAFETY: by this function's contract.
    unsafe {
        let zero = S::splat(0.0);
        // e^-|y|, which never overflows: 1 / (1 + e^-y) is 1 / (1 + e) for positive y, and e / (1 + e) for others.
        let e = exp_negative::<S>(S::min(S::sub(zero, y), y));
        let product = S::mul_add(S::min(zero, x), e, S::max(zero, x));
        S::div(product, S::add(S::splat(1.0), e))
    }
}

/// e^(scale (x - max)) of a row, in place, and 1 / Σ, by which the caller multiplies its result: that is
/// shorter than the row. `len` is a multiple of `LANES`, `scale` positive.
///
/// # Safety
/// The CPU has `S`; `row` is valid for `len` elements.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(row: *mut f32, len: usize, scale: f32) -> f32 {
    // SAFETY: every `at` is below `len`, a multiple of LANES, so each access is within the row.
    unsafe {
        let mut largest = S::load(row);
        for at in (S::LANES..len).step_by(S::LANES) {
            largest = S::max(largest, S::load(row.add(at)));
        }
        let below = S::splat(-scale * S::largest(largest));
        let scale = S::splat(scale);
        let mut sum = S::splat(0.0);
        for at in (0..len).step_by(S::LANES) {
            let e = exp_negative::<S>(S::mul_add(S::load(row.add(at)), scale, below));
            sum = S::add(sum, e);
            S::store(row.add(at), e);
        }
        1.0 / S::sum(sum)
    }
}

/// `a + b` into `sum`, and its layer norm into `to`. `sum` may be `a` or `b`, and `to` any of the three. Variance in two
/// passes, as PyTorch's is accurate to: error below 1e-6 relative to the largest element.
///
/// # Safety
/// The CPU has `S`; `sum` and `to` are valid for writes and the others for reads of `len` elements, or are the same.
#[inline(always)]
pub(super) unsafe fn add_norm<S: Simd>(
    (sum, to): (*mut f32, *mut f32),
    (a, b): (*const f32, *const f32),
    (weight, bias): (*const f32, *const f32),
    len: usize,
    eps: f32,
) {
    // SAFETY: by this function's contract; `load_at` and `store_at` stay below `len`. Element i is read before it is written.
    unsafe {
        let mut total = S::splat(0.0);
        for at in (0..len).step_by(S::LANES) {
            let x = S::add(load_at::<S>(a, at, len), load_at::<S>(b, at, len));
            total = S::add(total, x);
            store_at::<S>(sum, at, len, x);
        }
        let mean = S::sum(total) / len as f32;
        let mut squares = S::splat(0.0);
        let whole = len - len % S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            let x = S::sub(S::load(sum.add(at)), S::splat(mean));
            squares = S::mul_add(x, x, squares);
        }
        let mut variance = S::sum(squares);
        for at in whole..len {
            variance += (*sum.add(at) - mean) * (*sum.add(at) - mean);
        }
        let inverse = S::splat(1.0 / (variance / len as f32 + eps).sqrt());
        for at in (0..len).step_by(S::LANES) {
            let x = S::mul(S::sub(load_at::<S>(sum, at, len), S::splat(mean)), inverse);
            let x = S::mul_add(x, load_at::<S>(weight, at, len), load_at::<S>(bias, at, len));
            store_at::<S>(to, at, len, x);
        }
    }
}

/// `a + b` into `sum`. Into `to` that sum divided by its root mean square, times `weight`. Otherwise as [`add_norm`], but without a
/// bias.
///
/// # Safety
/// As for [`add_norm`].
#[inline(always)]
pub(super) unsafe fn add_rms_norm<S: Simd>(
    (sum, to): (*mut f32, *mut f32),
    (a, b): (*const f32, *const f32),
    weight: *const f32,
    len: usize,
    eps: f32,
) {
    // SAFETY: by this function's contract; `load_at` and `store_at` stay below `len`. Element i is read before it is written.
    unsafe {
        for at in (0..len).step_by(S::LANES) {
            let x = S::add(load_at::<S>(a, at, len), load_at::<S>(b, at, len));
            store_at::<S>(sum, at, len, x);
        }
        let inverse = S::splat(inverse_rms::<S>(sum, len, eps));
        for at in (0..len).step_by(S::LANES) {
            let x = S::mul(load_at::<S>(sum, at, len), inverse);
            store_at::<S>(to, at, len, S::mul(x, load_at::<S>(weight, at, len)));
        }
    }
}

/// 1 / √(mean of squares + eps) of a row.
///
/// # Safety
/// The CPU has `S`; `row` is valid for reads of `len` elements.
#[inline(always)]
pub(super) unsafe fn inverse_rms<S: Simd>(row: *const f32, len: usize, eps: f32) -> f32 {
    // SAFETY: by this function's contract; `load_at` stays below `len`, with zeros beyond.
    unsafe {
        let mut squares = S::splat(0.0);
        for at in (0..len).step_by(S::LANES) {
            let x = load_at::<S>(row, at, len);
            squares = S::mul_add(x, x, squares);
        }
        1.0 / (S::sum(squares) / len as f32 + eps).sqrt()
    }
}

#[cfg(test)]
#[path = "math_tests.rs"]
mod tests;
