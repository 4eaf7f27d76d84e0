//! Who may use a device's memory: slots for jobs in hand, permits for passes.

use std::fmt;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What slots are computed from, in bytes; read after the weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub free: u64,
    /// Kept free for others.
    pub reserve: u64,
    /// Already taken by the model's weights; only told, not subtracted again.
    pub weights: u64,
    /// Models that share the device, each with an equal part of the room.
    pub models: u64,
    /// What one job of the model needs at most.
    pub per_job: u64,
}

impl Room {
    /// Bytes for this model's jobs.
    pub fn share(&self) -> u64 {
        self.free.saturating_sub(self.reserve) / self.models.max(1)
    }

    /// `floor(share / per_job)`, at most `cap`.
    ///
    /// # Errors
    /// [`DoesNotFit`] when not even one job has room.
    pub fn slots(&self, cap: NonZeroU16) -> Result<NonZeroU16, DoesNotFit> {
        let slots = self.share() / self.per_job.max(1);
        let slots = u16::try_from(slots).unwrap_or(u16::MAX).min(cap.get());
        NonZeroU16::new(slots).ok_or(DoesNotFit(*self))
    }
}

/// A device without room for one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit(pub Room);

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let room = &self.0;
        let missing = room.per_job.saturating_sub(room.share()) * room.models.max(1);
        write!(
            f,
            "no job fits: {} free after {} of weights, minus {} reserve",
            Mib(room.free),
            Mib(room.weights),
            Mib(room.reserve)
        )?;
        if room.models > 1 {
            write!(f, ", shared by {} models", room.models)?;
        }
        write!(
            f,
            ", leaves {}; one job needs {}: {} are missing. Lower job_items or pass_tokens of the model or the \
             device's reserve_mib, or give the device more memory",
            Mib(room.share()),
            Mib(room.per_job),
            Mib(missing)
        )
    }
}

/// Bytes for a person: in MiB, rounded up to a tenth so that a shortage never reads as zero.
#[derive(Clone, Copy, Debug)]
pub struct Mib(pub u64);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = (u128::from(self.0) * 10).div_ceil(1 << 20);
        write!(f, "{}.{} MiB", tenths / 10, tenths % 10)
    }
}

/// A device's bytes for passes. Clones share it.
#[derive(Clone, Debug)]
pub struct Budget(Arc<Account>);

#[derive(Debug)]
struct Account {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Budget {
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Account { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }))
    }

    pub fn limit(&self) -> u64 {
        self.0.limit.load(Ordering::Acquire)
    }

    /// Follows the device's memory. Permits that are out stay valid; no more are given until there is room again.
    pub fn set_limit(&self, bytes: u64) {
        self.0.limit.store(bytes, Ordering::Release);
    }

    /// Bytes that permits stand for.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Acquire)
    }

    pub fn available(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }

    /// A share of the budget, or nothing while others hold too much of it.
    pub fn try_acquire(&self, bytes: u64) -> Option<Permit> {
        let limit = self.limit();
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
        self.0.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).ok()?;
        Some(Permit { bytes, account: Arc::clone(&self.0) })
    }

    /// The whole budget, or nothing while anyone holds a part of it.
    pub fn try_acquire_all(&self) -> Option<Permit> {
        let limit = self.limit();
        self.0.used.compare_exchange(0, limit, Ordering::AcqRel, Ordering::Acquire).ok()?;
        Some(Permit { bytes: limit, account: Arc::clone(&self.0) })
    }
}

/// A share of a [`Budget`]. It goes where the work goes and comes back when it is dropped, so whoever runs a pass
/// drops it only after the device is done with the memory.
#[derive(Debug)]
#[must_use = "dropping a permit gives it back"]
pub struct Permit {
    bytes: u64,
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn room(free: u64, reserve: u64, per_job: u64) -> Room {
        Room {
            free: free * MIB,
            reserve: reserve * MIB,
            weights: 90 * MIB,
            models: 1,
            per_job: per_job * MIB,
        }
    }

    #[test]
    fn slots_are_whole_jobs_in_what_the_reserve_leaves() {
        let cap = NonZeroU16::MAX;
        assert_eq!(room(1000, 100, 300).slots(cap).unwrap().get(), 3);
        assert_eq!(room(1000, 100, 900).slots(cap).unwrap().get(), 1);
        assert_eq!(room(1000, 100, 1).slots(NonZeroU16::new(64).unwrap()).unwrap().get(), 64);
        let shared = Room { models: 2, ..room(1000, 100, 300) };
        assert_eq!(shared.slots(cap).unwrap().get(), 1);
    }

    #[test]
    fn a_refusal_shows_its_arithmetic() {
        let refusal = room(1000, 100, 901).slots(NonZeroU16::MAX).unwrap_err().to_string();
        for figure in [
            "1000.0 MiB free",
            "90.0 MiB of weights",
            "100.0 MiB reserve",
            "needs 901.0 MiB",
            "1.0 MiB are missing",
        ] {
            assert!(refusal.contains(figure), "{figure} not in: {refusal}");
        }
    }

    #[test]
    fn a_reserve_above_the_free_memory_leaves_nothing_and_does_not_wrap() {
        assert_eq!(room(10, 100, 1).share(), 0);
        assert!(room(10, 100, 1).slots(NonZeroU16::MAX).is_err());
    }

    #[test]
    fn the_whole_budget_is_only_for_one_alone() {
        let budget = Budget::new(10);
        let part = budget.try_acquire(1).unwrap();
        assert!(budget.try_acquire_all().is_none());
        drop(part);
        let all = budget.try_acquire_all().unwrap();
        assert!(budget.try_acquire(1).is_none());
        drop(all);
        assert_eq!(budget.available(), 10);
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
