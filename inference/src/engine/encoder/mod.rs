//! The built-in engine: embeddings, sparse vectors and scores of texts, with encoders of the families that [`families`] lists.
//!
//! `hub` finds the model's folder; `config` reads it with `modules`, `saved_config`, `text_config` and `families`. `tokens` makes items
//! of texts (with `long_text` and `safe_split` for long ones, `word_piece` for plain words, `word_cache` for others that come again,
//! `tokenizer_class`, `class_parts`, `class_tokens` and `token_keys` for what transformers makes of the tokenizer's files). `pairs` makes items
//! of pairs. `checkpoint` reads the weights from the files that `shards` finds. `plan` computes a pass's bytes, and `forward` runs its layers
//! over a device's operations.
//!
//! On the CPU `pass` runs a pass, `pack` deals its items to threads, and the operations in `cpu` use `matmul`, `attention`,
//! `rotary`, `token_ops` and `math`, each compiled for every vector unit in `simd`. On a CPU with a tile unit `tiles` computes the
//! matrix products; `units` chooses. `cuda` runs a pass on a GPU. `outputs` makes outputs of a pass's vectors: `dense`
//! transforms them, `head` computes scores, and `vocabulary` and `sparse` make sparse vectors.

mod attention;
mod barrier;
mod checkpoint;
mod class_parts;
mod class_tokens;
mod config;
mod cpu;
pub mod cuda;
mod dense;
mod families;
mod forward;
mod head;
mod hub;
mod json;
mod load_error;
mod long_text;
mod math;
mod matmul;
mod modules;
mod outputs;
mod pack;
mod pairs;
mod pass;
mod plan;
mod rotary;
mod safe_split;
mod saved_config;
mod shards;
mod simd;
#[cfg(target_arch = "aarch64")]
mod simd_neon;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
mod sparse;
mod tensors;
mod text_config;
mod tiles;
mod token_keys;
mod token_ops;
mod tokenizer_class;
mod tokens;
mod units;
mod vocabulary;
mod weights;
mod word_cache;
mod word_piece;

use std::fmt;
use std::sync::Arc;

use vramq_schemas::{Input, Output, Params};

pub use config::Dims;
pub use hub::Source;
pub use load_error::LoadError;
pub use modules::Pooling;
pub use simd::Level;
pub use tiles::{AmxAbsent, Parts};
pub use units::{ComputeType, CpuUnits, TypeUnavailable};

use crate::device::cpu::CpuDevice;
use crate::device::cuda::CudaDevice;
use crate::engine::{Engine, InvalidInput, Item, OutputMax, PassError, PassShape};

use config::ModelConfig;
use cuda::{CudaEncoder, CudaOptions, ElementType};
use families::Sequence;
use outputs::Outputs;
use pass::CpuEncoder;
use tiles::Tiles;
use tokens::Tokens;
use units::Chosen;

/// What runs the layers: a kind of device.
trait Backend: fmt::Debug + Send + Sync {
    fn dims(&self) -> Dims;

    /// The tokens of a pass that keep the device busy, if it is known how many.
    fn pass_tokens(&self) -> Option<usize> {
        None
    }

    fn resident_bytes(&self) -> u64;

    fn pass_bytes(&self, shape: PassShape) -> u64;

    /// Runs one pass over items, and gives `take` the vector of each, in their order.
    fn run(&self, items: &[Sequence<'_>], take: &mut dyn FnMut(usize, Vec<f32>)) -> Result<(), PassError>;
}

/// A loaded encoder.
pub struct Encoder {
    backend: Box<dyn Backend>,
    tokens: Tokens,
    tokens_max: usize,
    revision: String,
    /// The types and units that it is computed with, in words.
    computes: String,
    outputs: Outputs,
}

impl Encoder {
    /// Loads a model onto the CPU device, for f32 on vector units: results are the same on every CPU, except for rounding. Reads
    /// files or the network and takes seconds, so do not call it on the runtime.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_f32(source: &Source, device: Arc<CpuDevice>) -> Result<Self, LoadError> {
        Self::load_dtype(source, device, ComputeType::F32)
    }

    /// As [`load_f32`](Self::load_f32), but computes in `dtype` on the fastest units of this CPU. Workers use this.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_dtype(
        source: &Source,
        device: Arc<CpuDevice>,
        dtype: ComputeType,
    ) -> Result<Self, LoadError> {
        let chosen = Chosen::for_type(dtype)?;
        match &chosen.amx_absent {
            Some(absent) if absent.is_fault() => {
                tracing::warn!(%source, units = %chosen.units, %absent, "AMX does not work as it should: the encoder computes without it");
            }
            _ => tracing::info!(%source, units = %chosen, "chose the CPU units of the encoder"),
        }
        let mut encoder = Self::load_on_units(source, device, chosen.units)?;
        encoder.computes = chosen.to_string();
        Ok(encoder)
    }

