//! Runs passes: devices that hold memory, engines in this process, and programs of the user in their own processes. Knows nothing
//! of RabbitMQ.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

pub mod device;
pub mod engine;
pub mod process;
mod process_tree;
pub mod revision;
