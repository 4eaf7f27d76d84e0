//! The jobs that callers have withdrawn and that have not ended yet: their withdrawals are repeated.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use vramq_schemas::withdrawal::Withdrawal;

/// Withdrawn jobs whose end is awaited. Each is repeated every few seconds, so that this bounds messages too; of more, the
/// withdrawal is sent once.
pub const WITHDRAWN_MAX: usize = 4_096;

/// The withdrawals to repeat. One entry a job; removed when the job has ended.
#[derive(Debug, Default)]
pub struct Withdrawals {
    open: Mutex<Open>,
    /// Tells the link that there is a new one.
    pub added: Notify,
}

#[derive(Debug, Default)]
struct Open {
    by_job: HashMap<String, Withdrawal>,
    /// Not sent once yet; at most [`WITHDRAWN_MAX`].
    unsent: Vec<Withdrawal>,
}

/// A withdrawn job: as long as this lives, its withdrawal is repeated.
#[derive(Debug)]
pub struct Withdrawn {
    withdrawals: Arc<Withdrawals>,
    job: String,
}

impl Withdrawals {
    /// Withdraws a job. `None` if too many are withdrawn: then its withdrawal is sent once.
    pub fn add(self: &Arc<Self>, withdrawal: Withdrawal) -> Option<Withdrawn> {
        let mut open = self.open();
        if open.unsent.len() < WITHDRAWN_MAX {
            open.unsent.push(withdrawal.clone());
        }
        let job = withdrawal.job.clone();
        let room = open.by_job.len() < WITHDRAWN_MAX;
        if room {
            open.by_job.insert(job.clone(), withdrawal);
        }
        drop(open);
        self.added.notify_one();
        room.then(|| Withdrawn { withdrawals: Arc::clone(self), job })
    }

    /// Those that were not sent yet.
    pub fn take_unsent(&self) -> Vec<Withdrawal> {
        std::mem::take(&mut self.open().unsent)
    }

    /// All that are to be repeated.
    pub fn all(&self) -> Vec<Withdrawal> {
        self.open().by_job.values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.open().by_job.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // Nothing panics while it holds the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Withdrawn {
    fn drop(&mut self) {
        self.withdrawals.open().by_job.remove(&self.job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn withdrawal(n: usize) -> Withdrawal {
        Withdrawal { job: n.to_string(), secret: String::new() }
    }

    #[test]
    fn a_withdrawal_is_repeated_until_its_job_has_ended() {
        let withdrawals = Arc::new(Withdrawals::default());
        let withdrawn = withdrawals.add(withdrawal(1)).unwrap();
        assert_eq!(withdrawals.take_unsent(), [withdrawal(1)]);
        assert!(withdrawals.take_unsent().is_empty());
        assert_eq!(withdrawals.all(), [withdrawal(1)]);
        drop(withdrawn);
        assert!(withdrawals.is_empty());
    }

    #[test]
    fn too_many_are_sent_once() {
        let withdrawals = Arc::new(Withdrawals::default());
        let held: Vec<_> = (0..WITHDRAWN_MAX).map(|n| withdrawals.add(withdrawal(n)).unwrap()).collect();
        withdrawals.take_unsent();
        assert!(withdrawals.add(withdrawal(WITHDRAWN_MAX)).is_none());
        assert_eq!(withdrawals.take_unsent(), [withdrawal(WITHDRAWN_MAX)]);
        assert_eq!(withdrawals.len(), held.len());
    }
}
