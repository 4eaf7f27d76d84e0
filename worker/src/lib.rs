//! The worker: takes jobs from RabbitMQ as memory allows, runs them on a device, publishes the results, acknowledges last.
//!
//! This crate is the shell around [`vramq_core`], which decides. [`event_loop`] passes events to the core and carries its
//! actions out.

// No message, peer or device may cause a panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod app;
pub mod broker;
pub mod config;
pub mod context;
pub mod decode;
pub mod event_loop;
pub mod executor;
pub mod failpoint;
pub mod host_memory;
pub mod identity;
pub mod job_store;
pub mod limits_writer;
pub mod model;
pub mod observability;
pub mod preparation;
mod prepared_items;
pub mod progress;
pub mod publishers;
pub mod retry;
pub mod run_outputs;
pub mod signals;
pub mod state_file;
pub mod stores;
pub mod wire_size;

use std::time::{SystemTime, UNIX_EPOCH};

pub use vramq_inference::{device, engine};

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