    /// As [`load_f32`](Self::load_f32), on units in particular.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_on_units(
        source: &Source,
        device: Arc<CpuDevice>,
        units: CpuUnits,
    ) -> Result<Self, LoadError> {
        let config = ModelConfig::read(&source.folder()?)?;
        let threads = device.threads();
        let element = match units.tiles {
            Some(Tiles { parts: Parts::Rounded, .. }) => ElementType::Bf16,
            // Split bf16 is as exact as f32, so workers with and without AMX have the same revision.
            Some(Tiles { parts: Parts::Split, .. }) | None => ElementType::F32,
        };
        let backend = Box::new(CpuEncoder::load(&config, units, device)?);
        Self::from_backend(&config, threads, element, units.to_string(), backend)
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
        let backend = CudaEncoder::load(&config, device, options)?;
        let (element, computes) = (backend.element(), backend.computes().to_owned());
        Self::from_backend(&config, threads, element, computes, Box::new(backend))
    }

    fn from_backend(
        config: &ModelConfig,
        threads: usize,
        element: ElementType,
        computes: String,
        backend: Box<dyn Backend>,
    ) -> Result<Self, LoadError> {
        let outputs = Outputs::load(config)?;
        let (tokens, tokens_max) = (Tokens::load(config, threads)?, config.texts.tokens_max);
        let revision = config.revision(element.as_str(), tokens.uses_older_files)?;
        Ok(Self { backend, tokens, tokens_max, revision, computes, outputs })
    }

    /// The model's sizes.
    pub fn dims(&self) -> Dims {
        self.backend.dims()
    }

    /// The tokens of each item. An item that no `prepare` of this model made is an error, not an invalid memory access.
    fn checked<'a>(&self, items: &'a [Item]) -> Result<Vec<Sequence<'a>>, PassError> {
        let (tokens_max, vocabulary) = (self.tokens_max, self.dims().vocabulary);
        let check = |(at, item): (usize, &'a Item)| {
            let Some(sequence) = self.outputs.sequence(item) else {
                return Err(PassError::Failed(format!("item {at} is not of this model")));
            };
            let ids = sequence.ids;
            if ids.len() > tokens_max {
                let has = format!("item {at} has {} tokens, the model takes {tokens_max}", ids.len());
                return Err(PassError::Failed(has));
            }
            match ids.iter().find(|id| **id as usize >= vocabulary) {
                Some(id) => Err(PassError::Failed(format!("item {at} has token {id} of {vocabulary}"))),
                None => Ok(sequence),
            }
        };
        // Reserved at once, because collecting a `Result` would grow it in steps.
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

    fn pass_cost(&self) -> Option<usize> {
        self.backend.pass_tokens()
    }

    fn revision(&self) -> Option<String> {
        Some(self.revision.clone())
    }

    fn computes(&self) -> Option<String> {
        Some(self.computes.clone())
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.backend.pass_bytes(shape)
    }

    fn output_max(&self, _: &Input, params: &Params) -> Option<OutputMax> {
        Some(self.outputs.max(&self.tokens, params))
    }

    fn check(&self, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        self.outputs.check(&self.tokens, inputs, params)
    }

    fn prepares_in_pieces(&self) -> bool {
        true
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        self.outputs.items(&self.tokens, inputs, params)
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let sequences = self.checked(items)?;
        self.outputs.run(&*self.backend, &sequences, items, &self.tokens.threads)
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("backend", &self.backend).finish_non_exhaustive()
    }
}
