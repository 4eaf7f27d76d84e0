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
use crate::transfer::{ConfirmTime, Transfer};

/// The factor by which each further confirm reduces the slowest time: after some dozens it no longer counts.
pub const SLOWEST_FADES: f64 = 0.95;

/// The most late publishes: those no longer waited for that may still be confirmed. Each is a reply to a silent queue, and a worker runs
/// only two jobs a minute for such a queue. A session with more is useless.
const LATE_MAX: usize = 256;

/// Why the outcome of a publish is unknown. The broker may have the message.
#[derive(Debug, thiserror::Error)]
pub enum UnknownOutcome {
    /// The connection or channel is closed.
    #[error(transparent)]
    Closed(#[from] lapin::Error),
    #[error("the broker did not confirm a message within {0}")]
    NoConfirm(ConfirmTime),
    #[error("the broker did not confirm a message within {0}, nor one that was published after it")]
    Silent(ConfirmTime),
    #[error("{0} messages wait for confirms of silent queues, as many as a session allows")]
    SilentQueues(usize),
    /// The message was not sent.
    #[error("the broker did not open a channel for a message within {0}")]
    NoChannel(ConfirmTime),
}

/// A publish that waits for its confirm.
#[derive(Debug)]
struct Open {
    /// The clock's time when the message was sent.
    sent: Duration,
    /// Where it ends on the connection: see [`Transfer`].
    end: u64,
    /// The tick from which on the broker could have confirmed the message.
    since: u32,
    /// A later publish was confirmed: the broker has read this one.
    is_read: bool,
    due: Option<Overdue>,
    waker: Option<Waker>,
}

impl Open {
    /// Stops waiting for the confirm.
    fn give_up(&mut self, silence: Silence, after: ConfirmTime) {
        self.due = Some(Overdue { silence, after });
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// A confirm that did not come in its time.
#[derive(Clone, Copy, Debug)]
struct Overdue {
    silence: Silence,
    after: ConfirmTime,
}

/// What is silent when a confirm does not come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// The queue that the message went to.
    Queue,
    /// The whole channel.
    Channel,
}

/// What of a connection's messages may still be on its way to the broker, as one of its channels sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnItsWay {
    /// Bytes up to the end of the channel's last publish.
    pub up_to_last_bytes: u64,
    /// Bytes of all that was published on the connection.
    pub all_bytes: u64,
    /// The broker has confirmed a message that was published after the channel's last one, on another channel.
    pub is_last_passed: bool,
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
    /// The second of the last confirm, or of the last silence after which publishes have their time again.
    waiting_since: u32,
    /// The highest number that is confirmed.
    confirmed: u64,
    /// The time of the silence that gave up the oldest publish. A second silence gives up all. `None` after a confirm.
    silent_for: Option<ConfirmTime>,
    /// What the connection has sent, and how much of it the broker has read or has had the time to read.
    transfer: Transfer,
    read: u64,
    /// Where the last publish ends.
    end: u64,
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
    /// Publish numbers start after `last`. The broker has `seconds_max` seconds for each confirm, or no limit. `transfer` counts what all
    /// channels of the connection publish.
    pub(crate) fn new(
        last: u64,
        match_by: MatchBy,
        seconds_max: Option<u32>,
        transfer: Transfer,
        now: Instant,
    ) -> Self {
        Self {
            last,
            seconds_max: seconds_max.unwrap_or(u32::MAX),
            clock: ConfirmClock::running(now),
            returns: Returns::new(match_by),
            read: transfer.read(),
            transfer,
            ..Self::default()
        }
    }

