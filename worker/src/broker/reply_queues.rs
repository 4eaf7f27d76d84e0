//! Decides from earlier confirms which reply queues may use the channel that all publishes share. Pure.
//!
//! RabbitMQ registers a channel with a quorum queue before it publishes the channel's first message there. It waits up to 65 s for the
//! queue's majority, and reads nothing else from the channel meanwhile. So a reply uses the shared channel only if its queue works: the
//! queue confirmed a reply on that channel before, or on another channel a moment ago.
//!
//! A queue that loses its majority later blocks the shared channel too, once 32 replies to it are unconfirmed. After 400 further messages
//! to any queue, RabbitMQ then reads nothing from the connection. So a queue that confirms nothing gets at most 32 replies.
//!
//! A channel may go on refusing replies to a quorum queue that is not full any more: RabbitMQ 3.10 tells a channel that a queue is full, and
//! if the length limit is then removed, tells it nothing. So a refused reply, and those that follow, use separate channels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use tokio::sync::Notify;

use super::publisher::MessageOutcome;

/// How long a confirm shows that a queue works. Within this time of a confirm on another channel, a reply may use the shared channel, which
/// then registers with the queue. So the replies of a caller with more than ten a second move there. Within this time the queue may also
/// have more than [`UNCONFIRMED_MAX`] replies there; a queue on a slower disk gets them in turns.
///
/// A queue that falls silent blocks the shared channel only if, within this time, it got its first reply there, or more than
/// [`UNCONFIRMED_MAX`].
const LATELY: Duration = Duration::from_millis(100);

/// After the shared channel refused a reply to a queue, confirms on other channels do not bring the queue's replies back to it for so long.
/// Until then they go one by one. If the shared channel still refuses them after that, one reply in each such time is offered twice.
const REFUSED_LATELY: Duration = Duration::from_secs(2);

/// The most unconfirmed replies to a queue on the shared channel, unless the queue confirmed one lately: RabbitMQ's `SOFT_LIMIT`
/// (`rabbit_fifo_client.erl`).
const UNCONFIRMED_MAX: usize = 32;

/// The most queues that are remembered in each of two generations. A forgotten queue costs one more reply on a separate channel.
const GENERATION_MAX: usize = 2048;

/// The reply queues that were used most recently.
#[derive(Debug, Default)]
pub(super) struct ReplyQueues {
    /// Queues used since the generations last changed.
    young: HashMap<ShortString, Arc<ReplyQueue>>,
    /// Queues used in the generation before, and not since.
    old: HashMap<ShortString, Arc<ReplyQueue>>,
}

impl ReplyQueues {
    /// The record of a queue; a new one if there is none.
    pub(super) fn of(&mut self, name: &ShortString) -> Arc<ReplyQueue> {
        if let Some(queue) = self.young.get(name) {
            return Arc::clone(queue);
        }
        let queue = self.old.remove(name).unwrap_or_default();
        if self.young.len() >= GENERATION_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(name.clone(), Arc::clone(&queue));
        queue
    }
}

/// Whether a reply to a queue may go over the shared channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueTrust {
    Proven,
    /// Only after the queue has confirmed another reply.
    Slow,
    /// No: it needs a separate channel.
    Unproven,
}

/// What is known of one reply queue in this session.
#[derive(Debug, Default)]
pub(super) struct ReplyQueue {
    /// Held until a reply was sent on the shared channel, or has ended on a separate one. This keeps the replies in order.
    pub(super) turn: tokio::sync::Mutex<()>,
    facts: Mutex<Facts>,
    /// Notified when a reply on the shared channel has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Facts {
    /// Whether the shared channel is registered with the queue: the queue confirmed a reply there, and was neither silent, deleted nor full
    /// since.
    is_registered: bool,
    /// When it last confirmed a reply.
    confirmed_at: Option<Instant>,
    /// When the shared channel last refused a reply to it.
    refused_at: Option<Instant>,
    /// Replies on the shared channel whose outcome is not known yet.
    unconfirmed: usize,
    /// How often it did not confirm a reply.
    silences: u32,
}

