//! The consumers of a session, and the channel that each has started on. A further queue may have got another channel by the
//! time its consumer is stopped: a cancel on the new channel would stop nothing. A cancel that the broker reads before the consumer exists stops
//! nothing either, so a consumer that is starting is stopped after it has started.

use std::collections::HashMap;

use vramq_core::ids::ConsumerId;

/// When a consumer can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopTime<C> {
    /// Now, on this channel.
    Now(C),
    OnceStarted,
    /// It has ended, or was stopped before.
    IsOver,
}

/// A consumer that has not ended.
#[derive(Debug)]
enum State<C> {
    /// Whether it must be stopped once it has started.
    Starting { is_to_stop: bool },
    /// On this channel.
    Started(C),
}

/// The consumers that are starting, and those that have started and were not stopped. `C`: a channel.
#[derive(Debug)]
pub(super) struct SessionConsumers<C>(HashMap<ConsumerId, State<C>>);

impl<C> Default for SessionConsumers<C> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<C> SessionConsumers<C> {
    /// The broker is asked to start a consumer.
    pub(super) fn add(&mut self, consumer: ConsumerId) {
        self.0.insert(consumer, State::Starting { is_to_stop: false });
    }

    /// Requests the stop of a consumer. If the consumer is starting, [`started`](Self::started) returns its channel later.
    pub(super) fn stop(&mut self, consumer: ConsumerId) -> StopTime<C> {
        match self.0.remove(&consumer) {
            Some(State::Starting { .. }) => {
                self.0.insert(consumer, State::Starting { is_to_stop: true });
                StopTime::OnceStarted
            }
            Some(State::Started(channel)) => StopTime::Now(channel),
            None => StopTime::IsOver,
        }
    }

    /// A consumer has started on a channel. Returns the channel if the consumer must be stopped now.
    pub(super) fn started(&mut self, consumer: ConsumerId, channel: C) -> Option<C> {
        if let Some(State::Starting { is_to_stop: true }) = self.0.remove(&consumer) {
            return Some(channel);
        }
        self.0.insert(consumer, State::Started(channel));
        None
    }

    /// A consumer has ended, or could not be started.
    pub(super) fn ended(&mut self, consumer: ConsumerId) {
        self.0.remove(&consumer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call, and the expected answer. Channels are letters.
    #[derive(Debug)]
    enum Step {
        Add(u64),
        Stop(u64, StopTime<char>),
        /// The channel on which it has to be stopped.
        Started(u64, char, Option<char>),
        Ended(u64),
    }

    #[test]
    fn a_consumer_is_stopped_once_it_has_started_and_on_the_channel_that_it_is_on() {
        use Step::{Add, Ended, Started, Stop};
        use StopTime::{IsOver, Now, OnceStarted};
        let table: &[&[Step]] = &[
            // The queue may have another channel by the time of the stop.
            &[Add(1), Started(1, 'a', None), Add(2), Started(2, 'b', None), Stop(1, Now('a'))],
            &[Add(1), Stop(1, OnceStarted), Started(1, 'a', Some('a'))],
            &[Add(1), Stop(1, OnceStarted), Stop(1, OnceStarted), Started(1, 'a', Some('a'))],
            // It could not be started, has ended, or was never requested.
            &[Add(1), Stop(1, OnceStarted), Ended(1), Stop(1, IsOver)],
            &[Add(1), Started(1, 'a', None), Ended(1), Stop(1, IsOver)],
            &[Stop(1, IsOver), Ended(1)],
            // A stop counts only once.
            &[Add(1), Stop(1, OnceStarted), Started(1, 'a', Some('a')), Stop(1, IsOver)],
            &[Add(1), Started(1, 'a', None), Stop(1, Now('a')), Stop(1, IsOver)],
            // Only the named consumer is stopped.
            &[Add(1), Add(2), Stop(2, OnceStarted), Started(1, 'a', None), Started(2, 'a', Some('a'))],
        ];
        for steps in table {
            let mut consumers = SessionConsumers::default();
            for step in *steps {
                match *step {
                    Add(consumer) => consumers.add(ConsumerId(consumer)),
                    Stop(consumer, time) => {
                        assert_eq!(consumers.stop(ConsumerId(consumer)), time, "{step:?} of {steps:?}");
                    }
                    Started(consumer, channel, expected) => {
                        let stopped = consumers.started(ConsumerId(consumer), channel);
                        assert_eq!(stopped, expected, "{step:?} of {steps:?}");
                    }
                    Ended(consumer) => consumers.ended(ConsumerId(consumer)),
                }
            }
        }
    }
}
