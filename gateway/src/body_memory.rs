//! Bounds the memory that the bodies of all requests take together, and those of one caller.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::problem::Problem;
use crate::shares::Shares;

/// Bytes that a permit stands for: a semaphore's permits fit 32 bits also for many GiB.
const UNIT: usize = 1024;

/// When to try again while other bodies fill the memory: they take a fraction of a second.
const FULL_RETRY: Duration = Duration::from_secs(1);

/// The memory for bodies.
#[derive(Debug)]
pub struct BodyMemory {
    units: Arc<Semaphore>,
    bytes_max: usize,
    /// Slow bodies of one caller must not keep out those of others.
    shares: Shares,
}

/// What a body has of the memory. Gives it back when it is dropped.
#[derive(Debug)]
pub struct BodyRoom {
    of_all: OwnedSemaphorePermit,
    of_caller: OwnedSemaphorePermit,
}

impl BodyMemory {
    /// A budget of `bytes_max` bytes, of which a caller has at most `share_bytes`; both are multiples of 1,024.
    pub fn new(bytes_max: usize, share_bytes: usize) -> Self {
        Self {
            units: Arc::new(Semaphore::new(bytes_max / UNIT)),
            bytes_max,
            shares: Shares::new(share_bytes / UNIT),
        }
    }

    /// Takes room for a body of `bytes` bytes.
    ///
    /// # Errors
    /// Other bodies fill the memory that there is for them, or for those of this caller.
    pub fn room(&self, caller: &str, bytes: usize) -> Result<BodyRoom, Problem> {
        let share = self.shares.of(caller);
        self.more(&share, bytes.div_ceil(UNIT), bytes.div_ceil(UNIT))
    }

    /// Grows the room of a body to `bytes` bytes. Room that is larger already stays as it is.
    ///
    /// # Errors
    /// Other bodies have the memory, or all of it is too little.
    pub fn grow(&self, room: &mut BodyRoom, bytes: usize) -> Result<(), Problem> {
        let most = self.bytes_max;
        if bytes > most {
            let message = format!(
                "the body takes {bytes} bytes once it is parsed, and all bodies may have {most}: send fewer values"
            );
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
        }
        let wanted = bytes.div_ceil(UNIT);
        let of_all = wanted.saturating_sub(room.of_all.num_permits());
        // A body that is larger than its caller's share once it is parsed takes all of the share.
        let of_caller = wanted.min(self.shares.most()).saturating_sub(room.of_caller.num_permits());
        let share = Arc::clone(room.of_caller.semaphore());
        let more = self.more(&share, of_all, of_caller)?;
        room.of_all.merge(more.of_all);
        room.of_caller.merge(more.of_caller);
        Ok(())
    }

    fn more(&self, share: &Arc<Semaphore>, of_all: usize, of_caller: usize) -> Result<BodyRoom, Problem> {
        let of_caller = acquired(share, of_caller).ok_or_else(|| {
            if self.shares.most() == self.bytes_max / UNIT {
                return full();
            }
            let message = "the bodies of this key's other requests fill its share of this gateway's memory";
            Problem::busy(StatusCode::TOO_MANY_REQUESTS, "too_many_in_flight", message, FULL_RETRY)
        })?;
        let of_all = acquired(&self.units, of_all).ok_or_else(full)?;
        Ok(BodyRoom { of_all, of_caller })
    }
}

fn full() -> Problem {
    let message = "the bodies of other requests fill this gateway's memory";
    Problem::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", message, FULL_RETRY)
}

fn acquired(units: &Arc<Semaphore>, count: usize) -> Option<OwnedSemaphorePermit> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    Arc::clone(units).try_acquire_many_owned(count).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(result: Result<impl Sized, Problem>) -> (u16, &'static str) {
        let problem = result.err().unwrap();
        (problem.status.as_u16(), problem.code)
    }

    #[test]
    fn the_memory_of_a_body_grows_with_it_and_not_beyond_the_limit() {
        let memory = BodyMemory::new(10 * UNIT, 10 * UNIT);
        let mut room = memory.room("a", 3 * UNIT - 1).unwrap();
        assert_eq!(room.of_all.num_permits(), 3);
        for (bytes, permits) in [(0, 3), (3 * UNIT, 3), (3 * UNIT + 1, 4), (2 * UNIT, 4)] {
            memory.grow(&mut room, bytes).unwrap();
            assert_eq!(room.of_all.num_permits(), permits, "{bytes}");
        }
        // A caller that may have all of it has no share to keep to.
        assert_eq!(refused(memory.room("a", 7 * UNIT)), (429, "overloaded"));
        let others = memory.room("b", 5 * UNIT).unwrap();
        assert_eq!(refused(memory.grow(&mut room, 6 * UNIT)), (429, "overloaded"));
        assert_eq!((room.of_all.num_permits(), room.of_caller.num_permits()), (4, 4));
        // No other body's end would help.
        assert_eq!(refused(memory.grow(&mut room, 10 * UNIT + 1)).0, 413);
        drop(others);
        memory.grow(&mut room, 10 * UNIT).unwrap();
        assert!(memory.room("b", 1).is_err());
        drop(room);
        assert!(memory.room("b", 10 * UNIT).is_ok());
    }

    #[test]
    fn bodies_of_one_caller_leave_room_for_others() {
        let memory = BodyMemory::new(10 * UNIT, 4 * UNIT);
        let mut first = memory.room("a", 3 * UNIT).unwrap();
        let second = memory.room("a", UNIT).unwrap();
        assert_eq!(refused(memory.room("a", 1)), (429, "too_many_in_flight"));
        assert_eq!(refused(memory.grow(&mut first, 4 * UNIT)), (429, "too_many_in_flight"));
        let others = memory.room("b", 4 * UNIT).unwrap();
        // Once it is parsed, a body may be larger than the share: then it is its caller's only one.
        assert_eq!(refused(memory.grow(&mut first, 5 * UNIT)), (429, "too_many_in_flight"));
        drop(second);
        memory.grow(&mut first, 6 * UNIT).unwrap();
        assert_eq!((first.of_all.num_permits(), first.of_caller.num_permits()), (6, 4));
        assert_eq!(refused(memory.room("a", 1)), (429, "too_many_in_flight"));
        assert_eq!(refused(memory.room("c", 1)), (429, "overloaded"));
        drop((first, others));
        assert!(memory.room("a", 4 * UNIT).is_ok() && memory.room("c", 4 * UNIT).is_ok());
    }
}
