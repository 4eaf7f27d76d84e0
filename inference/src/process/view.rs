//! The memory of a worker's device that its programs share.

use std::sync::{Arc, OnceLock, Weak};

use super::device_view::{DeviceView, Reading};
use super::memory::DeviceAccount;
use crate::device::{Device, Memory};

/// What programs call the only GPU that they see.
const FIRST_GPU: &str = "cuda:0";

/// A device of the worker's, for the account of its programs.
#[derive(Debug)]
pub struct WorkerDevice {
    device: Arc<dyn Device>,
    account: OnceLock<Weak<DeviceAccount>>,
}

impl WorkerDevice {
    /// The account of a device's programs.
    pub fn account(device: Arc<dyn Device>) -> Arc<DeviceAccount> {
        let view = Arc::new(Self { device, account: OnceLock::new() });
        let account = DeviceAccount::new(Arc::<Self>::clone(&view));
        // The first and only time.
        let _ = view.account.set(Arc::downgrade(&account));
        account
    }
}

impl DeviceView for WorkerDevice {
    fn name(&self) -> &str {
        let name = self.device.name();
        if name.starts_with("cuda") { FIRST_GPU } else { name }
    }

    fn memory(&self) -> Reading {
        // A reading from before a program took its memory would not show it.
        self.device.refresh();
        if let Some(account) = self.account.get().and_then(Weak::upgrade) {
            self.device.note_programs(self.device.held_by(&account.pids()).unwrap_or(0));
        }
        let memory = self.device.memory();
        let Memory { free, total, .. } = memory;
        Reading { free, total, own: memory.own() }
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        self.device.held_by(pids)
    }

    fn env(&self) -> Vec<(String, String)> {
        self.device.program_env()
    }
}
