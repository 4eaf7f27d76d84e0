//! The memory of a worker's device that its programs share.

use std::sync::Arc;

use super::device_view::{DeviceView, Reading};
use super::memory::DeviceAccount;
use crate::device::{Device, Memory};

/// What programs call the only GPU that they see.
const FIRST_GPU: &str = "cuda:0";

/// A device of the worker's, for the account of its programs.
#[derive(Debug)]
pub struct WorkerDevice(Arc<dyn Device>);

impl WorkerDevice {
    /// The account of a device's programs.
    pub fn account(device: Arc<dyn Device>) -> Arc<DeviceAccount> {
        DeviceAccount::new(Arc::new(Self(device)))
    }
}

impl DeviceView for WorkerDevice {
    fn name(&self) -> &str {
        let name = self.0.name();
        if name.starts_with("cuda") { FIRST_GPU } else { name }
    }

    fn memory(&self, programs: &[i32]) -> Option<Reading> {
        self.0.note_programs(programs);
        // Not the reading of a moment ago, which would not show what a program has just taken.
        let memory = self.0.try_memory()?;
        let Memory { free, total, .. } = memory;
        Some(Reading { free, total, own: memory.own() })
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        self.0.held_by(pids)
    }

    fn env(&self) -> Vec<(String, String)> {
        self.0.program_env()
    }
}
