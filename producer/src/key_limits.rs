//! How many jobs may await their confirm. Each routing key has limits of its own, so that the jobs for a queue that does not answer take
//! few places of others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Jobs of a routing key. RabbitMQ reads nothing from a connection any more when a channel that waits for a queue has got 200 to 400
/// messages. With fewer, a queue that does not answer holds up only its channel.
pub(crate) const KEY_JOBS_MAX: usize = 192;

/// Bytes of the bodies of a key's jobs: two of the largest allowed.
pub(crate) const KEY_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Bytes of all bodies: as much as eight keys may have.
const ALL_KEYS_BYTES_MAX: usize = 8 * KEY_BYTES_MAX;

/// With more keys, those without jobs are forgotten. They lose nothing by it.
const REMEMBERED: usize = 256;

#[derive(Debug)]
pub(crate) struct KeyLimits {
    keys: Mutex<HashMap<String, KeyLimit>>,
    all_bytes: Arc<Semaphore>,
}

#[derive(Clone, Debug)]
struct KeyLimit {
    jobs: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

/// The place of a job among those of its key, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _job: OwnedSemaphorePermit,
    key_bytes: Arc<Semaphore>,
    all_bytes: Arc<Semaphore>,
}

/// The place of a job whose body is known.
#[derive(Debug)]
pub(crate) struct BodyPlace {
    _place: Place,
    _of_key: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Default for KeyLimits {
    fn default() -> Self {
        Self { keys: Mutex::default(), all_bytes: Arc::new(Semaphore::new(ALL_KEYS_BYTES_MAX)) }
    }
}

impl KeyLimits {
    /// Waits until another job of this key may be published.
    pub(crate) async fn place(&self, key: &str) -> Place {
        let KeyLimit { jobs, bytes } = self.of(key);
        Place { _job: acquire(jobs, 1).await, key_bytes: bytes, all_bytes: Arc::clone(&self.all_bytes) }
    }

    fn of(&self, key: &str) -> KeyLimit {
        // Nothing panics while it holds the lock.
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if keys.len() >= REMEMBERED && !keys.contains_key(key) {
            // Whoever waits for a place or has one holds a semaphore.
            keys.retain(|_, limit| Arc::strong_count(&limit.jobs) > 1);
        }
        keys.entry(key.to_owned()).or_default().clone()
    }
}

impl Place {
    /// Waits until so many bytes may be published.
    pub(crate) async fn with_body(self, bytes: usize) -> BodyPlace {
        let bytes = u32::try_from(bytes.min(KEY_BYTES_MAX)).unwrap_or(u32::MAX);
        // In this order, whoever waits for a slow key holds no bytes of all.
        let of_key = acquire(Arc::clone(&self.key_bytes), bytes).await;
        let of_all = acquire(Arc::clone(&self.all_bytes), bytes).await;
        BodyPlace { _place: self, _of_key: of_key, _of_all: of_all }
    }
}

impl Default for KeyLimit {
    fn default() -> Self {
        Self { jobs: Arc::new(Semaphore::new(KEY_JOBS_MAX)), bytes: Arc::new(Semaphore::new(KEY_BYTES_MAX)) }
    }
}

#[allow(clippy::expect_used, reason = "KeyLimits never closes its semaphores")]
async fn acquire(semaphore: Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    semaphore.acquire_many_owned(permits).await.expect("nobody closes the semaphore")
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn now(limits: &KeyLimits, key: &str, bytes: usize) -> Option<BodyPlace> {
        limits.place(key).now_or_never()?.with_body(bytes).now_or_never()
    }

    #[test]
    fn a_key_without_room_takes_no_room_of_others() {
        let limits = KeyLimits::default();
        let mut places = (0..KEY_JOBS_MAX).map(|_| now(&limits, "silent", 1).unwrap()).collect::<Vec<_>>();
        assert!(now(&limits, "silent", 1).is_none());
        assert!(now(&limits, "other", 1).is_some());
        places.pop();
        assert!(now(&limits, "silent", KEY_BYTES_MAX).is_none(), "its bytes do not fit");
        places.clear();
        assert!(now(&limits, "silent", 2 * KEY_BYTES_MAX).is_some(), "a large body has its turn alone");
    }

    #[test]
    fn the_bytes_of_all_keys_are_bounded() {
        let limits = KeyLimits::default();
        let full = |at: usize| now(&limits, &at.to_string(), KEY_BYTES_MAX);
        let mut places = (0..8).map(|at| full(at).unwrap()).collect::<Vec<_>>();
        assert!(full(8).is_none());
        places.pop();
        assert!(full(8).is_some());
    }

    #[test]
    fn only_keys_without_jobs_are_forgotten() {
        let limits = KeyLimits::default();
        let _used = now(&limits, "used", KEY_BYTES_MAX).unwrap();
        for other in 0..3 * REMEMBERED {
            drop(now(&limits, &format!("other {other}"), 1));
            assert!(limits.keys.lock().unwrap().len() <= REMEMBERED);
        }
        assert!(now(&limits, "used", 1).is_none());
    }
}
