//! Bounds the memory that the bodies of all requests take together, and those of one caller.

use std::time::{Duration, Instant};

use axum::http::StatusCode;

use crate::in_flight::{InFlight, Permit};
use crate::problem::Problem;
use crate::shares::Shares;

/// Bytes in which memory is counted.
const UNIT: usize = 1024;

/// The memory for bodies.
#[derive(Debug)]
pub struct BodyMemory {
    all: InFlight,
    bytes_max: usize,
    /// Slow bodies of one caller must not keep out those of others.
    shares: Shares,
}

/// What a body has of the memory. Gives it back when it is dropped.
#[derive(Debug)]
pub struct BodyRoom {
    of_all: Permit,
    of_caller: Permit,
}

impl BodyMemory {
    /// A budget of `bytes_max` bytes, of which a caller has at most `share_bytes`; both are multiples of 1,024.
    pub fn new(bytes_max: usize, share_bytes: usize) -> Self {
        Self { all: InFlight::default(), bytes_max, shares: Shares::new(share_bytes / UNIT) }
    }

    /// Takes room for a body of `bytes` bytes.
    ///
    /// # Errors
    /// Other bodies fill the memory that there is for them, or for those of this caller.
    pub fn room(&self, caller: &str, bytes: usize, now: Instant) -> Result<BodyRoom, Problem> {
        let (units, share) = (bytes.div_ceil(UNIT), self.shares.of(caller));
        let of_caller =
            share.take(units, self.shares.most(), now).map_err(|after| self.share_is_full(after))?;
        match self.all.take(units, self.most(), now) {
            Ok(of_all) => Ok(BodyRoom { of_all, of_caller }),
            Err(after) => {
                of_caller.unused();
                Err(is_full(after))
            }
        }
    }

    /// Grows the room of a body to `bytes` bytes. Room that is larger already stays as it is.
    ///
    /// # Errors
    /// Other bodies have the memory, or all of it is too little.
    pub fn grow(&self, room: &mut BodyRoom, bytes: usize, now: Instant) -> Result<(), Problem> {
        let most = self.bytes_max;
        if bytes > most {
            let message = format!(
                "the request takes {bytes} bytes in memory, and all may have {most}: send fewer or smaller inputs"
            );
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
        }
        let wanted = bytes.div_ceil(UNIT);
        let of_all = wanted.saturating_sub(room.of_all.units());
        // Once parsed, a body may be larger than its caller's share. Then it takes the whole share.
        let of_caller = wanted.min(self.shares.most()).saturating_sub(room.of_caller.units());
        let share = self.shares.most();
        room.of_caller.grow(of_caller, share, now).map_err(|after| self.share_is_full(after))?;
        room.of_all.grow(of_all, self.most(), now).map_err(|after| {
            room.of_caller.shrink(of_caller);
            is_full(after)
        })
    }

    /// Grows the room of a body by `bytes` bytes.
    ///
    /// # Errors
    /// As for [`grow`](Self::grow).
    pub fn grow_by(&self, room: &mut BodyRoom, bytes: usize, now: Instant) -> Result<(), Problem> {
        let held = room.of_all.units() * UNIT;
        self.grow(room, held + bytes, now)
    }

    fn most(&self) -> usize {
        self.bytes_max / UNIT
    }

    /// `after`: about when enough of it is free.
    fn share_is_full(&self, after: Duration) -> Problem {
        if self.shares.most() == self.most() {
            return is_full(after);
        }
        let message = "the bodies of this key's other requests fill its share of this gateway's memory";
        Problem::busy(StatusCode::TOO_MANY_REQUESTS, "too_many_in_flight", message, after)
    }
}

