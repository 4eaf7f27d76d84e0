//! Limits how many jobs of other gateways this one follows: in all, and for each caller.

use std::time::{Duration, Instant};

use crate::in_flight::{self, InFlight};
use crate::shares::Shares;

/// Jobs that are followed at a time: as many as a gateway has of its own by default.
const FOLLOWED_MAX: usize = 1_024;

/// Those of one caller: as many as it may have in flight at a gateway by default.
const FOLLOWED_PER_CALLER_MAX: usize = 256;

/// Places for jobs that are followed.
#[derive(Debug)]
pub(super) struct Places {
    all: InFlight,
    shares: Shares,
}

/// The place of a job that is followed.
#[derive(Debug)]
pub struct Place {
    _of_all: in_flight::Place,
    _of_caller: in_flight::Place,
}

impl Default for Places {
    fn default() -> Self {
        Self { all: InFlight::default(), shares: Shares::new(FOLLOWED_PER_CALLER_MAX) }
    }
}

impl Places {
    /// Reserves a place for a job of this caller.
    ///
    /// # Errors
    /// About how long it takes until a place is free: all are taken, or all that the caller may have.
    pub(super) fn place(&self, caller: &str, now: Instant) -> Result<Place, Duration> {
        let of_caller = self.shares.of(caller).enter(self.shares.most(), now)?;
        let of_all = self.all.enter(FOLLOWED_MAX, now)?;
        Ok(Place { _of_all: of_all, _of_caller: of_caller })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_takes_the_places_of_others() {
        let (all, now) = (Places::default(), Instant::now());
        let place = |caller: &str| all.place(caller, now).ok();
        let places =
            |caller: &str| std::iter::from_fn(|| place(caller)).take(FOLLOWED_MAX + 1).collect::<Vec<_>>();
        let mut of_a = places("a");
        assert_eq!(of_a.len(), FOLLOWED_PER_CALLER_MAX);
        of_a.pop();
        let again = place("a");
        assert!(again.is_some() && place("a").is_none());
        let others = ["b", "c", "d"].map(places);
        assert!(others.iter().all(|places| places.len() == FOLLOWED_PER_CALLER_MAX));
        assert!(place("e").is_none());
        // The followed jobs are expected to take as long again as they took so far.
        assert_eq!(all.place("b", now + Duration::from_secs(30)).unwrap_err(), Duration::from_secs(30));
        drop((of_a, again, others));
        assert!(place("e").is_some());
    }
}
