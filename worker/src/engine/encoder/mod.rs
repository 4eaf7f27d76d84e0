//! The built-in engine: text embeddings with BERT-family encoders.
//!
//! `hub` finds the model's folder, `config` reads it, `tokens` makes items of texts. A pass: `plan` says its bytes,
//! `pack` deals its items to threads, `forward` runs the layers over the operations in `cpu`, which stand on
//! `matmul`, `attention`, `rows` and `math`, each compiled for every vector unit in `simd`.

mod attention;
mod config;
mod cpu;
mod forward;
mod hub;
mod math;
mod matmul;
mod pack;
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

use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

pub use config::{Dims, Pooling};
pub use hub::Source;
pub use simd::Level;

use crate::admission::Mib;
use crate::device::OutOfMemory;
use crate::device::cpu::{AllocError, CpuDevice};
use crate::engine::{Engine, InvalidInput, Item, PassError, PassShape};

use config::ModelConfig;
use cpu::{CpuModel, CpuOps, Member, Team, TellsTeam};
use pack::Packing;
use plan::{CpuPlan, Layout, activations_per_token};
use tokens::Tokens;
use weights::Weights;

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
}

impl From<AllocError> for LoadError {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::OutOfMemory(oom) => Self::OutOfMemory(oom),
            AllocError::HostExhausted { bytes } => Self::HostExhausted { bytes },
        }
    }
}

/// A loaded encoder.
pub struct Encoder {
    model: CpuModel,
    tokens: Tokens,
    tokens_max: usize,
    device: Arc<CpuDevice>,
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
        Ok(Self {
            tokens: Tokens::load(&config, device.threads())?,
            model: CpuModel {
                weights: Weights::load(&config, level, &device)?,
                dims: config.dims,
                pooling: config.pooling,
                normalize: config.normalize,
                level,
            },
            tokens_max: config.tokens_max,
            device,
        })
    }

    /// The model's sizes.
    pub fn dims(&self) -> Dims {
        self.model.dims
    }

    fn plan(&self, shape: PassShape) -> CpuPlan {
        CpuPlan::new(&self.model.dims, self.model.level, self.device.threads(), shape)
    }

    /// The ids of each item; an item that no `prepare` of this model made is an error, not a wild read.
    fn checked<'a>(&self, items: &'a [Item]) -> Result<Vec<&'a [u32]>, PassError> {
        let (tokens_max, vocabulary) = (self.tokens_max, self.model.dims.vocabulary);
        let check = |(at, item): (usize, &'a Item)| match item {
            Item::Tokens { ids, .. } if ids.len() > tokens_max => Err(PassError::Failed(format!(
                "item {at} has {} tokens, the model takes {tokens_max}",
                ids.len()
            ))),
            Item::Tokens { ids, .. } => match ids.iter().find(|id| **id as usize >= vocabulary) {
                Some(id) => Err(PassError::Failed(format!("item {at} has token {id} of {vocabulary}"))),
                None => Ok(&**ids),
            },
            Item::Plain(_) => Err(PassError::Failed(format!("item {at} is not tokens"))),
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
        self.model.weights.bytes()
    }

    fn item_cost_max(&self) -> usize {
        self.tokens_max
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.plan(shape).bytes as u64
    }

    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput> {
        self.tokens.items(inputs, params)
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let ids = self.checked(items)?;
        let plan = self.plan(items.iter().collect());
        let arena = self.device.alloc_arena(plan.bytes)?;
        let lengths: Vec<usize> = ids.iter().map(|ids| ids.len()).collect();
        let packing = Packing::new(&lengths, &self.model.dims, self.device.threads());
        let pass = Pass { model: &self.model, packing: &packing, plan: &plan, arena: arena.as_ptr() };
        pass.fill(&ids);
        let team = Team::new(if packing.shards.len() == 1 { self.device.threads() } else { 1 });
        self.device.on_all_threads(|rank| pass.run(rank, &team));
        Ok(pass.outputs(items))
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder")
            .field("dims", &self.model.dims)
            .field("level", &self.model.level)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A pass that has its memory.
struct Pass<'a> {
    model: &'a CpuModel,
    packing: &'a Packing,
    plan: &'a CpuPlan,
    arena: *mut u8,
}

