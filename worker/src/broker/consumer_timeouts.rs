//! Which queues let a consumer say how long it may hold a delivery, by the argument `x-consumer-timeout`.
//!
//! RabbitMQ 4.3 has no such timeout for classic queues, and closes the channel of a consumer that asks one for it. Earlier versions
//! take the argument for every queue (docs/rabbitmq.md says which of them follow it). AMQP tells neither a queue's type nor, through lapin, the broker's version.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use lapin::types::ShortString;

use crate::config::QueueType;

/// What is known about it. Outlives sessions, because a refusal costs the session in which it is learned.
#[derive(Clone, Debug)]
pub struct ConsumerTimeouts {
    /// The type of the queues that workers declare. One that was there before may have another.
    declared: QueueType,
    refused: Arc<Mutex<HashSet<String>>>,
}

impl ConsumerTimeouts {
    pub fn new(declared: QueueType) -> Self {
        Self { declared, refused: Arc::default() }
    }

    /// Whether a consumer of this queue may name its timeout.
    pub fn takes(&self, queue: &ShortString) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        self.declared == QueueType::Quorum && !refused.contains(queue.as_str())
    }

    /// Learns from an error of the broker, if it says that a queue does not take the argument.
    pub fn learn(&self, error: &lapin::Error) {
        let lapin::ErrorKind::ProtocolError(answer) = error.kind() else { return };
        let Some(queue) = refusing(answer.get_message().as_str()) else { return };
        // The same error may come by the connection and by the consumer.
        if !self.refused.lock().unwrap_or_else(PoisonError::into_inner).insert(queue.to_owned()) {
            return;
        }
        tracing::warn!(
            queue,
            "the queue does not let a consumer name its timeout (x-consumer-timeout): it is a classic queue of RabbitMQ 4.3 or \
             later. The worker consumes it without one from now on"
        );
    }
}

/// The queue that a broker's message says does not take the argument.
fn refusing(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("invalid arg 'x-consumer-timeout' for queue '")?;
    rest.split_once("' in vhost ").map(|(queue, _)| queue)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_classic_queue_is_never_asked() {
        let timeouts = ConsumerTimeouts::new(QueueType::Classic);
        assert!(!timeouts.takes(&"vramq.jobs.m".into()));
    }

    #[test]
    fn a_queue_that_refused_is_not_asked_again() {
        let timeouts = ConsumerTimeouts::new(QueueType::Quorum);
        let error = |text: &str| {
            let refused = lapin::protocol::AMQPSoftError::PRECONDITIONFAILED;
            let answer = lapin::protocol::AMQPError::new(refused.into(), text.into());
            lapin::Error::from(lapin::ErrorKind::ProtocolError(answer))
        };
        timeouts.learn(&error(
            "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used: 100 ms",
        ));
        assert!(timeouts.takes(&"it's".into()));
        // As RabbitMQ 4.3.6 says it.
        timeouts.learn(&error(
            "PRECONDITION_FAILED - invalid arg 'x-consumer-timeout' for queue 'it's' in vhost '/' of queue type rabbit_classic_queue",
        ));
        assert!(!timeouts.takes(&"it's".into()));
        assert!(timeouts.takes(&"vramq.jobs.m".into()));
    }
}
