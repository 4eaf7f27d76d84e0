//! A deterministic world in which workers run: the same seed gives the same history.

pub mod agenda;
pub mod broker;
mod callers;
mod deletions;
mod device;
mod disks;
mod env;
mod fault;
mod faults;
mod ledger;
mod names;
mod odds;
pub mod plan;
pub mod plan_file;
mod random;
mod record;
pub mod sharing;
mod shell;
mod shrink;
pub mod trace;
mod waits;
mod withdrawals;
mod world;

pub use random::Random;
pub use shell::Sabotage;
pub use shrink::shrink;
pub use world::{History, run};
