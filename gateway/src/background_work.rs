//! Work that goes on after its client has hung up, such as storing a withdrawal. A gateway that stops waits for it.

use tokio::sync::watch;

/// The pieces of work that go on. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct BackgroundWork(watch::Sender<usize>);

/// A piece of work, which ends when this is dropped.
#[derive(Debug)]
pub struct Work(BackgroundWork);

impl BackgroundWork {
    /// Counts a piece of work until the returned value is dropped. To be called before the work's client can hang up: otherwise a gateway that
    /// stops may not know of the work.
    pub fn begin(&self) -> Work {
        self.0.send_modify(|count| *count += 1);
        Work(self.clone())
    }

    /// How many pieces of work have not ended.
    pub fn count(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until none is left.
    pub async fn all_ended(&self) {
        let mut count = self.0.subscribe();
        // Cannot fail: `self` keeps the sender.
        let _ = count.wait_for(|count| *count == 0).await;
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn all_of_it_has_ended_with_the_last_piece() {
        let background = BackgroundWork::default();
        assert!(background.all_ended().now_or_never().is_some());
        let (one, other) = (background.begin(), background.clone().begin());
        drop(one);
        assert_eq!(background.count(), 1);
        let mut ended = Box::pin(background.all_ended());
        assert!((&mut ended).now_or_never().is_none());
        drop(other);
        ended.await;
    }
}
