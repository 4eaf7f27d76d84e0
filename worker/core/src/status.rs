//! The current status of a worker, for the status board, heartbeats and gauges.

use std::time::Duration;

use vramq_schemas::status::WorkerState;

/// What the worker does now.
#[derive(Clone, Debug)]
pub struct Status {
    pub state: WorkerState,
    /// Why it takes no jobs, if it does not.
    pub reason: Option<&'static str>,
    pub models: Vec<ModelStatus>,
    pub is_blocked: bool,
    pub is_sick: bool,
}

/// What it does with one model.
#[derive(Clone, Copy, Debug)]
pub struct ModelStatus {
    pub slots: u16,
    /// Jobs that are unacknowledged.
    pub unacked: usize,
    /// Jobs with items that wait for a pass.
    pub waiting: usize,
    pub is_consuming: bool,
}

/// Figures that change slowly; read once a second.
#[derive(Clone, Copy, Debug)]
pub struct MemoryStatus {
    pub resident: u64,
    pub pressure_ratio: f64,
    pub pressure_lasted: Duration,
    /// Bytes held more than after the first passes, and for each job since.
    pub leaked: u64,
    pub leaked_per_job: u64,
}
