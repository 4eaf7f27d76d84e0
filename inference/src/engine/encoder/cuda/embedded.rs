//! The kernels as PTX that is embedded in the program, for machines that have only the driver. `scripts/kernels` generates it.

use std::io::Read as _;

use flate2::read::GzDecoder;

use super::element::ElementType;

/// Compute capabilities for which there is text, the newest first. Drivers compile it for newer devices too.
const F32: [((u32, u32), &[u8]); 1] = [((7, 5), include_bytes!("../kernels/ptx/f32-75.ptx.gz"))];
const F16: [((u32, u32), &[u8]); 2] = [
    ((8, 0), include_bytes!("../kernels/ptx/f16-80.ptx.gz")),
    ((7, 5), include_bytes!("../kernels/ptx/f16-75.ptx.gz")),
];
const BF16: [((u32, u32), &[u8]); 1] = [((8, 0), include_bytes!("../kernels/ptx/bf16-80.ptx.gz"))];

/// The text for a device. A device older than [`ElementType::capability_min`] gets the oldest text, which its driver rejects.
pub(super) fn ptx(element: ElementType, capability: (u32, u32)) -> String {
    let all: &[((u32, u32), &[u8])] = match element {
        ElementType::F32 => &F32,
        ElementType::F16 => &F16,
        ElementType::Bf16 => &BF16,
    };
    let suitable = all.iter().find(|(needs, _)| *needs <= capability).or(all.last());
    let mut text = String::new();
    if let Some((_, packed)) = suitable {
        // Cannot fail: the tests unpack every embedded text.
        let _ = GzDecoder::new(*packed).read_to_string(&mut text);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::sources;
    use super::*;

    #[test]
    fn the_texts_are_of_these_sources() {
        let made_of = include_str!("../kernels/ptx/sources.sha256");
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            let line = format!("{}  {element}\n", sources::hash(element));
            assert!(made_of.contains(&line), "the kernels have changed: run scripts/kernels");
        }
    }

    #[test]
    fn every_device_gets_text_for_it_or_for_one_before_it() {
        let rows = [
            (ElementType::F32, (9, 0), ".target sm_75"),
            (ElementType::F16, (7, 5), ".target sm_75"),
            (ElementType::F16, (8, 0), ".target sm_80"),
            (ElementType::F16, (12, 0), ".target sm_80"),
            (ElementType::Bf16, (8, 9), ".target sm_80"),
        ];
        for (element, capability, target) in rows {
            let text = ptx(element, capability);
            assert!(text.contains(target), "{element} for {capability:?}");
            assert!(text.contains(&format!(".entry attention_64_{element}(")), "{element}");
        }
    }
}
