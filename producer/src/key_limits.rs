//! How many jobs of a routing key may await their confirm. Each key has limits of its own, so that the jobs for a queue that does not
//! answer take no places of others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use lapin::types::ShortString;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Jobs of a routing key. RabbitMQ reads nothing from a connection any more when a channel that waits for a queue has got 200 to 400
/// messages. With fewer, a queue that does not answer holds up only its channel.
pub(crate) const JOBS_MAX: usize = 192;

/// Bytes of their bodies: two of the largest allowed.
pub(crate) const BODY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// With more keys, those without jobs are forgotten. Their limits are full, so they lose nothing.
const REMEMBERED: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct KeyLimits(Mutex<HashMap<ShortString, KeyLimit>>);

#[derive(Clone, Debug)]
struct KeyLimit {
    jobs: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// The place of a job, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _job: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

impl KeyLimits {
    /// Waits until a job of this key with so many bytes may be published. Jobs of a key have their turn in the order of these calls.
    pub(crate) async fn place(&self, key: &ShortString, bytes: usize) -> Place {
        let limit = self.of(key);
        let bytes = u32::try_from(bytes.min(BODY_BYTES_MAX)).unwrap_or(u32::MAX);
        Place { _job: acquire(limit.jobs, 1).await, _bytes: acquire(limit.bytes, bytes).await }
    }

    fn of(&self, key: &ShortString) -> KeyLimit {
        // Nothing panics while it holds the lock.
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if limits.len() >= REMEMBERED && !limits.contains_key(key) {
            // Whoever waits for a place or has one holds the semaphore.
            limits.retain(|_, limit| Arc::strong_count(&limit.jobs) > 1);
        }
        limits.entry(key.clone()).or_default().clone()
    }
}

impl Default for KeyLimit {
    fn default() -> Self {
        Self { jobs: Arc::new(Semaphore::new(JOBS_MAX)), bytes: Arc::new(Semaphore::new(BODY_BYTES_MAX)) }
    }
}

async fn acquire(semaphore: Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    semaphore.acquire_many_owned(permits).await.expect("nobody closes the semaphore")
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn now(limits: &KeyLimits, key: &str, bytes: usize) -> Option<Place> {
        limits.place(&key.into(), bytes).now_or_never()
    }

    #[test]
    fn a_key_without_room_takes_no_room_of_others() {
        let limits = KeyLimits::default();
        let mut places = (0..JOBS_MAX).map(|_| now(&limits, "silent", 1).unwrap()).collect::<Vec<_>>();
        assert!(now(&limits, "silent", 1).is_none());
        assert!(now(&limits, "other", 1).is_some());
        places.pop();
        assert!(now(&limits, "silent", BODY_BYTES_MAX).is_none(), "its bytes do not fit");
        places.clear();
        assert!(now(&limits, "silent", 2 * BODY_BYTES_MAX).is_some(), "a large body has its turn alone");
    }

    #[test]
    fn only_keys_without_jobs_are_forgotten() {
        let limits = KeyLimits::default();
        let _used = now(&limits, "used", BODY_BYTES_MAX).unwrap();
        for other in 0..3 * REMEMBERED {
            drop(now(&limits, &format!("other {other}"), 1));
            assert!(limits.0.lock().unwrap().len() <= REMEMBERED);
        }
        assert!(now(&limits, "used", 1).is_none());
    }
}
