//! The seam to a device: the memory that engines allocate from and that admission counts.

pub mod cpu;
pub mod cuda;
pub mod thread;

use std::fmt;

/// A reading of a device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub free: u64,
    pub total: u64,
}

/// An allocation that the device refused, as its allocator reported it. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    pub asked: u64,
    pub free: u64,
    pub total: u64,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { asked, free, total } = self;
        write!(f, "out of device memory: asked for {asked} bytes, {free} of {total} are free")
    }
}

impl std::error::Error for OutOfMemory {}

/// A device that engines run on. Implemented by [`cpu::CpuDevice`]; CUDA joins it.
pub trait Device: Send + Sync + fmt::Debug {
    /// How logs, metrics and dead letters name it: `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// Free and total memory now.
    fn memory(&self) -> Memory;
}
