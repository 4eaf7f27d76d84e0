//! The current status of a worker, for the status board, heartbeats and gauges.

use std::time::Duration;

use vramq_schemas::status::WorkerState;

/// The worker's state.
#[derive(Clone, Debug)]
pub struct Status {
    pub state: WorkerState,
    /// Why the worker takes no jobs, if it does not.
    pub reason: Option<&'static str>,
    pub models: Vec<ModelStatus>,
    pub is_blocked: bool,
    pub is_sick: bool,
}

/// One model's state.
#[derive(Clone, Copy, Debug)]
pub struct ModelStatus {
    pub slots: u16,
    /// Jobs that are unacknowledged.
    pub unacked: usize,
    /// Jobs that have items waiting for a pass.
    pub waiting: usize,
    pub is_consuming: bool,
}

/// Figures that change slowly; read once a second.
#[derive(Clone, Copy, Debug)]
pub struct MemoryStatus {
    pub resident: u64,
    pub pressure_ratio: f64,
    pub pressure_lasted: Duration,
    /// Bytes held beyond those after the first passes, and bytes per job since then.
    pub leaked: u64,
    pub leaked_per_job: u64,
}
