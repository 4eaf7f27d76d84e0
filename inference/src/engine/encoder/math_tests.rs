//! Tests of each function against f64, on every vector unit.

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
struct GeluTanh;
#[derive(Clone, Copy)]
struct Silu;

trait Function {
    unsafe fn of<S: Simd>(x: S::V) -> S::V;
}
impl Function for Exp {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { exp_negative::<S>(x) }
    }
}
impl Function for Gelu {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { gelu::<S>(x) }
    }
}
impl Function for GeluTanh {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: by this function's contract.
        unsafe { gelu_tanh::<S>(x) }
    }
}
impl Function for Silu {
    #[inline(always)]
    unsafe fn of<S: Simd>(x: S::V) -> S::V {
        // SAFETY: by this function's contract.
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
fn the_approximation_of_gelu_keeps_its_bound_at_every_level() {
    let mut xs: Vec<f32> = (-200_000..=200_000).map(|i| i as f32 * 1e-4).collect();
    xs.extend([-1e4, 1e4, 1e-30, -1e-30]);
    for level in Level::available() {
        for (x, y) in xs.iter().zip(map(level, GeluTanh, &xs)) {
            let wide = f64::from(*x);
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide * wide * wide);
            let exact = wide / 2.0 * (1.0 + u.tanh());
            let error = (f64::from(y) - exact).abs() / wide.abs().max(1.0);
            assert!(error < 1e-6, "{level:?}: gelu_tanh({x}) = {y}, not {exact}, off by {error:e}");
        }
        let edges = map(level, GeluTanh, &[1e30, -1e30, f32::INFINITY, f32::NAN]);
        assert!(edges[0] == 1e30 && edges[1].abs() < 1e-6, "{edges:?}");
        assert!(edges[2] == f32::INFINITY && edges[3].is_nan(), "{edges:?}");
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
