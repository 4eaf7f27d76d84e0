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

    /// True if the session follows a lost one. Nothing was redelivered to this worker since that one ended, so what it remembers has not
    /// become older. That has no limit: a broker may be away for a night, and what was published again in that time is no redelivery.
    pub(crate) fn session_opened(&mut self, now: Instant) -> bool {
        let lost_at = self.losses.last().unwrap_or(now);
        let away = now.saturating_duration_since(lost_at);
        self.settled_before.postpone(away);
        self.given_back.postpone(away);
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

    /// Forgets that a message was settled. True if its delivery was settled before, in a session that was lost. An identical message that
    /// was published again is a new job; one settlement excuses one redelivery.
    pub(crate) fn take_settlement(&mut self, delivery: &Delivery, now: Instant) -> bool {
        let settled = self.settled_before.contains(delivery.fingerprint, now);
        self.settled_before.forget(delivery.fingerprint);
        self.settled_now.forget(delivery.fingerprint);
        settled && delivery.redelivered
    }

    /// What to do with a delivery that may have crashed workers.
    pub(crate) fn judge(&mut self, delivery: &Delivery, now: Instant) -> RedeliveryDecision {
        // A job that cannot be read is dead-lettered before it can do any harm.
        let Some(headers) = &delivery.headers else { return RedeliveryDecision::Run(0) };
        let returns = if delivery.redelivered { delivery.delivery_count.unwrap_or(1).max(1) } else { 0 };
        let given_back = self.given_back.times(delivery.fingerprint, now);
        self.policy.judge(Arrival {
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
        if !matches!(end, End::GivenBack | End::Rejected(_)) {
            self.settled_before.remember(message, now);
        }
    }

    /// Records the end of a job: everything about it is confirmed, or it was given back.
    pub(crate) fn remember_end(&mut self, message: Fingerprint, end: End, now: Instant) {
        match end {
            End::GivenBack => self.given_back.remember(message, now),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vramq_schemas::{Attempt, Reason};

    use super::*;
    use crate::ids::{ChannelId, ConsumerId, DeliveryTag, JobKey, ModelIndex, QueueIndex};

    const MESSAGE: Fingerprint = Fingerprint(1);

    fn redelivery() -> Redelivery {
        Redelivery::new(PoisonPolicy { suspect_after: 2, crashes_max: 5 })
    }

    /// The message is delivered once more.
    fn again(headers: JobHeaders) -> Delivery {
        Delivery {
            job: JobKey(1),
            model: ModelIndex(0),
            source: Source::Jobs(QueueIndex::OWN, ConsumerId(1)),
            channel: ChannelId { model: ModelIndex(0), number: 0 },
            tag: DeliveryTag(1),
            fingerprint: MESSAGE,
            redelivered: true,
            delivery_count: Some(1),
            id: None,
            caller: None,
            withdrawal: None,
            reply_queue: None,
            trace_id: None,
            bytes: 0,
            headers: Some(headers),
            expires_at_ms: None,
            published_ms: None,
        }
    }

    /// Whether two redeliveries of the message are taken for settled.
    fn settled(redelivery: &mut Redelivery, now: Instant) -> [bool; 2] {
        let delivery = again(JobHeaders::default());
        [redelivery.take_settlement(&delivery, now), redelivery.take_settlement(&delivery, now)]
    }

    #[test]
    fn an_ack_that_may_not_have_arrived_excuses_one_redelivery() {
        let now = Instant::now();
        for (end, expected) in [
            (End::Replied, [true, false]),
            (End::GivenBack, [false, false]),
            (End::Rejected(Reason::Crashed), [false, false]),
        ] {
            let mut redelivery = redelivery();
            redelivery.ack_lost(MESSAGE, end, now);
            assert_eq!(settled(&mut redelivery, now), expected, "{end:?}");
        }
    }

    #[test]
    fn what_was_settled_counts_once_the_session_is_lost() {
        let now = Instant::now();
        for (end, unsettled, expected) in [
            (End::Replied, None, [true, false]),
            // An identical message was not settled: nothing shows which of the two comes back.
            (End::Replied, Some(MESSAGE), [false, false]),
            (End::Rejected(Reason::Crashed), None, [false, false]),
        ] {
            let mut redelivery = redelivery();
            assert!(!redelivery.session_opened(now));
            redelivery.remember_end(MESSAGE, end, now);
            redelivery.session_lost(unsettled, now);
            assert!(redelivery.session_opened(now), "it follows a lost one");
            assert_eq!(settled(&mut redelivery, now), expected, "{end:?} {unsettled:?}");
        }
        let mut redelivery = redelivery();
        redelivery.remember_end(MESSAGE, End::Replied, now);
        redelivery.session_lost(None, now);
        let published_again = Delivery { redelivered: false, ..again(JobHeaders::default()) };
        assert!(!redelivery.take_settlement(&published_again, now), "a new job");
    }

    /// The broker has the acks or not: it cannot redeliver anything before the next session.
    #[test]
    fn while_the_broker_is_away_nothing_is_forgotten() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut redelivery = redelivery();
        redelivery.session_opened(start);
        redelivery.remember_end(MESSAGE, End::Replied, start);
        redelivery.remember_end(MESSAGE, End::GivenBack, start);
        redelivery.session_lost(None, at(60));
        redelivery.session_opened(at(3660));
        let are_known = |redelivery: &Redelivery, now| {
            [redelivery.settled_before.contains(MESSAGE, now), redelivery.given_back.contains(MESSAGE, now)]
        };
        // A minute of the five was over.
        assert_eq!(are_known(&redelivery, at(3660 + 240)), [true; 2]);
        assert_eq!(are_known(&redelivery, at(3660 + 241)), [false; 2]);
    }

    #[test]
    fn a_job_that_this_process_gave_back_or_lost_with_its_session_is_not_suspected() {
        let (now, delivery) = (Instant::now(), again(JobHeaders::default()));
        assert_eq!(redelivery().judge(&delivery, now), RedeliveryDecision::Run(1));
        let mut given_back = redelivery();
        given_back.remember_end(MESSAGE, End::GivenBack, now);
        assert_eq!(given_back.judge(&delivery, now), RedeliveryDecision::Run(0));
        let mut lost = redelivery();
        lost.session_lost([MESSAGE], now);
        assert_eq!(lost.judge(&delivery, now), RedeliveryDecision::Run(0));
    }

    #[test]
    fn processes_that_died_are_told_from_lost_workers_and_devices() {
        let decision = |history: &[&str]| {
            let attempt = |what: &&str| Attempt { outcome: (*what).to_owned(), ..Attempt::default() };
            let history = history.iter().map(attempt).collect();
            let headers = JobHeaders { crashes: 2, history, ..JobHeaders::default() };
            let first = Delivery { redelivered: false, ..again(headers) };
            redelivery().judge(&first, Instant::now())
        };
        assert_eq!(decision(&[PROCESS_LOST, PROCESS_LOST]), RedeliveryDecision::RunAlone(2));
        let suspected = RedeliveryDecision::Quarantine(2);
        assert_eq!(decision(&[PROCESS_LOST]), suspected, "nobody knows what the other one was");
        assert_eq!(decision(&[PROCESS_LOST, PROCESS_LOST, WORKER_LOST]), suspected);
        assert_eq!(decision(&[PROCESS_LOST, PROCESS_LOST, DEVICE_LOST]), suspected);
        assert_eq!(decision(&[PROCESS_LOST, PROCESS_LOST, WORKER_LOST, DEVICE_LOST]), suspected);
    }

    #[test]
    fn a_dead_letter_that_is_retried_runs_in_the_quarantine() {
        let redelivery = redelivery();
        let headers = JobHeaders { crashes: redelivery.crashes_of_dead_letter(), ..JobHeaders::default() };
        let mut of_retried = self::redelivery();
        let retried = Delivery { redelivered: false, ..again(headers) };
        assert_eq!(of_retried.judge(&retried, Instant::now()), RedeliveryDecision::Quarantine(2));
    }
}
