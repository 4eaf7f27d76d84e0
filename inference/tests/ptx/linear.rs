//! Linear maps: `to = from · weightsᵀ + bias`, with GELU behind or without.

use super::fault::Report;
use super::harness::{Element, Text, gelu, is_close, numbers, on_texts};

/// Sizes of a linear map.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
}

/// A kernel: its name, the side of its tile, and the threads of a block.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    pub name: &'static str,
    pub side: usize,
    pub threads: usize,
}

pub const LARGE: Tile = Tile { name: "linear_large", side: 128, threads: 256 };
pub const SMALL: Tile = Tile { name: "linear_small", side: 64, threads: 128 };
const SMALL_F32: Tile = Tile { name: "linear_small", side: 64, threads: 256 };

pub fn small(element: Element) -> Tile {
    if element == Element::F32 { SMALL_F32 } else { SMALL }
}

/// Runs a map and compares it.
///
/// # Errors
/// What the kernel did wrong, or how far off it is.
pub fn check(text: &Text, tile: Tile, shape: Shape, with_gelu: bool, aligned: bool) -> Result<(), Wrong> {
    let Shape { rows, inner, columns } = shape;
    let element = text.element;
    let from = numbers(element, 1, rows * inner);
    let weights = numbers(element, 2, columns * inner);
    let bias = numbers(Element::F32, 3, columns);
    let name = if with_gelu { format!("{}_gelu", tile.name) } else { tile.name.to_owned() };
    let launch =
        text.launch(&name).elements("from", &from).elements("weights", &weights).floats("bias", &bias);
    let launch = launch.output("to", rows * columns).number(rows).number(inner).number(columns).flag(aligned);
    let blocks = rows.div_ceil(tile.side) * columns.div_ceil(tile.side);
    let results = launch.run((blocks, 1), tile.threads).map_err(Wrong::Act)?;
    let mut want = Vec::with_capacity(rows * columns);
    for row in from.chunks(inner) {
        for (of_column, bias) in weights.chunks(inner).zip(&bias) {
            let products = row.iter().zip(of_column).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let sum = products.sum::<f64>() + f64::from(*bias);
            want.push(if with_gelu { gelu(sum) } else { sum });
        }
    }
    is_close(&results.elements("to"), &want, element.bounds().once).map_err(Wrong::Numbers)
}

/// What is wrong with a kernel.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    #[error(transparent)]
    Act(Report),
    #[error("{0}")]
    Numbers(String),
}

/// Both maps of a tile, at shapes whose rows are whole chunks and others.
fn maps(text: &Text, tile: Tile, shapes: &[(usize, usize, usize)]) {
    for (rows, inner, columns) in shapes.iter().copied() {
        let shape = Shape { rows, inner, columns };
        let chunk = text.element.chunk();
        let aligned = inner.is_multiple_of(chunk) && columns.is_multiple_of(chunk);
        for with_gelu in [false, true] {
            check(text, tile, shape, with_gelu, aligned)
                .unwrap_or_else(|wrong| panic!("{} {shape:?} gelu {with_gelu}: {wrong}", text.file));
        }
    }
}

/// One row, one more than a tile, less than a step, sizes that are multiples of nothing, MiniLM's widths, the fixtures' widths.
const SHAPES: [(usize, usize, usize); 8] = [
    (1, 384, 384),
    (65, 32, 96),
    (64, 384, 64),
    (7, 8, 16),
    (1, 1, 1),
    (3, 33, 17),
    (70, 70, 65),
    (5, 64, 37),
];

fn small_tiles(text: &Text) {
    maps(text, small(text.element), &SHAPES);
    // Whole chunks that may not be read as chunks, because of the model's other sizes.
    let shape = Shape { rows: 5, inner: 32, columns: 48 };
    check(text, small(text.element), shape, false, false).unwrap();
}
on_texts!(small_tiles);

fn large_tiles(text: &Text) {
    maps(text, LARGE, &[(129, 96, 136), (1, 384, 128), (130, 37, 131)]);
}
on_texts!(large_tiles: f16_75 = "f16-75", f16_80 = "f16-80", bf16_80 = "bf16-80");

/// All four maps of a layer of MiniLM, on more tokens than one tile.
fn layers(text: &Text) {
    let shapes = [(150, 384, 1152), (150, 384, 384), (150, 384, 1536), (150, 1536, 384)];
    maps(text, small(text.element), &shapes);
    if text.element != Element::F32 {
        maps(text, LARGE, &shapes);
    }
}

mod minilm {
    use super::super::harness::{FILES, Text};

    #[test]
    #[ignore = "takes minutes: make nightly"]
    fn maps_of_a_layer() {
        for file in FILES {
            super::layers(&Text::of(file));
        }
    }
}
