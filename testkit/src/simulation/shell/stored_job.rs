//! A job that a worker's process holds: the data of the shell, and the data that the checks compare.

use std::collections::VecDeque;

use vramq_core::action::Route;
use vramq_core::event::Source;
use vramq_core::ids::{ChannelId, ConsumerId, ModelIndex};
use vramq_schemas::{Attempt, JobHeaders, Reason};

use super::pace::Tries;
use super::publications::{Out, What};
use crate::simulation::agenda::Micros;
use crate::simulation::ledger::{JobNumber, Letter};

/// Whether the process has heard that the job's caller withdrew it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Withdrawn {
    No,
    /// It arrived while something about the job was being published, so it may have been too late.
    WhilePublishing,
    Yes,
}

/// How a job came.
pub(super) struct Delivered {
    pub(super) channel: ChannelId,
    pub(super) source: Source,
    pub(super) tag: u64,
    pub(super) withdrawn: Withdrawn,
    /// How often the broker delivered it before, as far as it says so.
    pub(super) returns: u32,
    /// When, by both clocks.
    pub(super) at: Micros,
    pub(super) at_ms: u64,
    /// How often the device had been found to be sick by then.
    pub(super) findings: u32,
}

/// What the broker last confirmed about a job that ends here, or what the worker last sent to it.
#[derive(Clone, Debug)]
pub(super) enum SeenEnd {
    Replied,
    Requeued(Box<JobHeaders>, Route),
    DeadLettered(Reason),
    Rejected(Reason),
    Withdrawn,
    GivenBack,
}

/// A job that this process holds.
#[derive(Debug)]
pub(super) struct StoredJob {
    pub(super) letter: Letter,
    pub(super) job: JobNumber,
    pub(super) model: ModelIndex,
    pub(super) channel: ChannelId,
    pub(super) tag: u64,
    pub(super) consumer: Option<ConsumerId>,
    pub(super) source: Source,
    pub(super) returns: u32,
    pub(super) delivered_at: Micros,
    pub(super) delivered_ms: u64,
    pub(super) first_pass_at: Option<Micros>,
    /// Outputs that are there, by item.
    pub(super) outputs: Vec<bool>,
    /// The first item that is in no reply yet.
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
    /// What its share of them took, in nanoseconds.
    pub(super) had_device: u64,
    /// The out-of-memories of passes with the job, as its history may list them.
    pub(super) ran_out: Vec<Attempt>,
    /// When a pass with it on the device's own thread failed otherwise.
    pub(super) failed_at: Option<Micros>,
    /// A pass with it failed on any executor: it may run without others from then on.
    pub(super) may_be_alone: bool,
    /// How many programs died in a pass with it.
    pub(super) programs_lost: u32,
    /// Whether a pass hung on the device while the job was held.
    pub(super) was_behind_hung: bool,
    pub(super) findings_before: u32,
    /// Whether a store failed to return its inputs.
    pub(super) store_failed: bool,
    /// Since when its inputs are being fetched.
    pub(super) fetches_since: Option<Micros>,
    /// Whether its store was silent when it was read, so that it may wait without a fetch.
    pub(super) may_wait_unfetched: bool,
    /// The disk had no room for a pass of its items alone.
    pub(super) had_no_room_alone: bool,
    /// The message of its next attempt, once that is published.
    pub(super) next_attempt: Option<Letter>,
    /// It demands another revision of its model.
    pub(super) is_of_other_revision: bool,
    /// Whether it must move to the queue of large jobs.
    pub(super) must_move: bool,
    /// Whether an operator was told that it will be stopped.
    pub(super) is_cancelled: bool,
    /// Since when it has been waiting although the device has memory for it.
    pub(super) room_since: Option<Micros>,
    /// Passes of its model that started while it waited.
    pub(super) passed_over: usize,
    /// Whether its next attempt was checked. A refused one is published again, and passes that were given up may have ended by then.
    pub(super) is_requeued: bool,
    /// Outputs of it that count as lost with its requeue.
    pub(super) recomputed: usize,
    /// What is being published, and how often it was refused.
    pub(super) what: Option<What>,
    pub(super) tries: Tries,
    /// The other attempt that is being published.
    pub(super) requeue: Option<(Box<JobHeaders>, Route)>,
    /// The last reply is a part: more follow.
    pub(super) is_part_out: bool,
    /// The first item of the reply that was not taken.
    pub(super) refused_from: Option<u32>,
    /// Whether a full queue refused another message about it.
    pub(super) was_refused: bool,
    /// Whether a full queue refused its dead letter, so that it may come back undecided.
    pub(super) is_dead_refused: bool,
    pub(super) end: Option<SeenEnd>,
    /// Its end was counted.
    pub(super) is_counted: bool,
    pub(super) unconfirmed: VecDeque<Out>,
    pub(super) reply_messages: u32,
    /// Whether something about it is being published, after which more may be published.
    pub(super) is_publishing: bool,
    pub(super) withdrawn: Withdrawn,
}

impl StoredJob {
    /// A job that was just delivered, of so many items. Those before `next` were answered earlier.
    pub(super) fn new(letter: Letter, job: JobNumber, delivered: Delivered, items: usize, next: u32) -> Self {
        let Delivered { channel, source, tag, withdrawn, returns, at, at_ms, findings } = delivered;
        Self {
            letter,
            job,
            model: channel.model,
            channel,
            tag,
            consumer: source.consumer(),
            source,
            returns,
            delivered_at: at,
            delivered_ms: at_ms,
            first_pass_at: None,
            outputs: vec![false; items],
            next,
            prepared: next,
            asked: 0,
            is_decoded: false,
            has_inputs: false,
            has_started: false,
            fitted: 0,
            had_device: 0,
            ran_out: Vec::new(),
            failed_at: None,
            may_be_alone: false,
            programs_lost: 0,
            was_behind_hung: false,
            findings_before: findings,
            store_failed: false,
            fetches_since: None,
            may_wait_unfetched: false,
            had_no_room_alone: false,
            next_attempt: None,
            is_of_other_revision: false,
            must_move: false,
            is_cancelled: false,
            room_since: None,
            passed_over: 0,
            is_requeued: false,
            recomputed: 0,
            what: None,
            tries: Tries::default(),
            requeue: None,
            is_part_out: false,
            refused_from: None,
            was_refused: false,
            is_dead_refused: false,
            end: None,
            is_counted: false,
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
