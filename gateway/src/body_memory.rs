//! Bounds the memory that the bodies of all requests take together.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::problem::Problem;

/// Bytes that a permit stands for: a semaphore's permits fit 32 bits also for many GiB.
const UNIT: usize = 1024;

/// When to try again while other bodies fill the memory: they take a fraction of a second.
const FULL_RETRY: Duration = Duration::from_secs(1);

/// The memory for bodies. A permit is the share of one of them, and gives it back when it is dropped.
#[derive(Debug)]
pub struct BodyMemory {
    units: Arc<Semaphore>,
    bytes_max: usize,
}

impl BodyMemory {
    /// A budget of `bytes_max` bytes, a multiple of 1,024.
    pub fn new(bytes_max: usize) -> Self {
        Self { units: Arc::new(Semaphore::new(bytes_max / UNIT)), bytes_max }
    }

    /// Takes room for a body of `bytes` bytes.
    ///
    /// # Errors
    /// Other bodies fill the memory that there is for them.
    pub fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Problem> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        Arc::clone(&self.units).try_acquire_many_owned(units).map_err(|_| {
            let message = "the bodies of other requests fill this gateway's memory";
            Problem::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", message, FULL_RETRY)
        })
    }

    /// Grows the room of a body to `bytes` bytes. Room that is larger already stays as it is.
    ///
    /// # Errors
    /// Other bodies have the memory, or all of it is too little.
    pub fn grow(&self, room: &mut OwnedSemaphorePermit, bytes: usize) -> Result<(), Problem> {
        let most = self.bytes_max;
        if bytes > most {
            let message = format!(
                "the body takes {bytes} bytes once it is parsed, and all bodies may have {most}: send fewer values"
            );
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
        }
        let held = room.num_permits() * UNIT;
        if bytes > held {
            room.merge(self.room(bytes - held)?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_grows_to_what_is_needed_and_no_further_than_the_memory() {
        let memory = BodyMemory::new(10 * UNIT);
        let mut room = memory.room(3 * UNIT - 1).unwrap();
        assert_eq!(room.num_permits(), 3);
        for (bytes, permits) in [(0, 3), (3 * UNIT, 3), (3 * UNIT + 1, 4), (2 * UNIT, 4)] {
            memory.grow(&mut room, bytes).unwrap();
            assert_eq!(room.num_permits(), permits, "{bytes}");
        }
        let others = memory.room(5 * UNIT).unwrap();
        let refused = memory.grow(&mut room, 6 * UNIT).unwrap_err();
        assert_eq!((refused.status.as_u16(), refused.code, room.num_permits()), (429, "overloaded", 4));
        // No other body's end would help.
        assert_eq!(memory.grow(&mut room, 10 * UNIT + 1).unwrap_err().status, 413);
        drop(others);
        memory.grow(&mut room, 10 * UNIT).unwrap();
        assert!(memory.room(1).is_err());
        drop(room);
        assert!(memory.room(10 * UNIT).is_ok());
    }
}
