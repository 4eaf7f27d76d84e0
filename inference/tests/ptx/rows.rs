//! Kernels that process rows one by one: rotary positions, gates, GELU after a library's product; and the pooling of sequences.

use half::{bf16, f16};

use super::fault::Report;
use super::harness::{Element, Results, Text, gelu, is_close, numbers, on_texts};

const EPS: f32 = 1e-6;

fn starts_of(lengths: &[usize]) -> Vec<u32> {
    let mut starts = vec![0_u32];
    for length in lengths {
        starts.push(starts[starts.len() - 1] + u32::try_from(*length).unwrap());
    }
    starts
}

fn close(text: &Text, what: &str, got: &[f64], want: &[f64]) {
    is_close(got, want, text.element.bounds().once)
        .unwrap_or_else(|wrong| panic!("{} {what}: {wrong}", text.file));
}

fn rotations(text: &Text) {
    for head in [8, 10, 32, 64, 128, 256] {
        for has_norms in [false, true] {
            rotate(text, &[17, 0, 1], (2, 1, head), has_norms);
        }
    }
    rotate(text, &[2], (3, 3, 16), true);
}
on_texts!(rotations);

/// Heads of queries, of keys and values, and elements of each.
fn rotate(text: &Text, lengths: &[usize], (heads, kv_heads, head): (usize, usize, usize), has_norms: bool) {
    let stride = (heads + 2 * kv_heads) * head;
    let longest = lengths.iter().copied().max().unwrap();
    let qkv = numbers(text.element, 14, lengths.iter().sum::<usize>() * stride);
    let [of_queries, of_keys] = [15, 16].map(|seed| numbers(Element::F32, seed, head));
    let half = head / 2;
    let angle = |place: usize, pair: usize| place as f64 / 100_f64.powf(pair as f64 / half as f64);
    let table: Vec<f32> = (0..longest)
        .flat_map(|place| (0..head).map(move |i| (place, i)))
        .map(|(place, i)| if i < half { angle(place, i).cos() } else { angle(place, i - half).sin() } as f32)
        .collect();
    let launch = text
        .launch("rotate")
        .in_place("qkv", &qkv)
        .words("starts", &starts_of(lengths))
        .floats("table", &table);
    let launch = if has_norms {
        launch.floats("of queries", &of_queries).floats("of keys", &of_keys)
    } else {
        launch.null().null()
    };
    let tiles = longest.div_ceil(16);
    let launch = launch.float(EPS).number(tiles).number(stride).number(heads).number(kv_heads).number(head);
    let results = launch.run((tiles * lengths.len(), 1), 128).unwrap();

    let mut want: Vec<f64> = qkv.iter().map(|x| f64::from(*x)).collect();
    let places = lengths.iter().flat_map(|length| 0..*length);
    for (row, place) in want.chunks_mut(stride).zip(places) {
        for (number, x) in row.chunks_mut(head).take(heads + kv_heads).enumerate() {
            if has_norms {
                let scale =
                    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / head as f64 + f64::from(EPS)).sqrt();
                let weight = if number < heads { &of_queries } else { &of_keys };
                x.iter_mut().zip(weight).for_each(|(x, weight)| *x *= scale * f64::from(*weight));
            }
            for pair in 0..half {
                let [cosine, sine] = [pair, half + pair].map(|i| f64::from(table[place * head + i]));
                let (first, second) = (x[pair], x[half + pair]);
                x[pair] = first * cosine - second * sine;
                x[half + pair] = second * cosine + first * sine;
            }
        }
    }
    close(text, &format!("rotate {lengths:?} heads of {head}"), &results.elements("qkv"), &want);
}

/// As the kernel numbers them.
#[derive(Clone, Copy, Debug)]
enum Gate {
    Gelu,
    Silu,
    /// The approximation of GELU by tanh.
    GeluTanh,
}

impl Gate {
    fn of(self, x: f64) -> f64 {
        match self {
            Self::Gelu => gelu(x),
            Self::Silu => x / (1.0 + (-x).exp()),
            Self::GeluTanh => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh())
            }
        }
    }
}

fn gates(text: &Text) {
    for columns in [1, 37, 64, 100, 1536] {
        for function in [Gate::Gelu, Gate::Silu, Gate::GeluTanh] {
            for of_second in [false, true] {
                gate(text, columns, function, of_second);
            }
        }
    }
}
on_texts!(gates);

fn gate(text: &Text, columns: usize, function: Gate, of_second: bool) {
    let element = text.element;
    let rows = 3;
    // Wide enough for both ends of the functions.
    let halves: Vec<f32> =
        numbers(element, 17, rows * 2 * columns).iter().map(|x| element.round(x * 6.0)).collect();
    let launch = text.launch("gate").elements("halves", &halves).output("to", rows * columns).number(columns);
    let launch =
        launch.number(function as usize).flag(of_second).flag(columns.is_multiple_of(element.chunk()));
    let stripes = columns.div_ceil(128 * element.chunk());
    let results = launch.run((rows, stripes), 128).unwrap();
    let mut want = Vec::new();
    for row in halves.chunks(2 * columns) {
        let (first, second) = row.split_at(columns);
        let (gate, other) = if of_second { (second, first) } else { (first, second) };
        let pairs = gate.iter().map(|x| f64::from(*x)).zip(other);
        want.extend(pairs.map(|(x, other)| function.of(x) * f64::from(*other)));
    }
    close(text, &format!("gate {function:?} of {columns}"), &results.elements("to"), &want);
}

