//! Bounds the memory that answers, or the buffers of uploads, take together, and those of one caller. A request that finds no room waits for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::problem::Problem;

/// Bytes in which memory is counted.
const UNIT: usize = 1024;

/// Up to this size nobody waits, so that large answers do not hold up small ones. `http.in_flight_max` of them take 64 MiB by default.
const FREE_BYTES: usize = 64 * 1024;

/// How long somebody waits for room: 256 MiB of answers leave a network of 200 Mbit/s in this time, and clients wait for longer.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The `Retry-After` of who has waited in vain. Nothing says how fast the others' clients read or send.
pub const FULL_RETRY: Duration = Duration::from_secs(5);

/// A budget of bytes, of which each caller may use a share.
#[derive(Debug)]
pub struct ByteBudget {
    all: Arc<Semaphore>,
    share: u32,
    wait_max: Duration,
    /// The shares of callers that have or want room.
    by_caller: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// Room in a budget, given back when it is dropped.
#[derive(Debug)]
pub struct Room {
    _of_caller: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

/// There was no room in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

impl NoRoom {
    /// The problem of a request that published nothing. `what` fills the memory that the key `limit` bounds.
    pub fn problem(self, what: &str, limit: &str) -> Problem {
        let message = format!("{what} fill the memory that this gateway has for them ({limit})");
        Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message, FULL_RETRY)
    }
}

impl ByteBudget {
    /// A budget of `most` bytes, of which a caller has at most `share`.
    pub fn new(most: usize, share: usize) -> Self {
        let units =
            |bytes: usize| u32::try_from((bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS)).unwrap_or(u32::MAX);
        let (most, share) = (units(most), units(share.min(most)));
        Self { all: semaphore(most), share, wait_max: WAIT_MAX, by_caller: Mutex::default() }
    }

    /// Takes room for this many bytes, in the order of the callers' requests. What is larger than the caller's share takes the
    /// share, and no more: otherwise it would wait for the others' room, and they for it.
    ///
    /// # Errors
    /// Others had the room for all of the longest wait.
    pub async fn room(&self, caller: &str, bytes: usize) -> Result<Room, NoRoom> {
        if bytes <= FREE_BYTES {
            return Ok(Room { _of_caller: None, _of_all: None });
        }
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let (share, all) = (self.share_of(caller), Arc::clone(&self.all));
        let taken = timeout(self.wait_max, async {
            let units = units.min(self.share);
            // The share first: who waits for it holds nothing that others could have.
            let of_caller = share.acquire_many_owned(units).await.ok();
            Room { _of_caller: of_caller, _of_all: all.acquire_many_owned(units).await.ok() }
        });
        taken.await.map_err(|_| NoRoom)
    }

    /// The longest wait for room.
    pub fn wait_max(&self) -> Duration {
        self.wait_max
    }

    /// A caller's share, forgotten with its last room and the last one that waits for room.
    fn share_of(&self, caller: &str) -> Arc<Semaphore> {
        // Nothing panics while it holds the lock.
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = by_caller.get(caller).and_then(Weak::upgrade) {
            return found;
        }
        by_caller.retain(|_, share| share.strong_count() > 0);
        let new = semaphore(self.share);
        by_caller.insert(caller.to_owned(), Arc::downgrade(&new));
        new
    }
}

fn semaphore(units: u32) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(units as usize))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const MIB: usize = 1 << 20;

    fn budget(most: usize, share: usize) -> ByteBudget {
        ByteBudget { wait_max: Duration::from_millis(20), ..ByteBudget::new(most, share) }
    }

    #[tokio::test]
    async fn who_finds_no_room_waits_and_is_refused_in_the_end() {
        let budget = ByteBudget::new(4 * MIB, 4 * MIB);
        let first = budget.room("a", 3 * MIB).await.unwrap();
        let mut waits = Box::pin(budget.room("a", 2 * MIB));
        assert!(waits.as_mut().now_or_never().is_none());
        // Small ones do not wait.
        assert!(budget.room("a", FREE_BYTES).now_or_never().is_some());
        drop(first);
        drop(waits.await.unwrap());
        let budget = self::budget(4 * MIB, 4 * MIB);
        let _first = budget.room("a", 3 * MIB).await.unwrap();
        assert_eq!(budget.room("b", 2 * MIB).await.err(), Some(NoRoom));
        let problem = NoRoom.problem("answers", "http.answers_mib_max");
        assert_eq!((problem.status.as_u16(), problem.code), (503, "overloaded"));
    }

    #[tokio::test]
    async fn a_caller_leaves_room_for_others_also_with_more_than_its_share() {
        let budget = budget(2 * MIB, MIB);
        let first = budget.room("a", MIB).await.unwrap();
        assert!(budget.room("a", MIB).await.is_err());
        let others = budget.room("b", MIB).await.unwrap();
        assert!(budget.room("c", MIB).await.is_err(), "all is taken");
        drop((first, others));
        let large = budget.room("a", 100 * MIB).await.unwrap();
        assert_eq!(budget.by_caller.lock().unwrap().len(), 1, "the others are forgotten");
        assert!(budget.room("a", 100 * MIB).await.is_err(), "the share is taken");
        // Neither who has more than its share nor who waits for it holds up others.
        let others = budget.room("b", 100 * MIB).await.unwrap();
        drop((large, others));
        assert!(budget.room("a", 100 * MIB).await.is_ok());
    }
}
