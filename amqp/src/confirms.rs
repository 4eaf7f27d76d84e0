//! Matches returned messages with their publishes. Pure.
//!
//! lapin attaches a returned message to the next confirm that completes, whichever publish that confirm belongs to. With several
//! confirms in flight, the confirm of a routed message may carry the return of another. So a return is matched by the content of
//! the returned message. A confirm that carried the return of another publish is settled only when its own return cannot come any
//! more.

use std::collections::{HashMap, HashSet, VecDeque};

/// What the broker did with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The broker has it: on disk, and on a majority of nodes for a quorum queue.
    Confirmed,
    /// No queue is bound for it. It is gone.
    Returned,
    /// Nacked: the length limit of a queue with `reject-publish` is reached.
    Refused,
    /// Its body is larger than [`Limits::body_bytes`](crate::Limits::body_bytes), or its properties and headers do not fit one frame of the
    /// connection. Not sent: the broker would close the channel, or the connection.
    TooLarge,
}

/// Completed confirms of publishes whose outcome is not known yet.
#[derive(Debug, Default)]
pub(crate) struct Confirms {
    completed: HashMap<u64, Completed>,
    /// Places and publishes that `settle` has not looked at yet, in the order of places. After a burst of confirms many wait here until it is known
    /// that no earlier confirm is missing. Without this order each confirm would cost a look at all of them.
    in_order: VecDeque<(u64, u64)>,
    /// Publishes that were looked at, whose chain is not closed. Few: only unroutable messages make chains.
    chained: Vec<u64>,
    returned: HashSet<u64>,
    /// How many confirms were noted.
    noted: u64,
    /// Every confirm that completed before one of the first `noted_without_gap` confirms is noted as well.
    noted_without_gap: u64,
}

#[derive(Debug)]
struct Completed {
    ack: bool,
    /// The publish whose returned message this confirm carried.
    carried: Option<u64>,
    /// Its place in the order in which confirms were noted, from 1.
    place: u64,
}

impl Confirms {
    /// Notes that publish `seq` is confirmed, and that its confirm carried the return of `carried`. Returns the confirm's place for
    /// [`no_gap_before`](Self::no_gap_before): confirms may be noted in another order than they completed in.
    pub(crate) fn complete(&mut self, seq: u64, ack: bool, carried: Option<u64>) -> u64 {
        self.noted += 1;
        self.returned.extend(carried);
        self.completed.insert(seq, Completed { ack, carried, place: self.noted });
        self.in_order.push_back((self.noted, seq));
        self.noted
    }

    /// Records that all confirms which completed before those up to `place` are noted.
    pub(crate) fn no_gap_before(&mut self, place: u64) {
        self.noted_without_gap = self.noted_without_gap.max(place);
    }

    /// Removes and returns the known outcomes. `open` says whether a publish still awaits its confirm.
    ///
    /// Why following the chain is enough: a return arrives before the confirm of its publish, and lapin hands returns out first in, first
    /// out, one to each completed confirm. If the confirm of `a` carried the return of `b`, the return of `a` was either handed out before,
    /// or waits behind that of `b` and is handed out when `b` completes at the latest. The same holds along the chain. Only confirms
    /// without a gap before them show which returns were handed out.
    pub(crate) fn settle(&mut self, open: impl Fn(u64) -> bool) -> Vec<(u64, PublishOutcome)> {
        let mut looked_at = std::mem::take(&mut self.chained);
        while let Some((_, seq)) = self.in_order.pop_front_if(|(place, _)| *place <= self.noted_without_gap) {
            looked_at.push(seq);
        }
        let (settled, chained): (Vec<_>, _) =
            looked_at.into_iter().partition(|seq| self.chain_is_closed(*seq, &open));
        self.chained = chained;
        settled
            .into_iter()
            .filter_map(|seq| {
                let completed = self.completed.remove(&seq)?;
                let outcome = match (self.returned.remove(&seq), completed.ack) {
                    (true, _) => PublishOutcome::Returned,
                    (false, true) => PublishOutcome::Confirmed,
                    (false, false) => PublishOutcome::Refused,
                };
                Some((seq, outcome))
            })
            .collect()
    }

