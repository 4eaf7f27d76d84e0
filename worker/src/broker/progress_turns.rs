//! Limits the `progress` replies to one queue: one at a time is on its way. Pure.

use std::time::{Duration, Instant};

use tokio::sync::{Mutex, MutexGuard, Semaphore, SemaphorePermit};

/// The most progress replies to a queue of which one is on its way and the others wait. A gateway's jobs share a queue, and those of one pass
/// begin together.
const WAITING_MAX: usize = 64;

/// The turns of one queue. Replies do not take part: progress never holds up a reply.
#[derive(Debug)]
pub(super) struct ProgressTurns {
    places: Semaphore,
    /// Until when the queue gets no progress. Locked while a message is on its way.
    rests_until: Mutex<Option<Instant>>,
}

impl Default for ProgressTurns {
    fn default() -> Self {
        Self { places: Semaphore::new(WAITING_MAX), rests_until: Mutex::default() }
    }
}

impl ProgressTurns {
    /// Waits until a message may be published; `None` if it may not, because too many wait or the queue rests.
    pub(super) async fn next(&self) -> Option<ProgressTurn<'_>> {
        let place = self.places.try_acquire().ok()?;
        let rests_until = self.rests_until.lock().await;
        let rests = rests_until.is_some_and(|until| Instant::now() < until);
        (!rests).then_some(ProgressTurn { rests_until, _place: place })
    }
}

/// The turn of one message. Ends when dropped.
#[derive(Debug)]
pub(super) struct ProgressTurn<'a> {
    rests_until: MutexGuard<'a, Option<Instant>>,
    _place: SemaphorePermit<'a>,
}

impl ProgressTurn<'_> {
    /// The message was not confirmed. The queue gets no progress for a while, and what waits is dropped.
    pub(super) fn rest(mut self, lasts: Duration) {
        *self.rests_until = Some(Instant::now() + lasts);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn one_message_at_a_time_is_on_its_way_and_not_too_many_wait() {
        let turns = ProgressTurns::default();
        let first = turns.next().await.unwrap();
        let mut waiting: Vec<_> = (1..WAITING_MAX).map(|_| Box::pin(turns.next())).collect();
        assert!(waiting.iter_mut().all(|next| next.now_or_never().is_none()), "the first is on its way");
        assert!(turns.next().now_or_never().unwrap().is_none(), "too many wait");
        drop(first);
        let second = waiting.remove(0).now_or_never().flatten();
        assert!(second.is_some());
        assert!(waiting.iter_mut().all(|next| next.now_or_never().is_none()), "the second is on its way");
    }

    #[tokio::test]
    async fn a_queue_that_did_not_confirm_gets_nothing_for_a_while() {
        let turns = ProgressTurns::default();
        let first = turns.next().await.unwrap();
        let mut waiting = Box::pin(turns.next());
        assert!(waiting.as_mut().now_or_never().is_none());
        first.rest(LONG);
        assert!(waiting.await.is_none() && turns.next().await.is_none());
        *turns.rests_until.lock().await = Some(Instant::now());
        let after = turns.next().await.unwrap();
        after.rest(Duration::ZERO);
        assert!(turns.next().await.is_some());
    }
}
