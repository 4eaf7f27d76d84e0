//! A keeper: a small process that starts one program, and ensures that none of its processes outlives the worker.
//!
//! Each program has its own keeper, with one thread: the kernel's parent-death signal follows the thread that forked, and only
//! the reaper of all descendants knows when the last of them is gone. It is the worker's own executable, started again with
//! [`ARGUMENT`].

mod launch;
mod messages;
mod serve;

pub use launch::Limits;
pub use messages::{Death, Order, OutputUse, Report, Spec};
pub use serve::keeper_main;

/// The hidden argument with which the worker's executable becomes a keeper. It is the only one then.
pub const ARGUMENT: &str = "__keeper";
