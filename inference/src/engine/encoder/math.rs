//! Functions of vectors: exponential, GELU, SiLU, softmax, norms. Each with its source and error bound.

use super::simd::Simd;

/// The first element that a loop over whole vectors and one partial one has not reached.
///
/// # Safety
/// The CPU has `S`; `from` is valid for reads of elements `at..min(at + LANES, len)`.
#[inline(always)]
pub(super) unsafe fn load_at<S: Simd>(from: *const f32, at: usize, len: usize) -> S::V {
    // SAFETY: the caller's word covers exactly the lanes that either branch reads.
    unsafe { if at + S::LANES <= len { S::load(from.add(at)) } else { S::load_part(from.add(at), len - at) } }
}

/// # Safety
/// The CPU has `S`; `to` is valid for writes of elements `at..min(at + LANES, len)`.
#[inline(always)]
pub(super) unsafe fn store_at<S: Simd>(to: *mut f32, at: usize, len: usize, v: S::V) {
    // SAFETY: the caller's word covers exactly the lanes that either branch writes.
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
    // SAFETY: the caller's word.
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
    // SAFETY: the caller's word; n is in -126..=0 by the clamp, as `scale` asks.
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
    // SAFETY: the caller's word.
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

/// x / (1 + e^-x). Relative error below 1e-6; below -87 it is that small that it does not matter, but not zero. NaN gives NaN.
///
/// # Safety
/// The CPU has `S`.
#[inline(always)]
pub(super) unsafe fn silu<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller's word.
    unsafe {
        let zero = S::splat(0.0);
        // e^-|x|, which never overflows: 1 / (1 + e^-x) is 1 / (1 + e) for positive x, and e / (1 + e) for others.
        let e = exp_negative::<S>(S::min(S::sub(zero, x), x));
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
    // SAFETY: the caller's word; `load_at` and `store_at` stay below `len`. Element i is read before it is written.
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

/// `a + b` into `sum`, and that divided by the root of the mean of its squares, times `weight`, into `to`. As in
/// [`add_norm`], but without a bias.
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
    // SAFETY: the caller's word; `load_at` and `store_at` stay below `len`. Element i is read before it is written.
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
    // SAFETY: the caller's word; `load_at` stays below `len`, with zeros beyond.
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
mod tests {
    use super::super::simd::{Kernel, Level};
    use super::*;

    struct Map<F> {
        from: Vec<f32>,
        to: *mut f32,
        f: F,
    }

    #[derive(Clone, Copy)]
    struct Exp;
    #[derive(Clone, Copy)]
    struct Gelu;
    #[derive(Clone, Copy)]
    struct Silu;

    trait Function {
        unsafe fn of<S: Simd>(x: S::V) -> S::V;
    }
    impl Function for Exp {
        #[inline(always)]
        unsafe fn of<S: Simd>(x: S::V) -> S::V {
            // SAFETY: the caller's word.
            unsafe { exp_negative::<S>(x) }
        }
    }
    impl Function for Gelu {
        #[inline(always)]
        unsafe fn of<S: Simd>(x: S::V) -> S::V {
            // SAFETY: the caller's word.
            unsafe { gelu::<S>(x) }
        }
    }
    impl Function for Silu {
        #[inline(always)]
        unsafe fn of<S: Simd>(x: S::V) -> S::V {
            // SAFETY: the caller's word.
            unsafe { silu::<S>(x) }
        }
    }
    impl<F: Function> Kernel for Map<F> {
        #[inline(always)]
        unsafe fn run<S: Simd>(&self) {
            let _ = &self.f;
            for at in (0..self.from.len()).step_by(S::LANES) {
                // SAFETY: `to` is as long as `from`.
                unsafe {
                    let x = load_at::<S>(self.from.as_ptr(), at, self.from.len());
                    store_at::<S>(self.to, at, self.from.len(), F::of::<S>(x));
                }
            }
        }
    }

    fn map<F: Function>(level: Level, f: F, from: &[f32]) -> Vec<f32> {
        let mut to = vec![0.0; from.len()];
        let kernel = Map { from: from.to_vec(), to: to.as_mut_ptr(), f };
        // SAFETY: `to` is valid for as many elements as `from` has.
        unsafe { level.run(&kernel) };
        to
    }

    /// Φ by erfc's continued fraction and erf's series, in f64: nothing shared with the code under test.
    fn erf(z: f64) -> f64 {
        if z.abs() < 3.0 {
            let (mut term, mut sum) = (z, z);
            for n in 1..200 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return sum * 2.0 / std::f64::consts::PI.sqrt();
        }
        let mut fraction = 0.0;
        for k in (1..=120).rev() {
            fraction = f64::from(k) / 2.0 / (z.abs() + fraction);
        }
        let erfc = (-z * z).exp() / std::f64::consts::PI.sqrt() / (z.abs() + fraction);
        z.signum() * (1.0 - erfc)
    }

    #[test]
    fn exp_keeps_its_bound_at_every_level() {
        let xs: Vec<f32> = (0..400_003).map(|i| -(i as f32) * 87.0 / 400_003.0).collect();
        for level in Level::available() {
            for (x, y) in xs.iter().zip(map(level, Exp, &xs)) {
                let exact = f64::from(*x).exp();
                let error = (f64::from(y) - exact).abs() / exact;
                assert!(error < 2.5e-7, "{level:?}: exp({x}) = {y}, off by {error:e}");
            }
            let edges = map(level, Exp, &[-1e30, f32::NEG_INFINITY, f32::NAN]);
            assert!(edges[0] < 2e-38 && edges[1] < 2e-38 && edges[2].is_nan(), "{edges:?}");
        }
    }

    #[test]
    fn gelu_keeps_its_bound_at_every_level() {
        let mut xs: Vec<f32> = (-200_000..=200_000).map(|i| i as f32 * 1e-4).collect();
        xs.extend([-1e4, 1e4, 1e-30, -1e-30]);
        for level in Level::available() {
            let mut worst = 0.0_f64;
            for (x, y) in xs.iter().zip(map(level, Gelu, &xs)) {
                let exact = f64::from(*x) / 2.0 * (1.0 + erf(f64::from(*x) / 2.0_f64.sqrt()));
                let error = (f64::from(y) - exact).abs() / f64::from(x.abs().max(1.0));
                worst = worst.max(error);
                assert!(error < 4e-7, "{level:?}: gelu({x}) = {y}, not {exact}, off by {error:e}");
            }
            let edges = map(level, Gelu, &[f32::INFINITY, f32::NAN]);
            assert!(edges[0] == f32::INFINITY && edges[1].is_nan(), "{edges:?}");
        }
    }

    #[test]
    fn silu_keeps_its_bound_at_every_level() {
        let xs: Vec<f32> = (-80_000..=80_000).map(|i| i as f32 * 1e-3).collect();
        for level in Level::available() {
            for (x, y) in xs.iter().zip(map(level, Silu, &xs)) {
                let exact = f64::from(*x) / (1.0 + (-f64::from(*x)).exp());
                let error = (f64::from(y) - exact).abs();
                assert!(error <= 1e-6 * exact.abs(), "{level:?}: silu({x}) = {y}, not {exact}");
            }
            let edges = map(level, Silu, &[1e30, -1000.0, f32::NAN]);
            assert!(edges[0] == 1e30 && edges[1].abs() < 1e-30 && edges[2].is_nan(), "{edges:?}");
        }
    }
}
