//! What a vramq worker decides.
//!
//! [`Core`] is a state machine without I/O: [`Core::apply`] takes an event and the time, and answers with actions. It has no
//! clock, no thread, no socket and no file. The shell (`vramq-worker`) turns RabbitMQ, the device, the CPU pool, operators
//! and signals into events, and carries the actions out.

pub mod action;
pub mod acks;
pub mod admission;
pub mod dedup;
pub mod device;
pub mod device_health;
pub mod event;
pub mod ids;
pub mod learned_limits;
pub mod observation;
pub mod poison_policy;
pub mod pressure;
pub mod rejection;
pub mod settings;
pub mod slot_controller;
pub mod slots;
pub mod status;
pub mod units;

use std::time::Instant;

use action::Action;
use admission::Budget;
use event::{Event, Now};
use learned_limits::LearnedLimits;
use settings::{ModelFacts, Settings};
use status::{MemoryStatus, Status};

/// A worker's decisions. It lives as long as the process and through all its sessions with the broker.
#[derive(Debug)]
pub struct Core {}

impl Core {
    /// A worker that has loaded its models and has no session yet. `budget` is what the device has for passes; clones of it
    /// show others how much is in use.
    pub fn new(settings: Settings, models: Vec<ModelFacts>, limits: LearnedLimits, budget: Budget) -> Self {
        let _ = (settings, models, limits, budget);
        Self {}
    }

    /// Takes in an event. The actions are to be carried out in their order before the next event is applied; carrying them
    /// out does not mean to wait for their answers.
    pub fn apply(&mut self, event: Event, now: Now) -> Vec<Action> {
        let _ = (event, now);
        Vec::new()
    }

    /// When `Event::Timer` is due next, if it is.
    pub fn next_timer(&self) -> Option<Instant> {
        None
    }

    /// What the worker does now. Costs a few dozen loads: made to be called whenever nothing else is at hand.
    pub fn status(&self) -> Status {
        unimplemented!()
    }

    pub fn memory_status(&self, at: Instant) -> MemoryStatus {
        let _ = at;
        unimplemented!()
    }

    /// What is known of passes that fit and passes that do not.
    pub fn learned_limits(&self) -> &LearnedLimits {
        unimplemented!()
    }

    /// The worker was asked to stop: no session follows the one that ends.
    pub fn is_draining(&self) -> bool {
        false
    }

    /// The process is to be started again when it has ended (exit code 5).
    pub fn wants_restart(&self) -> bool {
        false
    }

    /// Jobs that were unacknowledged when the last session ended.
    pub fn unsettled(&self) -> usize {
        0
    }
}
