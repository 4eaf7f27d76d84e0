//! Observability of the worker: metrics, status, health, heartbeats, spans and logs.

pub mod http;
pub mod logs;
pub mod metrics;
pub mod spans;
pub mod status_board;
pub mod status_reporter;
pub mod summary;
