//! Withdrawn jobs that have not ended yet, whose withdrawals are published and repeated.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel};
use tokio::sync::Notify;
use uuid::Uuid;
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::{REMEMBERED_S, TYPE, Withdrawal};

/// The most withdrawn jobs whose withdrawals are repeated every few seconds, which bounds messages. Beyond it, a withdrawal is sent only
/// once.
pub const WITHDRAWN_MAX: usize = 4_096;

/// The most withdrawals that wait to be sent for the first time: as many as a worker remembers. One burst has far fewer; more may pile up
/// while there is no connection.
const UNSENT_MAX: usize = 4 * WITHDRAWN_MAX;

/// The interval of repeats. A worker that joins misses a withdrawal for this time at most. Workers remember withdrawals for several
/// intervals.
pub const REPEAT_EVERY: Duration = Duration::from_secs(5);
const _: () = assert!(REPEAT_EVERY.as_secs() * 3 < REMEMBERED_S);

/// How long a withdrawal is repeated. A job that a broker's own policy removed never ends.
const REPEAT_FOR: Duration = Duration::from_secs(3600);

/// The withdrawals to repeat. One entry a job; removed when the job has ended.
#[derive(Debug, Default)]
pub struct Withdrawals {
    open: Mutex<Open>,
    /// Notifies the publisher of a new withdrawal.
    pub added: Notify,
    /// Notifies [`all_ended`](Withdrawals::all_ended) that a job has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Open {
    /// Each with the time of its withdrawal.
    by_job: HashMap<String, (Withdrawal, Instant)>,
    /// Not sent once yet; at most [`UNSENT_MAX`].
    unsent: Vec<Withdrawal>,
    excess: Excess,
}

/// Counts, since the start, the withdrawals of jobs beyond [`WITHDRAWN_MAX`]. These jobs may run, on a worker that joins later or did not
/// receive the only message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Excess {
    /// Queued to be sent once, and not repeated. If sending fails, they are dropped; they count here all the same.
    pub sent_once: u64,
    /// Not sent at all: too many waited to be sent.
    pub not_sent: u64,
}

/// A withdrawn job: as long as this lives, its withdrawal is repeated.
#[derive(Debug)]
pub struct Withdrawn {
    withdrawals: Arc<Withdrawals>,
    job: String,
}

/// A new secret of a job: 244 random bits.
pub fn new_secret() -> String {
    format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple())
}

/// Publishes withdrawals. On a channel in confirm mode it returns when the broker has them.
///
/// # Errors
/// The channel is lost, also if there is no such exchange, or this user may not write to it.
pub async fn publish_withdrawals(channel: &Channel, withdrawals: &[Withdrawal]) -> lapin::Result<()> {
    let mut confirms = Vec::with_capacity(withdrawals.len());
    for withdrawal in withdrawals {
        let properties = BasicProperties::default()
            .with_type(TYPE.into())
            .with_content_type("application/json".into())
            .with_expiration((REMEMBERED_S * 1000).to_string().into());
        let (exchange, key, body) =
            (WITHDRAWALS_EXCHANGE.into(), ShortString::default(), withdrawal.to_json());
        let options = BasicPublishOptions::default();
        confirms.push(channel.basic_publish(exchange, key, options, &body, properties).await?);
    }
    for confirm in confirms {
        confirm.await?;
    }
    Ok(())
}

impl Withdrawals {
    /// Withdraws a job until [`ended`](Self::ended) names it. Returns false if too many jobs are withdrawn: then the withdrawal is sent
    /// once at most ([`excess`](Self::excess)).
    pub fn withdraw(&self, withdrawal: Withdrawal) -> bool {
        let mut open = self.open();
        let is_repeated = open.by_job.len() < WITHDRAWN_MAX;
        if is_repeated {
            open.by_job.insert(withdrawal.job.clone(), (withdrawal.clone(), Instant::now()));
        }
        // A withdrawal that is repeated may be left out here, because the next repeat sends it.
        let is_queued = open.unsent.len() < if is_repeated { WITHDRAWN_MAX } else { UNSENT_MAX };
        if is_queued {
            open.unsent.push(withdrawal);
        }
        match (is_repeated, is_queued) {
            (true, _) => {}
            (false, true) => open.excess.sent_once += 1,
            (false, false) => open.excess.not_sent += 1,
        }
        drop(open);
        self.added.notify_one();
        is_repeated
    }

    /// Withdraws a job while the returned value lives. `None` if too many jobs are withdrawn: then the withdrawal is sent once at most.
    pub fn add(self: &Arc<Self>, withdrawal: Withdrawal) -> Option<Withdrawn> {
        let job = withdrawal.job.clone();
        self.withdraw(withdrawal).then(|| Withdrawn { withdrawals: Arc::clone(self), job })
    }

