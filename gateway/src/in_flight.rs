//! Bounds what is in flight at a time, such as requests or the bytes of bodies, and estimates when some of it will end. Pure but for its
//! lock.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How much one more permit counts in the mean: the last ten make up two thirds.
const MEAN_WEIGHT: f64 = 0.1;

/// The least expected time of a permit, if none has ended yet and none has been in flight for longer.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// What is in flight. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct InFlight(Arc<Mutex<Permits>>);

/// A weak [`InFlight`], which ends with the last strong one and the last permit.
#[derive(Debug)]
pub struct WeakInFlight(Weak<Mutex<Permits>>);

#[derive(Debug, Default)]
struct Permits {
    last: u64,
    /// In the order in which they began.
    held: BTreeMap<u64, Held>,
    /// The units of all.
    units: usize,
    /// The mean time of those that ended, in seconds.
    mean_s: Option<f64>,
}

#[derive(Debug)]
struct Held {
    since: Instant,
    units: usize,
}

/// Lets one thing be in flight, until it is dropped.
#[derive(Debug)]
pub struct Permit {
    of: InFlight,
    number: u64,
}

impl InFlight {
    /// Takes a permit, if fewer than `most` are taken.
    ///
    /// # Errors
    /// About how long it takes until one of them is free.
    pub fn enter(&self, most: usize, now: Instant) -> Result<Permit, Duration> {
        self.take(1, most, now)
    }

    /// Takes a permit of so many units, if all permits have at most `most` then.
    ///
    /// # Errors
    /// About how long it takes until so many are free.
    pub fn take(&self, units: usize, most: usize, now: Instant) -> Result<Permit, Duration> {
        let mut permits = self.permits();
        permits.check(units, most, None, now)?;
        permits.last += 1;
        permits.units += units;
        let number = permits.last;
        permits.held.insert(number, Held { since: now, units });
        drop(permits);
        Ok(Permit { of: self.clone(), number })
    }

    pub fn downgrade(&self) -> WeakInFlight {
        WeakInFlight(Arc::downgrade(&self.0))
    }

    /// Nothing panics while it holds the lock.
    fn permits(&self) -> MutexGuard<'_, Permits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeakInFlight {
    pub fn upgrade(&self) -> Option<InFlight> {
        self.0.upgrade().map(InFlight)
    }

    /// Whether an [`InFlight`] or one of its permits still exists.
    pub fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl Permit {
    pub fn units(&self) -> usize {
        self.of.permits().held.get(&self.number).map_or(0, |held| held.units)
    }

    /// Takes more units, if all permits have at most `most` then.
    ///
    /// # Errors
    /// About how long it takes until so many are free.
    pub fn grow(&mut self, units: usize, most: usize, now: Instant) -> Result<(), Duration> {
        let mut permits = self.of.permits();
        permits.check(units, most, Some(self.number), now)?;
        permits.units += units;
        if let Some(held) = permits.held.get_mut(&self.number) {
            held.units += units;
        }
        Ok(())
    }

    /// Gives the permit back because nothing was done with it: its time does not count in the mean.
    pub fn unused(self) {
        self.of.permits().remove(self.number);
    }

    /// Gives back units that it has.
    pub fn shrink(&mut self, units: usize) {
        let mut permits = self.of.permits();
        permits.units -= units;
        if let Some(held) = permits.held.get_mut(&self.number) {
            held.units -= units;
        }
    }
}

impl Permits {
    /// Checks that `units` more fit, for a new permit or for the permit `of`.
    fn check(&self, units: usize, most: usize, of: Option<u64>, now: Instant) -> Result<(), Duration> {
        match (self.units + units).saturating_sub(most) {
            0 => Ok(()),
            missing => Err(self.free_after(missing, of, now)),
        }
    }

    /// When enough permits will have ended. A permit is expected to take the mean time of those that ended; an older one is expected to take
    /// the mean once more. Before any permit has ended, each is expected to take as long again as it took so far. The permit `of` is not
    /// counted: if it cannot grow, it is given back.
    fn free_after(&self, missing: usize, of: Option<u64>, now: Instant) -> Duration {
        let others = self.held.iter().filter(|(number, _)| Some(**number) != of).map(|(_, held)| held);
        let others = others.filter(|held| held.units > 0);
        let all: usize = others.clone().map(|held| held.units).sum();
        let mean = self.mean_s.map(Duration::from_secs_f64);
        let left = |held: &Held| {
            let age = now.saturating_duration_since(held.since);
            match mean {
                Some(mean) => mean.checked_sub(age).filter(|left| !left.is_zero()).unwrap_or(mean),
                None => age.max(LEAST_WAIT),
            }
        };
        let mut ends: Vec<(Duration, usize)> = others.map(|held| (left(held), held.units)).collect();
        if mean.is_some() {
            ends.sort_unstable();
        }
        // The latest of the ends that free enough units: without a mean they are not in the order of their times.
        let (mut freed, mut wait) = (0, None::<Duration>);
        for (left, units) in ends {
            wait = wait.max(Some(left));
            freed += units;
            if freed >= missing.min(all) {
                break;
            }
        }
        wait.unwrap_or(LEAST_WAIT)
    }