impl ReplyQueue {
    pub(super) fn trust(&self, now: Instant) -> QueueTrust {
        let facts = self.facts();
        let is_within = |time: Duration, at: Option<Instant>| {
            at.is_some_and(|at| now.saturating_duration_since(at) < time)
        };
        let confirmed_lately = is_within(LATELY, facts.confirmed_at);
        let may_register = confirmed_lately && !is_within(REFUSED_LATELY, facts.refused_at);
        if !facts.is_registered && !may_register {
            QueueTrust::Unproven
        } else if facts.unconfirmed >= UNCONFIRMED_MAX && !confirmed_lately {
            QueueTrust::Slow
        } else {
            QueueTrust::Proven
        }
    }

    /// Waits until a slow queue may get another reply, or is silent.
    pub(super) async fn wait_while_slow(&self) {
        loop {
            // Notifications from here on are not missed.
            let ended = self.ended.notified();
            if self.trust(Instant::now()) != QueueTrust::Slow {
                return;
            }
            ended.await;
        }
    }

    /// How often it did not confirm a reply.
    pub(super) fn silences(&self) -> u32 {
        self.facts().silences
    }

    /// Records that a reply is published on the shared channel.
    pub(super) fn publishes(&self) {
        self.facts().unconfirmed += 1;
    }

    /// Records the outcome of a reply on the shared channel.
    pub(super) fn took(&self, outcome: MessageOutcome, now: Instant) {
        let mut facts = self.facts();
        facts.unconfirmed -= 1;
        facts.is_registered |= outcome == MessageOutcome::Confirmed;
        if outcome == MessageOutcome::Refused {
            facts.refused_at = Some(now);
        }
        facts.note(outcome, now);
        drop(facts);
        self.ended.notify_waiters();
    }

    /// Records the outcome of a reply on a separate channel.
    pub(super) fn took_alone(&self, outcome: MessageOutcome, now: Instant) {
        self.facts().note(outcome, now);
    }

