//! A device that runs no pass until it is released, so that a test can keep jobs unacknowledged for as long as it needs.

use anyhow::Result;
use vramq_inference::device::lock::DeviceLock;

use crate::shared_device::SharedDevice;

/// Memory of the device: never the limit here.
const MEMORY_MIB: u64 = 256;

/// A device that several workers may share, kept by this process.
#[derive(Debug)]
pub struct BlockedDevice {
    device: SharedDevice,
    lock: Option<DeviceLock>,
}

impl BlockedDevice {
    /// # Errors
    /// The file cannot be locked.
    pub fn new() -> Result<Self> {
        let device = SharedDevice::new(MEMORY_MIB)?;
        let lock = device.block()?;
        // The lock ends with its file, when this is released.
        std::mem::forget(lock.enter(true)?);
        Ok(Self { device, lock: Some(lock) })
    }

    /// The settings that put a worker on it.
    pub fn settings(&self) -> [String; 3] {
        self.device.settings()
    }

    /// Lets passes run from now on.
    pub fn release(&mut self) {
        self.lock = None;
    }
}
