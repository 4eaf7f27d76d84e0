//! The bytes that a store for uploads or results uses, or will use: by all callers, and by each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The bytes of all objects in a place, with their bounds.
#[derive(Debug)]
pub struct Used {
    pub all_max: u64,
    /// One owner must not fill the place for all others.
    pub of_owner_max: u64,
    bytes: Mutex<Bytes>,
}

#[derive(Debug, Default)]
struct Bytes {
    all: Sum,
    /// Of owners that have some.
    by_owner: HashMap<String, Sum>,
}

/// Bytes of objects that are there, and of those that are coming.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    pub stored: u64,
    pub coming: u64,
}

/// Who has no room left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    All,
    Owner,
}

impl Used {
    pub fn new(all_max: u64, of_owner_max: u64) -> Self {
        Self { all_max, of_owner_max, bytes: Mutex::default() }
    }

    /// Begins to reserve room for an object that is to be stored.
    pub fn reserve(self: &Arc<Self>, owner: &str) -> Reserved {
        Reserved { used: Arc::clone(self), owner: owner.to_owned(), bytes: 0 }
    }

    /// Records that an object was removed.
    pub fn removed(&self, owner: &str, bytes: u64) {
        self.bytes().change(owner, |sum| sum.stored = sum.stored.saturating_sub(bytes));
    }

    /// Replaces the sums by those that a sweep found, by owner and of all gateways.
    pub fn counted(&self, stored: HashMap<String, u64>) {
        let mut bytes = self.bytes();
        bytes.all.stored = stored.values().sum();
        for sum in bytes.by_owner.values_mut() {
            sum.stored = 0;
        }
        for (owner, found) in stored {
            bytes.by_owner.entry(owner).or_default().stored = found;
        }
        bytes.by_owner.retain(|_, sum| *sum != Sum::default());
    }

    fn bytes(&self) -> MutexGuard<'_, Bytes> {
        // Nothing panics while it holds the lock.
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bytes {
    fn change(&mut self, owner: &str, change: impl Fn(&mut Sum)) {
        change(&mut self.all);
        let of_owner = self.by_owner.entry(owner.to_owned()).or_default();
        change(of_owner);
        if *of_owner == Sum::default() {
            self.by_owner.remove(owner);
        }
    }
}

impl Sum {
    fn has_room(self, bytes: u64, most: u64) -> bool {
        self.stored.saturating_add(self.coming).saturating_add(bytes) <= most
    }
}

/// Bytes that an object will take of the place.
///
/// They count as stored once this is dropped, also if nobody knows whether the object is stored: a folder goes on writing although the one
/// that waited for it has given up. The next sweep counts what is there. If the object is not there, call [`give_back`](Self::give_back).
#[derive(Debug)]
pub struct Reserved {
    used: Arc<Used>,
    owner: String,
    bytes: u64,
}

impl Reserved {
    /// # Errors
    /// There is no room for so many more.
    pub fn grow(&mut self, more: u64) -> Result<(), Full> {
        let mut bytes = self.used.bytes();
        let of_owner = bytes.by_owner.get(&self.owner).copied().unwrap_or_default();
        if !of_owner.has_room(more, self.used.of_owner_max) {
            return Err(Full::Owner);
        }
        if !bytes.all.has_room(more, self.used.all_max) {
            return Err(Full::All);
        }
        bytes.change(&self.owner, |sum| sum.coming = sum.coming.saturating_add(more));
        self.bytes += more;
        Ok(())
    }

    /// The object is not stored, and nobody writes it any more.
    pub fn give_back(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        self.used.bytes().change(&self.owner, |sum| sum.coming = sum.coming.saturating_sub(bytes));
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let bytes = self.bytes;
        self.used.bytes().change(&self.owner, |sum| {
            sum.coming = sum.coming.saturating_sub(bytes);
            sum.stored = sum.stored.saturating_add(bytes);
        });
    }
}

#[cfg(test)]
impl Used {
    /// The bytes of all owners.
    pub fn sum(&self) -> Sum {
        self.bytes().all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_leaves_room_for_others() {
        let used = Arc::new(Used::new(10, 6));
        let mut first = used.reserve("a");
        first.grow(4).unwrap();
        let mut second = used.reserve("a");
        second.grow(2).unwrap();
        assert_eq!(second.grow(1), Err(Full::Owner));
        let mut other = used.reserve("b");
        assert_eq!((other.grow(5), other.grow(4)), (Err(Full::All), Ok(())));
        drop(first);
        second.give_back();
        assert_eq!(used.sum(), Sum { stored: 4, coming: 4 });
        drop(other);
        let mut third = used.reserve("a");
        assert_eq!((third.grow(3), third.grow(2)), (Err(Full::Owner), Ok(())));
        third.give_back();
        used.removed("a", 4);
        used.removed("b", 4);
        assert_eq!(used.sum(), Sum::default());
        assert!(used.bytes().by_owner.is_empty());
    }

    #[test]
    fn a_new_count_replaces_the_bytes_of_every_owner() {
        let used = Arc::new(Used::new(10, 6));
        let mut coming = used.reserve("a");
        coming.grow(1).unwrap();
        used.counted(HashMap::from([("a".to_owned(), 5), ("b".to_owned(), 2)]));
        assert_eq!((used.sum(), coming.grow(1)), (Sum { stored: 7, coming: 1 }, Err(Full::Owner)));
        used.counted(HashMap::from([("b".to_owned(), 1)]));
        assert_eq!((used.sum(), coming.grow(1)), (Sum { stored: 1, coming: 1 }, Ok(())));
        assert_eq!(used.bytes().by_owner.len(), 2);
    }
}
