//! Which queues accept the argument `x-consumer-timeout`, by which a consumer sets how long it may hold a delivery.
//!
//! RabbitMQ 4.3 has no such timeout for classic queues, and closes the channel of a consumer that requests it there. Earlier versions
//! accept the argument for every queue (docs/rabbitmq.md lists which of them respect it). AMQP does not tell a queue's type, and lapin does
//! not tell the broker's version.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use lapin::types::ShortString;

use crate::config::QueueType;

/// The queues that refused the argument. Outlives sessions, because each refusal costs a session.
#[derive(Clone, Debug)]
pub struct ConsumerTimeouts {
    /// The type of the queues that workers declare. A queue that already existed may have another type.
    declared: QueueType,
    refused: Arc<Mutex<HashSet<String>>>,
}

impl ConsumerTimeouts {
    pub fn new(declared: QueueType) -> Self {
        Self { declared, refused: Arc::default() }
    }

    /// Whether a consumer of this queue may set its timeout.
    pub fn takes(&self, queue: &ShortString) -> bool {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        self.declared == QueueType::Quorum && !refused.contains(queue.as_str())
    }

    /// Learns from a broker's error whether a queue refuses the argument.
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

/// The queue that refuses the argument, according to a broker's message.
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
        // The text of RabbitMQ 4.3.6.
        timeouts.learn(&error(
            "PRECONDITION_FAILED - invalid arg 'x-consumer-timeout' for queue 'it's' in vhost '/' of queue type rabbit_classic_queue",
        ));
        assert!(!timeouts.takes(&"it's".into()));
        assert!(timeouts.takes(&"vramq.jobs.m".into()));
    }
}
