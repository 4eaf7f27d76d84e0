//! The kinds of matrix products that the encoder is compared and measured with.

use vramq_inference::device::cuda::CudaDevice;
use vramq_inference::engine::encoder::cuda::{CudaOptions, ElementType};

use crate::Scale;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// cuBLASLt's, by the algorithms that it expects to be the fastest.
    Library,
    /// The same by those that are the fastest, as workers use it.
    Timed,
    /// The program's own.
    Own,
}

impl Kind {
    /// Those that there are on this machine.
    pub fn all(device: &CudaDevice) -> &'static [Self] {
        match device.libraries().cublaslt {
            Ok(_) => &[Self::Library, Self::Timed, Self::Own],
            Err(_) => &[Self::Own],
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Library => "cuBLASLt",
            Self::Timed => "cuBLASLt, timed",
            Self::Own => "own",
        }
    }

    /// In a command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Library => "library",
            Self::Timed => "timed",
            Self::Own => "own",
        }
    }

    /// For passes of up to so many tokens.
    pub fn options(self, element: ElementType, pass_tokens: usize, scale: Scale) -> CudaOptions {
        CudaOptions {
            element: Some(element),
            own_products: self == Self::Own,
            warm_up: self == Self::Timed,
            pass_tokens: Some(pass_tokens),
            cache: scale.cache(),
        }
    }
}