    /// Nothing panics while it holds the lock.
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Facts {
    fn note(&mut self, outcome: MessageOutcome, now: Instant) {
        match outcome {
            MessageOutcome::Confirmed => self.confirmed_at = Some(now),
            MessageOutcome::NoConfirm => {
                (self.is_registered, self.confirmed_at) = (false, None);
                self.silences += 1;
            }
            // A queue with the same name that is declared later is a different one. And a full queue works, but its channel may not learn
            // that it has room again.
            MessageOutcome::Unroutable | MessageOutcome::Refused => {
                (self.is_registered, self.confirmed_at) = (false, None);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn took(queue: &ReplyQueue, outcome: MessageOutcome, now: Instant) {
        queue.publishes();
        queue.took(outcome, now);
    }

    #[test]
    fn a_confirm_elsewhere_proves_for_a_moment_and_one_on_the_shared_channel_for_good() {
        let (queue, now) = (ReplyQueue::default(), Instant::now());
        assert_eq!(queue.trust(now), QueueTrust::Unproven, "nothing is known of it");
        queue.took_alone(MessageOutcome::Confirmed, now);
        assert_eq!(queue.trust(now), QueueTrust::Proven);
        assert_eq!(queue.trust(now + LATELY), QueueTrust::Unproven);
        took(&queue, MessageOutcome::Confirmed, now);
        assert_eq!(queue.trust(now + 1000 * LATELY), QueueTrust::Proven);
    }

    /// On RabbitMQ 3.10 the shared channel refuses for the rest of the session what other channels confirm.
    #[test]
    fn a_queue_that_the_shared_channel_refused_gets_its_replies_on_other_channels_for_a_while() {
        let (queue, now) = (ReplyQueue::default(), Instant::now());
        took(&queue, MessageOutcome::Confirmed, now);
        took(&queue, MessageOutcome::Refused, now);
        assert_eq!(queue.trust(now), QueueTrust::Unproven);
        queue.took_alone(MessageOutcome::Confirmed, now + LATELY);
        assert_eq!(queue.trust(now + LATELY), QueueTrust::Unproven, "the shared channel is another one");
        let later = now + REFUSED_LATELY;
        assert_eq!(queue.trust(later), QueueTrust::Unproven, "it has to confirm again");
        queue.took_alone(MessageOutcome::Confirmed, later);
        assert_eq!(queue.trust(later), QueueTrust::Proven);
        queue.took_alone(MessageOutcome::Refused, later);
        assert_eq!(queue.trust(later), QueueTrust::Unproven, "full again");
    }

    #[test]
    fn a_queue_that_was_silent_or_gone_has_to_prove_itself_again() {
        let now = Instant::now();
        for (outcome, silences) in [(MessageOutcome::NoConfirm, 1), (MessageOutcome::Unroutable, 0)] {
            let queue = ReplyQueue::default();
            queue.took_alone(MessageOutcome::Confirmed, now);
            took(&queue, MessageOutcome::Confirmed, now);
            took(&queue, outcome, now);
            assert_eq!((queue.trust(now), queue.silences()), (QueueTrust::Unproven, silences), "{outcome:?}");
            queue.took_alone(MessageOutcome::Confirmed, now);
            queue.took_alone(outcome, now);
            let again = (queue.trust(now), queue.silences());
            assert_eq!(again, (QueueTrust::Unproven, 2 * silences), "{outcome:?}");
        }
    }

    #[test]
    fn a_queue_that_confirms_nothing_gets_no_more_than_32_replies_on_the_shared_channel() {
        let (queue, now) = (ReplyQueue::default(), Instant::now());
        took(&queue, MessageOutcome::Confirmed, now);
        let later = now + LATELY;
        for at in 0..UNCONFIRMED_MAX {
            assert_eq!(queue.trust(later), QueueTrust::Proven, "{at}");
            queue.publishes();
        }
        assert_eq!(queue.trust(later), QueueTrust::Slow);
        queue.took(MessageOutcome::Confirmed, later);
        for at in 0..10 * UNCONFIRMED_MAX {
            assert_eq!(queue.trust(later), QueueTrust::Proven, "it confirms: {at}");
            queue.publishes();
        }
        assert_eq!(queue.trust(later + LATELY), QueueTrust::Slow);
        queue.took(MessageOutcome::NoConfirm, later + LATELY);
        assert_eq!(queue.trust(later + LATELY), QueueTrust::Unproven);
    }

    #[tokio::test]
    async fn a_reply_that_waits_for_a_slow_queue_goes_on_when_another_has_ended() {
        let queue = ReplyQueue::default();
        took(&queue, MessageOutcome::Confirmed, Instant::now());
        tokio::time::sleep(LATELY).await;
        (0..UNCONFIRMED_MAX).for_each(|_| queue.publishes());
        let goes_on = async {
            queue.wait_while_slow().await;
            queue.facts().unconfirmed
        };
        let ends = async {
            tokio::task::yield_now().await;
            queue.took(MessageOutcome::Refused, Instant::now());
        };
        assert_eq!(tokio::join!(goes_on, ends).0, UNCONFIRMED_MAX - 1);
    }

    #[test]
    fn the_queues_that_are_used_stay_known_and_others_are_forgotten() {
        let (mut queues, now) = (ReplyQueues::default(), Instant::now());
        let (used, unused) = (ShortString::from("used"), ShortString::from("unused"));
        for name in [&used, &unused] {
            took(&queues.of(name), MessageOutcome::Confirmed, now);
        }
        for other in 0..3 * GENERATION_MAX {
            queues.of(&format!("other {other}").into());
            assert_eq!(queues.of(&used).trust(now), QueueTrust::Proven, "{other}");
            assert!(queues.young.len() <= GENERATION_MAX && queues.old.len() <= GENERATION_MAX);
        }
        assert_eq!(queues.of(&unused).trust(now), QueueTrust::Unproven);
    }
}
