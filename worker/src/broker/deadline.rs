//! Deadlines for a broker's answers that count only the time in which the worker could have received an answer.
//!
//! While the process is stopped (SIGSTOP, a paused machine, a blocked event loop), the clock continues, and an answer that came in time is
//! read too late. A plain timeout would then end a session although the broker did nothing wrong.

use std::pin::pin;
use std::time::{Duration, Instant};

/// A deadline is divided into so many steps. A step that takes much longer than planned was a standstill and does not count. An answer that
/// was sent meanwhile then has a whole step to be read.
const STEPS: u32 = 5;

/// Runs `work`, and gives up after it could run for `limit`. Cancel-safe if `work` is.
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

    /// A broker on another thread that answers at once.
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

    /// The second question is asked after the limit has passed, and answered at once.
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
