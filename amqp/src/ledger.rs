//! The messages on a channel whose outcome is unknown. Finds the message that a return belongs to, measures how long confirms take, and
//! decides when to stop waiting for a confirm.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use lapin::{Confirmation, PublisherConfirm};
use tokio::sync::oneshot;

use crate::confirm_clock::ConfirmClock;
use crate::confirms::{Confirms, PublishOutcome};
use crate::returns::{MatchBy, Returns};

/// The factor by which each other confirm reduces the slowest time: after some dozens it no longer counts.
const SLOWEST_FADES: f64 = 0.95;

/// The most late publishes: those no longer waited for that may still be confirmed. Each is a reply to a silent queue, and a worker runs
/// only two jobs a minute for such a queue. A session with more is useless.
const LATE_MAX: usize = 256;

/// Why the outcome of a publish is unknown. The broker may have the message.
#[derive(Debug, thiserror::Error)]
pub enum UnknownOutcome {
    /// The connection or channel is closed.
    #[error(transparent)]
    Closed(#[from] lapin::Error),
    #[error("the broker did not confirm a message within {0} s")]
    NoConfirm(u32),
    #[error("the broker confirmed no message during two periods of {0} s")]
    Silent(u32),
    #[error("{0} messages wait for confirms of silent queues, as many as a session allows")]
    SilentQueues(usize),
}

/// A publish that waits for its confirm.
#[derive(Debug)]
struct Open {
    /// The clock's time when the message was sent.
    sent: Duration,
    /// The tick from which on the broker could have confirmed the message.
    since: u32,
    /// A later publish was confirmed: the broker has read this one.
    is_read: bool,
    due: Option<Silence>,
    waker: Option<Waker>,
}

impl Open {
    /// Stops waiting for the confirm.
    fn give_up(&mut self, silence: Silence) {
        self.due = Some(silence);
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// What is silent when a confirm does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// The queue that the message went to.
    Queue,
    /// The whole channel.
    Channel,
}

/// Publishes by number. Bounded by the messages that the publisher's owner has in flight (a worker: one for each unacknowledged
/// job), and [`LATE_MAX`].
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    last: u64,
    clock: ConfirmClock,
    /// Seconds in which the broker read and confirms could be taken, and how many of them the broker has for each.
    seconds: u32,
    seconds_max: u32,
    /// The last confirm: its second, and the latest publish that was confirmed.
    confirmed_at: u32,
    confirmed: u64,
    /// No confirm came for the whole time that one may take, and none since.
    is_silent: bool,
    open: HashMap<u64, Open>,
    /// Publishes no longer waited for. The confirm is `None` once it has come.
    late: HashMap<u64, Option<PublisherConfirm>>,
    /// The longest recent time to a confirm: what the broker's disks take.
    slowest: Duration,
    confirms: Confirms,
    returns: Returns,
    /// Outcomes that are known before the publisher asks for them.
    judged: HashMap<u64, PublishOutcome>,
    /// Publishers that wait for an outcome, which depends on a later confirm.
    waiting: HashMap<u64, oneshot::Sender<PublishOutcome>>,
}

impl Ledger {
    /// Publish numbers start after `last`. The broker has `seconds_max` seconds for each confirm, or no limit.
    pub(crate) fn new(last: u64, match_by: MatchBy, seconds_max: Option<u32>, now: Instant) -> Self {
        Self {
            last,
            seconds_max: seconds_max.unwrap_or(u32::MAX),
            clock: ConfirmClock::running(now),
            returns: Returns::new(match_by),
            ..Self::default()
        }
    }

    pub(crate) fn slowest(&self) -> Duration {
        self.slowest
    }

    pub(crate) fn stop_clock(&mut self, now: Instant) {
        self.clock.stop(now);
    }

    pub(crate) fn start_clock(&mut self, now: Instant) {
        self.clock.start(now);
    }

    /// Numbers a publish.
    pub(crate) fn register(&mut self, message_id: Option<&ShortString>, now: Instant) -> u64 {
        self.last += 1;
        self.returns.register(self.last, message_id);
        let (sent, since) = (self.clock.read(now), self.seconds);
        self.open.insert(self.last, Open { sent, since, is_read: false, due: None, waker: None });
        self.last
    }

    /// Counts a second, unless the broker blocks publishers. A standstill of the process counts as one second.
    ///
    /// The broker reads messages in order. So the time for a confirm starts when a later publish was confirmed: until then each confirm
    /// shows that the broker still has earlier messages to read, for example over a slow network. If no confirm comes at all, the broker
    /// may be stuck at the oldest publish. So that one is given up first; all are, if still nothing is confirmed.
    pub(crate) fn tick(&mut self) {
        if !self.clock.is_running() {
            return;
        }
        self.seconds += 1;
        let mut is_silent = false;
        for (sequence, open) in &mut self.open {
            if !open.is_read {
                open.is_read = self.confirmed > *sequence;
                let since = if open.is_read { self.seconds } else { self.confirmed_at };
                open.since = open.since.max(since);
            }
            // One more tick, because the message was sent in the middle of the first.
            let is_over = self.seconds - open.since > self.seconds_max;
            match open.is_read {
                true if is_over => open.give_up(Silence::Queue),
                true => {}
                false => is_silent |= is_over,
            }
        }
        if !is_silent {
            return;
        }
        let unread = self.open.iter_mut().filter(|(_, open)| !open.is_read);
        if self.is_silent {
            unread.for_each(|(_, open)| open.give_up(Silence::Channel));
        } else if let Some((_, oldest)) = unread.min_by_key(|(sequence, _)| **sequence) {
            oldest.give_up(Silence::Queue);
        }
        // Give the others the same time again.
        (self.is_silent, self.confirmed_at) = (true, self.seconds);
    }

