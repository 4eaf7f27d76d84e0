//! Decides what a redelivery means: the message was settled before, was given back, was lost with a session, or a worker crashed. Owns
//! what this process remembers about messages that it has seen.

use std::time::Instant;

use vramq_schemas::JobHeaders;
use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST, WORKER_LOST};

use crate::dedup::DedupCache;
use crate::event::{Delivery, Source};
use crate::ids::Fingerprint;
use crate::observation::End;
use crate::poison_policy::{Arrival, PoisonPolicy, RedeliveryDecision, SessionLosses};
use crate::sizes::Size;

/// What this process knows of messages that it has seen.
#[derive(Debug)]
pub(crate) struct Redelivery {
    policy: PoisonPolicy,
    losses: SessionLosses,
    /// Settled in this session.
    settled_now: DedupCache,
    /// Settled in sessions that were lost: their acks may never have arrived, even those that were sent.
    settled_before: DedupCache,
    /// Given back to the broker, or lost with a further queue.
    given_back: DedupCache,
}

impl Redelivery {
    pub(crate) fn new(policy: PoisonPolicy) -> Self {
        Self {
            policy,
            losses: SessionLosses::default(),
            settled_now: DedupCache::default(),
            settled_before: DedupCache::default(),
            given_back: DedupCache::default(),
        }
    }

    pub(crate) fn sizes(&self) -> [Size; 3] {
        [&self.settled_now, &self.settled_before, &self.given_back].map(DedupCache::size)
    }

    /// True if the session follows a lost one.
    pub(crate) fn session_opened(&mut self, now: Instant) -> bool {
        self.losses.begin(now)
    }

    /// The session is lost, with unsettled jobs of these messages.
    pub(crate) fn session_lost(&mut self, unsettled: impl IntoIterator<Item = Fingerprint>, now: Instant) {
        self.losses.note(now);
        self.settled_before.absorb(std::mem::take(&mut self.settled_now));
        // An identical message was not settled: nothing shows which of the two is redelivered.
        unsettled.into_iter().for_each(|message| self.settled_before.forget(message));
    }

    /// A further queue was lost, with unsettled jobs of these messages. If it lives on, they come again, because of this process.
    /// Unlike a lost session this excuses no other job: a queue that is deleted again and again would excuse all that crash workers.
    pub(crate) fn queue_lost(&mut self, unsettled: impl IntoIterator<Item = Fingerprint>, now: Instant) {
        self.settled_before.absorb(std::mem::take(&mut self.settled_now));
        for message in unsettled {
            self.settled_before.forget(message);
            self.comes_again(message, now);
        }
    }

    /// An unsettled job comes again, because of this process.
    pub(crate) fn comes_again(&mut self, message: Fingerprint, now: Instant) {
        self.given_back.remember(message, now);
    }

    /// Whether a delivery was settled before, in a session that was lost. An identical message that was published again is a
    /// new job; one settlement excuses one redelivery.
    pub(crate) fn was_settled(&mut self, delivery: &Delivery, now: Instant) -> bool {
        let settled = self.settled_before.contains(delivery.fingerprint, now);
        self.settled_before.forget(delivery.fingerprint);
        self.settled_now.forget(delivery.fingerprint);
        settled && delivery.redelivered
    }

    /// What to do with a delivery that may have crashed workers.
    pub(crate) fn decide(&mut self, delivery: &Delivery, now: Instant) -> RedeliveryDecision {
        // A job that cannot be read is dead-lettered before it can do any harm.
        let Some(headers) = &delivery.headers else { return RedeliveryDecision::Run(0) };
        let returns = if delivery.redelivered { delivery.delivery_count.unwrap_or(1).max(1) } else { 0 };
        let given_back = self.given_back.times(delivery.fingerprint, now);
        self.policy.decide(Arrival {
            crashes: headers.crashes,
            of_processes: are_of_processes(headers),
            returns,
            counted: delivery.redelivered && delivery.delivery_count.is_some(),
            explained: self.losses.recent(now).saturating_add(given_back),
            quarantined: delivery.source == Source::Quarantine,
        })
    }

    /// The number of crashes in the header of a dead letter: if the job is retried, it runs again, in the quarantine.
    pub(crate) fn crashes_of_dead_letter(&self) -> u32 {
        self.policy.suspect_after
    }

    /// The broker was perhaps not sent the ack of a job that ended like this: its message may come again.
    pub(crate) fn ack_lost(&mut self, message: Fingerprint, end: End, now: Instant) {
        if !matches!(end, End::Returned | End::Rejected(_)) {
            self.settled_before.remember(message, now);
        }
    }

    /// A job ends like this: the broker has everything of it, or it is given back.
    pub(crate) fn ended(&mut self, message: Fingerprint, end: End, now: Instant) {
        match end {
            End::Returned => self.given_back.remember(message, now),
            // If the broker was not sent the rejection, the job is still there, and there is no dead letter: an ack would lose it.
            End::Rejected(_) => {}
            _ => self.settled_now.remember(message, now),
        }
    }
}

/// Whether all crashes that the headers count were of processes whose workers went on: the history names each of them, and neither a
/// lost worker nor a lost device.
fn are_of_processes(headers: &JobHeaders) -> bool {
    let times = |what: &str| headers.history.iter().filter(|attempt| attempt.outcome == what).count();
    times(PROCESS_LOST) >= headers.crashes as usize && times(WORKER_LOST) + times(DEVICE_LOST) == 0
}
