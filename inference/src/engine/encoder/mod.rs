//! The built-in engine: embeddings, sparse vectors and scores of texts, with encoders of the families that [`families`] lists.
//!
//! `hub` finds the model's folder; `config` reads it with `modules`, `text_config` and `families`. `tokens` makes items of texts (with
//! `long_text` and `safe_split` for long ones, and `tokenizer_class` for what transformers changes in a tokenizer). `pairs` makes items of
//! pairs. `checkpoint` reads the weights from the files that `shards` finds. `plan` computes a pass's bytes, and `forward` runs its layers
//! over a device's operations.
//!
//! On the CPU `pass` runs a pass, `pack` deals its items to threads, and the operations in `cpu` use `matmul`, `attention`,
//! `rotary`, `rows` and `math`, each compiled for every vector unit in `simd`. On a CPU with a tile unit `tiles` computes the
//! matrix products; `units` chooses. `cuda` runs a pass on a GPU. After a pass `dense` transforms vectors, `head` computes
//! scores, and `vocabulary` and `sparse` make sparse vectors.

mod attention;
mod checkpoint;
mod config;
mod cpu;
pub mod cuda;
mod dense;
mod families;
mod forward;
mod head;
mod hub;
mod load_error;
mod long_text;
mod math;
mod matmul;
mod modules;
mod pack;
mod pairs;
mod pass;
mod plan;
mod rotary;
mod rows;
mod safe_split;
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
mod tokenizer_class;
mod tokens;
mod units;
mod vocabulary;
mod weights;

use std::fmt;
use std::sync::Arc;

use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

pub use config::Dims;
pub use hub::Source;
pub use load_error::LoadError;
pub use modules::Pooling;
pub use simd::Level;
pub use tiles::{AmxAbsent, Parts};
pub use units::{ComputeType, CpuUnits, TypeUnavailable};

use crate::device::cpu::CpuDevice;
use crate::device::cuda::CudaDevice;
use crate::engine::{Engine, InvalidInput, Item, OutputMax, PassError, PassShape, ScoredItem, SparseItem};

use checkpoint::Checkpoint;
use config::ModelConfig;
use cuda::{CudaEncoder, CudaOptions, ElementType};
use dense::Dense;
use families::Sequence;
use head::Head;
use pass::CpuEncoder;
use sparse::SparseConfig;
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

/// What becomes of the vectors that the device makes.
enum Outputs {
    Embeddings {
        /// What makes other vectors of them before.
        dense: Option<Dense>,
        /// Elements of an output.
        width: usize,
    },
    Sparse(SparseConfig),
    Scores(Head),
}

