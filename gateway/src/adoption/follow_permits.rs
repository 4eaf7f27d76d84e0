//! Limits how many jobs of other gateways this one follows: in all, and for each caller.

use std::time::{Duration, Instant};

use crate::in_flight::{InFlight, Permit};
use crate::shares::Shares;

/// Jobs that are followed at a time: as many as a gateway has of its own by default.
const FOLLOWED_MAX: usize = 1_024;

/// Those of one caller: as many as it may have in flight at a gateway by default.
const FOLLOWED_PER_CALLER_MAX: usize = 256;

/// Permits for jobs that are followed.
#[derive(Debug)]
pub(super) struct FollowPermits {
    all: InFlight,
    shares: Shares,
}

/// The permit of a job that is followed.
#[derive(Debug)]
pub struct FollowPermit {
    _of_all: Permit,
    _of_caller: Permit,
}

impl Default for FollowPermits {
    fn default() -> Self {
        Self { all: InFlight::default(), shares: Shares::new(FOLLOWED_PER_CALLER_MAX) }
    }
}

impl FollowPermits {
    /// Takes a permit for a job of this caller.
    ///
    /// # Errors
    /// About how long it takes until one is free: all are taken, or all that the caller may have.
    pub(super) fn permit(&self, caller: &str, now: Instant) -> Result<FollowPermit, Duration> {
        let of_caller = self.shares.of(caller).enter(self.shares.most(), now)?;
        match self.all.enter(FOLLOWED_MAX, now) {
            Ok(of_all) => Ok(FollowPermit { _of_all: of_all, _of_caller: of_caller }),
            Err(after) => {
                of_caller.unused();
                Err(after)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_takes_the_permits_of_others() {
        let (all, now) = (FollowPermits::default(), Instant::now());
        let permit = |caller: &str| all.permit(caller, now).ok();
        let permits =
            |caller: &str| std::iter::from_fn(|| permit(caller)).take(FOLLOWED_MAX + 1).collect::<Vec<_>>();
        let mut of_a = permits("a");
        assert_eq!(of_a.len(), FOLLOWED_PER_CALLER_MAX);
        of_a.pop();
        let again = permit("a");
        assert!(again.is_some() && permit("a").is_none());
        let others = ["b", "c", "d"].map(permits);
        assert!(others.iter().all(|permits| permits.len() == FOLLOWED_PER_CALLER_MAX));
        assert!(permit("e").is_none());
        // The followed jobs are expected to take as long again as they took so far.
        assert_eq!(all.permit("b", now + Duration::from_secs(30)).unwrap_err(), Duration::from_secs(30));
        drop((of_a, again, others));
        assert!(permit("e").is_some());
    }

    #[test]
    fn a_job_not_followed_because_of_others_says_nothing_of_how_long_those_of_its_caller_take() {
        const HALF_MINUTE: Duration = Duration::from_secs(30);
        let (permits, now) = (FollowPermits::default(), Instant::now());
        let _before = permits.permit("a", now).unwrap();
        let _of_others = permits.all.take(FOLLOWED_MAX - 1, FOLLOWED_MAX, now).unwrap();
        assert!(permits.permit("a", now).is_err());
        // None has ended yet, so the one before is expected to take as long again.
        assert_eq!(permits.shares.of("a").enter(1, now + HALF_MINUTE).unwrap_err(), HALF_MINUTE);
    }
}
