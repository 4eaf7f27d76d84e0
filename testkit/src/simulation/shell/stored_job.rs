//! A job that a worker's process holds: the data of the shell, and the data that the checks compare.

use std::collections::VecDeque;

use vramq_core::event::Source;
use vramq_core::ids::{ConsumerId, ModelIndex};

use super::publications::Out;
use crate::simulation::agenda::Micros;
use crate::simulation::ledger::{JobNumber, Letter};

/// Whether the process has heard that the job's caller withdrew it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Withdrawn {
    No,
    /// While something about the job was being published: it may have been too late.
    WhilePublishing,
    Yes,
}

/// How a job came.
pub(super) struct Delivered {
    pub(super) model: ModelIndex,
    pub(super) source: Source,
    pub(super) tag: u64,
    pub(super) withdrawn: Withdrawn,
}

/// A job that this process holds.
#[derive(Debug)]
pub(super) struct StoredJob {
    pub(super) letter: Letter,
    pub(super) job: JobNumber,
    pub(super) model: ModelIndex,
    pub(super) tag: u64,
    pub(super) consumer: Option<ConsumerId>,
    /// Outputs that are there, by item.
    pub(super) outputs: Vec<bool>,
    /// The first item that no reply was made of.
    pub(super) next: u32,
    /// The first item that is not prepared, and the cost that the core last asked for.
    pub(super) prepared: u32,
    pub(super) asked: usize,
    pub(super) is_decoded: bool,
    /// The inputs that it refers to are here.
    pub(super) has_inputs: bool,
    pub(super) has_started: bool,
    /// Passes of it that fitted since it was delivered.
    pub(super) fitted: u32,
    /// Since when it waits although the device has room for it.
    pub(super) room_since: Option<Micros>,
    /// Passes of its model that started while it waited.
    pub(super) passed_over: usize,
    /// Its next attempt was checked: a refused one is published again, when passes that were given up may have ended.
    pub(super) is_requeued: bool,
    pub(super) unconfirmed: VecDeque<Out>,
    pub(super) reply_messages: u32,
    /// Something about it is being published, and more may follow from that.
    pub(super) is_publishing: bool,
    pub(super) withdrawn: Withdrawn,
}

impl StoredJob {
    /// A job that was just delivered, of so many items. Those before `next` were answered earlier.
    pub(super) fn new(letter: Letter, job: JobNumber, delivered: Delivered, items: usize, next: u32) -> Self {
        let Delivered { model, source, tag, withdrawn } = delivered;
        Self {
            letter,
            job,
            model,
            tag,
            consumer: source.consumer(),
            outputs: vec![false; items],
            next,
            prepared: next,
            asked: 0,
            is_decoded: false,
            has_inputs: false,
            has_started: false,
            fitted: 0,
            room_since: None,
            passed_over: 0,
            is_requeued: false,
            unconfirmed: VecDeque::new(),
            reply_messages: 0,
            is_publishing: false,
            withdrawn,
        }
    }

    /// Prepares the next items, of as much cost as was asked for. Gives the cost of each.
    pub(super) fn prepare_next(&mut self, costs: &[usize]) -> Vec<usize> {
        let (mut sum, mut prepared) = (0, Vec::new());
        while let Some(cost) = costs.get(self.prepared as usize).filter(|_| sum < self.asked) {
            sum += (*cost).max(1);
            prepared.push(*cost);
            self.prepared += 1;
        }
        prepared
    }
}
