//! Limits how much each caller may have of something that all callers use.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::in_flight::{InFlight, WeakInFlight};

/// The share of each caller that has something, by its name.
#[derive(Debug)]
pub struct Shares {
    /// How many units each caller may have.
    most: usize,
    by_caller: Mutex<HashMap<String, WeakInFlight>>,
}

impl Shares {
    pub fn new(most: usize) -> Self {
        Self { most, by_caller: Mutex::default() }
    }

    /// How many units each caller may have.
    pub fn most(&self) -> usize {
        self.most
    }

    /// What a caller has of its share, forgotten when the last permit and handle of it are dropped.
    pub fn of(&self, caller: &str) -> InFlight {
        // Nothing panics while it holds the lock.
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = by_caller.get(caller).and_then(WeakInFlight::upgrade) {
            return found;
        }
        by_caller.retain(|_, share| share.is_held());
        let new = InFlight::default();
        by_caller.insert(caller.to_owned(), new.downgrade());
        new
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn only_callers_that_have_something_are_counted() {
        let (shares, now) = (Shares::new(1), Instant::now());
        let enter = |caller: &str| shares.of(caller).enter(shares.most(), now);
        let held = enter("a").unwrap();
        assert!(enter("a").is_err() && enter("b").is_ok());
        drop(held);
        assert!(enter("c").is_ok());
        assert_eq!(shares.by_caller.lock().unwrap().len(), 1);
    }
}
