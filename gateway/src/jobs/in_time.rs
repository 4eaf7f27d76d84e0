//! Bounds how long the store of results may take: a shared folder that hangs must not keep the caller waiting, nor its permits.

use std::time::Duration;

use tokio::time::timeout;

pub(super) const STORED_WITHIN: Duration = Duration::from_secs(10);

/// What the store answers about a job; `None`, and a line in the log, if it does not in time.
pub async fn in_time<T>(job: &str, what: &str, answer: impl Future<Output = T>) -> Option<T> {
    let answer = timeout(STORED_WITHIN, answer).await.ok();
    if answer.is_none() {
        let seconds = STORED_WITHIN.as_secs();
        tracing::warn!(job, seconds, "{what}: the store of results did not answer in time");
    }
    answer
}
