//! Observability of the worker: metrics, status, health, heartbeats, and spans.

pub mod http;
pub mod metrics;
pub mod spans;
pub mod status_board;
pub mod status_reporter;
pub mod summary;
