//! Permits: a pass starts only with a share of the device's budget, and the share comes back when the pass is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A device's bytes for passes. The scheduler owns the only one and admits passes; everything else gets a [`BudgetView`].
#[derive(Debug)]
pub struct Budget(Arc<Account>);

/// A read-only view of a [`Budget`].
#[derive(Clone, Debug)]
pub struct BudgetView(Arc<Account>);

#[derive(Debug)]
struct Account {
    limit: AtomicU64,
    used: AtomicU64,
    /// A permit for the whole budget is out. It stays exclusive even if the budget grows or is zero.
    is_whole: AtomicBool,
}

impl Budget {
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Account {
            limit: AtomicU64::new(limit),
            used: AtomicU64::new(0),
            is_whole: AtomicBool::new(false),
        }))
    }

    /// What shows the budget to others.
    pub fn view(&self) -> BudgetView {
        BudgetView(Arc::clone(&self.0))
    }

    pub(crate) fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Sets the budget to follow the device's memory. Permits already given stay valid; new ones wait until `used` is below the limit
    /// again.
    pub(crate) fn set_limit(&self, bytes: u64) {
        self.0.limit.store(bytes, Ordering::Release);
    }

    pub(crate) fn available(&self) -> u64 {
        self.0.available()
    }

    /// A permit for `bytes`, or `None` while other permits leave too little.
    pub fn try_acquire(&self, bytes: u64) -> Option<Permit> {
        if self.0.is_whole.load(Ordering::Acquire) {
            return None;
        }
        let limit = self.limit();
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        self.0.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(Permit { bytes, is_whole: false, account: Arc::clone(&self.0) })
    }

    /// A permit for the whole budget, or `None` while any other permit is out.
    pub(crate) fn try_acquire_all(&self) -> Option<Permit> {
        if self.0.used() > 0 || self.0.is_whole.swap(true, Ordering::AcqRel) {
            return None;
        }
        let limit = self.limit();
        self.0.used.store(limit, Ordering::Release);
        Some(Permit { bytes: limit, is_whole: true, account: Arc::clone(&self.0) })
    }
}

impl BudgetView {
    /// Bytes that all passes together may take.
    pub fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Bytes that permits stand for.
    pub fn used(&self) -> u64 {
        self.0.used()
    }

    /// Bytes that a permit could be given for.
    pub fn available(&self) -> u64 {
        self.0.available()
    }
}

impl Account {
    fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    fn available(&self) -> u64 {
        if self.is_whole.load(Ordering::Acquire) {
            return 0;
        }
        self.limit().saturating_sub(self.used())
    }
}

/// A share of a [`Budget`], returned on drop. The code that runs a pass drops it only after the device is done with the memory.
#[derive(Debug)]
#[must_use = "dropping a permit gives it back"]
pub struct Permit {
    bytes: u64,
    is_whole: bool,
    account: Arc<Account>,
}

impl Permit {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.account.used.fetch_sub(self.bytes, Ordering::AcqRel);
        if self.is_whole {
            self.account.is_whole.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_whole_budget_is_only_for_one_alone() {
        let budget = Budget::new(10);
        let part = budget.try_acquire(1).unwrap();
        assert!(budget.try_acquire_all().is_none());
        let view = budget.view();
        assert_eq!((view.limit(), view.used(), view.available()), (10, 1, 9));
        drop(part);
        let all = budget.try_acquire_all().unwrap();
        assert!(budget.try_acquire(1).is_none());
        assert_eq!(budget.view().available(), 0);
        drop(all);
        assert_eq!(budget.available(), 10);
    }

    #[test]
    fn an_empty_budget_is_acquired_whole_only_once() {
        let budget = Budget::new(0);
        let all = budget.try_acquire_all().unwrap();
        assert!(budget.try_acquire_all().is_none() && budget.try_acquire(0).is_none());
        drop(all);
        assert!(budget.try_acquire_all().is_some());
    }

    #[test]
    fn a_budget_that_grows_admits_nothing_beside_a_permit_for_all_of_it() {
        let budget = Budget::new(10);
        let all = budget.try_acquire_all().unwrap();
        budget.set_limit(30);
        assert_eq!(budget.available(), 0);
        assert!(budget.try_acquire(1).is_none() && budget.try_acquire_all().is_none());
        drop(all);
        assert_eq!((budget.available(), budget.view().used()), (30, 0));
    }

    proptest! {
        #[test]
        fn permits_never_exceed_the_budget(limit in 0u64..1000, asks in prop::collection::vec((0u64..400, any::<bool>()), 0..60)) {
            let budget = Budget::new(limit);
            let mut held = Vec::new();
            for (bytes, give_back) in asks {
                if give_back { held.pop(); }
                held.extend(budget.try_acquire(bytes));
                let sum: u64 = held.iter().map(Permit::bytes).sum();
                prop_assert!(sum <= limit);
                prop_assert_eq!(budget.available(), limit - sum);
            }
            held.clear();
            prop_assert_eq!(budget.available(), limit);
        }
    }
}
