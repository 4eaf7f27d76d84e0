//! A worker's device, as its programs share it.

use std::sync::Arc;

use super::memory::{DeviceView, Reading};
use crate::device::{Device, Memory};

/// What programs call the only GPU that they see.
const FIRST_GPU: &str = "cuda:0";

/// A device of the worker's, for the book of its programs.
#[derive(Debug)]
pub struct WorkerDevice(Arc<dyn Device>);

impl WorkerDevice {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self(device)
    }
}

impl DeviceView for WorkerDevice {
    fn name(&self) -> &str {
        let name = self.0.name();
        if name.starts_with("cuda") { FIRST_GPU } else { name }
    }

    fn memory(&self) -> Reading {
        let Memory { free, total, .. } = self.0.memory();
        Reading { free, total }
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        self.0.held_by(pids)
    }

    fn env(&self) -> Vec<(String, String)> {
        self.0.program_env()
    }
}
