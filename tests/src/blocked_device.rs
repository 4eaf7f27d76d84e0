//! A device that runs no pass until it is released, so that a test can keep jobs unacknowledged for as long as it needs.

use anyhow::Result;
use vramq_inference::device::lock::DeviceLockGuard;

use crate::shared_device::SharedDevice;

/// Memory of the device: never the limit here.
const MEMORY_MIB: u64 = 256;

/// A device that several workers may share, kept by this process.
#[derive(Debug)]
pub struct BlockedDevice {
    device: SharedDevice,
    lock: Option<DeviceLockGuard>,
}

impl BlockedDevice {
    /// # Errors
    /// The file cannot be locked.
    pub async fn new() -> Result<Self> {
        let device = SharedDevice::new(MEMORY_MIB)?;
        let lock = Some(device.block().await?);
        Ok(Self { device, lock })
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
