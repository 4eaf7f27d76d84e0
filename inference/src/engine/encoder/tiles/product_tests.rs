//! Products by the tile model, and by AVX512-BF16 where the CPU has it, against f64: all shapes of edges, both kinds of elements.

use super::super::super::families::{FeedForward, Gate};
use super::super::super::matmul::Product;
use super::super::super::simd::Level;
use super::super::super::token_ops::Gated;
use super::super::{BLOCK, Parts, TileUnit, Tiles};
use super::{TileFeedForward, TileProduct};

/// Numbers in -1..1 that no other seed gives.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

fn model(parts: Parts) -> Tiles {
    Tiles { unit: TileUnit::Model, parts }
}

/// The units that every CPU has, and AVX512-BF16.
fn units() -> impl Iterator<Item = TileUnit> {
    [TileUnit::Model].into_iter().chain(TileUnit::avx512_bf16())
}

fn with_both_parts() -> impl Iterator<Item = Tiles> {
    units().flat_map(|unit| [Parts::Split, Parts::Rounded].map(|parts| Tiles { unit, parts }))
}

struct Matrices {
    a: Vec<f32>,
    b: Vec<f32>,
    bias: Vec<f32>,
    inner: usize,
    columns: usize,
}

/// What lies between a row's end and the next row.
const UNTOUCHED: f32 = 7.0;
const GAP: usize = 3;

impl Matrices {
    fn new(rows: usize, inner: usize, columns: usize) -> Self {
        let bias = noise(columns, 3);
        Self { a: noise(rows * inner, 1), b: noise(inner * columns, 2), bias, inner, columns }
    }

    /// `a · b`, and the bias and GELU if asked for, for the rows from `first` on.
    fn product(&self, tiles: Tiles, level: Level, first: usize, with_bias: bool, gelu: bool) -> Vec<f32> {
        let a = &self.a[first * self.inner..];
        let rows = a.len() / self.inner;
        let mut b = vec![0xff; tiles.packed_bytes(self.inner, self.columns)];
        tiles.pack(&mut b, (self.inner, self.columns), |k, n| self.b[k * self.columns + n]);
        let mut scratch = vec![0xffff_u16; tiles.scratch_bytes(rows, self.inner) / 2];
        let stride = self.columns + GAP;
        let mut c = vec![UNTOUCHED; rows * stride];
        let product = Product {
            a: a.as_ptr(),
            a_stride: self.inner,
            b: b.as_ptr().cast(),
            bias: if with_bias { self.bias.as_ptr() } else { std::ptr::null() },
            c: c.as_mut_ptr(),
            c_stride: stride,
            rows,
            inner: self.inner,
            columns: self.columns,
            gelu,
        };
        let product = TileProduct { tiles, product, scratch: scratch.as_mut_ptr().cast() };
        // SAFETY: every matrix has the size that its fields say.
        unsafe { level.run(&product) };
        let (written, gaps): (Vec<_>, Vec<_>) =
            c.chunks(stride).map(|row| row.split_at(self.columns)).unzip();
        assert!(gaps.concat().iter().all(|x| *x == UNTOUCHED), "wrote past a row");
        written.concat()
    }

    /// The exact sum at a row and column, and the sum of its terms' sizes.
    fn exact(&self, row: usize, column: usize) -> (f64, f64) {
        (0..self.inner).fold((0.0, 0.0), |(sum, size), k| {
            let term = f64::from(self.a[row * self.inner + k]) * f64::from(self.b[k * self.columns + column]);
            (sum + term, size + term.abs())
        })
    }
}

/// The most that a sum may be off, relative to the sizes of its terms: of split elements each factor loses 2^-17 and
/// low times low is 2^-16, of rounded ones each loses 2^-8. Twice that leaves room for sums in f32.
fn bound(parts: Parts) -> f64 {
    match parts {
        Parts::Split => 2.0_f64.powi(-14),
        Parts::Rounded => 2.0_f64.powi(-6),
    }
}

fn check(tiles: Tiles, level: Level, (rows, inner, columns): (usize, usize, usize)) {
    let matrices = Matrices::new(rows, inner, columns);
    let with_bias = columns % 2 == 0;
    let found = matrices.product(tiles, level, 0, with_bias, false);
    for (at, found) in found.iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        let (sum, size) = matrices.exact(row, column);
        let exact = sum + if with_bias { f64::from(matrices.bias[column]) } else { 0.0 };
        let error = (f64::from(*found) - exact).abs();
        assert!(
            error <= bound(tiles.parts) * size + 1e-6,
            "{tiles:?}, {level:?}, {rows}x{inner}x{columns} at {row},{column}: off by {error}"
        );
    }
}

