//! What programs and their accounting need to know of a device; and the host's memory in the place of one.

use std::fmt;

use crate::process_tree;

/// A device, as far as programs on it are concerned. Implementations may take milliseconds: they are called off the runtime.
pub trait DeviceView: fmt::Debug + Send + Sync {
    /// `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// Whether programs on it compute with the host's processors.
    fn computes_on_host(&self) -> bool {
        self.name() == "cpu"
    }

    /// The memory now; `None` if it cannot be read. `programs`: the processes of the worker's programs, for a device that cannot see what
    /// they hold.
    fn memory(&self, programs: &[i32]) -> Option<Reading>;

    /// Bytes that these processes hold together; `None` if the device cannot tell processes apart.
    fn held_by(&self, pids: &[i32]) -> Option<u64>;

    /// Whether memory that is not free after a program has ended may be the program's. Not where others take and free memory all the time.
    fn shows_what_is_left(&self) -> bool {
        true
    }

    /// What programs need in their environment to find this device, and no other: `CUDA_VISIBLE_DEVICES`.
    fn env(&self) -> Vec<(String, String)>;
}

/// Bytes of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub free: u64,
    pub total: u64,
    /// Held by the worker's own process, for passes that it runs itself.
    pub own: u64,
}

/// The host's memory as a device: a process holds its private resident memory. For trying a model by hand.
#[derive(Debug)]
pub struct HostView;

impl DeviceView for HostView {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self, _: &[i32]) -> Option<Reading> {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
        };
        let (free, total) = (kib("MemAvailable:") << 10, kib("MemTotal:") << 10);
        (total > 0).then_some(Reading { free, total, own: 0 })
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        Some(pids.iter().map(|pid| process_tree::private_bytes(*pid)).sum())
    }

    /// All programs of the machine use this memory.
    fn shows_what_is_left(&self) -> bool {
        false
    }

    fn env(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}
