//! Vectors of token ids against transformers, for lengths that no text of the fixtures has (models/lengths.py).

use vramq_inference::engine::encoder::{CpuUnits, Encoder, Level};
use vramq_inference::engine::{Engine as _, Item, SparseItem};
use vramq_schemas::{EmbeddingFormat, Input};

use crate::{CLOSE, Reference, cpu, fixtures, floats, json, tiny};

/// A model's token ids, and their vectors. The inputs are for messages only.
fn reference(name: &str) -> Reference {
    let path = |extension: &str| fixtures().join("lengths").join(format!("{name}.{extension}"));
    let tokens: Vec<Vec<u32>> = json(&path("json"));
    let numbers = floats(&path("f32"));
    let vectors = numbers.chunks(numbers.len() / tokens.len()).map(<[f32]>::to_vec).collect();
    let inputs = tokens.iter().map(|ids| Input::Text(format!("({} tokens)", ids.len()))).collect();
    Reference { inputs, tokens, vectors, is_tiny: true }
}

/// On every vector unit, in one pass and alone.
fn agree(name: &str) {
    let reference = reference(name);
    let is_sparse = name.starts_with("tiny-splade");
    let item = |ids: &Vec<u32>| match is_sparse {
        true => Item::Sparse(SparseItem { ids: ids.clone().into(), elements_max: None }),
        false => Item::Tokens { ids: ids.clone().into(), format: EmbeddingFormat::default() },
    };
    let items: Vec<Item> = reference.tokens.iter().map(item).collect();
    assert!(!items.is_empty());
    for level in Level::available() {
        let encoder = Encoder::load_on_units(&tiny(name), cpu(2), CpuUnits::vectors(level)).unwrap();
        let what = format!("{name}, {level}");
        reference.check(0, &encoder.run(&items).unwrap(), CLOSE, &format!("{what}, in one pass"));
        for at in 0..items.len() {
            let alone = encoder.run(&items[at..=at]).unwrap();
            reference.check(at, &alone, CLOSE, &format!("{what}, alone"));
        }
    }
}

#[test]
fn every_length_up_to_512_agrees() {
    agree("tiny-long");
}

#[test]
fn lengths_around_tiles_and_windows_agree_in_every_family() {
    for name in ["tiny-mpnet", "tiny-modernbert", "tiny-qwen3", "tiny-nomic", "tiny-gte", "tiny-gemma"] {
        agree(name);
    }
}

#[test]
fn single_tokens_agree() {
    for name in ["tiny-mean", "tiny-cls-normalize", "tiny-splade", "tiny-splade-distilbert"] {
        agree(name);
    }
    for name in ["tiny-roberta", "tiny-xlm-roberta", "tiny-camembert", "tiny-distilbert"] {
        agree(name);
    }
}