    /// What of the connection's messages may still be on its way.
    pub(crate) fn on_its_way(&self) -> OnItsWay {
        OnItsWay {
            up_to_last_bytes: self.transfer.unread(self.end),
            all_bytes: self.transfer.all_unread(),
            is_last_passed: self.transfer.read() > self.end,
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

    /// Numbers a publish, whose body has so many bytes.
    pub(crate) fn register(&mut self, message_id: Option<&ShortString>, bytes: usize, now: Instant) -> u64 {
        self.last += 1;
        self.returns.register(self.last, message_id);
        self.end = self.transfer.publish(bytes);
        let (sent, end, since) = (self.clock.read(now), self.end, self.seconds);
        self.open.insert(self.last, Open { sent, end, since, is_read: false, due: None, waker: None });
        self.last
    }

    /// Counts a second, unless the broker blocks publishers. A standstill of the process counts as one second.
    ///
    /// The broker reads messages in order. A publish has its time from the moment when the broker can have read it: after a confirm of a
    /// later publish of this channel, or while other channels' confirms come nearer to it. Until then each confirm of this channel starts
    /// the time again. If nothing is confirmed, the time also covers the bytes before it on the connection. When that is over, the broker
    /// may be stuck at the oldest publish, so only that one is given up. If the same time passes again without a confirm, now for all bytes
    /// on the connection, all unread publishes are given up.
    pub(crate) fn tick(&mut self) {
        if !self.clock.is_running() {
            return;
        }
        self.seconds += 1;
        let read_before = self.read;
        self.read = self.read.max(self.transfer.read());
        for (sequence, open) in self.open.iter_mut().filter(|(_, open)| !open.is_read) {
            open.is_read = self.confirmed > *sequence;
            // Another channel's confirm shows that the broker reads what stands before this publish.
            let comes_nearer = self.read > read_before && open.end > read_before;
            let since = if open.is_read || comes_nearer { self.seconds } else { self.waiting_since };
            open.since = open.since.max(since);
        }
        let queue_time = ConfirmTime::new(self.seconds_max, 0);
        let mut silent = None;
        for (sequence, open) in &mut self.open {
            // One more tick than the limit, because the message was sent in the middle of the first.
            let waited = self.seconds - open.since;
            if open.is_read {
                if waited > self.seconds_max {
                    open.give_up(Silence::Queue, queue_time);
                }
                continue;
            }
            let end = self.silent_for.map_or(open.end, |_| self.transfer.published());
            let time = ConfirmTime::new(self.seconds_max, end.saturating_sub(self.read));
            if waited > time.seconds() && silent.is_none_or(|(oldest, _)| *sequence < oldest) {
                silent = Some((*sequence, time));
            }
        }
        if let Some((oldest, time)) = silent {
            self.note_silence(oldest, time);
        }
    }

    /// The channel confirmed nothing in the time for its oldest publish.
    fn note_silence(&mut self, oldest: u64, time: ConfirmTime) {
        if let Some(before) = self.silent_for {
            let unread = self.open.values_mut().filter(|open| !open.is_read);
            unread.for_each(|open| open.give_up(Silence::Channel, before.and(time)));
        } else if let Some(oldest) = self.open.get_mut(&oldest) {
            oldest.give_up(Silence::Queue, time);
            // It has had the time to arrive.
            self.read = self.read.max(oldest.end);
        }
        // Give the others the same time again.
        (self.silent_for, self.waiting_since) = (Some(time), self.seconds);
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
        let Some(Overdue { silence, after }) = open.due else {
            open.waker = Some(waker.clone());
            return Poll::Pending;
        };
        self.open.remove(&sequence);
        self.late.insert(sequence, confirm.take());
        Poll::Ready(match (silence, self.late.len()) {
            (Silence::Channel, _) => UnknownOutcome::Silent(after),
            (Silence::Queue, late @ LATE_MAX..) => UnknownOutcome::SilentQueues(late),
            (Silence::Queue, _) => UnknownOutcome::NoConfirm(after),
        })
    }

    /// Takes in a confirm. Returns its place for [`no_gap_before`](Self::no_gap_before).
    pub(crate) fn note(&mut self, sequence: u64, confirmation: &Confirmation, now: Instant) -> u64 {
        self.note_late();
        if let Some(open) = self.open.remove(&sequence) {
            let took = self.clock.read(now).saturating_sub(open.sent);
            self.slowest = took.max(self.slowest.mul_f64(SLOWEST_FADES));
            self.transfer.confirmed(open.end);
            self.read = self.read.max(open.end);
        }
        (self.silent_for, self.waiting_since) = (None, self.seconds);
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
#[path = "ledger_tests.rs"]
mod tests;
