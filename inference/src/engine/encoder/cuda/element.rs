//! The type that weights and activations have on a CUDA device. Sums are in f32 whatever it is.

use std::fmt;

use half::{bf16, f16};

use crate::engine::encoder::ComputeType;

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ElementType {
    F32,
    /// Tensor cores, and three more bits than bf16: no weight of the models in use is too large for it.
    #[default]
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

    /// Elements of 128 bits, which kernels read and write at a time.
    pub(super) fn chunk(self) -> usize {
        16 / self.bytes()
    }

    /// The oldest compute capability whose tensor cores, or ordinary ones for f32, take it.
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

impl From<ComputeType> for ElementType {
    fn from(dtype: ComputeType) -> Self {
        match dtype {
            ComputeType::Auto => Self::default(),
            ComputeType::F32 => Self::F32,
            ComputeType::F16 => Self::F16,
            ComputeType::Bf16 => Self::Bf16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configured_type_is_an_element_type_of_its_name() {
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            let configured: ComputeType = element.as_str().parse().unwrap();
            assert_eq!(ElementType::from(configured), element);
            assert_eq!(element.chunk() * element.bytes(), 16);
        }
        assert_eq!(ElementType::from(ComputeType::Auto), ElementType::F16);
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
