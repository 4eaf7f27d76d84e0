//! Which reply queues may get replies on the channel that all publishes share, by what they confirmed before. Pure.
//!
//! RabbitMQ registers a channel with a quorum queue before it publishes the channel's first message there. It waits up to 65 s
//! for the queue's majority, and reads nothing else from the channel meanwhile. So a reply goes over the shared channel only if
//! its queue lives: the queue confirmed a reply on that channel before, or on another channel a moment ago.
//!
//! A queue that loses its majority later holds up the shared channel, too, once 32 replies to it have no confirm: after 400
//! further messages to whichever queue, RabbitMQ reads nothing from the connection. So while a queue confirms nothing, it gets no
//! more than 32.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use tokio::sync::Notify;

use super::publisher::MessageOutcome;

/// How long a confirm says that a queue lives. Within this time of a confirm on another channel, a reply may go over the shared
/// one, which registers with the queue then: so a caller with more than ten replies a second gets there. And a queue may have
/// more than [`UNCONFIRMED_MAX`] replies there; one on a disk that takes longer to write gets them in turns.
///
/// A queue that falls silent holds up the shared channel only if it got its first reply there, or more than
/// [`UNCONFIRMED_MAX`], in this time.
const LATELY: Duration = Duration::from_millis(100);

/// The most replies without a confirm on the shared channel, unless the queue confirmed one lately: RabbitMQ's `SOFT_LIMIT`
/// (`rabbit_fifo_client.erl`).
const UNCONFIRMED_MAX: usize = 32;

/// The most queues that are remembered, in each of two generations. A queue that is forgotten costs one more reply on a channel
/// of its own.
const GENERATION_MAX: usize = 2048;

/// Reply queues, those that were used last.
#[derive(Debug, Default)]
pub(super) struct ReplyQueues {
    /// Used since the last change of generations.
    young: HashMap<ShortString, Arc<ReplyQueue>>,
    /// Used in the generation before, and not since.
    old: HashMap<ShortString, Arc<ReplyQueue>>,
}

impl ReplyQueues {
    /// What is known of a queue.
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
pub(super) enum Standing {
    Proven,
    /// When the queue has confirmed another one.
    Slow,
    /// On a channel of its own.
    Unproven,
}

/// What is known of one reply queue in this session.
#[derive(Debug, Default)]
pub(super) struct ReplyQueue {
    /// Held until a reply is sent on the shared channel, or has ended on a channel of its own: replies keep their order.
    pub(super) turn: tokio::sync::Mutex<()>,
    facts: Mutex<Facts>,
    /// A reply on the shared channel has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Facts {
    /// The shared channel is registered with it: it confirmed a reply there, and is neither silent nor gone since.
    is_registered: bool,
    /// When it last confirmed a reply.
    confirmed_at: Option<Instant>,
    /// Replies on the shared channel that have not ended.
    unconfirmed: usize,
    /// How often it did not confirm a reply.
    silences: u32,
}

impl ReplyQueue {
    pub(super) fn standing(&self, now: Instant) -> Standing {
        let facts = self.facts();
        let confirmed_lately =
            facts.confirmed_at.is_some_and(|at| now.saturating_duration_since(at) < LATELY);
        if !facts.is_registered && !confirmed_lately {
            Standing::Unproven
        } else if facts.unconfirmed >= UNCONFIRMED_MAX && !confirmed_lately {
            Standing::Slow
        } else {
            Standing::Proven
        }
    }

    /// Waits until a slow queue may get a further reply, or is silent.
    pub(super) async fn wait_while_slow(&self) {
        loop {
            // It misses nothing from here on.
            let ended = self.ended.notified();
            if self.standing(Instant::now()) != Standing::Slow {
                return;
            }
            ended.await;
        }
    }

    /// How often it did not confirm a reply.
    pub(super) fn silences(&self) -> u32 {
        self.facts().silences
    }

    /// A reply is published on the shared channel.
    pub(super) fn publishes(&self) {
        self.facts().unconfirmed += 1;
    }

    /// How that reply ended.
    pub(super) fn took(&self, outcome: MessageOutcome, now: Instant) {
        let mut facts = self.facts();
        facts.unconfirmed -= 1;
        facts.is_registered |= outcome == MessageOutcome::Confirmed;
        facts.note(outcome, now);
        drop(facts);
        self.ended.notify_waiters();
    }

    /// How a reply ended on a channel of its own.
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
            // A queue that takes this name later is another one.
            MessageOutcome::Unroutable => (self.is_registered, self.confirmed_at) = (false, None),
            // It is full, and lives.
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
        assert_eq!(queue.standing(now), Standing::Unproven, "nothing is known of it");
        queue.took_alone(MessageOutcome::Confirmed, now);
        assert_eq!(queue.standing(now), Standing::Proven);
        assert_eq!(queue.standing(now + LATELY), Standing::Unproven);
        took(&queue, MessageOutcome::Confirmed, now);
        assert_eq!(queue.standing(now + 1000 * LATELY), Standing::Proven);
        took(&queue, MessageOutcome::Refused, now);
        assert_eq!(queue.standing(now + 1000 * LATELY), Standing::Proven, "a full queue lives");
    }

    #[test]
    fn a_queue_that_was_silent_or_gone_has_to_prove_itself_again() {
        let now = Instant::now();
        for (outcome, silences) in [(MessageOutcome::NoConfirm, 1), (MessageOutcome::Unroutable, 0)] {
            let queue = ReplyQueue::default();
            queue.took_alone(MessageOutcome::Confirmed, now);
            took(&queue, MessageOutcome::Confirmed, now);
            took(&queue, outcome, now);
            assert_eq!(
                (queue.standing(now), queue.silences()),
                (Standing::Unproven, silences),
                "{outcome:?}"
            );
            queue.took_alone(MessageOutcome::Confirmed, now);
            queue.took_alone(outcome, now);
            let again = (queue.standing(now), queue.silences());
            assert_eq!(again, (Standing::Unproven, 2 * silences), "{outcome:?}");
        }
    }

    #[test]
    fn a_queue_that_confirms_nothing_gets_no_more_than_32_replies_on_the_shared_channel() {
        let (queue, now) = (ReplyQueue::default(), Instant::now());
        took(&queue, MessageOutcome::Confirmed, now);
        let later = now + LATELY;
        for at in 0..UNCONFIRMED_MAX {
            assert_eq!(queue.standing(later), Standing::Proven, "{at}");
            queue.publishes();
        }
        assert_eq!(queue.standing(later), Standing::Slow);
        queue.took(MessageOutcome::Confirmed, later);
        for at in 0..10 * UNCONFIRMED_MAX {
            assert_eq!(queue.standing(later), Standing::Proven, "it confirms: {at}");
            queue.publishes();
        }
        assert_eq!(queue.standing(later + LATELY), Standing::Slow);
        queue.took(MessageOutcome::NoConfirm, later + LATELY);
        assert_eq!(queue.standing(later + LATELY), Standing::Unproven);
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
            assert_eq!(queues.of(&used).standing(now), Standing::Proven, "{other}");
            assert!(queues.young.len() <= GENERATION_MAX && queues.old.len() <= GENERATION_MAX);
        }
        assert_eq!(queues.of(&unused).standing(now), Standing::Unproven);
    }
}
