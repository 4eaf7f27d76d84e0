//! The consumers that are starting. A cancel that the broker reads before the consumer exists stops nothing, so such a consumer is stopped
//! after it has started.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use vramq_core::action::JobQueue;
use vramq_core::ids::{ConsumerId, ModelIndex};

/// When a consumer can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopTime {
    Now,
    OnceStarted,
}

#[derive(Debug)]
struct Starting {
    model: ModelIndex,
    queue: JobQueue,
    asked: Instant,
    /// It must be stopped once it has started.
    is_to_stop: bool,
}

/// The consumers that are starting.
#[derive(Debug, Default)]
pub(super) struct StartingConsumers(HashMap<ConsumerId, Starting>);

impl StartingConsumers {
    /// The broker is asked now to start a consumer of a queue.
    pub(super) fn add(&mut self, consumer: ConsumerId, model: ModelIndex, queue: JobQueue, now: Instant) {
        self.0.insert(consumer, Starting { model, queue, asked: now, is_to_stop: false });
    }

    /// The queues of the consumers that the broker was asked for longer than `wait` ago.
    pub(super) fn asked_before(
        &self,
        now: Instant,
        wait: Duration,
    ) -> impl Iterator<Item = (ModelIndex, JobQueue)> {
        let starting = self.0.values();
        let late = starting.filter(move |starting| now.saturating_duration_since(starting.asked) > wait);
        late.map(|starting| (starting.model, starting.queue))
    }

    /// Requests the stop of a consumer. If the consumer is starting, [`remove`](Self::remove) returns true later.
    pub(super) fn stop(&mut self, consumer: ConsumerId) -> StopTime {
        match self.0.get_mut(&consumer) {
            Some(starting) => {
                starting.is_to_stop = true;
                StopTime::OnceStarted
            }
            None => StopTime::Now,
        }
    }

    /// A consumer has started, or could not. Returns whether it must be stopped now.
    pub(super) fn remove(&mut self, consumer: ConsumerId) -> bool {
        self.0.remove(&consumer).is_some_and(|starting| starting.is_to_stop)
    }
}

#[cfg(test)]
mod tests {
    use vramq_core::ids::QueueIndex;

    use super::*;

    #[test]
    fn the_queues_that_were_asked_for_long_ago_are_known() {
        let (mut starting, then, wait) =
            (StartingConsumers::default(), Instant::now(), Duration::from_secs(3));
        let now = then + wait + Duration::from_secs(1);
        let [early, late, started] = [1, 2, 3].map(|queue| JobQueue::Jobs(QueueIndex(queue)));
        starting.add(ConsumerId(1), ModelIndex(0), early, then);
        starting.add(ConsumerId(2), ModelIndex(0), late, now);
        starting.add(ConsumerId(3), ModelIndex(0), started, then);
        starting.remove(ConsumerId(3));
        let found: Vec<_> = starting.asked_before(now, wait).collect();
        assert_eq!(found, [(ModelIndex(0), early)]);
    }

    /// A call, and the expected answer.
    #[derive(Debug)]
    enum Step {
        Add(u64),
        Stop(u64, StopTime),
        /// Whether it was to be stopped.
        Remove(u64, bool),
    }

    #[test]
    fn a_consumer_that_is_starting_is_stopped_once_it_has_started() {
        use Step::{Add, Remove, Stop};
        use StopTime::{Now, OnceStarted};
        let table: &[&[Step]] = &[
            // No stop was requested.
            &[Add(1), Remove(1, false)],
            &[Add(1), Stop(1, OnceStarted), Remove(1, true)],
            &[Add(1), Stop(1, OnceStarted), Stop(1, OnceStarted), Remove(1, true)],
            // Already started, or never requested.
            &[Add(1), Remove(1, false), Stop(1, Now)],
            &[Stop(1, Now), Remove(1, false)],
            // A stop counts only once.
            &[Add(1), Stop(1, OnceStarted), Remove(1, true), Stop(1, Now), Remove(1, false)],
            // Only the named consumer is stopped.
            &[Add(1), Add(2), Stop(2, OnceStarted), Remove(1, false), Remove(2, true)],
        ];
        for steps in table {
            let mut starting = StartingConsumers::default();
            for step in *steps {
                match *step {
                    Add(consumer) => {
                        starting.add(ConsumerId(consumer), ModelIndex(0), JobQueue::Bulk, Instant::now());
                    }
                    Stop(consumer, time) => {
                        assert_eq!(starting.stop(ConsumerId(consumer)), time, "{step:?} of {steps:?}");
                    }
                    Remove(consumer, is_to_stop) => {
                        assert_eq!(
                            starting.remove(ConsumerId(consumer)),
                            is_to_stop,
                            "{step:?} of {steps:?}"
                        );
                    }
                }
            }
        }
    }
}