#[test]
fn products_of_all_shapes_are_right() {
    for tiles in with_both_parts() {
        for rows in [1, 16, 33] {
            for inner in [1, 31, 32, 97] {
                for columns in [1, 15, 16, 33, 50] {
                    check(tiles, Level::best(), (rows, inner, columns));
                }
            }
        }
        for level in Level::available() {
            check(tiles, level, (17, 33, 47));
        }
    }
}

#[test]
fn rows_that_are_packed_in_several_rounds_are_right() {
    let (rows, inner) = (BLOCK + 3, 10_000);
    let tiles = model(Parts::Split);
    assert!(tiles.rows_at_once(rows, inner) < rows);
    check(tiles, Level::best(), (rows, inner, 5));
}

/// A feed-forward.
struct Maps {
    up: Matrices,
    down: Matrices,
    between: FeedForward,
}

impl Maps {
    fn new(rows: usize, inner: usize, hidden: usize, between: FeedForward) -> Self {
        let up = if between == FeedForward::Gelu { hidden } else { 2 * hidden };
        Self { up: Matrices::new(rows, inner, up), down: Matrices::new(rows, hidden, inner), between }
    }

    /// One operation after the other.
    fn one_by_one(mut self, tiles: Tiles, with_bias: bool) -> Vec<f32> {
        let is_gelu = self.between == FeedForward::Gelu;
        let up = self.up.product(tiles, Level::best(), 0, with_bias, is_gelu);
        self.down.a = match self.between {
            FeedForward::Gelu => up,
            FeedForward::Gated { gate, of_second } => {
                let mut to = vec![UNTOUCHED; up.len() / 2];
                let (columns, rows) = (self.down.inner, up.len() / self.up.columns);
                let halves = up.as_ptr();
                // SAFETY: both have the rows and columns that the fields say.
                unsafe {
                    Level::best().run(&Gated { halves, gate, of_second, rows, columns, to: to.as_mut_ptr() });
                }
                to
            }
        };
        self.down.product(tiles, Level::best(), 0, with_bias, false)
    }

    /// In one, written over the left side, as where norms come before blocks.
    fn in_one(&self, tiles: Tiles, with_bias: bool) -> Vec<f32> {
        let (inner, hidden) = (self.up.inner, self.down.inner);
        let mut rows = self.up.a.clone();
        let [up, down] = [&self.up, &self.down].map(|maps| {
            let mut packed = vec![0xff; tiles.packed_bytes(maps.inner, maps.columns)];
            tiles.pack(&mut packed, (maps.inner, maps.columns), |k, n| maps.b[k * maps.columns + n]);
            packed
        });
        let at = rows.as_mut_ptr();
        let count = rows.len() / inner;
        let mut scratch = vec![0xffff_u16; tiles.feed_forward_scratch_bytes(count, inner, hidden) / 2];
        let product = |maps: &Matrices, b: &Vec<u8>| Product {
            a: at,
            a_stride: inner,
            b: b.as_ptr().cast(),
            bias: if with_bias { maps.bias.as_ptr() } else { std::ptr::null() },
            c: at,
            c_stride: inner,
            rows: count,
            inner: maps.inner,
            columns: maps.columns,
            gelu: false,
        };
        let feed_forward = TileFeedForward {
            tiles,
            between: self.between,
            up: product(&self.up, &up),
            down: product(&self.down, &down),
            scratch: scratch.as_mut_ptr().cast(),
        };
        // SAFETY: every matrix has the size that its fields say.
        unsafe { Level::best().run(&feed_forward) };
        rows
    }
}

#[test]
fn a_feed_forward_is_bit_for_bit_its_two_products() {
    for tiles in with_both_parts() {
        for (rows, inner, hidden) in [(1, 40, 70), (33, 31, 100), (64, 32, 64), (70, 65, 33), (0, 8, 8)] {
            let maps = Maps::new(rows, inner, hidden, FeedForward::Gelu);
            let (in_one, with_bias) = (maps.in_one(tiles, hidden % 2 == 0), hidden % 2 == 0);
            assert_eq!(in_one, maps.one_by_one(tiles, with_bias), "{tiles:?}: {rows}x{inner}x{hidden}");
        }
    }
}

