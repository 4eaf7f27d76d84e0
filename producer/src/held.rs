//! Replies that this client has received and not acknowledged yet. If it dies, the broker delivers them to the client that adopts the
//! queue.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The most held replies to a client's own jobs. Beyond that, those of the oldest job are acknowledged, so that the broker always has room
/// to send the next. A job has one reply for each MiB of its outputs, so jobs in flight seldom have more than some thousand.
pub(crate) const HELD_MAX: u16 = 16_384;

/// How long a reply is held. Then it is requeued, and delivered again at once: the broker closes a channel that holds a delivery for longer
/// than its `consumer_timeout`, 30 minutes by default.
const HELD_FOR_MAX: Duration = Duration::from_secs(20 * 60);

/// The replies of a session. `R` is a reply's acker: lapin's, a number in tests.
#[derive(Debug)]
pub(crate) struct HeldReplies<R> {
    replies: Mutex<Replies<R>>,
    /// Notified when replies are to be settled.
    due: Notify,
}

#[derive(Debug)]
struct Replies<R> {
    /// By the number of their job's registration: the oldest job first.
    by_job: BTreeMap<u64, Vec<HeldReply<R>>>,
    /// Replies in `by_job`.
    count: usize,
    /// Answered jobs that are not released, by id: the numbers of their registrations. Their replies may come again, after a lost session
    /// or after [`HELD_FOR_MAX`].
    answered: HashMap<String, u64>,
    /// Replies to jobs that nobody has asked this client for, by the job's id.
    strays: HashMap<String, Vec<HeldReply<R>>>,
    due: Due<R>,
}

#[derive(Debug)]
struct HeldReply<R> {
    since: Instant,
    acker: R,
}

/// Replies that are to be settled now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Due<R> {
    pub(crate) acknowledge: Vec<R>,
    /// To be requeued; the broker delivers them again.
    pub(crate) requeue: Vec<R>,
}

impl<R> Default for Due<R> {
    fn default() -> Self {
        Self { acknowledge: Vec::new(), requeue: Vec::new() }
    }
}

impl<R> Default for Replies<R> {
    fn default() -> Self {
        Self {
            by_job: BTreeMap::new(),
            count: 0,
            answered: HashMap::new(),
            strays: HashMap::new(),
            due: Due::default(),
        }
    }
}

impl<R> Default for HeldReplies<R> {
    fn default() -> Self {
        Self { replies: Mutex::default(), due: Notify::new() }
    }
}

impl<R> HeldReplies<R> {
    /// Holds a reply until its job is released.
    pub(crate) fn hold(&self, registration: u64, acker: R, now: Instant) {
        self.hold_in(&mut self.replies(), registration, acker, now);
    }

    /// Notes that a job whose replies are held is answered: its registration is gone, but not released.
    pub(crate) fn answered(&self, id: &str, registration: u64) {
        self.replies().answered.insert(id.to_owned(), registration);
    }

    /// Holds a reply to an answered job that has come again, until the job is released. Returns it if it is none.
    pub(crate) fn hold_again(&self, id: &str, acker: R, now: Instant) -> Option<R> {
        let mut replies = self.replies();
        let Some(registration) = replies.answered.get(id).copied() else { return Some(acker) };
        self.hold_in(&mut replies, registration, acker, now);
        None
    }

    fn hold_in(&self, replies: &mut Replies<R>, registration: u64, acker: R, now: Instant) {
        replies.by_job.entry(registration).or_default().push(HeldReply { since: now, acker });
        replies.count += 1;
        if replies.count > usize::from(HELD_MAX)
            && let Some((_, oldest)) = replies.by_job.pop_first()
        {
            replies.acknowledge_all(oldest);
            self.due.notify_one();
        }
    }

    /// Holds a reply to a job that this client may be asked for later.
    pub(crate) fn hold_stray(&self, id: &str, acker: R, now: Instant) {
        let stray = HeldReply { since: now, acker };
        self.replies().strays.entry(id.to_owned()).or_default().push(stray);
    }

    /// Acknowledges the job's replies: nobody needs them any more.
    pub(crate) fn release(&self, id: &str, registration: u64) {
        let mut replies = self.replies();
        // After its answer a job's id is free, and may be that of a younger job by now.
        if replies.answered.get(id) == Some(&registration) {
            replies.answered.remove(id);
        }
        if let Some(released) = replies.by_job.remove(&registration) {
            replies.acknowledge_all(released);
            self.due.notify_one();
        }
    }

    /// Acknowledges a reply that nobody needs. Without a notification: the caller settles what is due next.
    pub(crate) fn acknowledge(&self, acker: R) {
        self.replies().due.acknowledge.push(acker);
    }

    /// Requeues the replies to a job that is now known, so that they come again. Replies to other jobs stay held: a quorum queue drops
    /// messages that come too often.
    pub(crate) fn requeue_strays(&self, id: &str) {
        let mut replies = self.replies();
        if let Some(strays) = replies.strays.remove(id) {
            replies.due.requeue.extend(strays.into_iter().map(|reply| reply.acker));
            self.due.notify_one();
        }
    }