// SAFETY: all but the arena is shared read-only; of the arena, `run` gives every thread parts that no other writes.
unsafe impl Sync for Pass<'_> {}

impl Pass<'_> {
    fn at<T>(&self, byte: usize) -> *mut T {
        debug_assert!(byte <= self.plan.bytes);
        self.arena.wrapping_add(byte).cast()
    }

    /// Writes token ids and `cu_seqlens` in packed order.
    fn fill(&self, items: &[&[u32]]) {
        let (ids, cu_seqlens): (*mut u32, *mut u32) = (self.at(self.plan.ids), self.at(self.plan.cu_seqlens));
        let mut end = 0;
        for (k, at) in self.packing.order.iter().enumerate() {
            let item = items[*at as usize];
            // SAFETY: the plan has room for all items' tokens and for one start more than items; nothing else holds
            // a reference into the arena yet.
            unsafe {
                cu_seqlens.add(k).write(end as u32);
                ids.add(end).copy_from_nonoverlapping(item.as_ptr(), item.len());
            }
            end += item.len();
        }
        // SAFETY: as above: this is the one more.
        unsafe { cu_seqlens.add(items.len()).write(end as u32) };
    }

    /// One thread's work: the shard of its rank, or its share of the only one.
    fn run(&self, rank: usize, team: &Team) {
        let alone = self.packing.shards.len() > 1;
        let Some(shard) = self.packing.shards.get(if alone { rank } else { 0 }) else {
            return;
        };
        let dims = &self.model.dims;
        let items = self.packing.order.len();
        let tokens = self.packing.shards.iter().map(|shard| shard.tokens).sum();
        let _tells = TellsTeam(team);
        let activations = self.at::<f32>(self.plan.activations);
        let mut ops = CpuOps {
            model: self.model,
            shard: *shard,
            // SAFETY: `fill` has written this many; no one writes them again while the pass runs.
            ids: unsafe { std::slice::from_raw_parts(self.at(self.plan.ids), tokens) },
            // SAFETY: as above.
            cu_seqlens: unsafe { std::slice::from_raw_parts(self.at(self.plan.cu_seqlens), items + 1) },
            activations: activations.wrapping_add(shard.first_token * activations_per_token(dims)),
            scratch: self.at(self.plan.scratch + rank * self.plan.scratch_stride),
            vectors: self.at(self.plan.vectors),
            team: Member { team, rank: if alone { 0 } else { rank } },
        };
        // `Broken` says that another thread has panicked; that panic is what the caller gets.
        let _ = forward::forward(&mut ops, dims, &Layout::new(dims, shard.tokens));
    }

    /// The vectors in the items' order and formats.
    fn outputs(&self, items: &[Item]) -> Vec<Output> {
        let hidden = self.model.dims.hidden;
        let mut sequence = vec![0; items.len()];
        for (k, at) in self.packing.order.iter().enumerate() {
            sequence[*at as usize] = k;
        }
        let output = |(item, k): (&Item, &usize)| {
            let vector = self.at::<f32>(self.plan.vectors).wrapping_add(k * hidden);
            // SAFETY: the pass has ended and written a vector of `hidden` elements for each sequence.
            let vector = unsafe { std::slice::from_raw_parts(vector, hidden) }.to_vec();
            let format = match item {
                Item::Tokens { format, .. } => *format,
                // `checked` has refused it.
                Item::Plain(_) => EmbeddingFormat::default(),
            };
            Output::Embedding(format.embedding(vector))
        };
        items.iter().zip(&sequence).map(output).collect()
    }
}
