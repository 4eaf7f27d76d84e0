//! The built-in engine: text embeddings with BERT-family encoders.
//!
//! `hub` finds the model's folder, `config` reads it, `tokens` makes items of texts. `plan` says a pass's bytes, `forward`
//! runs its layers over a device's operations. On the CPU `pass` has it, `pack` deals its items to threads, and the
//! operations in `cpu` stand on `matmul`, `attention`, `rows` and `math`, each compiled for every vector unit in `simd`.
//! `cuda` is the same on a GPU.

mod attention;
mod checkpoint;
mod config;
mod cpu;
pub mod cuda;
mod forward;
mod hub;
mod math;
mod matmul;
mod pack;
mod pass;
mod plan;
mod rows;
mod simd;
#[cfg(target_arch = "aarch64")]
mod simd_neon;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
mod tensors;
mod tokens;
mod weights;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use vramq_core::units::Mib;
use vramq_schemas::{Dtype, EmbeddingFormat, Input, Output, Params};

pub use config::{Dims, Pooling};
pub use hub::Source;
pub use simd::Level;

use crate::device::OutOfMemory;
use crate::device::cpu::{AllocError, CpuDevice};
use crate::device::cuda::{CudaDevice, CudaError};
use crate::engine::{Engine, InvalidInput, Item, PassError, PassShape};

use config::ModelConfig;
use cuda::{CudaEncoder, CudaOptions, ElementType, KernelsError};
use pass::CpuEncoder;
use tokens::Tokens;

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
        Mib(.0.free),
        Mib(.0.asked.saturating_sub(.0.free))
    )]
    OutOfMemory(OutOfMemory),
    #[error("the host has no memory for weights of {bytes} bytes, though the device's budget has room")]
    HostExhausted { bytes: u64 },
    #[error(transparent)]
    Cuda(CudaError),
    #[error(transparent)]
    Kernels(#[from] KernelsError),
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

/// What runs the layers: a kind of device.
trait Backend: fmt::Debug + Send + Sync {
    fn dims(&self) -> Dims;

    fn resident_bytes(&self) -> u64;

    fn pass_bytes(&self, shape: PassShape) -> u64;

    /// Runs one pass over the token ids of items, and gives `take` the vector of each, in their order.
    fn run(&self, items: &[&[u32]], take: &mut dyn FnMut(usize, Vec<f32>)) -> Result<(), PassError>;
}

/// A loaded encoder.
pub struct Encoder {
    backend: Box<dyn Backend>,
    tokens: Tokens,
    tokens_max: usize,
    revision: String,
}

impl Encoder {
    /// Loads a model onto the CPU device. Reads files, or the network: seconds, not to be called on the runtime.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(source: &Source, device: Arc<CpuDevice>) -> Result<Self, LoadError> {
        Self::load_at(source, device, Level::best())
    }

    /// As [`load`](Self::load), for one vector unit in particular.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_at(source: &Source, device: Arc<CpuDevice>, level: Level) -> Result<Self, LoadError> {
        let config = ModelConfig::read(&source.folder()?)?;
        let threads = device.threads();
        Self::with(&config, threads, ElementType::F32, Box::new(CpuEncoder::load(&config, level, device)?))
    }

    /// Loads a model onto a CUDA device. `threads` are for tokenising, which is done here.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_cuda(
        source: &Source,
        device: Arc<CudaDevice>,
        options: &CudaOptions,
        threads: usize,
    ) -> Result<Self, LoadError> {
        let config = ModelConfig::read(&source.folder()?)?;
        let backend = Box::new(CudaEncoder::load(&config, device, options)?);
        Self::with(&config, threads, options.element, backend)
    }

    fn with(
        config: &ModelConfig,
        threads: usize,
        element: ElementType,
        backend: Box<dyn Backend>,
    ) -> Result<Self, LoadError> {
        let revision = config.revision(element.as_str())?;
        Ok(Self { backend, tokens: Tokens::load(config, threads)?, tokens_max: config.tokens_max, revision })
    }

    /// The model's sizes.
    pub fn dims(&self) -> Dims {
        self.backend.dims()
    }

    /// The ids of each item; an item that no `prepare` of this model made is an error, not a wild read.
    fn checked<'a>(&self, items: &'a [Item]) -> Result<Vec<&'a [u32]>, PassError> {
        let (tokens_max, vocabulary) = (self.tokens_max, self.dims().vocabulary);
        let check = |(at, item): (usize, &'a Item)| match item {
            Item::Tokens { ids, .. } if ids.len() > tokens_max => Err(PassError::Failed(format!(
                "item {at} has {} tokens, the model takes {tokens_max}",
                ids.len()
            ))),
            Item::Tokens { ids, .. } => match ids.iter().find(|id| **id as usize >= vocabulary) {
                Some(id) => Err(PassError::Failed(format!("item {at} has token {id} of {vocabulary}"))),
                None => Ok(&**ids),
            },
            Item::Plain(_) | Item::Program(_) => Err(PassError::Failed(format!("item {at} is not tokens"))),
        };
        // Room for all at once: a `Result`'s collect would grow it in steps.
        let mut checked = Vec::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            checked.push(check((at, item))?);
        }
        Ok(checked)
    }
}

impl Engine for Encoder {
    fn resident_bytes(&self) -> u64 {
        self.backend.resident_bytes()
    }

    fn item_cost_max(&self) -> usize {
        self.tokens_max
    }

    fn revision(&self) -> Option<String> {
        Some(self.revision.clone())
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.backend.pass_bytes(shape)
    }

    fn output_bytes_max(&self, item: &Item) -> Option<u64> {
        let element = match item {
            Item::Tokens { format, .. } if format.dtype == Dtype::F16 => 2,
            Item::Tokens { .. } | Item::Plain(_) | Item::Program(_) => 4,
        };
        Some(self.dims().hidden as u64 * element)
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        self.tokens.items(inputs, params)
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.checked(items)?;
        let mut outputs = Vec::with_capacity(items.len());
        self.backend.run(&ids, &mut |at, vector| {
            let format = match items.get(at) {
                Some(Item::Tokens { format, .. }) => *format,
                // `checked` has refused it.
                Some(Item::Plain(_) | Item::Program(_)) | None => EmbeddingFormat::default(),
            };
            outputs.push(Output::Embedding(format.embedding(vector)));
        })?;
        Ok(outputs)
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("backend", &self.backend).finish_non_exhaustive()
    }
}
