//! Control groups (cgroup v2) for programs: one for each, where the worker's own group is delegated to it. The kernel then bounds a
//! program's host memory, kills all its processes in one step, and knows when the last of them is gone.
//!
//! Where no group is delegated, keepers find processes by their parents, and add up their resident memory.

mod delegation;
mod group;

pub use delegation::{Cgroups, NotDelegated};
pub use group::{Group, HostOom};
