//! A device that several processes share; the test process takes memory of it as another user.

use anyhow::{Context as _, Result};
use tempfile::TempDir;
use vramq_inference::device::Memory;
use vramq_inference::device::ledger::Ledger;
use vramq_inference::device::lock::{DeviceLock, DeviceLockGuard};

/// What the echo engine takes of the device per item.
pub const ECHO_ITEM_BYTES: u64 = 1024;

/// A shared device of its own for one test. This process is one of those on it, and for workers a foreign one.
#[derive(Debug)]
pub struct SharedDevice {
    folder: TempDir,
    memory_mib: u64,
    ledger: Ledger,
}

impl SharedDevice {
    /// # Errors
    /// The system has no room for a small file.
    pub fn new(memory_mib: u64) -> Result<Self> {
        let folder = tempfile::tempdir().context("make a folder")?;
        let ledger = Ledger::shared(&folder.path().join("memory"), memory_mib << 20)?;
        Ok(Self { folder, memory_mib, ledger })
    }

    /// The settings that put a worker on it.
    pub fn settings(&self) -> [String; 3] {
        [
            format!("device.cpu.file={}", self.folder.path().join("memory").display()),
            format!("device.cpu.memory_mib={}", self.memory_mib),
            "device.cpu.reserve_mib=0".to_owned(),
        ]
    }

    /// Takes memory, as a neighbour does.
    ///
    /// # Errors
    /// There is not so much free.
    pub fn hold(&self, bytes: u64) -> Result<()> {
        Ok(self.ledger.take(bytes)?)
    }

    /// Gives it back.
    pub fn give_back(&self, bytes: u64) {
        self.ledger.give(bytes);
    }

    /// The memory now. Waits while a worker uses the device's file. A file that cannot be read counts as a full device.
    pub fn memory(&self) -> Memory {
        self.ledger.try_memory().unwrap_or(Memory { free: 0, total: self.memory_mib << 20, foreign: 0 })
    }

    /// Holds the device lock: passes wait for it until the returned value is dropped.
    ///
    /// # Errors
    /// The file cannot be locked.
    pub async fn block(&self) -> Result<DeviceLockGuard> {
        Ok(DeviceLock::shared(&self.folder.path().join("memory"))?.enter(true).await?)
    }
}
