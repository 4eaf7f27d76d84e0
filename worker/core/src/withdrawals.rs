//! Remembers withdrawals, because the jobs that they name may be delivered later: from the queue, from a delay queue, or after their worker
//! was lost.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use vramq_schemas::withdrawal::REMEMBERED_S;

use crate::event::{Delivery, Withdrawn};
use crate::sizes::Size;

/// How many are remembered. One takes at most about 600 bytes (it holds the job's id twice), so all together take 10 MiB. Beyond that, the
/// one that was not repeated for the longest time is forgotten. Callers repeat withdrawals that still matter.
const REMEMBERED_MAX: usize = 16 * 1024;

/// How long a withdrawal is remembered after the caller last repeated it.
const REMEMBERED_FOR: Duration = Duration::from_secs(REMEMBERED_S);

/// A bounded memory of withdrawals. It does not matter who sent one: only the job's caller can know the secret whose digest matches the
/// job.
#[derive(Debug, Default)]
pub(crate) struct Withdrawals {
    /// When each was last received.
    known: HashMap<Withdrawn, Instant>,
    /// Each withdrawal once, with a time at which it was received: the last time or an earlier one.
    order: VecDeque<(Withdrawn, Instant)>,
}

impl Withdrawals {
    /// Records a withdrawal, or that it was repeated.
    pub(crate) fn remember(&mut self, withdrawn: Withdrawn, now: Instant) {
        if self.known.insert(withdrawn.clone(), now).is_none() {
            self.order.push_back((withdrawn, now));
        }
        while let Some((oldest, noted)) = self.order.pop_front() {
            let last = self.known.get(&oldest).copied().unwrap_or(noted);
            if last > noted {
                self.order.push_back((oldest, last));
            } else if is_over(last, now) || self.known.len() > REMEMBERED_MAX {
                self.known.remove(&oldest);
            } else {
                self.order.push_front((oldest, noted));
                return;
            }
        }
    }

    pub(crate) fn size(&self) -> Size {
        Size::of("withdrawals", self.known.len().max(self.order.len()), REMEMBERED_MAX)
    }

    /// Whether a job was withdrawn by its caller.
    pub(crate) fn has(&self, delivery: &Delivery, now: Instant) -> bool {
        // Skips the search while there are no withdrawals.
        if self.known.is_empty() {
            return false;
        }
        let (Some(id), Some(digest)) = (&delivery.id, delivery.withdrawal) else { return false };
        let withdrawn = Withdrawn { id: id.clone(), digest };
        self.known.get(&withdrawn).is_some_and(|at| !is_over(*at, now))
    }
}

fn is_over(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) > REMEMBERED_FOR
}

#[cfg(test)]
mod tests {
    use vramq_schemas::withdrawal::Digest;

    use super::*;

    fn withdrawn(n: usize) -> Withdrawn {
        Withdrawn { id: n.to_string(), digest: Digest::of(&n.to_string()) }
    }

    fn knows(withdrawals: &Withdrawals, n: usize, now: Instant) -> bool {
        withdrawals.known.get(&withdrawn(n)).is_some_and(|at| !is_over(*at, now))
    }

    #[test]
    fn those_that_are_not_repeated_are_forgotten() {
        let (mut withdrawals, start) = (Withdrawals::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        withdrawals.remember(withdrawn(1), at(0));
        withdrawals.remember(withdrawn(2), at(0));
        withdrawals.remember(withdrawn(1), at(REMEMBERED_S));
        assert!(knows(&withdrawals, 1, at(2 * REMEMBERED_S)));
        assert!(!knows(&withdrawals, 1, at(2 * REMEMBERED_S + 1)));
        assert!(!knows(&withdrawals, 2, at(REMEMBERED_S + 1)));
        withdrawals.remember(withdrawn(3), at(REMEMBERED_S + 1));
        assert_eq!(
            (withdrawals.known.len(), withdrawals.order.len()),
            (2, 2),
            "what is over takes no memory"
        );
    }

    #[test]
    fn a_flood_stays_bounded_and_does_not_displace_what_is_repeated() {
        let (mut withdrawals, start) = (Withdrawals::default(), Instant::now());
        withdrawals.remember(withdrawn(0), start);
        for n in 1..3 * REMEMBERED_MAX {
            if n % (REMEMBERED_MAX / 2) == 0 {
                withdrawals.remember(withdrawn(0), start + Duration::from_millis(n as u64 / 16));
            }
            withdrawals.remember(withdrawn(n), start + Duration::from_millis(n as u64 / 16));
        }
        assert_eq!((withdrawals.known.len(), withdrawals.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
        let now = start + Duration::from_secs(4);
        assert!(knows(&withdrawals, 0, now) && knows(&withdrawals, 3 * REMEMBERED_MAX - 1, now));
        assert!(!knows(&withdrawals, 1, now));
    }
}
