//! Waits for an observed condition, with a deadline. No test sleeps for a fixed time.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::Instant;

/// How long a condition may take to come true. Generous: it only costs time where a test fails, and the machine may
/// be busy with other builds.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// Wait this long for a message that must not come, after everything that could send one has come to rest.
pub const SILENCE: Duration = Duration::from_millis(300);

/// How often a condition is looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// Looks until there is something to see.
///
/// # Errors
/// Names `what` when [`DEADLINE`] passes; whatever `look` fails with.
pub async fn until<T>(what: &str, look: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(DEADLINE, what, look).await
}

/// [`until`] with a deadline of its own.
///
/// # Errors
/// As for [`until`].
pub async fn until_within<T>(
    deadline: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    let end = Instant::now() + deadline;
    loop {
        if let Some(seen) = look().await? {
            return Ok(seen);
        }
        if Instant::now() >= end {
            bail!("waited {deadline:?} in vain for: {what}");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