    /// Lets replies come again that have been held for too long.
    pub(crate) fn requeue_old(&self, now: Instant) {
        let is_old = |reply: &mut HeldReply<R>| now.saturating_duration_since(reply.since) >= HELD_FOR_MAX;
        let mut replies = self.replies();
        let Replies { by_job, count, strays, due, .. } = &mut *replies;
        let mut old = Vec::new();
        for held in by_job.values_mut() {
            old.extend(held.extract_if(.., is_old));
        }
        *count -= old.len();
        for held in strays.values_mut() {
            old.extend(held.extract_if(.., is_old));
        }
        strays.retain(|_, held| !held.is_empty());
        due.requeue.extend(old.into_iter().map(|reply| reply.acker));
    }

    /// Resolves when some are to be settled.
    pub(crate) async fn due(&self) {
        self.due.notified().await;
    }

    pub(crate) fn take_due(&self) -> Due<R> {
        std::mem::take(&mut self.replies().due)
    }

    /// Forgets all replies: a new session begins, and the broker delivers them again.
    pub(crate) fn clear(&self) {
        let mut replies = self.replies();
        let answered = std::mem::take(&mut replies.answered);
        *replies = Replies { answered, ..Replies::default() };
    }

    /// Whether no job's replies are held, or to be held when they come again. Those to unknown jobs do not count.
    pub(crate) fn is_empty(&self) -> bool {
        let replies = self.replies();
        replies.count == 0 && replies.answered.is_empty()
    }

    fn replies(&self) -> MutexGuard<'_, Replies<R>> {
        // Nothing panics while it holds the lock.
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R> Replies<R> {
    fn acknowledge_all(&mut self, released: Vec<HeldReply<R>>) {
        self.count -= released.len();
        self.due.acknowledge.extend(released.into_iter().map(|reply| reply.acker));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(held: &HeldReplies<u32>) -> (Vec<u32>, Vec<u32>) {
        let Due { acknowledge, requeue } = held.take_due();
        (acknowledge, requeue)
    }

    #[test]
    fn replies_are_acknowledged_when_their_job_is_released() {
        let (held, now) = (HeldReplies::default(), Instant::now());
        for (job, reply) in [(1, 10), (2, 20), (1, 11)] {
            held.hold(job, reply, now);
        }
        assert_eq!(due(&held), (vec![], vec![]));
        held.release("one", 1);
        assert_eq!(due(&held), (vec![10, 11], vec![]));
        held.release("one", 1);
        assert!(!held.is_empty());
        held.release("two", 2);
        assert_eq!((due(&held), held.is_empty()), ((vec![20], vec![]), true));
    }

    #[test]
    fn replies_to_an_unknown_job_come_again_when_it_is_known() {
        let (held, now) = (HeldReplies::default(), Instant::now());
        held.hold_stray("a", 1, now);
        held.hold(1, 10, now);
        held.hold_stray("b", 2, now);
        held.hold_stray("a", 3, now);
        held.requeue_strays("a");
        assert_eq!(due(&held), (vec![], vec![1, 3]));
        held.requeue_strays("a");
        assert_eq!(due(&held), (vec![], vec![]));
        held.requeue_strays("b");
        assert_eq!(due(&held), (vec![], vec![2]));
    }

    #[test]
    fn replies_to_an_answered_job_that_come_again_are_held_until_it_is_released() {
        let (held, now) = (HeldReplies::default(), Instant::now());
        held.hold(1, 10, now);
        held.answered("one", 1);
        // A new session.
        held.clear();
        assert!(!held.is_empty());
        assert_eq!((held.hold_again("one", 10, now), held.hold_again("two", 20, now)), (None, Some(20)));
        assert_eq!(due(&held), (vec![], vec![]));
        // A younger job with the same id is answered: what comes again is held for it.
        held.answered("one", 2);
        held.release("one", 1);
        assert_eq!(due(&held), (vec![10], vec![]));
        assert_eq!(held.hold_again("one", 11, now), None);
        held.release("one", 2);
        assert_eq!((due(&held), held.is_empty()), ((vec![11], vec![]), true));
        assert_eq!(held.hold_again("one", 12, now), Some(12));
    }

    #[test]
    fn a_delivery_that_is_held_for_too_long_comes_again() {
        let (held, now) = (HeldReplies::default(), Instant::now());
        held.hold(1, 10, now);
        held.hold_stray("a", 1, now);
        let later = now + HELD_FOR_MAX;
        held.hold(1, 11, later);
        held.hold_stray("a", 2, later);
        held.requeue_old(later);
        assert_eq!(due(&held), (vec![], vec![10, 1]));
        held.requeue_strays("a");
        assert_eq!(due(&held), (vec![], vec![2]));
        held.release("one", 1);
        assert_eq!((due(&held), held.is_empty()), ((vec![11], vec![]), true));
    }

    #[test]
    fn the_replies_of_the_oldest_job_are_released_if_too_many_are_held() {
        let (held, now) = (HeldReplies::default(), Instant::now());
        held.hold(1, 0, now);
        for reply in 1..=HELD_MAX {
            held.hold(2, u32::from(reply), now);
        }
        assert_eq!(due(&held), (vec![0], vec![]));
        held.clear();
        assert!(held.is_empty());
    }
}