    /// Polls for the end of the wait. When the confirm is overdue, the ledger keeps it: it may still come, and carry the return of another
    /// publish.
    pub(crate) fn wait(
        &mut self,
        sequence: u64,
        confirm: &mut Option<PublisherConfirm>,
        waker: &Waker,
    ) -> Poll<UnknownOutcome> {
        let Some(open) = self.open.get_mut(&sequence) else { return Poll::Pending };
        let Some(silence) = open.due else {
            open.waker = Some(waker.clone());
            return Poll::Pending;
        };
        self.open.remove(&sequence);
        self.late.insert(sequence, confirm.take());
        Poll::Ready(match (silence, self.late.len()) {
            (Silence::Channel, _) => UnknownOutcome::Silent(self.seconds_max),
            (Silence::Queue, late @ LATE_MAX..) => UnknownOutcome::SilentQueues(late),
            (Silence::Queue, _) => UnknownOutcome::NoConfirm(self.seconds_max),
        })
    }

    /// Takes in a confirm. Returns its place for [`no_gap_before`](Self::no_gap_before).
    pub(crate) fn note(&mut self, sequence: u64, confirmation: &Confirmation, now: Instant) -> u64 {
        self.note_late();
        if let Some(open) = self.open.remove(&sequence) {
            let took = self.clock.read(now).saturating_sub(open.sent);
            self.slowest = took.max(self.slowest.mul_f64(SLOWEST_FADES));
        }
        (self.is_silent, self.confirmed_at) = (false, self.seconds);
        self.confirmed = self.confirmed.max(sequence);
        let carried = carried(confirmation, &self.returns);
        self.confirms.complete(sequence, confirmation.is_ack(), carried)
    }

    /// Records that every awaited confirm which completed before the one at `place` is noted.
    pub(crate) fn no_gap_before(&mut self, place: u64) {
        self.note_late();
        self.confirms.no_gap_before(place);
    }

    /// Notes confirms that have come late: they may carry returns of other publishes.
    fn note_late(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for (sequence, confirm) in &mut self.late {
            let Some(Poll::Ready(confirmed)) = confirm.as_mut().map(|it| Pin::new(it).poll(&mut context))
            else {
                continue;
            };
            *confirm = None;
            // An `Err`: the channel is closed, so no further outcome is needed.
            if let Ok(confirmation) = confirmed {
                let carried = carried(&confirmation, &self.returns);
                self.confirms.complete(*sequence, confirmation.is_ack(), carried);
            }
        }
    }

    /// The outcomes that are known now, each returned once.
    pub(crate) fn settle(&mut self) -> Vec<(u64, PublishOutcome)> {
        let (open, late) = (&self.open, &self.late);
        let may_come = |sequence| late.get(&sequence).is_some_and(Option::is_some);
        let mut settled = self.confirms.settle(|sequence| open.contains_key(&sequence) || may_come(sequence));
        settled.retain(|(sequence, _)| {
            self.returns.forget(*sequence);
            self.late.remove(sequence).is_none()
        });
        settled
    }

    /// Hands out all outcomes that are known now. Returns the one of `sequence`, or a receiver for it.
    pub(crate) fn judge(
        &mut self,
        sequence: u64,
    ) -> Result<PublishOutcome, oneshot::Receiver<PublishOutcome>> {
        for (judged, outcome) in self.settle() {
            match self.waiting.remove(&judged) {
                // An `Err`: the future that waited was dropped.
                Some(waiting) => drop(waiting.send(outcome)),
                None => drop(self.judged.insert(judged, outcome)),
            }
        }
        self.judged.remove(&sequence).ok_or_else(|| {
            let (sender, outcome) = oneshot::channel();
            self.waiting.insert(sequence, sender);
            outcome
        })
    }
}

/// The publish whose return came with a confirm.
fn carried(confirmation: &Confirmation, returns: &Returns) -> Option<u64> {
    let (Confirmation::Ack(returned) | Confirmation::Nack(returned)) = confirmation else { return None };
    returns.sequence_of(&returned.as_ref()?.delivery.properties)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS_MAX: u32 = 3;

    fn ledger(now: Instant) -> Ledger {
        Ledger::new(0, MatchBy::PublishSeq, Some(SECONDS_MAX), now)
    }

    fn register(ledger: &mut Ledger, now: Instant) -> u64 {
        ledger.register(None, now)
    }

    fn confirm(ledger: &mut Ledger, sequence: u64, at: Instant) {
        let place = ledger.note(sequence, &Confirmation::Ack(None), at);
        ledger.no_gap_before(place);
    }

    #[test]
    fn the_slowest_confirm_does_not_count_the_time_for_which_the_broker_blocked() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ledger = ledger(start);
        let before = register(&mut ledger, at(100));
        ledger.clock.stop(at(120));
        // Neither does a second word on it.
        ledger.clock.stop(at(130));
        let during = register(&mut ledger, at(5_000));
        ledger.clock.start(at(60_120));
        confirm(&mut ledger, before, at(60_140));
        assert_eq!(ledger.slowest, Duration::from_millis(40));
        confirm(&mut ledger, during, at(60_150));
        assert_eq!(ledger.slowest, Duration::from_millis(38), "30 ms, and what is left of the 40");
        let after = register(&mut ledger, at(60_200));
        confirm(&mut ledger, after, at(60_300));
        assert_eq!(ledger.slowest, Duration::from_millis(100));
    }

