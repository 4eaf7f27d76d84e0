//! Runs long work outside the runtime's threads, so that it does not hold up other requests.

use std::panic::resume_unwind;

use tokio::task::{JoinHandle, spawn_blocking};

/// Work on this many bytes or more runs outside the runtime's threads.
const BLOCKING_BYTES: usize = 64 * 1024;

/// Runs `work` on `bytes` bytes where it does not hold up other requests.
pub async fn off_runtime<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes < BLOCKING_BYTES {
        return work();
    }
    joined(spawn_blocking(work)).await
}

/// What the work has returned. Panics if it has panicked. A runtime that ends does not begin the work: then this waits until the runtime drops
/// whoever waits.
pub async fn joined<T>(work: JoinHandle<T>) -> T {
    match work.await {
        Ok(done) => done,
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn work_that_a_runtime_does_not_begin_at_its_end_is_no_panic() {
        let runtime = Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let handle = runtime.handle().clone();
        runtime.shutdown_background();
        let _within = handle.enter();
        assert!(off_runtime(BLOCKING_BYTES, || ()).now_or_never().is_none());
    }
}
