//! Decides what must be given up when something that a queue's consumers need has failed. Pure.

use vramq_core::action::JobQueue;
use vramq_core::ids::QueueIndex;

use crate::broker::session::{consumer_timeout, why_closed};

/// What is lost by a failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum QueueFailure {
    /// Nothing: the channel was replaced meanwhile, and its error does not affect its successor.
    OfReplacedChannel,
    /// A further queue, for this reason of the broker.
    Queue(QueueIndex, String),
    /// The session. Also when a job was held for too long: the broker then closes the channel with all its deliveries.
    Session,
}

/// Classifies an error that ended something that the consumers of `queue` need. `is_whole`: everything is open without which a model
/// receives no jobs. `has_open`: a further queue has an open channel.
pub(super) fn classify_failure(
    queue: Option<JobQueue>,
    error: &lapin::Error,
    is_whole: bool,
    has_open: impl FnOnce(QueueIndex) -> bool,
) -> QueueFailure {
    let why = why_closed(error).filter(|_| consumer_timeout(error).is_none());
    match (queue, why) {
        (Some(JobQueue::Jobs(queue)), Some(why)) if queue.is_further() && is_whole => {
            if has_open(queue) {
                QueueFailure::OfReplacedChannel
            } else {
                QueueFailure::Queue(queue, why)
            }
        }
        _ => QueueFailure::Session,
    }
}

#[cfg(test)]
mod tests {
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};
    use lapin::{ChannelState, ErrorKind};

    use super::QueueFailure::{OfReplacedChannel, Queue, Session};
    use super::*;

    fn protocol(kind: impl Into<AMQPErrorKind>, text: &str) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), text.into())).into()
    }

    #[test]
    fn only_the_channel_of_a_further_queue_costs_less_than_the_session() {
        let gone = || protocol(AMQPSoftError::NOTFOUND, "no queue");
        let held_for_too_long = protocol(
            AMQPSoftError::PRECONDITIONFAILED,
            "delivery acknowledgement on channel 1 timed out. Timeout value used: 1000 ms.",
        );
        let closed: lapin::Error = ErrorKind::InvalidChannelState(ChannelState::Closed, "").into();
        let broken: lapin::Error = std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        let further = Some(JobQueue::Jobs(QueueIndex(2)));
        let own = Some(JobQueue::Jobs(QueueIndex::OWN));
        let lost = |why: &str| Queue(QueueIndex(2), why.to_owned());
        // Columns: queue, error, whether the session is whole, whether the queue has an open channel.
        let table = [
            (further, gone(), true, false, lost("no queue")),
            (further, closed.clone(), true, false, lost(&closed.to_string())),
            (further, gone(), true, true, OfReplacedChannel),
            (further, gone(), false, false, Session),
            (further, gone(), false, true, Session),
            (further, held_for_too_long, true, false, Session),
            (further, protocol(AMQPHardError::CONNECTIONFORCED, "restart"), true, false, Session),
            (further, broken, true, false, Session),
            (own, gone(), true, false, Session),
            (Some(JobQueue::Bulk), gone(), true, false, Session),
            // The quarantine.
            (None, gone(), true, false, Session),
        ];
        for (queue, error, is_whole, has_open, expected) in table {
            let failure = classify_failure(queue, &error, is_whole, |_| has_open);
            assert_eq!(failure, expected, "{queue:?}, {error}, whole {is_whole}, open {has_open}");
        }
    }
}