    /// The job has ended: its withdrawal is not repeated any more.
    pub fn ended(&self, job: &str) {
        if self.open().by_job.remove(job).is_some() {
            self.ended.notify_one();
        }
    }

    /// Removes and returns the withdrawals that were not sent yet.
    pub fn take_unsent(&self) -> Vec<Withdrawal> {
        std::mem::take(&mut self.open().unsent)
    }

    /// Takes back withdrawals that could not be sent. Drops those that are not repeated: their jobs have ended, or they exceeded
    /// [`WITHDRAWN_MAX`].
    pub fn put_back(&self, unsent: Vec<Withdrawal>) {
        let mut open = self.open();
        let Open { by_job, unsent: waiting, .. } = &mut *open;
        waiting.extend(unsent.into_iter().filter(|withdrawal| by_job.contains_key(&withdrawal.job)));
    }

    /// All that are to be repeated.
    pub fn all(&self) -> Vec<Withdrawal> {
        let mut open = self.open();
        open.by_job.retain(|_, (_, since)| since.elapsed() < REPEAT_FOR);
        open.by_job.values().map(|(withdrawal, _)| withdrawal.clone()).collect()
    }

    /// Counts withdrawals that are not repeated, or not sent at all.
    pub fn excess(&self) -> Excess {
        self.open().excess
    }

    /// How many jobs have withdrawals that are repeated.
    pub fn len(&self) -> usize {
        self.open().by_job.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Resolves when all withdrawn jobs have ended. For one caller at a time.
    pub async fn all_ended(&self) {
        while !self.is_empty() {
            self.ended.notified().await;
        }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // Nothing panics while it holds the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Withdrawn {
    fn drop(&mut self) {
        self.withdrawals.ended(&self.job);
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
    fn unsent_withdrawals_are_sent_later_unless_their_job_has_ended() {
        let withdrawals = Withdrawals::default();
        for job in 1..=2 {
            assert!(withdrawals.withdraw(withdrawal(job)));
        }
        let unsent = withdrawals.take_unsent();
        withdrawals.ended("1");
        withdrawals.put_back(unsent);
        assert_eq!(withdrawals.take_unsent(), [withdrawal(2)]);
    }

    #[test]
    fn too_many_are_sent_once() {
        let withdrawals = Arc::new(Withdrawals::default());
        let held: Vec<_> = (0..WITHDRAWN_MAX).map(|n| withdrawals.add(withdrawal(n)).unwrap()).collect();
        withdrawals.take_unsent();
        assert_eq!(withdrawals.excess(), Excess::default());
        assert!(withdrawals.add(withdrawal(WITHDRAWN_MAX)).is_none());
        assert_eq!(withdrawals.take_unsent(), [withdrawal(WITHDRAWN_MAX)]);
        assert_eq!(withdrawals.len(), held.len());
        assert_eq!(withdrawals.excess(), Excess { sent_once: 1, not_sent: 0 });
    }

    #[test]
    fn each_of_a_burst_is_sent_and_what_is_not_is_counted() {
        let withdrawals = Withdrawals::default();
        for n in 0..=UNSENT_MAX {
            assert_eq!(withdrawals.withdraw(withdrawal(n)), n < WITHDRAWN_MAX, "{n}");
        }
        let sent = withdrawals.take_unsent();
        assert_eq!((sent.len(), sent.last()), (UNSENT_MAX, Some(&withdrawal(UNSENT_MAX - 1))));
        let sent_once = (UNSENT_MAX - WITHDRAWN_MAX) as u64;
        assert_eq!(withdrawals.excess(), Excess { sent_once, not_sent: 1 });
    }

    #[tokio::test]
    async fn the_end_of_all_is_seen_whenever_it_was() {
        let withdrawals = Withdrawals::default();
        withdrawals.all_ended().await;
        for job in 1..=3 {
            assert!(withdrawals.withdraw(withdrawal(job)));
        }
        withdrawals.ended("1");
        let others = async {
            tokio::task::yield_now().await;
            withdrawals.ended("2");
            withdrawals.ended("unknown");
            tokio::task::yield_now().await;
            assert!(!withdrawals.is_empty());
            withdrawals.ended("3");
        };
        tokio::join!(withdrawals.all_ended(), others);
        assert!(withdrawals.is_empty());
    }

    #[test]
    fn a_secret_is_64_hexadecimal_digits_and_used_once() {
        let secret = new_secret();
        assert_eq!(secret.len(), 64);
        assert!(secret.bytes().all(|digit| digit.is_ascii_hexdigit()));
        assert_ne!(secret, new_secret());
    }
}
