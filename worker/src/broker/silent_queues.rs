//! Further queues of which the broker started no consumer in time.
//!
//! RabbitMQ waits up to 65 s for the majority of a quorum queue before it starts a consumer, and reads nothing from the channel meanwhile.
//! Without the majority it then closes the whole connection (3.10.8 and 4.0.5). So each try may cost a session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::types::ShortString;

/// How long the worker waits after the first failed try before it tries such a queue again, unless the broker answers late. The wait doubles
/// with each further try that fails.
const NOT_TRIED_FOR: Duration = Duration::from_secs(600);

/// The longest wait.
const NOT_TRIED_MAX: Duration = Duration::from_secs(3600);

/// Why such a queue is not consumed, and what to do.
pub const WHY: &str = "the broker does not start a consumer of it, as of a quorum queue without the majority of its members: start \
                       the nodes of its members. The worker tries again when the broker has answered, or after ten minutes, and \
                       twice as long after each try, up to an hour: each may cost a session";

/// A queue that is not tried.
#[derive(Clone, Copy, Debug)]
struct Rest {
    until: Instant,
    lasts: Duration,
}

/// The queues about which the broker is silent. Outlives sessions.
#[derive(Clone, Debug, Default)]
pub struct SilentQueues {
    rests: Arc<Mutex<HashMap<ShortString, Rest>>>,
}

impl SilentQueues {
    /// The broker has not started a consumer of a queue in time. Changes nothing while the queue is not tried anyway.
    pub fn note(&self, queue: &ShortString, now: Instant) {
        self.with(|rests| {
            let lasts = match rests.get(queue) {
                Some(rest) if now < rest.until => return,
                Some(rest) => (2 * rest.lasts).min(NOT_TRIED_MAX),
                None => NOT_TRIED_FOR,
            };
            rests.insert(queue.clone(), Rest { until: now + lasts, lasts });
        });
    }

    /// The broker has answered, or the connection ended for another reason before it could.
    pub fn forget(&self, queue: &ShortString) {
        self.with(|rests| rests.remove(queue));
    }

    /// Whether the queue is not to be tried now.
    pub fn is_silent(&self, queue: &ShortString, now: Instant) -> bool {
        self.with(|rests| rests.get(queue).is_some_and(|rest| now < rest.until))
    }

    /// Nothing panics while it holds the lock.
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<ShortString, Rest>) -> T) -> T {
        act(&mut self.rests.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whether the broker closed the connection, and perhaps over a queue. Not if the network or a heartbeat failed, if this worker closed it,
/// or if an operator or the end of the node did.
pub fn is_about_a_queue(error: &lapin::Error) -> bool {
    let lapin::ErrorKind::ProtocolError(answer) = error.kind() else { return false };
    matches!(answer.kind(), AMQPErrorKind::Hard(kind) if *kind != AMQPHardError::CONNECTIONFORCED)
}

#[cfg(test)]
mod tests {
    use lapin::protocol::{AMQPError, AMQPSoftError};
    use lapin::{ConnectionState, ErrorKind};

    use super::*;

    #[test]
    fn a_silent_queue_is_tried_again_after_a_while_or_an_answer() {
        let (queues, now) = (SilentQueues::default(), Instant::now());
        let [silent, other] = ["silent", "other"].map(ShortString::from);
        queues.note(&silent, now);
        assert!(queues.is_silent(&silent, now) && !queues.is_silent(&other, now));
        assert!(!queues.is_silent(&silent, now + NOT_TRIED_FOR));
        queues.forget(&silent);
        assert!(!queues.is_silent(&silent, now));
    }

    #[test]
    fn a_queue_that_stays_silent_is_tried_less_and_less_often() {
        let (queues, queue, mut now) = (SilentQueues::default(), ShortString::from("silent"), Instant::now());
        for minutes in [10, 20, 40, 60, 60] {
            let rest = Duration::from_secs(60 * minutes);
            queues.note(&queue, now);
            // Another consumer of the same try.
            queues.note(&queue, now + rest / 2);
            assert!(queues.is_silent(&queue, now + rest - Duration::from_secs(1)), "{minutes}");
            now += rest;
            assert!(!queues.is_silent(&queue, now), "{minutes}");
        }
        queues.forget(&queue);
        queues.note(&queue, now);
        assert!(!queues.is_silent(&queue, now + NOT_TRIED_FOR), "as at first");
    }

    #[test]
    fn only_an_error_of_the_broker_is_about_a_queue() {
        let protocol = |kind: AMQPErrorKind| ErrorKind::ProtocolError(AMQPError::new(kind, "text".into()));
        let table = [
            (protocol(AMQPHardError::INTERNALERROR.into()), true),
            (protocol(AMQPHardError::CONNECTIONFORCED.into()), false),
            (protocol(AMQPSoftError::NOTFOUND.into()), false),
            (ErrorKind::InvalidConnectionState(ConnectionState::Closed), false),
            (ErrorKind::MissingHeartbeatError, false),
        ];
        for (kind, expected) in table {
            let error = lapin::Error::from(kind);
            assert_eq!(is_about_a_queue(&error), expected, "{error}");
        }
        let cut: lapin::Error = std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        assert!(!is_about_a_queue(&cut));
    }
}
