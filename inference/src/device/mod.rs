//! The seam to a device: the memory that engines allocate from and that admission counts.

pub mod any;
pub mod cpu;
pub mod cuda;
pub mod fault;
pub mod lane;
pub mod ledger;
pub mod telemetry;
pub mod thread;

use std::fmt;

use telemetry::Telemetry;

/// A reading of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub free: u64,
    pub total: u64,
    /// Held by other processes.
    pub foreign: u64,
}

impl Memory {
    /// Held by this process.
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

/// A device that is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub error: String,
    /// It came to light after whatever did it: the pass that runs now did not.
    pub is_late: bool,
}

/// A device that engines run on. Implemented by [`cpu::CpuDevice`] and [`cuda::CudaDevice`]. Nothing here waits for the device:
/// the event loop asks.
pub trait Device: Send + Sync + fmt::Debug {
    /// How logs, metrics and dead letters name it: `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// The memory now.
    fn memory(&self) -> Memory;

    /// Bytes of it that passes which run now hold: they come back by themselves.
    fn passing(&self) -> u64;

    /// Gives back to the system what is kept for the next pass, at once or soon.
    fn trim(&self);

    /// Why it is of no use until the process restarts, if it is not. Does not wait for it.
    fn lost(&self) -> Option<Loss>;

    /// The newest readings of its sensors, if it has some and they can be read.
    fn telemetry(&self) -> Option<Telemetry>;

    /// Who may run passes on it.
    fn lane(&self) -> &lane::Lane;
}
