//! Waits in tests, but not for ever.

use std::time::Duration;

use tokio::task::yield_now;
use tokio::time::timeout;

const DEADLINE: Duration = Duration::from_secs(90);

/// Waits until something is so.
pub async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            yield_now().await;
        }
    };
    timeout(DEADLINE, waiting).await.unwrap_or_else(|_| panic!("never so: {what}"));
}
