//! Why a model could not be loaded.

use std::io;
use std::path::PathBuf;

use vramq_core::units::{FreeMib, Mib};

use super::cuda::KernelsError;
use super::units::TypeUnavailable;
use crate::device::OutOfMemory;
use crate::device::cpu::AllocError;
use crate::device::cuda::CudaError;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("parse {}", path.display())]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("parse {}: the key `{key}`", path.display())]
    JsonKey {
        path: PathBuf,
        key: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{} has {found}; this engine takes {takes}", path.display())]
    Unsupported { path: PathBuf, found: String, takes: String },
    #[error("{}: {reason}", path.display())]
    Safetensors { path: PathBuf, reason: String },
    #[error("{} has no tensor `{name}`", path.display())]
    MissingTensor { path: PathBuf, name: String },
    #[error("{}: tensor `{name}` is {found:?}, but by config.json it is {expected:?}", path.display())]
    TensorShape { path: PathBuf, name: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("{}: tensor `{name}` is of type {found}; this engine takes F32, F16, BF16", path.display())]
    TensorDtype { path: PathBuf, name: String, found: String },
    #[error("{}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: String },
    #[error(
        "get {id} at {revision} from the hub: {reason}. Without the network, either configure the path of a folder \
         that holds the model, or fetch it on a connected machine (`hf download {id}`), copy its cache, and set \
         HF_HOME to it; the cache looked in is {}",
        cache.display()
    )]
    Hub { id: String, revision: String, reason: String, cache: PathBuf },
    #[error(
        "the weights do not fit the device: they take {}, {} are free: {} are missing",
        Mib(.0.asked),
        FreeMib(.0.free),
        Mib(.0.asked.saturating_sub(.0.free))
    )]
    OutOfMemory(OutOfMemory),
    #[error("the host has no memory for weights of {bytes} bytes, though the device's budget has room")]
    HostExhausted { bytes: u64 },
    #[error(transparent)]
    Cuda(CudaError),
    #[error(transparent)]
    Kernels(#[from] KernelsError),
    #[error(transparent)]
    Type(#[from] TypeUnavailable),
}

impl From<AllocError> for LoadError {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::OutOfMemory(oom) => Self::OutOfMemory(oom),
            AllocError::HostExhausted { bytes } => Self::HostExhausted { bytes },
        }
    }
}

impl From<CudaError> for LoadError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory(oom) => Self::OutOfMemory(oom),
            error => Self::Cuda(error),
        }
    }
}
