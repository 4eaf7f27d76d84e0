//! Shares of callers in something that the gateway bounds: none takes what others need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::Semaphore;

/// The share of each caller that has something, by its name.
#[derive(Debug)]
pub struct Shares {
    /// Permits of each.
    most: usize,
    by_caller: Mutex<HashMap<String, Weak<Semaphore>>>,
}

impl Shares {
    pub fn new(most: usize) -> Self {
        Self { most, by_caller: Mutex::default() }
    }

    /// The permits of every caller.
    pub fn most(&self) -> usize {
        self.most
    }

    /// A caller's share, forgotten when the last permit and handle of it are dropped.
    pub fn of(&self, caller: &str) -> Arc<Semaphore> {
        // Nothing panics while it holds the lock.
        let mut by_caller = self.by_caller.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = by_caller.get(caller).and_then(Weak::upgrade) {
            return found;
        }
        by_caller.retain(|_, share| share.strong_count() > 0);
        let new = Arc::new(Semaphore::new(self.most));
        by_caller.insert(caller.to_owned(), Arc::downgrade(&new));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_callers_that_have_something_are_counted() {
        let shares = Shares::new(1);
        let held = shares.of("a").try_acquire_owned().unwrap();
        assert!(shares.of("a").try_acquire_owned().is_err() && shares.of("b").try_acquire_owned().is_ok());
        drop(held);
        assert!(shares.of("c").try_acquire_owned().is_ok());
        assert_eq!(shares.by_caller.lock().unwrap().len(), 1);
    }
}