    /// Removes a permit, and gives back its units. `None`: it was removed before.
    fn remove(&mut self, number: u64) -> Option<Held> {
        let held = self.held.remove(&number)?;
        self.units -= held.units;
        Some(held)
    }

    fn end(&mut self, number: u64, now: Instant) {
        let Some(Held { since, .. }) = self.remove(number) else { return };
        let took = now.saturating_duration_since(since).as_secs_f64();
        let mean = self.mean_s.get_or_insert(took);
        *mean += MEAN_WEIGHT * (took - *mean);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.of.permits().end(self.number, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn permits_are_bounded_and_come_back() {
        let (in_flight, now) = (InFlight::default(), Instant::now());
        let first = in_flight.enter(2, now).unwrap();
        let _second = in_flight.enter(2, now).unwrap();
        assert!(in_flight.enter(2, now).is_err() && in_flight.enter(3, now).is_ok());
        drop(first);
        assert!(in_flight.enter(2, now).is_ok());
        assert!(in_flight.enter(0, now).is_err());
    }

    #[test]
    fn units_are_bounded_and_come_back() {
        let (in_flight, now) = (InFlight::default(), Instant::now());
        let mut first = in_flight.take(3, 10, now).unwrap();
        let second = in_flight.take(6, 10, now).unwrap();
        assert!(in_flight.take(2, 10, now).is_err() && first.grow(2, 10, now).is_err());
        first.grow(1, 10, now).unwrap();
        assert_eq!((first.units(), in_flight.permits().units), (4, 10));
        first.shrink(1);
        drop(second);
        assert_eq!((first.units(), in_flight.permits().units), (3, 3));
        drop(first);
        assert_eq!(in_flight.permits().units, 0);
    }

    #[test]
    fn a_permit_that_was_not_used_says_nothing_of_how_long_others_take() {
        let (in_flight, start) = (InFlight::default(), Instant::now());
        let _held = in_flight.enter(1, start).unwrap();
        in_flight.enter(2, start).unwrap().unused();
        assert_eq!(in_flight.permits().units, 1);
        assert_eq!(in_flight.enter(1, start + 30 * SECOND).unwrap_err(), 30 * SECOND, "as long again");
        drop(in_flight.enter(2, start).unwrap());
        assert!(in_flight.enter(1, start + 30 * SECOND).unwrap_err() < 30 * SECOND);
    }

    #[test]
    fn the_wait_for_a_permit_follows_how_long_permits_take() {
        let start = Instant::now();
        let mut permits = Permits::default();
        let enter = |permits: &mut Permits, second: u32, units| {
            permits.last += 1;
            permits.held.insert(permits.last, Held { since: start + second * SECOND, units });
            permits.units += units;
            permits.last
        };
        let after =
            |permits: &Permits, missing, second| permits.free_after(missing, None, start + second * SECOND);
        let first = enter(&mut permits, 0, 1);
        assert_eq!(after(&permits, 1, 0), SECOND);
        assert_eq!(after(&permits, 1, 20), 20 * SECOND, "as long again");
        permits.end(first, start + 60 * SECOND);
        let oldest = enter(&mut permits, 60, 1);
        enter(&mut permits, 80, 2);
        // From 120 on the oldest counts as one that has just begun, and the other may end before it; from 140 on so does that.
        for (second, wait) in [(80, 40), (119, 1), (120, 20), (139, 1), (150, 60), (9000, 60)] {
            assert_eq!(after(&permits, 1, second), wait * SECOND, "{second}");
        }
        // Those of the oldest are not enough: the next one has to end, too.
        for (second, wait) in [(80, 60), (119, 21), (141, 60)] {
            assert_eq!(after(&permits, 2, second), wait * SECOND, "{second}");
        }
        assert_eq!(after(&permits, 9, 80), 60 * SECOND, "more than all have");
        // What cannot grow ends at once, and frees nothing that is missing.
        assert_eq!(permits.free_after(1, Some(oldest), start + 80 * SECOND), 60 * SECOND);
    }
}
