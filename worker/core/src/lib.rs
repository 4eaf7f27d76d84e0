//! What a vramq worker decides.
//!
//! [`Core`] is a state machine without I/O: [`Core::apply`] takes an event and the time, and answers with actions. It has no
//! clock, no thread, no socket and no file. The shell (`vramq-worker`) turns RabbitMQ, the device, the CPU pool, operators
//! and signals into events, and carries the actions out.

#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

pub mod acks;
pub mod action;
pub mod admission;
mod backoff;
mod commands;
mod consumers;
mod core;
mod credit;
mod dedup;
mod destinations;
pub mod device;
pub mod device_health;
mod disposition;
pub mod event;
mod handlers;
mod health_watch;
pub mod ids;
mod jobs;
mod large_turns;
pub mod learned_limits;
mod lifecycle;
mod memory_watch;
mod model_slots;
pub mod observation;
pub mod poison_policy;
mod pressure;
mod quarantine;
mod random;
mod redelivery;
pub mod rejection;
mod scheduling;
mod session;
pub mod settings;
mod silent_stores;
pub mod sizes;
mod slot_controller;
pub mod slots;
mod standstill;
pub mod status;
mod successors;
mod time_limits;
mod timers;
pub mod units;
mod withdrawals;

pub use crate::core::Core;
