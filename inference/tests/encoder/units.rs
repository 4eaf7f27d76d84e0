//! Element types and CPU units: the results of tiles, and types that are refused on CPUs without the unit.

use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{
    ComputeType, CpuUnits, Encoder, Level, LoadError, Parts, Source, TypeUnavailable,
};
use vramq_schemas::{Output, Params};

use crate::{Reference, cosine, cpu, minilm, numbers, tiny};

/// The vectors of some of a reference's texts in one pass on three threads, after a check that each is the same to the bit alone.
fn alone_and_packed(reference: &Reference, source: &Source, parts: Parts) -> Vec<Output> {
    let encoder = Encoder::load_on(source, cpu(3), CpuUnits::tile_model(Level::best(), parts)).unwrap();
    let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
    let packed = encoder.run(&items).unwrap();
    for (at, output) in packed.iter().enumerate() {
        let alone = encoder.run(&items[at..=at]).unwrap();
        assert_eq!(alone[0], *output, "{source} in {parts:?}: {:?}", reference.inputs[at]);
    }
    packed
}

#[test]
fn on_tiles_a_vector_is_bitwise_the_same_alone_and_with_others() {
    for name in ["tiny-mean", "tiny-mpnet"] {
        for parts in [Parts::Split, Parts::Rounded] {
            alone_and_packed(&Reference::read(name), &tiny(name), parts);
        }
    }
}

#[test]
fn minilm_in_bf16_is_near_sentence_transformers() {
    let Some(minilm) = minilm() else { return };
    let mut reference = Reference::read("minilm");
    reference.inputs.truncate(12);
    for (output, expected) in
        alone_and_packed(&reference, &minilm, Parts::Rounded).iter().zip(&reference.vectors)
    {
        let cosine = cosine(&numbers(output), expected);
        assert!(cosine >= 0.9999, "{cosine}");
    }
}

#[test]
fn types_that_the_cpu_lacks_are_refused_by_name() {
    let load = |dtype| Encoder::load_as(&tiny("tiny-mean"), cpu(1), dtype);
    assert!(matches!(load(ComputeType::F16), Err(LoadError::Type(TypeUnavailable::F16))));
    match load(ComputeType::Bf16) {
        Ok(encoder) => assert!(encoder.computes().unwrap().starts_with("linear maps in bf16 on AMX")),
        Err(LoadError::Type(TypeUnavailable::Bf16(_))) => {}
        Err(other) => panic!("{other}"),
    }
    let (auto, f32) = (load(ComputeType::Auto).unwrap(), load(ComputeType::F32).unwrap());
    assert_eq!(auto.revision(), f32.revision());
    assert!(f32.computes().unwrap().starts_with("f32 on "));
}