#[test]
fn a_gated_feed_forward_is_bit_for_bit_its_products_and_its_gate() {
    for tiles in with_both_parts() {
        for gate in [Gate::Gelu, Gate::GeluTanh, Gate::Silu] {
            for (rows, inner, hidden, of_second) in
                [(1, 40, 32, false), (33, 31, 96, true), (70, 65, 64, false)]
            {
                let with_bias = rows % 2 == 0;
                let maps = Maps::new(rows, inner, hidden, FeedForward::Gated { gate, of_second });
                let in_one = maps.in_one(tiles, with_bias);
                let case = format!("{tiles:?}, {gate:?}: {rows}x{inner}x{hidden}");
                assert_eq!(in_one, maps.one_by_one(tiles, with_bias), "{case}");
            }
        }
    }
}

#[test]
fn a_feed_forward_of_more_rows_than_are_packed_at_once_is_the_same() {
    let (rows, inner) = (BLOCK + 3, 5);
    let tiles = model(Parts::Split);
    let gated = FeedForward::Gated { gate: Gate::Silu, of_second: true };
    for (between, hidden) in [(FeedForward::Gelu, 10_000), (gated, 9_984)] {
        assert!(tiles.rows_at_once(rows, hidden) < rows);
        let maps = Maps::new(rows, inner, hidden, between);
        assert_eq!(maps.in_one(tiles, true), maps.one_by_one(tiles, true), "{between:?}");
    }
}

/// The largest error, relative to the root of the mean square of the sums.
fn error_of_rms(parts: Parts) -> f64 {
    let (rows, columns) = (40, 64);
    let matrices = Matrices::new(rows, 384, columns);
    let found = matrices.product(model(parts), Level::best(), 0, false, false);
    let (mut worst, mut squares) = (0.0_f64, 0.0);
    for (at, found) in found.iter().enumerate() {
        let (exact, _) = matrices.exact(at / columns, at % columns);
        worst = worst.max((f64::from(*found) - exact).abs());
        squares += exact * exact;
    }
    worst / (squares / found.len() as f64).sqrt()
}

#[test]
fn split_elements_lose_little_and_rounded_ones_more() {
    let (split, rounded) = (error_of_rms(Parts::Split), error_of_rms(Parts::Rounded));
    assert!((1e-6..2e-5).contains(&split), "{split:e}");
    assert!((1e-3..1.5e-2).contains(&rounded), "{rounded:e}");
}

/// Both add up the same products, but in another order and with other roundings.
#[test]
fn avx512_bf16_computes_as_the_model() {
    let Some(unit) = TileUnit::avx512_bf16() else {
        vramq_testkit::not_run::not_run("the CPU has no AVX512-BF16");
        return;
    };
    for parts in [Parts::Split, Parts::Rounded] {
        let matrices = Matrices::new(70, 300, 65);
        let expected = matrices.product(model(parts), Level::best(), 0, false, false);
        let found = matrices.product(Tiles { unit, parts }, Level::best(), 0, false, false);
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (_, size) = matrices.exact(at / matrices.columns, at % matrices.columns);
            let difference = f64::from((found - expected).abs());
            assert!(difference <= size * 1e-6, "{parts:?}, element {at}: {found}, not {expected}");
        }
    }
}

#[test]
fn a_row_is_bitwise_the_same_with_any_other_rows() {
    for tiles in with_both_parts() {
        let (rows, columns) = (41, 40);
        let matrices = Matrices::new(rows, 70, columns);
        let all = matrices.product(tiles, Level::best(), 0, true, true);
        for first in [1, 16, 31, 40] {
            let some = matrices.product(tiles, Level::best(), first, true, true);
            assert_eq!(some, all[first * columns..], "{tiles:?}: rows from {first} on");
        }
    }
}

#[test]
fn gelu_comes_after_the_bias() {
    let matrices = Matrices::new(5, 40, 37);
    for level in Level::available() {
        let before = matrices.product(model(Parts::Split), level, 0, true, false);
        let after = matrices.product(model(Parts::Split), level, 0, true, true);
        for (x, y) in before.iter().zip(after) {
            // Φ by its logistic approximation, which is within 0.02.
            let about = x / (1.0 + (-1.702 * x).exp());
            assert!((y - about).abs() < 0.025, "{level:?}: GELU of {x} is not {y}");
        }
    }
}
