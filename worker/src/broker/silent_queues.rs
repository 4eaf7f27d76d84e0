//! Further queues of which the broker started no consumer in time.
//!
//! RabbitMQ waits up to 65 s for the majority of a quorum queue before it starts a consumer, and reads nothing from the channel meanwhile.
//! Without the majority it then closes the whole connection (3.10.8 and 4.0.5). So a try may cost a session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::types::ShortString;

/// How long the worker does not try such a queue again, unless the broker answers late.
const NOT_TRIED_FOR: Duration = Duration::from_secs(600);

/// Why such a queue is not consumed, and what to do.
pub const WHY: &str = "the broker does not start a consumer of it, as of a quorum queue without the majority of its members: start \
                       the nodes of its members. The worker tries again when the broker has answered, or after ten minutes";

/// The queues, and since when the broker is silent about each. Outlives sessions.
#[derive(Clone, Debug, Default)]
pub struct SilentQueues {
    since: Arc<Mutex<HashMap<ShortString, Instant>>>,
}

impl SilentQueues {
    /// The broker has not started a consumer of a queue in time.
    pub fn note(&self, queue: &ShortString, now: Instant) {
        self.with(|since| since.insert(queue.clone(), now));
    }

    /// The broker has answered.
    pub fn answered(&self, queue: &ShortString) {
        self.with(|since| since.remove(queue));
    }

    /// Whether the queue is not to be tried now.
    pub fn is_silent(&self, queue: &ShortString, now: Instant) -> bool {
        self.with(|since| {
            let since = since.get(queue);
            since.is_some_and(|since| now.saturating_duration_since(*since) < NOT_TRIED_FOR)
        })
    }

    /// Nothing panics while it holds the lock.
    fn with<T>(&self, act: impl FnOnce(&mut HashMap<ShortString, Instant>) -> T) -> T {
        act(&mut self.since.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_queue_is_tried_again_after_a_while_or_an_answer() {
        let (queues, now) = (SilentQueues::default(), Instant::now());
        let [silent, other] = ["silent", "other"].map(ShortString::from);
        queues.note(&silent, now);
        assert!(queues.is_silent(&silent, now) && !queues.is_silent(&other, now));
        assert!(!queues.is_silent(&silent, now + NOT_TRIED_FOR));
        queues.answered(&silent);
        assert!(!queues.is_silent(&silent, now));
    }
}
