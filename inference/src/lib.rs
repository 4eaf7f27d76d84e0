//! Runs passes: devices that hold memory, engines in this process, and programs of the user in their own processes. Knows nothing
//! of RabbitMQ.

pub mod device;
pub mod engine;
pub mod process;
mod process_tree;
pub mod revision;
