//! Calls to a device, off the runtime and with a limit: a driver may hang for ever.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::{Duration, Instant, timeout};

/// After this long a call counts as failed.
pub(super) const CALL_MAX: Duration = Duration::from_secs(10);

/// The calls to one device.
#[derive(Debug)]
pub(super) struct DeviceCalls {
    limit: Duration,
    under_way: Arc<Mutex<UnderWay>>,
}

/// Calls that have not returned yet, and when each began.
#[derive(Debug, Default)]
struct UnderWay {
    next: u64,
    began: BTreeMap<u64, Instant>,
}

impl DeviceCalls {
    /// `limit`: [`CALL_MAX`], except in tests.
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, under_way: Arc::default() }
    }

    /// What a call returns; `None` if it panics or takes too long. Each call that hangs keeps a thread of the runtime. So while one hangs,
    /// all others fail at once.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.hangs() {
            return None;
        }
        let under_way = Arc::clone(&self.under_way);
        let called = tokio::task::spawn_blocking(move || {
            let _guard = Call::begin(&under_way);
            call()
        });
        timeout(self.limit, called).await.ok()?.ok()
    }

    fn hangs(&self) -> bool {
        lock(&self.under_way).began.values().any(|began| began.elapsed() >= self.limit)
    }
}

/// A call under way, until this is dropped.
struct Call<'a> {
    under_way: &'a Mutex<UnderWay>,
    number: u64,
}

impl<'a> Call<'a> {
    fn begin(under_way: &'a Mutex<UnderWay>) -> Self {
        let mut calls = lock(under_way);
        calls.next += 1;
        let number = calls.next;
        calls.began.insert(number, Instant::now());
        Self { under_way, number }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        lock(self.under_way).began.remove(&self.number);
    }
}

/// A poisoned lock is usable: no panic leaves the list half changed.
fn lock(calls: &Mutex<UnderWay>) -> MutexGuard<'_, UnderWay> {
    calls.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn beside_a_call_that_hangs_no_other_begins_until_it_returns() {
        let calls = DeviceCalls::new(Duration::from_millis(100));
        let (go_on, waits) = mpsc::channel::<()>();
        assert_eq!(calls.call(move || waits.recv()).await, None, "it hangs");
        // Its thread may have begun later than the wait for it.
        while !calls.hangs() {
            tokio::task::yield_now().await;
        }
        assert_eq!(calls.call(|| 1).await, None, "it is not called");
        go_on.send(()).unwrap();
        while calls.hangs() {
            tokio::task::yield_now().await;
        }
        // On a busy machine a call may take longer than the limit.
        while calls.call(|| 2).await != Some(2) {}
    }
}
