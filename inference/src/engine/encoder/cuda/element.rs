//! The element type of weights and activations on a CUDA device. Sums are always in f32.

use std::fmt;

use half::{bf16, f16};

use crate::engine::encoder::ComputeType;
use crate::engine::encoder::families::Norms;

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    F32,
    /// Uses tensor cores, and is three bits more precise than bf16. No weight of the models in use is too large for it.
    F16,
    /// Tensor cores since compute capability 8.0, and the range of f32.
    Bf16,
}

impl ElementType {
    /// In configurations, in kernels' names, and as the macro `ELEMENT_…` of their sources.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The type that a configuration names; `None` for `auto`, where [`auto`](Self::auto) chooses.
    pub fn configured(dtype: ComputeType) -> Option<Self> {
        match dtype {
            ComputeType::Auto => None,
            ComputeType::F32 => Some(Self::F32),
            ComputeType::F16 => Some(Self::F16),
            ComputeType::Bf16 => Some(Self::Bf16),
        }
    }

    /// The type for a model on a device of a compute capability, if the configuration names none.
    ///
    /// Where a norm follows each block, activations stay near one. Where norms come before blocks, blocks only add to the
    /// activations, and trained models have some beyond 65,504, f16's largest number: these get the range of f32.
    pub(super) fn auto(norms: Norms, capability: (u32, u32)) -> Self {
        if norms == Norms::After {
            Self::F16
        } else if capability >= Self::Bf16.capability_min() {
            Self::Bf16
        } else {
            Self::F32
        }
    }

    /// Elements of 128 bits, which kernels read and write at a time.
    pub(super) fn chunk(self) -> usize {
        16 / self.bytes()
    }

    /// The oldest compute capability whose tensor cores take this type; for f32, whose ordinary cores do.
    pub(super) fn capability_min(self) -> (u32, u32) {
        match self {
            Self::F32 | Self::F16 => (7, 5),
            Self::Bf16 => (8, 0),
        }
    }

    /// Appends numbers as little-endian elements, each the nearest to its number.
    pub(super) fn append(self, numbers: &[f32], to: &mut Vec<u8>) {
        match self {
            Self::F32 => to.extend(numbers.iter().flat_map(|x| x.to_le_bytes())),
            Self::F16 => to.extend(numbers.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            Self::Bf16 => to.extend(numbers.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
        }
    }

    /// Whether a number is so large that it would become infinite.
    pub(super) fn overflows(self, x: f32) -> bool {
        x.is_finite()
            && match self {
                Self::F32 => false,
                Self::F16 => !f16::from_f32(x).is_finite(),
                Self::Bf16 => !bf16::from_f32(x).is_finite(),
            }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_type_is_an_element_type_of_its_name() {
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            let configured: ComputeType = element.as_str().parse().unwrap();
            assert_eq!(ElementType::configured(configured), Some(element));
            assert_eq!(element.chunk() * element.bytes(), 16);
        }
        assert_eq!(ElementType::configured(ComputeType::Auto), None);
    }

    #[test]
    fn models_whose_activations_may_grow_are_not_computed_in_f16_by_default() {
        for capability in [(7, 5), (8, 0), (9, 0), (12, 0)] {
            assert_eq!(ElementType::auto(Norms::After, capability), ElementType::F16);
        }
        for norms in [Norms::Before, Norms::BeforeButFirst] {
            assert_eq!(ElementType::auto(norms, (7, 5)), ElementType::F32);
            assert_eq!(ElementType::auto(norms, (8, 0)), ElementType::Bf16);
            assert_eq!(ElementType::auto(norms, (12, 0)), ElementType::Bf16);
        }
    }

    #[test]
    fn numbers_become_the_nearest_elements() {
        let mut bytes = Vec::new();
        ElementType::F16.append(&[1.0, 65_519.0], &mut bytes);
        ElementType::Bf16.append(&[1.0], &mut bytes);
        ElementType::F32.append(&[1.0], &mut bytes);
        assert_eq!(bytes, [0x00, 0x3c, 0xff, 0x7b, 0x80, 0x3f, 0, 0, 0x80, 0x3f]);
        assert!(ElementType::F16.overflows(-65_520.0) && !ElementType::F16.overflows(65_519.0));
        assert!(!ElementType::Bf16.overflows(65_520.0) && !ElementType::F16.overflows(f32::INFINITY));
    }
}
