//! The consumers that are starting. A cancel that the broker reads before the consumer exists stops nothing, so such a consumer is stopped
//! after it has started.

use std::collections::HashMap;

use vramq_core::ids::ConsumerId;

/// When a consumer can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopTime {
    Now,
    OnceStarted,
}

/// The consumers that are starting, and whether each must be stopped once it has started.
#[derive(Debug, Default)]
pub(super) struct StartingConsumers(HashMap<ConsumerId, bool>);

impl StartingConsumers {
    /// The broker is asked to start a consumer.
    pub(super) fn add(&mut self, consumer: ConsumerId) {
        self.0.insert(consumer, false);
    }

    /// Requests the stop of a consumer. If the consumer is starting, [`remove`](Self::remove) returns true later.
    pub(super) fn stop(&mut self, consumer: ConsumerId) -> StopTime {
        match self.0.get_mut(&consumer) {
            Some(is_to_stop) => {
                *is_to_stop = true;
                StopTime::OnceStarted
            }
            None => StopTime::Now,
        }
    }

    /// A consumer has started, or could not. Returns whether it must be stopped now.
    pub(super) fn remove(&mut self, consumer: ConsumerId) -> bool {
        self.0.remove(&consumer).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                    Add(consumer) => starting.add(ConsumerId(consumer)),
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