fn is_full(after: Duration) -> Problem {
    let message = "the bodies of other requests fill this gateway's memory";
    Problem::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", message, after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Retry;

    fn refused(result: Result<impl Sized, Problem>) -> (u16, &'static str) {
        let problem = result.err().unwrap();
        (problem.status.as_u16(), problem.code)
    }

    #[test]
    fn the_memory_of_a_body_grows_with_it_and_not_beyond_the_limit() {
        let now = Instant::now();
        let memory = BodyMemory::new(10 * UNIT, 10 * UNIT);
        let mut room = memory.room("a", 3 * UNIT - 1, now).unwrap();
        assert_eq!(room.of_all.units(), 3);
        for (bytes, permits) in [(0, 3), (3 * UNIT, 3), (3 * UNIT + 1, 4), (2 * UNIT, 4)] {
            memory.grow(&mut room, bytes, now).unwrap();
            assert_eq!(room.of_all.units(), permits, "{bytes}");
        }
        // The share of this caller is all of the memory, so only the total counts.
        assert_eq!(refused(memory.room("a", 7 * UNIT, now)), (429, "overloaded"));
        let others = memory.room("b", 5 * UNIT, now).unwrap();
        assert_eq!(refused(memory.grow(&mut room, 6 * UNIT, now)), (429, "overloaded"));
        assert_eq!((room.of_all.units(), room.of_caller.units()), (4, 4));
        // Even alone the body would not fit.
        assert_eq!(refused(memory.grow(&mut room, 10 * UNIT + 1, now)).0, 413);
        drop(others);
        memory.grow(&mut room, 10 * UNIT, now).unwrap();
        assert!(memory.room("b", 1, now).is_err());
        drop(room);
        assert!(memory.room("b", 10 * UNIT, now).is_ok());
    }

    #[test]
    fn bodies_of_one_caller_leave_room_for_others() {
        let now = Instant::now();
        let memory = BodyMemory::new(10 * UNIT, 4 * UNIT);
        let mut first = memory.room("a", 3 * UNIT, now).unwrap();
        let second = memory.room("a", UNIT, now).unwrap();
        assert_eq!(refused(memory.room("a", 1, now)), (429, "too_many_in_flight"));
        assert_eq!(refused(memory.grow(&mut first, 4 * UNIT, now)), (429, "too_many_in_flight"));
        let others = memory.room("b", 4 * UNIT, now).unwrap();
        // Once it is parsed, a body may be larger than the share: then it is its caller's only one.
        assert_eq!(refused(memory.grow(&mut first, 5 * UNIT, now)), (429, "too_many_in_flight"));
        drop(second);
        memory.grow(&mut first, 6 * UNIT, now).unwrap();
        assert_eq!((first.of_all.units(), first.of_caller.units()), (6, 4));
        assert_eq!(refused(memory.room("a", 1, now)), (429, "too_many_in_flight"));
        assert_eq!(refused(memory.room("c", 1, now)), (429, "overloaded"));
        drop((first, others));
        assert!(memory.room("a", 4 * UNIT, now).is_ok() && memory.room("c", 4 * UNIT, now).is_ok());
    }

    #[test]
    fn a_refused_body_is_told_when_enough_of_the_memory_is_free() {
        let (memory, start) = (BodyMemory::new(10 * UNIT, 4 * UNIT), Instant::now());
        let seconds = Duration::from_secs;
        let at = |s| start + seconds(s);
        let after = |result: Result<BodyRoom, Problem>| match result.unwrap_err().retry {
            Retry::After(after) => after,
            retry => panic!("{retry:?}"),
        };
        let _first = memory.room("a", 3 * UNIT, at(0)).unwrap();
        let _second = memory.room("a", UNIT, at(20)).unwrap();
        let _others = memory.room("b", 4 * UNIT, at(25)).unwrap();
        // No body has ended yet, so each is expected to take as long again as it took so far.
        assert_eq!(after(memory.room("a", 3 * UNIT, at(30))), seconds(30));
        assert_eq!(after(memory.room("a", 4 * UNIT, at(30))), seconds(30), "not before less of it is free");
        assert_eq!(after(memory.room("c", 3 * UNIT, at(30))), seconds(30));
        // A body that was refused because of others says nothing of how long those of its caller take.
        let _last = memory.room("c", 2 * UNIT, at(30)).unwrap();
        assert_eq!(refused(memory.room("c", UNIT, at(40))).1, "overloaded");
        assert_eq!(after(memory.room("c", 3 * UNIT, at(40))), seconds(10));
    }
}
