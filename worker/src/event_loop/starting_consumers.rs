//! The consumers that are starting. A cancel that the broker reads before the consumer is there stops nothing, so a consumer that is to be
//! stopped meanwhile is stopped once it has started.

use std::collections::HashMap;

use vramq_core::ids::ConsumerId;

/// When a consumer can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopTime {
    Now,
    OnceStarted,
}

/// The consumers that are starting, and whether each is to be stopped once it has started.
#[derive(Debug, Default)]
pub(super) struct StartingConsumers(HashMap<ConsumerId, bool>);

impl StartingConsumers {
    /// The broker is asked to start a consumer.
    pub(super) fn add(&mut self, consumer: ConsumerId) {
        self.0.insert(consumer, false);
    }

    /// A consumer is to be stopped. If it is starting, [`remove`](Self::remove) says so later.
    pub(super) fn stop(&mut self, consumer: ConsumerId) -> StopTime {
        match self.0.get_mut(&consumer) {
            Some(is_to_stop) => {
                *is_to_stop = true;
                StopTime::OnceStarted
            }
            None => StopTime::Now,
        }
    }

    /// A consumer has started, or cannot be. Whether it was to be stopped meanwhile.
    pub(super) fn remove(&mut self, consumer: ConsumerId) -> bool {
        self.0.remove(&consumer).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What happens to consumers, and the answer.
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
            // Nothing is to be stopped.
            &[Add(1), Remove(1, false)],
            &[Add(1), Stop(1, OnceStarted), Remove(1, true)],
            &[Add(1), Stop(1, OnceStarted), Stop(1, OnceStarted), Remove(1, true)],
            // It has started, or was never asked for.
            &[Add(1), Remove(1, false), Stop(1, Now)],
            &[Stop(1, Now), Remove(1, false)],
            // A stop counts once.
            &[Add(1), Stop(1, OnceStarted), Remove(1, true), Stop(1, Now), Remove(1, false)],
            // Of several, only the one that was named.
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
