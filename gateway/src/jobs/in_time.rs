//! Bounds how long the result store may take. Otherwise a shared folder that hangs would block the caller and its permits.

use std::time::Duration;

use tokio::time::timeout;

pub(super) const STORED_WITHIN: Duration = Duration::from_secs(10);

/// The store's answer about a job. `None`, and a line in the log, if the store does not answer in time. `what` begins that line: what cannot
/// be done.
pub async fn in_time<T>(job: &str, what: &str, answer: impl Future<Output = T>) -> Option<T> {
    let answer = timeout(STORED_WITHIN, answer).await.ok();
    if answer.is_none() {
        let seconds = STORED_WITHIN.as_secs();
        tracing::warn!(job, seconds, "{what}: the store of results did not answer in time");
    }
    answer
}
