//! Counts the requests that are in flight at a time, and estimates when one of them will end. Pure but for its lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How much one more request counts in the mean: the last ten make up two thirds.
const MEAN_WEIGHT: f64 = 0.1;

/// What a place takes at least, if no request has ended yet and none has been in flight for longer.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// Requests in flight. Clones count the same.
#[derive(Clone, Debug, Default)]
pub struct InFlight(Arc<Mutex<Places>>);

#[derive(Debug, Default)]
struct Places {
    last: u64,
    /// Since when each is in flight, in order.
    since: BTreeMap<u64, Instant>,
    /// The mean time of those that ended, in seconds.
    mean_s: Option<f64>,
}

/// One request in flight, until it is dropped.
#[derive(Debug)]
pub struct Place {
    of: InFlight,
    number: u64,
}

impl InFlight {
    /// Takes a place, if fewer than `most` requests are in flight.
    ///
    /// # Errors
    /// About how long it takes until one of them ends.
    pub fn enter(&self, most: usize, now: Instant) -> Result<Place, Duration> {
        let mut places = self.places();
        if places.since.len() >= most {
            return Err(places.next_end(now));
        }
        places.last += 1;
        let number = places.last;
        places.since.insert(number, now);
        drop(places);
        Ok(Place { of: self.clone(), number })
    }

    /// Nothing panics while it holds the lock.
    fn places(&self) -> MutexGuard<'_, Places> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Places {
    /// If requests take as long as those before them, the oldest ends first. One that has taken longer than the mean says nothing:
    /// then requests are taken to end evenly. Before the first end, a request is taken to need as long again as it has had.
    fn next_end(&self, now: Instant) -> Duration {
        let Some(oldest) = self.since.values().next() else { return LEAST_WAIT };
        let age = now.saturating_duration_since(*oldest);
        let Some(mean_s) = self.mean_s else { return age.max(LEAST_WAIT) };
        let mean = Duration::from_secs_f64(mean_s);
        match mean.checked_sub(age) {
            Some(left) if !left.is_zero() => left,
            _ => mean.div_f64(self.since.len() as f64),
        }
    }

    fn end(&mut self, number: u64, now: Instant) {
        let Some(since) = self.since.remove(&number) else { return };
        let took = now.saturating_duration_since(since).as_secs_f64();
        let mean = self.mean_s.get_or_insert(took);
        *mean += MEAN_WEIGHT * (took - *mean);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.places().end(self.number, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn places_are_bounded_and_come_back() {
        let (in_flight, now) = (InFlight::default(), Instant::now());
        let first = in_flight.enter(2, now).unwrap();
        let _second = in_flight.enter(2, now).unwrap();
        assert!(in_flight.enter(2, now).is_err() && in_flight.enter(3, now).is_ok());
        drop(first);
        assert!(in_flight.enter(2, now).is_ok());
        assert!(in_flight.enter(0, now).is_err());
    }

    #[test]
    fn the_wait_for_a_place_follows_how_long_requests_take() {
        let start = Instant::now();
        let mut places = Places::default();
        let enter = |places: &mut Places, second: u32| {
            places.last += 1;
            places.since.insert(places.last, start + second * SECOND);
            places.last
        };
        let first = enter(&mut places, 0);
        assert_eq!(places.next_end(start), SECOND);
        assert_eq!(places.next_end(start + 20 * SECOND), 20 * SECOND, "as long again");
        places.end(first, start + 60 * SECOND);
        enter(&mut places, 60);
        enter(&mut places, 80);
        for (second, wait) in [(80, 40), (119, 1), (121, 30)] {
            assert_eq!(places.next_end(start + second * SECOND), wait * SECOND, "{second}");
        }
    }
}
