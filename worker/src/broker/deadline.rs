//! Deadlines for a broker's answers that count only the time in which the worker could have received an answer.
//!
//! While the process is stopped (SIGSTOP, a paused machine, a blocked event loop), the clock continues, and an answer that came in time is
//! read too late. A plain timeout would then end a session although the broker did nothing wrong.

use std::pin::pin;
use std::time::{Duration, Instant};

/// A deadline is divided into so many steps. A step that takes much longer than planned was a standstill and does not count. An answer that
/// was sent meanwhile then has a whole step to be read.
const STEPS: u32 = 5;

/// The longest wait for an answer that comes after other messages. A broker that goes on to deliver jobs, and never answers, is given up, too.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(15 * 60);

/// Runs `work`, and gives up after it could run for `limit`. Cancel-safe if `work` is.
pub async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    within_silence(limit, limit, || 0, work).await
}

/// Waits for an answer that comes after other messages on the same connection. Gives up when nothing of a message came for `limit`, or after
/// `longest`. `received` counts what came of them. Cancel-safe if `work` is.
pub async fn within_silence<T>(
    limit: Duration,
    longest: Duration,
    received: impl Fn() -> u64,
    work: impl Future<Output = T>,
) -> Option<T> {
    let step = limit / STEPS;
    let mut work = pin!(work);
    let (mut had, mut before, mut waited) = (0, received(), Duration::ZERO);
    while had < STEPS && waited < longest {
        let start = Instant::now();
        if let Ok(done) = tokio::time::timeout(step, &mut work).await {
            return Some(done);
        }
        waited += step;
        let after = received();
        if after != before {
            (had, before) = (0, after);
        } else if start.elapsed() < 2 * step {
            had += 1;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::oneshot;

    use super::*;

    /// A broker on another thread that answers at once.
    async fn ask() {
        let (sender, answer) = oneshot::channel();
        std::thread::spawn(move || sender.send(()));
        answer.await.unwrap();
    }

    #[tokio::test]
    async fn a_wait_without_end_is_given_up() {
        assert_eq!(within(Duration::from_millis(50), std::future::pending::<()>()).await, None);
        assert_eq!(within(Duration::from_secs(3600), ask()).await, Some(()));
    }

    /// Ten deliveries, one in each step, then none for the five steps of the limit.
    #[tokio::test]
    async fn each_delivery_restarts_the_limit() {
        let looks = Cell::new(0);
        let received = || {
            looks.set(looks.get() + 1);
            looks.get().min(11)
        };
        let never = std::future::pending::<()>();
        assert_eq!(within_silence(Duration::from_millis(50), ANSWER_MAX, received, never).await, None);
        // More if the machine stood still for a step.
        assert!(looks.get() >= 1 + 10 + u64::from(STEPS), "{}", looks.get());
    }

    #[tokio::test]
    async fn deliveries_do_not_put_the_end_off_for_ever() {
        let looks = Cell::new(0);
        let received = || {
            looks.set(looks.get() + 1);
            assert!(looks.get() < 100, "it waits for ever");
            looks.get()
        };
        let (limit, longest) = (Duration::from_millis(50), Duration::from_millis(200));
        assert_eq!(within_silence(limit, longest, received, std::future::pending::<()>()).await, None);
        assert_eq!(looks.get(), 1 + 20, "steps of a fifth of the limit, 10 ms");
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