    fn is_due(ledger: &mut Ledger, sequence: u64) -> bool {
        ledger.wait(sequence, &mut None, Waker::noop()).is_ready()
    }

    fn ticks(ledger: &mut Ledger, seconds: u32) {
        (0..seconds).for_each(|_| ledger.tick());
    }

    #[test]
    fn a_confirm_is_due_when_its_time_is_over_and_the_broker_did_not_block() {
        let now = Instant::now();
        let mut ledger = ledger(now);
        let silent = register(&mut ledger, now);
        ticks(&mut ledger, SECONDS_MAX);
        assert!(!is_due(&mut ledger, silent));
        ledger.stop_clock(now);
        ticks(&mut ledger, 100);
        assert!(!is_due(&mut ledger, silent));
        ledger.start_clock(now);
        ledger.tick();
        assert!(is_due(&mut ledger, silent));
    }

    #[test]
    fn without_a_deadline_no_confirm_is_due() {
        let now = Instant::now();
        let mut ledger = Ledger::new(0, MatchBy::MessageId, None, now);
        let silent = register(&mut ledger, now);
        ticks(&mut ledger, 100_000);
        assert!(!is_due(&mut ledger, silent));
    }

    #[test]
    fn a_broker_that_confirms_one_after_the_other_has_time_for_each() {
        let now = Instant::now();
        let mut ledger = ledger(now);
        let publishes: Vec<_> = (0..5).map(|_| register(&mut ledger, now)).collect();
        for sequence in publishes {
            ticks(&mut ledger, SECONDS_MAX);
            assert!(!is_due(&mut ledger, sequence));
            confirm(&mut ledger, sequence, now);
        }
    }

    #[test]
    fn a_silent_queue_is_noticed_while_others_confirm() {
        let now = Instant::now();
        let mut ledger = ledger(now);
        let silent = register(&mut ledger, now);
        for second in 0..SECONDS_MAX + 2 {
            assert!(!is_due(&mut ledger, silent), "{second}");
            let other = register(&mut ledger, now);
            confirm(&mut ledger, other, now);
            ledger.tick();
        }
        assert!(is_due(&mut ledger, silent));
        // Its confirm is nobody's any more, and the next publish is judged.
        let other = register(&mut ledger, now);
        confirm(&mut ledger, other, now);
        assert_eq!(ledger.judge(other).ok(), Some(PublishOutcome::Confirmed));
    }

    #[test]
    fn a_silent_channel_gives_up_its_oldest_publish_and_then_all() {
        let now = Instant::now();
        let mut ledger = ledger(now);
        let [first, second, third] = [(); 3].map(|()| register(&mut ledger, now));
        ticks(&mut ledger, SECONDS_MAX + 1);
        assert!(is_due(&mut ledger, first));
        ticks(&mut ledger, SECONDS_MAX);
        assert!(!is_due(&mut ledger, second) && !is_due(&mut ledger, third));
        ledger.tick();
        for sequence in [second, third] {
            let end = ledger.wait(sequence, &mut None, Waker::noop());
            assert!(matches!(end, Poll::Ready(UnknownOutcome::Silent(SECONDS_MAX))));
        }
    }

    #[test]
    fn publishes_that_nobody_waits_for_are_bounded() {
        let now = Instant::now();
        let mut ledger = ledger(now);
        let publishes: Vec<_> = (0..LATE_MAX).map(|_| register(&mut ledger, now)).collect();
        let other = register(&mut ledger, now);
        confirm(&mut ledger, other, now);
        ticks(&mut ledger, SECONDS_MAX + 2);
        let ends = publishes.into_iter().map(|sequence| ledger.wait(sequence, &mut None, Waker::noop()));
        let silent = ends.filter(|end| matches!(end, Poll::Ready(UnknownOutcome::SilentQueues(_))));
        assert_eq!(silent.count(), 1);
    }
}
