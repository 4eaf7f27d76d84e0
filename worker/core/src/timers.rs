//! The timers of the core. Tasks with their times come in. When the shell must call the core next goes out, and which tasks are due then.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::ids::{JobKey, ModelIndex, QueueIndex};
use crate::sizes::Size;

/// Something that is due at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// A publication about a job that the broker refused is offered again.
    PublishAgain(JobKey),
    /// A job that can neither be dead-lettered nor requeued goes back to its queue.
    GiveBack(JobKey),
    /// Checks whether a further queue that was lost can be consumed.
    LookForQueue(ModelIndex, QueueIndex),
    /// Half of a drain's time is over: passes are cancelled, and unfinished jobs requeued.
    HalfTime,
    /// The time of a drain is over.
    DrainDeadline,
}

/// The timers that run. There are at most two for each unacknowledged job, and one for each further queue.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    due: BTreeMap<(Instant, u64), Timer>,
    last: u64,
}

impl Timers {
    pub(crate) fn set(&mut self, at: Instant, timer: Timer) {
        self.last += 1;
        self.due.insert((at, self.last), timer);
    }

    /// The bound, for at most so many unacknowledged jobs. A timer outlives its job by at most the longest wait between two tries.
    pub(crate) fn size(&self, slots: usize) -> Size {
        Size::of("timers", self.due.len(), 2 * slots + 2)
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }

    /// Removes and returns one task that is due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Timer> {
        let entry = self.due.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }

    /// The session is over. Drops the timers of its jobs and queues; those of a drain stay.
    pub(crate) fn session_closed(&mut self) {
        self.due.retain(|_, timer| matches!(timer, Timer::HalfTime | Timer::DrainDeadline));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timers_come_in_the_order_of_their_times() {
        let (start, mut timers) = (Instant::now(), Timers::default());
        let second = Duration::from_secs(1);
        timers.set(start + 2 * second, Timer::HalfTime);
        timers.set(start + second, Timer::GiveBack(JobKey(1)));
        timers.set(start + second, Timer::PublishAgain(JobKey(2)));
        assert_eq!(timers.next(), Some(start + second));
        assert_eq!(timers.take_due(start), None);
        assert_eq!(timers.take_due(start + second), Some(Timer::GiveBack(JobKey(1))));
        timers.session_closed();
        assert_eq!(timers.take_due(start + second), None);
        assert_eq!(timers.take_due(start + 3 * second), Some(Timer::HalfTime));
        assert_eq!(timers.next(), None);
    }
}
