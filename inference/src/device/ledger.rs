//! Counts how much of a device's memory each process holds: in this process only, or in a file that several processes share.

mod shared;
mod table;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

pub use shared::Shared;
pub use table::LedgerError;

use super::{Memory, OutOfMemory};
use crate::process_tree;

/// The account of a device's memory. Bytes are taken before they are allocated and returned after they are freed.
#[derive(Debug)]
pub enum Ledger {
    /// The device belongs to this process. `programs` is what its programs, which use no ledger, held at the last look.
    Own { total: u64, used: AtomicU64, programs: AtomicU64 },
    /// Processes that name the same file share the device.
    Shared(Shared),
}

impl Ledger {
    /// Memory that only this process uses.
    pub fn own(total: u64) -> Self {
        Self::Own { total, used: AtomicU64::new(0), programs: AtomicU64::new(0) }
    }

    /// Memory that all processes share which name the same file; it is made if it is not there.
    ///
    /// # Errors
    /// See [`LedgerError`].
    pub fn shared(path: &Path, total: u64) -> Result<Self, LedgerError> {
        Shared::open(path, total).map(Self::Shared)
    }

    /// # Errors
    /// There is not so much free. Nothing is taken then.
    pub fn take(&self, bytes: u64) -> Result<(), OutOfMemory> {
        match self {
            Self::Own { total, used, programs } => {
                let foreign = programs.load(Ordering::Acquire).min(*total);
                used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                    used.checked_add(bytes).filter(|sum| *sum <= total - foreign)
                })
                .map(drop)
                .map_err(|used| OutOfMemory {
                    asked: bytes,
                    free: (total - foreign).saturating_sub(used),
                    total: *total,
                    foreign,
                })
            }
            Self::Shared(shared) => shared.take(bytes),
        }
    }

    /// Gives back what was taken.
    pub fn give(&self, bytes: u64) {
        match self {
            Self::Own { used, .. } => drop(used.fetch_sub(bytes, Ordering::AcqRel)),
            Self::Shared(shared) => shared.give(bytes),
        }
    }

    /// The memory now, or as it was a moment ago. Hardly waits, because the event loop asks. If the file cannot be read, the device counts
    /// as full.
    pub fn memory(&self) -> Memory {
        let (Self::Own { total, .. } | Self::Shared(Shared { total, .. })) = self;
        let memory = match self {
            Self::Own { .. } => self.try_memory(),
            Self::Shared(shared) => shared.memory_soon(),
        };
        memory.unwrap_or(Memory { free: 0, total: *total, foreign: 0 })
    }

    /// The memory now. Waits while another process uses the file. `None` if the file cannot be read.
    pub fn try_memory(&self) -> Option<Memory> {
        match self {
            Self::Own { total, used, programs } => {
                let used = used.load(Ordering::Acquire);
                let foreign = programs.load(Ordering::Acquire).min(total - used);
                Some(Memory { free: total - used - foreign, total: *total, foreign })
            }
            Self::Shared(shared) => shared.memory(),
        }
    }

    /// Bytes that these processes hold together: by their rows in the file, or else their resident memory. `None` if the file cannot be
    /// read.
    pub fn held_by(&self, pids: &[i32]) -> Option<u64> {
        match self {
            Self::Own { .. } => Some(pids.iter().map(|pid| process_tree::resident_bytes(*pid)).sum()),
            Self::Shared(shared) => shared.held_by(pids),
        }
    }

    /// Records what the worker's programs, which are these processes, hold. A shared file has that already.
    pub fn note_programs(&self, pids: &[i32]) {
        if let Self::Own { programs, .. } = self
            && let Some(bytes) = self.held_by(pids)
        {
            programs.store(bytes, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