impl Encoder {
    /// Loads a model onto the CPU device, to be computed in f32 on vector units: the same everywhere but for rounding. Reads files,
    /// or the network: seconds, not to be called on the runtime.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(source: &Source, device: Arc<CpuDevice>) -> Result<Self, LoadError> {
        Self::load_as(source, device, ComputeType::F32)
    }

    /// As [`load`](Self::load), to be computed in a type, on the fastest units of this CPU that there are for it. Workers load so.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_as(source: &Source, device: Arc<CpuDevice>, dtype: ComputeType) -> Result<Self, LoadError> {
        let chosen = Chosen::for_type(dtype)?;
        match &chosen.amx_absent {
            Some(absent) if absent.is_fault() => {
                tracing::warn!(%source, %absent, "AMX does not work as it should: the encoder computes in f32 without it");
            }
            _ => tracing::info!(%source, units = %chosen, "units of the encoder"),
        }
        let mut encoder = Self::load_on(source, device, chosen.units)?;
        encoder.computes = chosen.to_string();
        Ok(encoder)
    }

    /// As [`load`](Self::load), for one vector unit in particular.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_at(source: &Source, device: Arc<CpuDevice>, level: Level) -> Result<Self, LoadError> {
        Self::load_on(source, device, CpuUnits::vectors(level))
    }

    /// As [`load`](Self::load), for units in particular.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load_on(source: &Source, device: Arc<CpuDevice>, units: CpuUnits) -> Result<Self, LoadError> {
        let config = ModelConfig::read(&source.folder()?)?;
        let threads = device.threads();
        let element = match units.tiles {
            Some(Tiles { parts: Parts::Rounded, .. }) => ElementType::Bf16,
            // As exact as f32, so that workers with AMX and without have one revision.
            Some(Tiles { parts: Parts::Split, .. }) | None => ElementType::F32,
        };
        let backend = Box::new(CpuEncoder::load(&config, units, device)?);
        Self::with(&config, threads, element, units.to_string(), backend)
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
        Self::with(&config, threads, element, computes, Box::new(backend))
    }

    fn with(
        config: &ModelConfig,
        threads: usize,
        element: ElementType,
        computes: String,
        backend: Box<dyn Backend>,
    ) -> Result<Self, LoadError> {
        let outputs = match (&config.sparse, &config.spec.classifier) {
            (Some(sparse), _) => Outputs::Sparse(sparse.clone()),
            (None, Some(classifier)) => {
                let hidden = config.spec.dims.hidden;
                Outputs::Scores(Head::load(&mut Checkpoint::open(config)?, classifier, hidden)?)
            }
            (None, None) => Outputs::Embeddings {
                dense: Dense::load(&config.dense, config.dense_normalize)?,
                width: config.width(),
            },
        };
        let (tokens, tokens_max) = (Tokens::load(config, threads)?, config.texts.tokens_max);
        let revision = config.revision(element.as_str())?;
        Ok(Self { backend, tokens, tokens_max, revision, computes, outputs })
    }

    /// The model's sizes.
    pub fn dims(&self) -> Dims {
        self.backend.dims()
    }

    /// The tokens of each item; an item that no `prepare` of this model made is an error, not a wild read.
    fn checked<'a>(&self, items: &'a [Item]) -> Result<Vec<Sequence<'a>>, PassError> {
        let (tokens_max, vocabulary) = (self.tokens_max, self.dims().vocabulary);
        let check = |(at, item): (usize, &'a Item)| {
            let sequence = match (item, &self.outputs) {
                (Item::Tokens { ids, .. }, Outputs::Embeddings { .. })
                | (Item::Sparse(SparseItem { ids, .. }), Outputs::Sparse(_)) => {
                    Sequence { ids, second_from: ids.len() }
                }
                (Item::Scored(item), Outputs::Scores(_)) => {
                    Sequence { ids: &item.ids, second_from: item.second_from }
                }
                _ => return Err(PassError::Failed(format!("item {at} is not of this model"))),
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
        // Room for all at once: a `Result`'s collect would grow it in steps.
        let mut checked = Vec::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            checked.push(check((at, item))?);
        }
        Ok(checked)
    }

    /// The vector of each item, as pooling makes it. All are checked: activations behind pooling make finite numbers of others.
    fn vectors(&self, sequences: &[Sequence<'_>]) -> Result<Vec<Vec<f32>>, PassError> {
        let mut vectors: Vec<Vec<f32>> = Vec::with_capacity(sequences.len());
        self.backend.run(sequences, &mut |_, vector| vectors.push(vector))?;
        for (at, vector) in vectors.iter().enumerate() {
            finite(at, vector.iter().position(|element| !element.is_finite()))?;
        }
        Ok(vectors)
    }

    /// An embedding of each item.
    fn embed(
        &self,
        dense: Option<&Dense>,
        sequences: &[Sequence<'_>],
        items: &[Item],
    ) -> Result<Vec<Output>, PassError> {
        let mut outputs = Vec::with_capacity(items.len());
        let mut checked = Ok(());
        let mut take = |at: usize, vector: Vec<f32>| {
            let format = match items.get(at) {
                Some(Item::Tokens { format, .. }) => *format,
                // `checked` has refused it.
                _ => EmbeddingFormat::default(),
            };
            let embedding = format.embedding(vector);
            if checked.is_ok() {
                checked = finite(at, embedding.values.first_not_finite());
            }
            outputs.push(Output::Embedding(embedding));
        };
        match dense {
            None => self.backend.run(sequences, &mut take)?,
            Some(dense) => {
                let vectors = dense.apply(self.vectors(sequences)?, &self.tokens.threads);
                vectors.into_iter().enumerate().for_each(|(at, vector)| take(at, vector));
            }
        }
        checked.map(|()| outputs)
    }

    /// A sparse vector of each item, from its scores of the vocabulary.
    fn sparse(
        &self,
        sparse: &SparseConfig,
        sequences: &[Sequence<'_>],
        items: &[Item],
    ) -> Result<Vec<Output>, PassError> {
        // One after the other, because the scores of all would take far more memory than the outputs.
        let mut outputs = Vec::with_capacity(items.len());
        let mut checked = Ok(());
        let mut take = |at: usize, scores: Vec<f32>| {
            let Some(item) = items.get(at) else { return };
            match sparse.output(item, &scores) {
                Ok(output) => outputs.push(output),
                Err(error) => checked = Err(PassError::Failed(format!("item {at}: {error}"))),
            }
        };
        self.backend.run(sequences, &mut take)?;
        checked.map(|()| outputs)
    }

    /// The scores of items, once their vectors are known.
    fn score(
        &self,
        head: &Head,
        sequences: &[Sequence<'_>],
        items: &[Item],
    ) -> Result<Vec<Output>, PassError> {
        let vectors = self.vectors(sequences)?;
        let raw: Vec<bool> =
            items.iter().map(|item| matches!(item, Item::Scored(ScoredItem { raw: true, .. }))).collect();
        Ok(head.outputs(&vectors, &raw, &self.tokens.threads))
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
        Some(match &self.outputs {
            Outputs::Embeddings { width, .. } => {
                // Parameters that cannot be read are refused by `check`.
                let format = self.tokens.format(params).unwrap_or_default();
                let elements = format.dimensions.map_or(*width as u64, u64::from);
                OutputMax::Embedding { elements, format }
            }
            Outputs::Sparse(sparse) => sparse.output_max(params),
            Outputs::Scores(head) => OutputMax::Text(head.output_bytes_max()),
        })
    }

    fn check(&self, inputs: &[Input], params: &Params) -> Result<(), InvalidInput> {
        match &self.outputs {
            Outputs::Embeddings { .. } => self.tokens.check(inputs, params),
            Outputs::Sparse(sparse) => sparse.check(&self.tokens, inputs, params),
            Outputs::Scores(_) => self.tokens.check_scored(inputs, params),
        }
    }

    fn prepares_in_pieces(&self) -> bool {
        true
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        match &self.outputs {
            Outputs::Embeddings { .. } => self.tokens.items(inputs, params),
            Outputs::Sparse(sparse) => sparse.items(&self.tokens, inputs, params),
            Outputs::Scores(_) => self.tokens.scored(inputs, params),
        }
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let sequences = self.checked(items)?;
        match &self.outputs {
            Outputs::Embeddings { dense, .. } => self.embed(dense.as_ref(), &sequences, items),
            Outputs::Sparse(sparse) => self.sparse(sparse, &sequences, items),
            Outputs::Scores(head) => self.score(head, &sequences, items),
        }
    }
}

/// An item's vector, by its first element that is infinite or not a number. It would spoil every comparison in its reader's
/// store, so its pass fails; the worker then finds the item by running jobs alone.
///
/// # Errors
/// There is such an element.
fn finite(item: usize, first_not_finite: Option<usize>) -> Result<(), PassError> {
    match first_not_finite {
        None => Ok(()),
        Some(element) => Err(PassError::Failed(format!(
            "element {element} of the vector of item {item} is not a finite number"
        ))),
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("backend", &self.backend).finish_non_exhaustive()
    }
}
