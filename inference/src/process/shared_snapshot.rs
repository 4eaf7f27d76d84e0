//! One snapshot of the device for all callers that ask for one at the same time. A snapshot reads all processes of the machine.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use super::claim::Snapshot;

/// The snapshots of a device, one at a time.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    /// How many have begun.
    begun: AtomicU64,
    /// The number of the last one that has ended, and what it showed; `None` if it failed.
    last: Mutex<(u64, Option<Snapshot>)>,
}

impl Snapshots {
    /// What a snapshot shows that begins after this call: an own one, or another caller's. Cancel-safe.
    pub(super) async fn shared<F: Future<Output = Option<Snapshot>>>(
        &self,
        snapshot: impl FnOnce() -> F,
    ) -> Option<Snapshot> {
        let begun_before = self.begun.load(Ordering::Acquire);
        let mut last = self.last.lock().await;
        if last.0 > begun_before {
            return last.1;
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let seen = snapshot().await;
        *last = (number, seen);
        seen
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::future::{join, join_all};
    use tokio::task::yield_now;

    use super::*;

    /// Snapshots that show how many have begun.
    async fn snapshot(snapshots: &Snapshots, count: &Cell<u64>) -> u64 {
        let seen = snapshots.shared(|| async {
            count.set(count.get() + 1);
            let ours = count.get();
            for _ in 0..3 {
                yield_now().await;
            }
            Some(Snapshot { ours, ..Snapshot::default() })
        });
        seen.await.unwrap().ours
    }

    #[tokio::test]
    async fn calls_during_a_snapshot_share_the_next_one() {
        let (snapshots, count) = (Snapshots::default(), Cell::new(0));
        let later = async {
            yield_now().await;
            assert_eq!(count.get(), 1, "the first snapshot has begun");
            join_all((0..10).map(|_| snapshot(&snapshots, &count))).await
        };
        let (first, others) = join(snapshot(&snapshots, &count), later).await;
        assert_eq!(
            (first, others),
            (1, vec![2; 10]),
            "a snapshot that began earlier may miss what they ask for"
        );
        assert_eq!(snapshot(&snapshots, &count).await, 3, "nobody looks at the past");
    }

    #[tokio::test]
    async fn a_snapshot_that_is_dropped_holds_up_nobody() {
        let (snapshots, count) = (Snapshots::default(), Cell::new(0));
        {
            let dropped = snapshots.shared(std::future::pending);
            assert!(futures_util::poll!(std::pin::pin!(dropped)).is_pending());
        }
        assert_eq!(snapshot(&snapshots, &count).await, 1);
    }
}
