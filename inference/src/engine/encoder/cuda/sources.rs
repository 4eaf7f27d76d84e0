//! The kernels' sources, and the options that they are compiled with.

use sha2::{Digest as _, Sha256};

use super::element::ElementType;

/// A file of `kernels/`.
struct Source {
    name: &'static str,
    text: &'static str,
}

macro_rules! source {
    ($name:literal) => {
        Source { name: $name, text: include_str!(concat!("../kernels/", $name)) }
    };
}

/// In the order in which they are compiled, as one text: NVRTC then needs no file.
const BEFORE: [Source; 9] = [
    source!("ptx.cuh"),
    source!("element.cuh"),
    source!("norm.cuh"),
    source!("gelu.cuh"),
    source!("sees.cuh"),
    source!("attention_lanes.cuh"),
    source!("embed.cu"),
    source!("add_norm.cu"),
    source!("rotate.cu"),
];
const OF_F32: [Source; 2] = [source!("linear_f32.cu"), source!("attention_f32.cu")];
const OF_16_BITS: [Source; 3] = [source!("tile.cuh"), source!("linear.cu"), source!("attention.cu")];
const AFTER: [Source; 4] =
    [source!("attention_wide.cu"), source!("pool.cu"), source!("bias_gelu.cu"), source!("gate.cu")];

/// Options of NVRTC besides the architecture.
pub(super) const OPTIONS: [&str; 1] = ["--std=c++17"];

/// All kernels of a type of elements, as one text.
pub(super) fn text(element: ElementType) -> String {
    let middle: &[Source] = match element {
        ElementType::F32 => &OF_F32,
        ElementType::F16 | ElementType::Bf16 => &OF_16_BITS,
    };
    let define = element.as_str().to_uppercase();
    let mut text = format!("#define ELEMENT_{define}\n");
    for source in BEFORE.iter().chain(middle).chain(&AFTER) {
        // So that NVRTC's messages name file and line.
        text += &format!("#line 1 \"{}\"\n{}", source.name, source.text);
    }
    text
}

/// SHA-256 of the text and the options, in hexadecimal.
pub(super) fn hash(element: ElementType) -> String {
    let mut digest = Sha256::new();
    digest.update(text(element));
    for option in OPTIONS {
        digest.update([0]);
        digest.update(option);
    }
    hexadecimal(&digest.finalize())
}

pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_kernels_is_in_a_text() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/engine/encoder/kernels");
        let all = text(ElementType::F32) + &text(ElementType::F16);
        for file in std::fs::read_dir(folder).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".cu") || name.ends_with(".cuh") {
                assert!(all.contains(&format!("#line 1 \"{name}\"\n")), "{name}");
            }
        }
    }

    #[test]
    fn types_have_hashes_of_their_own() {
        assert_ne!(hash(ElementType::F16), hash(ElementType::Bf16));
        assert_eq!(hash(ElementType::F16).len(), 64);
    }
}
