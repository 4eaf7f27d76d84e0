//! Types of a device and its passes: memory, sizes, and the ways in which a pass can fail.

use std::fmt;

/// A reading of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub free: u64,
    pub total: u64,
    /// Held by other processes.
    pub foreign: u64,
}

impl Memory {
    /// Bytes held by this process.
    pub fn own(&self) -> u64 {
        self.total.saturating_sub(self.free).saturating_sub(self.foreign)
    }
}

/// An allocation that the device refused, as its allocator reported it. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    pub asked: u64,
    pub free: u64,
    pub total: u64,
    /// Held by other processes.
    pub foreign: u64,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, free, total, foreign } = self;
        write!(
            f,
            "out of device memory: asked for {asked} bytes, {free} of {total} are free, other processes hold {foreign}"
        )
    }
}

impl std::error::Error for OutOfMemory {}

/// Why a device is unusable until the process restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub error: String,
    /// The cause is older than the pass that runs now, so this pass is not to blame.
    pub is_late: bool,
}

/// The cost of an item whose cost is unknown, such as an image without a known header: more than any item has, and so little that the sum
/// over a job's items fits a `usize`.
pub const UNKNOWN_COST: usize = 1 << 40;

/// A cost as logs and dead letters say it; `None` if it is unknown.
pub(crate) fn told(cost: usize) -> Option<u32> {
    (cost < UNKNOWN_COST).then(|| u32::try_from(cost).unwrap_or(u32::MAX))
}

/// A cost as metrics count it: an unknown one is 1, the least that an item has.
pub(crate) fn counted(cost: usize) -> usize {
    if cost < UNKNOWN_COST { cost } else { 1 }
}

/// A cost as the work that it stands for: an item of unknown cost has a pass to itself.
pub(crate) fn work(cost: usize, pass_cost_max: usize) -> usize {
    if cost < UNKNOWN_COST { cost } else { pass_cost_max }
}

/// The sizes of a pass on which its memory depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassShape {
    pub items: usize,
    /// Sum of the items' costs (tokens, for an encoder).
    pub cost: usize,
    /// The largest cost of one item.
    pub longest: usize,
}

impl PassShape {
    /// The shape after one more item.
    #[must_use]
    pub fn with(self, cost: usize) -> Self {
        Self { items: self.items + 1, cost: self.cost + cost, longest: self.longest.max(cost) }
    }

    /// The shape of so many of these together.
    #[must_use]
    pub fn times(self, count: usize) -> Self {
        Self { items: self.items * count, cost: self.cost * count, longest: self.longest }
    }
}

impl FromIterator<usize> for PassShape {
    /// From the costs of the items.
    fn from_iter<I: IntoIterator<Item = usize>>(costs: I) -> Self {
        costs.into_iter().fold(Self::default(), Self::with)
    }
}

impl From<OutOfMemory> for PassError {
    fn from(oom: OutOfMemory) -> Self {
        Self::OutOfMemory { oom, said: String::new(), by_text: false }
    }
}

/// How a pass can end without all its outputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PassError {
    #[error("{oom}")]
    OutOfMemory {
        oom: OutOfMemory,
        /// The program's own message, for people; empty for built-in engines.
        said: String,
        /// All that is known of it is a message that the program printed. A program may also print what a caller gave it, so this teaches
        /// nothing about the jobs of others.
        by_text: bool,
    },
    /// The engine could not run these items; the device is well.
    #[error("{0}")]
    Failed(String),
    /// The same, where the engine names the item, by its index in the pass.
    #[error("{text}")]
    FailedItem { item: usize, text: String },
    /// The engine says that an item can never be run; the device is well. `item`: the index in the pass, if the engine names one.
    #[error("{text}")]
    InvalidInput { item: Option<usize>, text: String },
    /// The items took longer than they may; the device is well.
    #[error("{0}")]
    TimedOut(String),
    /// A disk has no room for all items of the pass together, or for what the engine writes while it runs them. The device is well.
    #[error("{0}")]
    DiskFull(String),
    /// The process that ran these items died; the device and other processes are not affected. Which job caused it is not known.
    #[error("{0}")]
    Crashed(String),
    /// The device is unusable until the process restarts, and these items may be the cause.
    #[error("device lost: {0}")]
    DeviceLost(String),
}
