//! Decides what a redelivery means: the message was settled before, was given back, was lost with a session, or was lost in a crash of a
//! worker. Owns what this process remembers of messages that it has seen.

use std::time::Instant;

use vramq_schemas::JobHeaders;
use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST, WORKER_LOST};

use crate::dedup::DedupCache;
use crate::event::{Delivery, Source};
use crate::ids::Fingerprint;
use crate::observation::End;
use crate::poison_policy::{Arrival, PoisonPolicy, RedeliveryDecision, SessionLosses};
use crate::sizes::Size;

/// Memory of messages that this process has seen.
#[derive(Debug)]
pub(crate) struct Redelivery {
    policy: PoisonPolicy,
    losses: SessionLosses,
    /// Settled in this session.
    settled_now: DedupCache,
    /// Messages settled in sessions that were lost. Even acks that were sent may not have arrived.
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

    /// The session is lost. `unsettled`: the messages of its unsettled jobs.
    pub(crate) fn session_lost(&mut self, unsettled: impl IntoIterator<Item = Fingerprint>, now: Instant) {
        self.losses.note(now);
        self.settled_before.absorb(std::mem::take(&mut self.settled_now));
        // Forget identical messages that were settled: nothing shows which of the two is redelivered.
        unsettled.into_iter().for_each(|message| self.settled_before.forget(message));
    }

    /// A further queue was lost. `unsettled`: the messages of its unsettled jobs. If the queue still exists, they are redelivered because
    /// of this process. Unlike a lost session this excuses no other job; otherwise a queue that is repeatedly deleted would excuse every
    /// job that crashes workers.
    pub(crate) fn queue_lost(&mut self, unsettled: impl IntoIterator<Item = Fingerprint>, now: Instant) {
        self.settled_before.absorb(std::mem::take(&mut self.settled_now));
        for message in unsettled {
            self.settled_before.forget(message);
            self.comes_again(message, now);
        }
    }

    /// Records that an unsettled job will be redelivered because of this process.
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

    /// The number of crashes for the headers of a dead letter. With it, a retried job runs again, but in the quarantine.
    pub(crate) fn crashes_of_dead_letter(&self) -> u32 {
        self.policy.suspect_after
    }

    /// The ack of a job with this end may not have reached the broker, so its message may be redelivered.
    pub(crate) fn ack_lost(&mut self, message: Fingerprint, end: End, now: Instant) {
        if !matches!(end, End::Returned | End::Rejected(_)) {
            self.settled_before.remember(message, now);
        }
    }

    /// Records the end of a job: everything about it is confirmed, or it was given back.
    pub(crate) fn ended(&mut self, message: Fingerprint, end: End, now: Instant) {
        match end {
            End::Returned => self.given_back.remember(message, now),
            // Not remembered: if the rejection was not sent, the job is still at the broker without a dead letter, and an ack would lose
            // it.
            End::Rejected(_) => {}
            _ => self.settled_now.remember(message, now),
        }
    }
}

/// Whether every crash that the headers count was a process whose worker survived. The history must name each of them, and neither a lost
/// worker nor a lost device.
fn are_of_processes(headers: &JobHeaders) -> bool {
    let times = |what: &str| headers.history.iter().filter(|attempt| attempt.outcome == what).count();
    times(PROCESS_LOST) >= headers.crashes as usize && times(WORKER_LOST) + times(DEVICE_LOST) == 0
}
