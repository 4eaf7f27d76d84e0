//! Attention within each sequence of a pass.

use super::harness::{Element, Text, is_close, numbers, on_texts};
use super::linear::Wrong;

/// All keys before a query, or behind it.
const ALL: usize = u32::MAX as usize;

/// A launch of attention.
#[derive(Clone, Debug)]
pub struct Shape {
    pub lengths: Vec<usize>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    /// Positions of the model, whose scores get a bias by their distance.
    pub positions: Option<usize>,
    /// Keys before a query, and behind it, that it attends to.
    pub sees: (usize, usize),
}

impl Shape {
    pub fn plain(lengths: &[usize], heads: usize, head: usize) -> Self {
        Self { lengths: lengths.to_vec(), heads, kv_heads: heads, head, positions: None, sees: (ALL, ALL) }
    }
}

/// The kernel for a head of this size.
fn size(head: usize) -> usize {
    head.next_power_of_two().max(16)
}

/// Runs attention and compares it.
///
/// # Errors
/// What the kernel did wrong, or how far off it is.
pub fn check(text: &Text, shape: &Shape) -> Result<(), Wrong> {
    let Shape { lengths, heads, kv_heads, head, positions, sees } = shape;
    let element = text.element;
    let mut starts = vec![0_u32];
    for length in lengths {
        starts.push(starts[starts.len() - 1] + u32::try_from(*length).unwrap());
    }
    let tokens: usize = lengths.iter().sum();
    let qkv = numbers(element, 4, tokens * (heads + 2 * kv_heads) * head);
    let bias = positions.map(|positions| numbers(Element::F32, 5, heads * (2 * positions - 1)));
    let scale = std::f32::consts::LOG2_E / (*head as f32).sqrt();
    let queries = match element {
        // The kernel for wide heads, which is the same for all types.
        _ if size(*head) == 256 => 8,
        Element::F32 => 16,
        Element::F16 | Element::Bf16 => 64,
    };
    let tiles = lengths.iter().max().unwrap().div_ceil(queries);
    let launch =
        text.launch(&format!("attention_{}", size(*head))).elements("qkv", &qkv).words("starts", &starts);
    let launch = launch.output("to", tokens * heads * head).number(tiles).number(*heads).number(*kv_heads);
    let launch = launch.number(*head).float(scale).flag(head.is_multiple_of(element.chunk()));
    let launch = match &bias {
        None => launch.null(),
        Some(bias) => launch.floats("bias", bias),
    };
    let launch = launch.number(positions.unwrap_or(1)).number(sees.0).number(sees.1);
    let results = launch.run((tiles * lengths.len(), *heads), 128).map_err(Wrong::Act)?;
    let want = reference(shape, &qkv, bias.as_deref(), f64::from(scale));
    is_close(&results.elements("to"), &want, element.bounds().attention).map_err(Wrong::Numbers)
}

/// Softmax of the scores of the keys that a query sees, times their values, in f64.
fn reference(shape: &Shape, qkv: &[f32], bias: Option<&[f32]>, scale: f64) -> Vec<f64> {
    let Shape { lengths, heads, kv_heads, head, positions, sees } = shape;
    let stride = (heads + 2 * kv_heads) * head;
    let at = |token: usize, of: usize| &qkv[token * stride + of * head..][..*head];
    let mut to = Vec::new();
    let mut start = 0;
    for length in lengths {
        for query in 0..*length {
            for number in 0..*heads {
                let of_keys = heads + number / (heads / kv_heads);
                let seen = query.saturating_sub(sees.0)
                    ..(*length).min(query.saturating_add(sees.1).saturating_add(1));
                let score = |key: usize| {
                    let products = at(start + query, number).iter().zip(at(start + key, of_keys));
                    let product: f64 = products.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let added = bias.zip(*positions).map_or(0.0, |(bias, positions)| {
                        f64::from(bias[number * (2 * positions - 1) + positions - 1 + key - query])
                    });
                    (product + added) * scale
                };
                let scores: Vec<f64> = seen.clone().map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp2()).collect();
                let total: f64 = weights.iter().sum();
                for column in 0..*head {
                    let values =
                        seen.clone().map(|key| f64::from(at(start + key, of_keys + kv_heads)[column]));
                    to.push(values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / total);
                }
            }
        }
        start += length;
    }
    to
}

fn checked(text: &Text, shape: &Shape) {
    check(text, shape).unwrap_or_else(|wrong| panic!("{} {shape:?}: {wrong}", text.file));
}

/// Every kernel, with a head of its size and one that is filled up; one token, a whole tile of queries, one more, and an
/// empty sequence.
fn every_size(text: &Text) {
    for head in [16, 32, 64, 128] {
        checked(text, &Shape::plain(&[1, 65, 0, 33], 1, head));
    }
    for head in [8, 12, 20, 40, 65, 96, 150, 256] {
        checked(text, &Shape::plain(&[3, 17], 2, head));
    }
}
on_texts!(every_size);

/// Keys shared by several heads of queries, a window, and keys before the query only.
fn designs(text: &Text) {
    let grouped = Shape { kv_heads: 2, ..Shape::plain(&[9, 66], 4, 16) };
    checked(text, &grouped);
    checked(text, &Shape { sees: (ALL, 0), ..grouped });
    for sees in [(0, 0), (5, 5), (70, 70)] {
        checked(text, &Shape { sees, ..Shape::plain(&[140, 2], 1, 32) });
    }
    let wide = Shape { kv_heads: 1, ..Shape::plain(&[40, 1, 9], 2, 256) };
    checked(text, &Shape { sees: (10, 10), ..wide.clone() });
    checked(text, &Shape { sees: (ALL, 0), ..wide });
    let biased = Shape { positions: Some(70), ..Shape::plain(&[67, 1, 20], 2, 16) };
    checked(text, &biased);
    checked(text, &Shape { head: 12, ..biased });
}
on_texts!(designs);

#[test]
#[ignore = "takes minutes: make nightly"]
fn long_sequences() {
    for file in super::harness::FILES {
        let text = Text::of(file);
        checked(&text, &Shape::plain(&[512, 300, 1], 12, 32));
        checked(&text, &Shape { sees: (64, 64), ..Shape::plain(&[600], 4, 64) });
        checked(&text, &Shape { kv_heads: 2, sees: (ALL, 0), ..Shape::plain(&[400], 4, 128) });
    }
}
