//! The runtime of the process. Its end waits for no thread that still blocks.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Runs the gateway on a runtime of its own.
///
/// The runtime ends with the future, also if that panics. tokio's own end would wait for threads that block, such as those in a folder that
/// hangs, and so perhaps for ever.
///
/// # Errors
/// The system does not give the runtime what it needs.
pub fn run_to_end<T>(future: impl Future<Output = T>) -> io::Result<T> {
    let runtime = Builder::new_multi_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let _ends = EndsAtOnce(Some(runtime));
    Ok(handle.block_on(future))
}

/// A runtime that waits for none of its threads when it is dropped.
struct EndsAtOnce(Option<Runtime>);

impl Drop for EndsAtOnce {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tokio::task::spawn_blocking;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(90);

    /// The thread blocks until the sender is dropped.
    async fn panics_while_a_thread_blocks(until_dropped: mpsc::Receiver<()>) {
        let (begin, begun) = oneshot::channel();
        spawn_blocking(move || {
            let _ = begin.send(());
            let _ = until_dropped.recv();
        });
        begun.await.unwrap();
        panic!("a fault of the gateway");
    }

    #[test]
    fn a_panic_does_not_wait_for_a_thread_that_blocks() {
        let (held, until_dropped) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        std::thread::spawn(move || {
            let run = AssertUnwindSafe(|| run_to_end(panics_while_a_thread_blocks(until_dropped)));
            let _ = ended.send(catch_unwind(run).is_err());
        });
        assert_eq!(has_ended.recv_timeout(DEADLINE), Ok(true));
        drop(held);
    }
}
