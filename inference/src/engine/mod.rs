//! The trait of engines, which turn the items of a pass into outputs.

pub mod echo;
pub mod encoder;

use std::sync::Arc;
pub use vramq_core::device::{PassError, PassShape};

use vramq_schemas::status::ProcessStatus;
use vramq_schemas::{EmbeddingFormat, Input, JsonText, Output, Params};

use crate::device::cpu::AllocError;
use crate::device::cuda::CudaError;

/// One input, made ready for a pass on the CPU side.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// Token ids, special tokens included, and how the vector is wanted.
    Tokens { ids: Box<[u32]>, format: EmbeddingFormat },
    /// A text of which a sparse vector is made.
    Sparse(SparseItem),
    /// One text or two, for a classifier or reranker.
    Scored(ScoredItem),
    /// An input that the engine takes as it came.
    Plain(Input),
    /// An input for a program of the user's own.
    Program(Box<ProgramItem>),
}

impl Item {
    /// What the item adds to a pass: its tokens, what a program's configuration counts, or 1.
    pub fn cost(&self) -> usize {
        match self {
            Self::Tokens { ids, .. }
            | Self::Sparse(SparseItem { ids, .. })
            | Self::Scored(ScoredItem { ids, .. }) => ids.len(),
            Self::Plain(_) => 1,
            Self::Program(item) => item.cost,
        }
    }
}

/// One text of which a sparse vector is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SparseItem {
    /// Token ids, special tokens included.
    pub ids: Box<[u32]>,
    /// How many elements are wanted at most, the largest ones; `None`: all that are not zero.
    pub elements_max: Option<u32>,
}

/// One text, or a query and a document as one sequence, to be scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredItem {
    /// Token ids, special tokens included.
    pub ids: Box<[u32]>,
    /// The first of them that is of the second token type; how many there are, if none is.
    pub second_from: usize,
    /// Logits are wanted, not scores.
    pub raw: bool,
}

/// An input for a program, with the parameters of its job and its cost in the unit that the model's memory goes by.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramItem {
    pub item: ProgramInput,
    pub params: Arc<Params>,
    pub cost: usize,
}

/// One input of a program.
#[derive(Clone, Debug, PartialEq)]
pub enum ProgramInput {
    Text(String),
    /// `media_type`: if it is known.
    Bytes {
        media_type: Option<String>,
        bytes: Vec<u8>,
    },
    Json(JsonText),
    Uri(String),
}

/// The most that an item's output takes, before it is encoded for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputMax {
    /// A vector of so many elements.
    Embedding { elements: u64, format: EmbeddingFormat },
    /// A sparse vector with so many elements that are not zero.
    Sparse { elements: u64 },
    /// So many bytes of text, as a JSON value.
    Text(u64),
    /// So many bytes as they are.
    Bytes(u64),
    /// A reference of so many bytes.
    Uri(u64),
}

/// The shape of a pass with these items.
pub fn shape_of(items: &[Item]) -> PassShape {
    items.iter().map(Item::cost).collect()
}

/// Why inputs cannot become items. The publisher is at fault, so the job is never retried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidInput(pub String);

impl From<AllocError> for PassError {
    fn from(error: AllocError) -> Self {
        match error {
            AllocError::OutOfMemory(oom) => oom.into(),
            // Neither the job's fault nor cured by a smaller pass, but another worker or a new process may have the memory.
            AllocError::HostExhausted { .. } => Self::DeviceLost(error.to_string()),
        }
    }
}

impl From<CudaError> for PassError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::OutOfMemory(oom) => oom.into(),
            CudaError::Lost { .. } => Self::DeviceLost(error.to_string()),
            CudaError::Refused { .. } => Self::Failed(error.to_string()),
        }
    }
}

/// A loaded model. One instance serves all jobs of its model; passes run one at a time on its device's thread.
pub trait Engine: Send + Sync {
    /// Device bytes held for as long as the model is loaded.
    fn resident_bytes(&self) -> u64;

    /// The largest cost that [`prepare`](Self::prepare) gives to one item.
    fn item_cost_max(&self) -> usize;

    /// The cost of a pass that keeps the device busy, where the engine knows better than a default for all devices.
    fn pass_cost(&self) -> Option<usize> {
        None
    }

    /// Distinguishes this model from others of its name that give other outputs, by its weights or program and its element type.
    /// `None` if that is unknown.
    fn revision(&self) -> Option<String> {
        None
    }

    /// The types and units that passes are computed with, in words, for an operator.
    fn computes(&self) -> Option<String> {
        None
    }

    /// The routing key of the workers that are to run a job with these inputs instead, if the configuration has one for them.
    fn moves_to(&self, _inputs: &[Input]) -> Option<String> {
        None
    }

    /// The model's processes, if it runs in processes of its own.
    fn processes(&self) -> Vec<ProcessStatus> {
        Vec::new()
    }

    /// Device bytes that a pass of this shape takes while it runs: an exact figure, or an upper bound.
    fn pass_bytes(&self, shape: PassShape) -> u64;

    /// Whether [`prepare`](Self::prepare) only passes inputs on. Handing that to another thread would cost more than doing it.
    fn takes_inputs_as_they_come(&self) -> bool {
        false
    }

    /// Whether the engine takes references as inputs. The worker then fetches nothing.
    fn takes_references(&self) -> bool {
        false
    }

    /// The most that an input's output takes; `None` if that is not known before it runs.
    fn output_max(&self, _input: &Input, _params: &Params) -> Option<OutputMax> {
        None
    }

    /// Looks at all inputs of a job, without the work of preparing them.
    ///
    /// # Errors
    /// Names the first input that the engine does not take, by its index.
    fn check(&self, _inputs: &[Input], _params: &Params) -> Result<(), InvalidInput> {
        Ok(())
    }

    /// Whether a job's inputs may be prepared a few at a time, between its passes. That requires `check` to find all faults in
    /// them.
    fn prepares_in_pieces(&self) -> bool {
        false
    }

    /// Turns a job's inputs into items, in order. CPU work only: called off the runtime and off the device's
    /// thread, for several jobs at once.
    ///
    /// # Errors
    /// Names the first input that the engine does not take, by its index.
    fn prepare(&self, inputs: &[Input], params: &Params) -> Result<Vec<Item>, InvalidInput>;

    /// Runs one pass: outputs in the order of `items`. Called on the device's thread only.
    ///
    /// # Errors
    /// See [`PassError`]. In any case the pass's memory is returned before this returns.
    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError>;
}
