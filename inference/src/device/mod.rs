//! The trait of devices: the memory that engines allocate from and that admission counts.

pub mod any;
pub mod cpu;
pub mod cuda;
pub mod fault;
pub mod ledger;
pub mod lock;
pub mod telemetry;

use std::fmt;

pub use vramq_core::device::{Loss, Memory, OutOfMemory};

use telemetry::Telemetry;

/// A device that engines run on. Implemented by [`cpu::CpuDevice`] and [`cuda::CudaDevice`]. Nothing here waits for the device,
/// because the event loop asks, unless it says so.
pub trait Device: Send + Sync + fmt::Debug {
    /// How logs, metrics and dead letters name it: `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// The memory now, or as it was a moment ago.
    fn memory(&self) -> Memory;

    /// The memory now; `None` if it cannot be read. May wait for the device: not for the event loop.
    fn try_memory(&self) -> Option<Memory>;

    /// Bytes that the passes which run now hold: they come back when these end.
    fn active_pass_bytes(&self) -> u64;

    /// Returns memory that is kept for the next pass to the system, at once or soon.
    fn trim(&self);

    /// Why it is unusable until the process restarts; `None` if it is usable. Does not wait for it.
    fn lost(&self) -> Option<Loss>;

    /// The newest readings of its sensors, if it has some and they can be read.
    fn telemetry(&self) -> Option<Telemetry>;

    /// Bytes that these processes hold on the device together; `None` if it cannot tell processes apart. May take milliseconds.
    fn held_by(&self, pids: &[i32]) -> Option<u64>;

    /// Records what the worker's own programs, which are these processes, hold: for a device that cannot see it.
    fn note_programs(&self, _pids: &[i32]) {}

    /// What programs need in their environment to find this device, and no other.
    fn program_env(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// The lock that keeps passes of other processes off the device.
    fn lock(&self) -> &lock::DeviceLock;
}
