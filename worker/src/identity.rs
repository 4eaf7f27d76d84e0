//! The name and version of this worker.

/// The worker's name and version: named in replies, dead letters, heartbeats, metrics and spans.
#[derive(Clone, Debug)]
pub struct Identity {
    pub worker: String,
    pub version: &'static str,
}
