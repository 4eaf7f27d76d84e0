//! Works on files on a thread of its own, because a disk may hang. The worker's event loop runs on the runtime's only thread, and would
//! hang, too.

use std::sync::Arc;

use tokio::sync::{Mutex, oneshot};
use tokio::task::spawn_blocking;
use tokio::time::{Duration, timeout};

/// How long anything waits for files to be removed, or looked at. The thread goes on.
const TIDY_LIMIT: Duration = Duration::from_secs(10);

/// Whose turn it is: one caller's work at a time, so that a disk that hangs holds one thread.
#[derive(Clone, Debug, Default)]
pub struct Aside(Arc<Mutex<()>>);

/// What was done, and how to undo it if nobody takes it.
struct Done<T> {
    result: Option<T>,
    undo: fn(T),
}

impl<T> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(result) = self.result.take() {
            (self.undo)(result);
        }
    }
}

impl Aside {
    /// Does `work` when earlier work has ended; `None` if it panics. Dropping this waits no longer: what is done after that is undone.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
        undo: fn(T),
    ) -> Option<T> {
        let turn = Arc::clone(&self.0).lock_owned().await;
        let (sender, done) = oneshot::channel();
        spawn_blocking(move || {
            // An error: nobody waits, and it is undone here.
            let _ = sender.send(Done { result: Some(work()), undo });
            drop(turn);
        });
        let mut done = done.await.ok()?;
        done.result.take()
    }
}

/// Removes or looks at files, unless that takes long.
pub(super) async fn tidy<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    timeout(TIDY_LIMIT, spawn_blocking(work)).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_undone_before_the_next_begins() {
        static UNDONE: AtomicU32 = AtomicU32::new(0);
        fn undo(number: u32) {
            UNDONE.store(number, Ordering::SeqCst);
        }
        let aside = Aside::default();
        let (go_on, waits) = mpsc::channel::<()>();
        let hangs = aside.run(
            move || {
                let _ = waits.recv();
                1
            },
            undo,
        );
        assert_eq!(hangs.now_or_never(), None);
        // It waits for its turn.
        assert_eq!(aside.run(|| 2, undo).now_or_never(), None);
        go_on.send(()).unwrap();
        assert_eq!(aside.run(|| UNDONE.load(Ordering::SeqCst) + 2, undo).await, Some(3));
        assert_eq!(UNDONE.load(Ordering::SeqCst), 1);
        assert_eq!(aside.run(|| -> u32 { panic!("as a bug") }, undo).await, None);
        assert_eq!(aside.run(|| 4, undo).await, Some(4));
    }
}