fn gelus(text: &Text) {
    for (rows, columns) in [(1, 8), (3, 384), (70, 64)] {
        bias_gelu(text, rows, columns).unwrap();
    }
}
on_texts!(gelus);

/// GELU of all elements from -8 to 8. The error is at most the rounding of the result and a relative 7e-6.
fn gelu_of_every_number(text: &Text) {
    let element = text.element;
    // Half of the distance between two elements, relative and among subnormal ones.
    let (half, smallest) = match element {
        Element::F16 => (2.0_f64.powi(-11), 2.0_f64.powi(-25)),
        Element::F32 | Element::Bf16 => (2.0_f64.powi(-8), 2.0_f64.powi(-134)),
    };
    let all = (0..=u16::MAX).map(|bits| match element {
        Element::F16 => f16::from_bits(bits).to_f32(),
        Element::F32 | Element::Bf16 => bf16::from_bits(bits).to_f32(),
    });
    let mut x: Vec<f32> = all.filter(|x| x.abs() <= 8.0).collect();
    x.resize(x.len().next_multiple_of(element.chunk()), 1.0);
    let chunks = x.len() / element.chunk();
    let launch = text.launch("bias_gelu").in_place("x", &x).floats("bias", &vec![0.0; x.len()]);
    let launch = launch.number(x.len()).number(chunks);
    let results = launch.run((chunks.div_ceil(256), 1), 256).unwrap();
    for (x, got) in x.iter().zip(results.elements("x")) {
        let want = gelu(f64::from(*x));
        // Below -6 the result is almost zero.
        let inexact = if *x < -6.0 { 1e-8 } else { 7e-6 * want.abs() };
        let bound = half * want.abs() + smallest + inexact;
        assert!((got - want).abs() <= bound, "{}: gelu({x}) = {got}, not {want}", text.file);
    }
}
on_texts!(gelu_of_every_number: f16_75 = "f16-75", f16_80 = "f16-80", bf16_80 = "bf16-80");

/// `x = gelu(x + bias)`.
pub fn bias_gelu(text: &Text, rows: usize, columns: usize) -> Result<Results, Report> {
    let element = text.element;
    let x: Vec<f32> = numbers(element, 18, rows * columns).iter().map(|x| element.round(x * 6.0)).collect();
    let bias = numbers(Element::F32, 19, columns);
    let chunks = rows * columns / element.chunk();
    let launch =
        text.launch("bias_gelu").in_place("x", &x).floats("bias", &bias).number(columns).number(chunks);
    let results = launch.run((chunks.div_ceil(256), 1), 256)?;
    let want: Vec<f64> =
        x.iter().zip(bias.iter().cycle()).map(|(x, bias)| gelu(f64::from(*x) + f64::from(*bias))).collect();
    close(text, &format!("bias_gelu of {rows} x {columns}"), &results.elements("x"), &want);
    Ok(results)
}

/// As the kernel numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    Mean,
    First,
    Max,
    Last,
}

fn pools(text: &Text) {
    for hidden in [1, 36, 384, 1023] {
        for (pooling, normalize) in [
            (Pooling::Mean, false),
            (Pooling::Mean, true),
            (Pooling::First, true),
            (Pooling::Max, false),
            (Pooling::Last, true),
        ] {
            pool(text, &[1, 9, 0, 20], hidden, pooling, normalize).unwrap();
        }
    }
}
on_texts!(pools);

/// Vectors are f32, whatever the elements are.
pub fn pool(
    text: &Text,
    lengths: &[usize],
    hidden: usize,
    pooling: Pooling,
    normalize: bool,
) -> Result<Results, Report> {
    let x = numbers(text.element, 20, lengths.iter().sum::<usize>() * hidden);
    let number = match pooling {
        Pooling::Mean => 0,
        Pooling::First => 1,
        Pooling::Max => 2,
        Pooling::Last => 3,
    };
    let launch = text.launch("pool").elements("x", &x).words("starts", &starts_of(lengths)).number(hidden);
    let launch = launch.number(number).flag(normalize).flag(hidden.is_multiple_of(text.element.chunk()));
    let results = launch.float_output("vectors", lengths.len() * hidden).run((lengths.len(), 1), 256)?;
    let mut want = Vec::new();
    let mut start = 0;
    for length in lengths {
        let value = |token: usize, column: usize| f64::from(x[(start + token) * hidden + column]);
        let pooled = |column: usize| match (length, pooling) {
            (0, _) => 0.0,
            (_, Pooling::First) => value(0, column),
            (_, Pooling::Last) => value(length - 1, column),
            (_, Pooling::Mean) => {
                (0..*length).map(|token| value(token, column)).sum::<f64>() / *length as f64
            }
            (_, Pooling::Max) => {
                (0..*length).map(|token| value(token, column)).fold(f64::NEG_INFINITY, f64::max)
            }
        };
        let vector: Vec<f64> = (0..hidden).map(pooled).collect();
        let norm = if normalize { vector.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12) } else { 1.0 };
        want.extend(vector.iter().map(|x| x / norm));
        start += length;
    }
    is_close(&results.floats("vectors"), &want, Element::F32.bounds().once)
        .unwrap_or_else(|wrong| panic!("{} {pooling:?} of {hidden}: {wrong}", text.file));
    Ok(results)
}
