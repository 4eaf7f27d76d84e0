//! Whether the clients that publish jobs and take their replies have sessions. A client's reply queue has its consumer as long as its session
//! lasts, so the gateway's own connection counts that queue's consumers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};
use vramq_amqp::Depth;

use crate::broker::link::Link;

/// How often the reply queues are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long a session may be away. A client that loses one alone opens the next within a second, and publishes the jobs of that second
/// then. While the broker is away its pauses grow to 10 s, so the gateway may be ready that much later than its broker.
const AWAY_MAX: Duration = Duration::from_secs(3);

/// What the looks have seen.
#[derive(Debug, Default)]
pub struct JobSessions {
    away_since: Mutex<Option<Instant>>,
}

impl JobSessions {
    /// Whether jobs can be published, and their replies taken, as far as the last looks say.
    pub fn are_there(&self, now: Instant) -> bool {
        let away_since = *self.away_since.lock().unwrap_or_else(PoisonError::into_inner);
        away_since.is_none_or(|since| now.saturating_duration_since(since) < AWAY_MAX)
    }

    fn note(&self, are_there: bool, now: Instant) {
        // Nothing panics while it holds the lock.
        let mut away_since = self.away_since.lock().unwrap_or_else(PoisonError::into_inner);
        *away_since = if are_there { None } else { away_since.or(Some(now)) };
    }
}

/// Looks at the clients' reply queues for as long as the process runs.
pub async fn watch(sessions: Arc<JobSessions>, link: Arc<Link>, queues: Vec<String>) {
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        if let Some(are_there) = look(&link, &queues).await {
            sessions.note(are_there, Instant::now());
        }
    }
}

/// Whether all clients have a session; `None`: the broker does not say.
async fn look(link: &Link, queues: &[String]) -> Option<bool> {
    for queue in queues {
        match link.queue(queue).await {
            Ok(Depth::Messages { consumers: 1.., .. } | Depth::NoPermission) => {}
            Ok(Depth::Messages { .. } | Depth::NoQueue) => return Some(false),
            // Without a connection of its own the gateway is not ready anyway. With one again, it first looks.
            Err(_) => return (!link.is_connected()).then_some(false),
        }
    }
    Some(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_is_back_soon_was_never_away() {
        let (sessions, start) = (JobSessions::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert!(sessions.are_there(start));
        for (ms, are_there, expected) in [
            (0, false, true),
            (2_900, true, true),
            (4_000, false, true),
            (6_000, false, true),
            (7_000, false, false),
            (8_000, true, true),
        ] {
            sessions.note(are_there, at(ms));
            assert_eq!(sessions.are_there(at(ms)), expected, "{ms}");
        }
    }
}
