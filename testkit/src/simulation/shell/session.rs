//! A session with the broker, as the simulated shell keeps it.

use std::collections::{BTreeMap, BTreeSet};

use vramq_core::ids::{ConsumerId, JobKey, ModelIndex};

use super::publications::{Outbox, Sent};
use crate::simulation::agenda::Micros;
use crate::simulation::broker::{ChannelId, ConnectionId, Name};

/// A consumer that was asked for.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) consumer: ConsumerId,
    pub(super) model: ModelIndex,
    pub(super) prefetch: u16,
    pub(super) tag: Name,
    pub(super) is_of_bulk: bool,
    /// The broker was asked to end it.
    pub(super) is_stopping: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: u32,
    pub(super) consuming: ConnectionId,
    pub(super) publishing: ConnectionId,
    pub(super) channels: Vec<ChannelId>,
    pub(super) publisher: ChannelId,
    pub(super) opened_at: Micros,
    pub(super) leases: Vec<Lease>,
    /// Of each channel: the jobs by their delivery tags.
    pub(super) tags: Vec<Vec<JobKey>>,
    pub(super) fetching: Option<ModelIndex>,
    /// Deliveries that were given back, by model and tag.
    pub(super) given_back: BTreeSet<(usize, u64)>,
    pub(super) published: u64,
    pub(super) confirms: BTreeMap<u64, Sent>,
    pub(super) outboxes: BTreeMap<JobKey, Outbox>,
}