    fn chain_is_closed(&self, seq: u64, open: impl Fn(u64) -> bool) -> bool {
        let mut at = seq;
        // A chain has no more links than there are completed confirms; a longer one is a loop that misses `seq`.
        for _ in 0..=self.completed.len() {
            match self.completed.get(&at) {
                None => return !open(at),
                Some(completed) if completed.place > self.noted_without_gap => return false,
                Some(Completed { carried: None, .. }) => return true,
                Some(Completed { carried: Some(next), .. }) if *next == seq => return true,
                Some(Completed { carried: Some(next), .. }) => at = *next,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Completes, then settles with the given publishes still open; sorted.
    fn settle(confirms: &mut Confirms, open: &[u64]) -> Vec<(u64, PublishOutcome)> {
        confirms.no_gap_before(confirms.noted);
        settle_before_gap(confirms, open)
    }

    fn settle_before_gap(confirms: &mut Confirms, open: &[u64]) -> Vec<(u64, PublishOutcome)> {
        let mut settled = confirms.settle(|seq| open.contains(&seq));
        settled.sort_by_key(|(seq, _)| *seq);
        settled
    }

    #[test]
    fn each_confirm_gives_its_own_outcome() {
        let mut confirms = Confirms::default();
        confirms.complete(1, true, None);
        confirms.complete(2, false, None);
        confirms.complete(3, true, Some(3));
        assert_eq!(
            settle(&mut confirms, &[]),
            [(1, PublishOutcome::Confirmed), (2, PublishOutcome::Refused), (3, PublishOutcome::Returned)]
        );
    }

    #[test]
    fn a_routed_publish_is_not_blamed_for_anothers_return() {
        let mut confirms = Confirms::default();
        confirms.complete(1, true, Some(3));
        assert_eq!(settle(&mut confirms, &[2, 3]), []);
        confirms.complete(3, true, None);
        assert_eq!(
            settle(&mut confirms, &[2]),
            [(1, PublishOutcome::Confirmed), (3, PublishOutcome::Returned)]
        );
        confirms.complete(2, true, None);
        assert_eq!(settle(&mut confirms, &[]), [(2, PublishOutcome::Confirmed)]);
    }

    /// The confirm of 1 completed first and carried the return of 2; that of 2 is noted first.
    #[test]
    fn a_confirm_is_not_judged_before_those_that_completed_earlier_are_noted() {
        let mut confirms = Confirms::default();
        let second = confirms.complete(2, true, None);
        assert_eq!(settle_before_gap(&mut confirms, &[1]), []);
        let first = confirms.complete(1, true, Some(2));
        assert_eq!(settle_before_gap(&mut confirms, &[]), []);
        confirms.no_gap_before(second);
        assert_eq!(settle_before_gap(&mut confirms, &[]), [(2, PublishOutcome::Returned)]);
        confirms.no_gap_before(first);
        assert_eq!(settle_before_gap(&mut confirms, &[]), [(1, PublishOutcome::Confirmed)]);
    }

    /// The confirm of 1 carried the return of 2, and the confirm of 2 has a gap before it: it may be one that carried the return of 1.
    #[test]
    fn a_chain_ends_at_a_gap() {
        let mut confirms = Confirms::default();
        let first = confirms.complete(1, true, Some(2));
        confirms.no_gap_before(first);
        let second = confirms.complete(2, true, None);
        assert_eq!(settle_before_gap(&mut confirms, &[3]), []);
        confirms.complete(3, true, Some(1));
        confirms.no_gap_before(second);
        let returned = [(1, PublishOutcome::Returned), (2, PublishOutcome::Returned)];
        assert_eq!(settle_before_gap(&mut confirms, &[]), returned);
    }

    #[test]
    fn a_multiple_ack_in_any_order_of_completion() {
        // Three unroutable publishes and a routed one, acked together: lapin completes them in a hash map's order
        // and hands out the returns first in, first out. Whatever is seen at any moment, the outcomes are right.
        for order in permutations(&[1, 2, 3, 4]) {
            for looks in 0..16u32 {
                let mut returns = [1, 2, 4].into_iter();
                let mut confirms = Confirms::default();
                let mut outcomes = Vec::new();
                for (n, seq) in order.iter().enumerate() {
                    confirms.complete(*seq, true, returns.next());
                    if looks & (1 << n) != 0 {
                        outcomes.extend(settle(&mut confirms, &order[n + 1..]));
                    }
                }
                outcomes.extend(settle(&mut confirms, &[]));
                outcomes.sort_by_key(|(seq, _)| *seq);
                assert_eq!(
                    outcomes,
                    [
                        (1, PublishOutcome::Returned),
                        (2, PublishOutcome::Returned),
                        (3, PublishOutcome::Confirmed),
                        (4, PublishOutcome::Returned)
                    ],
                    "order {order:?}, looked at {looks:b}"
                );
            }
        }
    }

    fn permutations(of: &[u64]) -> Vec<Vec<u64>> {
        if of.is_empty() {
            return vec![Vec::new()];
        }
        of.iter()
            .flat_map(|first| {
                let rest = of.iter().copied().filter(|x| x != first).collect::<Vec<_>>();
                permutations(&rest).into_iter().map(move |mut tail| {
                    tail.insert(0, *first);
                    tail
                })
            })
            .collect()
    }
}
