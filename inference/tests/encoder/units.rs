//! Element types and CPU units: the results of tiles, and types that are refused on CPUs without the unit.

use vramq_inference::engine::Engine as _;
use vramq_inference::engine::encoder::{
    ComputeType, CpuUnits, Encoder, Level, LoadError, Parts, Source, TypeUnavailable,
};
use vramq_schemas::{Output, Params};

use crate::{Reference, TEXTS_ON_TILES, cosine, cpu, minilm, numbers, tiny};

/// The vectors of some of a reference's texts in one pass on three threads, after a check that each is the same to the bit alone.
fn alone_and_packed(reference: &Reference, source: &Source, units: CpuUnits) -> Vec<Output> {
    let encoder = Encoder::load_on_units(source, cpu(3), units).unwrap();
    let items = encoder.prepare(&reference.inputs, &Params::default()).unwrap();
    let packed = encoder.run(&items).unwrap();
    for (at, output) in packed.iter().enumerate() {
        let alone = encoder.run(&items[at..=at]).unwrap();
        assert_eq!(alone[0], *output, "{source}, {units}: {:?}", reference.inputs[at]);
    }
    packed
}

/// The model of the tiles, and AVX512-BF16 where the CPU has it.
fn of_bf16(parts: Parts) -> impl Iterator<Item = CpuUnits> {
    [CpuUnits::tile_model(Level::best(), parts)].into_iter().chain(CpuUnits::avx512_bf16(parts))
}

#[test]
fn on_tiles_a_vector_is_bitwise_the_same_alone_and_with_others() {
    for name in ["tiny-mean", "tiny-mpnet"] {
        for parts in [Parts::Split, Parts::Rounded] {
            for units in of_bf16(parts) {
                alone_and_packed(&Reference::read(name), &tiny(name), units);
            }
        }
    }
}

#[test]
fn minilm_in_bf16_is_near_sentence_transformers() {
    let Some(minilm) = minilm() else { return };
    let mut reference = Reference::read("minilm");
    // The model of the tiles is slow, and comes last.
    let units: Vec<_> = of_bf16(Parts::Rounded).collect();
    for units in units.into_iter().rev() {
        if units == CpuUnits::tile_model(Level::best(), Parts::Rounded) {
            reference.inputs.truncate(12);
        }
        for (output, expected) in alone_and_packed(&reference, &minilm, units).iter().zip(&reference.vectors)
        {
            let cosine = cosine(&numbers(output), expected);
            assert!(cosine >= 0.9999, "{units}: {cosine}");
        }
    }
}

/// Random weights of width 32, whose errors do not cancel out as those of trained ones do.
#[test]
fn every_family_in_bf16_is_near_sentence_transformers() {
    for name in [
        "tiny-mean",
        "tiny-roberta",
        "tiny-xlm-roberta",
        "tiny-camembert",
        "tiny-distilbert",
        "tiny-mpnet",
        "tiny-modernbert",
        "tiny-modernbert-bias",
        "tiny-qwen3",
        "tiny-gemma",
        "tiny-nomic",
        "tiny-gte",
        "tiny-gte-no-types",
        "tiny-dense",
    ] {
        let mut reference = Reference::read(name);
        reference.inputs.truncate(TEXTS_ON_TILES);
        for units in of_bf16(Parts::Rounded) {
            let outputs = alone_and_packed(&reference, &tiny(name), units);
            assert_eq!(outputs.len(), reference.inputs.len());
            for (output, expected) in outputs.iter().zip(&reference.vectors) {
                let cosine = cosine(&numbers(output), expected);
                assert!(cosine >= 0.999, "{name}, {units}: {cosine}");
            }
        }
    }
}

#[test]
fn types_that_the_cpu_lacks_are_refused_by_name() {
    let load = |dtype| Encoder::load_dtype(&tiny("tiny-mean"), cpu(1), dtype);
    assert!(matches!(load(ComputeType::F16), Err(LoadError::Type(TypeUnavailable::F16))));
    match load(ComputeType::Bf16) {
        Ok(encoder) => {
            let computes = encoder.computes().unwrap();
            let unit = computes.strip_prefix("linear maps in bf16 on ").unwrap();
            assert!(unit.starts_with("AMX,") || unit.starts_with("AVX512-BF16,"), "{computes}");
        }
        Err(LoadError::Type(TypeUnavailable::Bf16(_))) => {}
        Err(other) => panic!("{other}"),
    }
    let (auto, f32) = (load(ComputeType::Auto).unwrap(), load(ComputeType::F32).unwrap());
    assert_eq!(auto.revision(), f32.revision());
    let computes = f32.computes().unwrap();
    assert!(computes.starts_with("f32 on ") && computes.contains("AMX"), "{computes}");
}
