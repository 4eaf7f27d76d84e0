//! Limits how many jobs of other gateways this one follows: in all, and for each caller.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::shares::Shares;

/// Jobs that are followed at a time: as many as a gateway has of its own by default.
const FOLLOWED_MAX: usize = 1_024;

/// Those of one caller: as many as it may have in flight at a gateway by default.
const FOLLOWED_PER_CALLER_MAX: usize = 256;

/// Places for jobs that are followed.
#[derive(Debug)]
pub(super) struct Places {
    all: Arc<Semaphore>,
    shares: Shares,
}

/// The place of a job that is followed.
#[derive(Debug)]
pub struct Place {
    _of_all: OwnedSemaphorePermit,
    _of_caller: OwnedSemaphorePermit,
}

impl Default for Places {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(FOLLOWED_MAX)), shares: Shares::new(FOLLOWED_PER_CALLER_MAX) }
    }
}

impl Places {
    /// A place for a job of this caller; `None`: all are taken, or all that it may have.
    pub(super) fn place(&self, caller: &str) -> Option<Place> {
        let of_caller = self.shares.of(caller).try_acquire_owned().ok()?;
        let of_all = Arc::clone(&self.all).try_acquire_owned().ok()?;
        Some(Place { _of_all: of_all, _of_caller: of_caller })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_takes_the_places_of_others() {
        let all = Places::default();
        let places = |caller: &str| {
            std::iter::from_fn(|| all.place(caller)).take(FOLLOWED_MAX + 1).collect::<Vec<_>>()
        };
        let mut of_a = places("a");
        assert_eq!(of_a.len(), FOLLOWED_PER_CALLER_MAX);
        of_a.pop();
        let again = all.place("a");
        assert!(again.is_some() && all.place("a").is_none());
        let others = ["b", "c", "d"].map(places);
        assert!(others.iter().all(|places| places.len() == FOLLOWED_PER_CALLER_MAX));
        assert!(all.place("e").is_none());
        drop((of_a, again, others));
        assert!(all.place("e").is_some());
    }
}
