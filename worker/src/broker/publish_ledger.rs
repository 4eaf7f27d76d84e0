//! What is published on a channel and not answered yet: whose return a confirm carries, how long confirms take, and which are due.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use lapin::{Confirmation, PublisherConfirm};
use tokio::sync::oneshot;
use vramq_amqp::{Confirms, Verdict};
use vramq_schemas::headers::PUBLISH_SEQ;

use super::publisher::{Answer, PublishError};

/// What every other confirm leaves of the slowest one: after some dozens it no longer counts.
const SLOWEST_FADES: f64 = 0.95;

/// Publishes that nobody waits for any more and that may still be confirmed. Each is a reply whose queue is silent, and of such a
/// queue two jobs run in a minute: a session has as many only if it is of no use.
const LATE_MAX: usize = 256;

/// Time that the broker has for confirms: it stands still while the broker blocks publishers, because then it reads nothing of
/// what was sent.
#[derive(Clone, Copy, Debug, Default)]
struct ConfirmClock {
    /// The time until it last started or stopped.
    before: Duration,
    /// Since when it runs.
    since: Option<Instant>,
}

impl ConfirmClock {
    fn running(now: Instant) -> Self {
        Self { before: Duration::ZERO, since: Some(now) }
    }

    fn read(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    fn stop(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: None };
    }

    fn start(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: Some(now) };
    }
}

/// A publish that waits for its confirm.
#[derive(Debug)]
struct Open {
    /// What the clock showed when it was sent.
    sent: Duration,
    /// The second since which the broker could have confirmed it.
    since: u32,
    /// A later publish was confirmed: the broker has read this one.
    is_read: bool,
    due: Option<Silence>,
    waker: Option<Waker>,
}

impl Open {
    /// Ends the waiting for the confirm.
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

/// Publishes by number. Bounded by the unacknowledged jobs, each of which has one message on its way at most, and [`LATE_MAX`].
#[derive(Debug, Default)]
pub(super) struct Ledger {
    last: u64,
    clock: ConfirmClock,
    /// Seconds in which the broker read and the worker could take confirms, and how many of them the broker has for each.
    seconds: u32,
    seconds_max: u32,
    /// The last confirm: its second, and the latest publish that was confirmed.
    confirmed_at: u32,
    confirmed: u64,
    /// Nothing was confirmed for the whole time that one confirm may take, and nothing since.
    is_silent: bool,
    open: HashMap<u64, Open>,
    /// No longer waited for; `None` once it is confirmed all the same.
    late: HashMap<u64, Option<PublisherConfirm>>,
    /// The longest recent time to a confirm: what the broker's disks take.
    slowest: Duration,
    confirms: Confirms,
    /// Judged, and about to ask for its answer.
    judged: HashMap<u64, Answer>,
    /// Confirmed, but not to be judged before another is.
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
}

impl Ledger {
    /// Numbers start after `last`. The broker has so many seconds for a confirm.
    pub(super) fn new(last: u64, seconds_max: u32, now: Instant) -> Self {
        Self { last, seconds_max, clock: ConfirmClock::running(now), ..Self::default() }
    }

    pub(super) fn slowest(&self) -> Duration {
        self.slowest
    }

    pub(super) fn stop_clock(&mut self, now: Instant) {
        self.clock.stop(now);
    }

    pub(super) fn start_clock(&mut self, now: Instant) {
        self.clock.start(now);
    }

    pub(super) fn open(&mut self, now: Instant) -> u64 {
        self.last += 1;
        let (sent, since) = (self.clock.read(now), self.seconds);
        self.open.insert(self.last, Open { sent, since, is_read: false, due: None, waker: None });
        self.last
    }

