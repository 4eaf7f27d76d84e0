//! Dead letters of a model: reads their queue without changing it, groups and explains them, and moves them to be retried or
//! archived. `vramq dlq` and the gateway's page use this crate.
//!
//! A dead letter leaves its queue only when another queue has confirmed it or the disk has it. Every action is logged before it
//! begins ([`audit_log`]).

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

pub mod access;
pub mod archive;
pub mod audit_log;
mod byte_limiter;
pub mod dead_letter;
pub mod destination;
mod error;
pub mod explain;
mod fingerprint;
pub mod groups;
mod header_values;
mod pairing;
pub mod plan;
pub mod preview;
pub mod queue_lock;
pub mod reader;
pub mod record;
pub mod republish;
pub mod scan;
pub mod select;
mod stop;
pub mod text;
pub mod transfer;

pub use access::Access;
pub use error::Error;
pub use stop::{Stop, Stops};
