//! Runs long work outside the runtime's threads, so that it does not hold up other requests.

/// Work on this many bytes or more runs outside the runtime's threads.
const BLOCKING_BYTES: usize = 64 * 1024;

/// Runs `work` on `bytes` bytes where it does not hold up other requests.
pub async fn off_runtime<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes < BLOCKING_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}