    /// A second has passed. It counts unless the broker blocks publishers. A standstill of the process is one second.
    ///
    /// The broker reads in order. So the time for a confirm runs from the moment at which it has confirmed a later publish; until
    /// then each confirm shows that it still has earlier ones to read, over a slow network for example. If no confirm comes at all,
    /// the broker may be stuck at the oldest publish: that is given up first, and all if nothing is confirmed after it either.
    pub(super) fn tick(&mut self) {
        if self.clock.since.is_none() {
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
            // The second in which it was sent had begun before.
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
        // The others have as long again.
        (self.is_silent, self.confirmed_at) = (true, self.seconds);
    }

    /// Lets a publish wait for its confirm, or ends the waiting, if the confirm is due. Then the ledger keeps the confirm: it may
    /// still come, and carry the return of another publish.
    pub(super) fn wait(
        &mut self,
        sequence: u64,
        confirm: &mut Option<PublisherConfirm>,
        waker: &Waker,
    ) -> Poll<PublishError> {
        let Some(open) = self.open.get_mut(&sequence) else { return Poll::Pending };
        let Some(silence) = open.due else {
            open.waker = Some(waker.clone());
            return Poll::Pending;
        };
        self.open.remove(&sequence);
        self.late.insert(sequence, confirm.take());
        Poll::Ready(match (silence, self.late.len()) {
            (Silence::Channel, _) => PublishError::Silent(self.seconds_max),
            (Silence::Queue, late @ LATE_MAX..) => PublishError::SilentQueues(late),
            (Silence::Queue, _) => PublishError::NoConfirm(self.seconds_max),
        })
    }

    /// Takes in a confirm.
    pub(super) fn note(&mut self, sequence: u64, confirmation: &Confirmation, now: Instant) {
        if let Some(open) = self.open.remove(&sequence) {
            let took = self.clock.read(now).saturating_sub(open.sent);
            self.slowest = took.max(self.slowest.mul_f64(SLOWEST_FADES));
        }
        (self.is_silent, self.confirmed_at) = (false, self.seconds);
        self.confirmed = self.confirmed.max(sequence);
        self.confirms.complete(sequence, confirmation.is_ack(), whose(confirmation));
    }

    /// Takes in the confirms that nobody waited for any more and that have come. To be called before each judgement: one that was
    /// completed before the others may carry their return.
    pub(super) fn note_late(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for (sequence, confirm) in &mut self.late {
            let Some(Poll::Ready(confirmed)) = confirm.as_mut().map(|it| Pin::new(it).poll(&mut context))
            else {
                continue;
            };
            *confirm = None;
            // An `Err`: the channel is closed, and nothing is judged any more.
            if let Ok(confirmation) = confirmed {
                self.confirms.complete(*sequence, confirmation.is_ack(), whose(&confirmation));
            }
        }
    }

    /// Judges all publishes that can be judged. Gives the answer to one of them, or a receiver for it.
    pub(super) fn judge(&mut self, sequence: u64) -> Result<Answer, oneshot::Receiver<Answer>> {
        let (open, late) = (&self.open, &self.late);
        let may_come = |sequence| late.get(&sequence).is_some_and(Option::is_some);
        let settled = self.confirms.settle(|sequence| open.contains_key(&sequence) || may_come(sequence));
        for (judged, verdict) in settled {
            if self.late.remove(&judged).is_some() {
                continue;
            }
            let answer = match verdict {
                Verdict::Accepted => Answer::Confirmed,
                Verdict::Returned => Answer::Unroutable,
                Verdict::Rejected => Answer::Refused,
            };
            match self.waiting.remove(&judged) {
                // An `Err`: the future that waited was dropped.
                Some(waiting) => drop(waiting.send(answer)),
                None => drop(self.judged.insert(judged, answer)),
            }
        }
        self.judged.remove(&sequence).ok_or_else(|| {
            let (sender, verdict) = oneshot::channel();
            self.waiting.insert(sequence, sender);
            verdict
        })
    }
}

/// The publish whose return came with a confirm.
fn whose(confirmation: &Confirmation) -> Option<u64> {
    let (Confirmation::Ack(returned) | Confirmation::Nack(returned)) = confirmation else { return None };
    let headers = returned.as_ref()?.delivery.properties.headers().as_ref()?;
    headers.inner().get(PUBLISH_SEQ)?.as_long_long_int().map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECONDS_MAX: u32 = 3;

    fn confirm(ledger: &mut Ledger, sequence: u64, at: Instant) {
        ledger.note(sequence, &Confirmation::Ack(None), at);
    }

    #[test]
    fn the_slowest_confirm_does_not_count_the_time_for_which_the_broker_blocked() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ledger = Ledger::new(0, SECONDS_MAX, start);
        let before = ledger.open(at(100));
        ledger.clock.stop(at(120));
        // Neither does a second word on it.
        ledger.clock.stop(at(130));
        let during = ledger.open(at(5_000));
        ledger.clock.start(at(60_120));
        confirm(&mut ledger, before, at(60_140));
        assert_eq!(ledger.slowest, Duration::from_millis(40));
        confirm(&mut ledger, during, at(60_150));
        assert_eq!(ledger.slowest, Duration::from_millis(38), "30 ms, and what is left of the 40");
        let after = ledger.open(at(60_200));
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
        let mut ledger = Ledger::new(0, SECONDS_MAX, now);
        let silent = ledger.open(now);
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
    fn a_broker_that_confirms_one_after_the_other_has_time_for_each() {
        let now = Instant::now();
        let mut ledger = Ledger::new(0, SECONDS_MAX, now);
        let publishes: Vec<_> = (0..5).map(|_| ledger.open(now)).collect();
        for sequence in publishes {
            ticks(&mut ledger, SECONDS_MAX);
            assert!(!is_due(&mut ledger, sequence));
            confirm(&mut ledger, sequence, now);
        }
    }

    #[test]
    fn a_silent_queue_is_noticed_while_others_confirm() {
        let now = Instant::now();
        let mut ledger = Ledger::new(0, SECONDS_MAX, now);
        let silent = ledger.open(now);
        for second in 0..SECONDS_MAX + 2 {
            assert!(!is_due(&mut ledger, silent), "{second}");
            let other = ledger.open(now);
            confirm(&mut ledger, other, now);
            ledger.tick();
        }
        assert!(is_due(&mut ledger, silent));
        // Its confirm is nobody's any more, and the next publish is judged.
        let other = ledger.open(now);
        confirm(&mut ledger, other, now);
        ledger.note_late();
        assert_eq!(ledger.judge(other).ok(), Some(Answer::Confirmed));
    }

    #[test]
    fn a_silent_channel_gives_up_its_oldest_publish_and_then_all() {
        let now = Instant::now();
        let mut ledger = Ledger::new(0, SECONDS_MAX, now);
        let [first, second, third] = [(); 3].map(|()| ledger.open(now));
        ticks(&mut ledger, SECONDS_MAX + 1);
        assert!(is_due(&mut ledger, first));
        ticks(&mut ledger, SECONDS_MAX);
        assert!(!is_due(&mut ledger, second) && !is_due(&mut ledger, third));
        ledger.tick();
        for sequence in [second, third] {
            let end = ledger.wait(sequence, &mut None, Waker::noop());
            assert!(matches!(end, Poll::Ready(PublishError::Silent(SECONDS_MAX))));
        }
    }

    #[test]
    fn publishes_that_nobody_waits_for_are_bounded() {
        let now = Instant::now();
        let mut ledger = Ledger::new(0, SECONDS_MAX, now);
        let publishes: Vec<_> = (0..LATE_MAX).map(|_| ledger.open(now)).collect();
        let other = ledger.open(now);
        confirm(&mut ledger, other, now);
        ticks(&mut ledger, SECONDS_MAX + 2);
        let ends = publishes.into_iter().map(|sequence| ledger.wait(sequence, &mut None, Waker::noop()));
        let silent = ends.filter(|end| matches!(end, Poll::Ready(PublishError::SilentQueues(_))));
        assert_eq!(silent.count(), 1);
    }
}
