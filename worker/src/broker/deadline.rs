//! Deadlines for a broker's answers that count only the time in which the worker could have taken an answer.
//!
//! While the process stands still (SIGSTOP, a paused machine, a blocked event loop), time goes on, and an answer that came in
//! time is read too late. A plain timeout would then give up a session with a broker that has done nothing wrong.

use std::pin::pin;
use std::time::{Duration, Instant};

/// A deadline is waited for in so many steps. A step that takes much longer than it should was a standstill, and does not count:
/// an answer that the broker gives at once has the whole of the next step.
const STEPS: u32 = 5;

/// Waits for `work`, but gives up when it has had `limit`. Cancel-safe if `work` is.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    let step = limit / STEPS;
    let mut work = pin!(work);
    let mut had = 0;
    while had < STEPS {
        let start = Instant::now();
        if let Ok(done) = tokio::time::timeout(step, &mut work).await {
            return Some(done);
        }
        had += u32::from(start.elapsed() < 2 * step);
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    /// A broker on a thread of its own: answers at once.
    async fn ask() {
        let (sender, answer) = oneshot::channel();
        std::thread::spawn(move || sender.send(()));
        answer.await.unwrap();
    }

    #[tokio::test]
    async fn what_never_ends_is_given_up() {
        assert_eq!(within(Duration::from_millis(50), std::future::pending::<()>()).await, None);
        assert_eq!(within(Duration::from_secs(3600), ask()).await, Some(()));
    }

    /// The second question is asked when the time is over, and answered at once.
    #[tokio::test]
    async fn a_standstill_does_not_use_up_the_deadline() {
        const LIMIT: Duration = Duration::from_secs(2);
        let questions = async {
            ask().await;
            std::thread::sleep(LIMIT + Duration::from_millis(500));
            ask().await;
        };
        assert_eq!(within(LIMIT, questions).await, Some(()));
    }
}
