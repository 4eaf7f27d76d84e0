//! Divides the slots of a model among the queues that its jobs come from. What comes in is how many jobs wait in each queue, counted
//! every second; what goes out are slots for each: by weight among the queues that have jobs, at least one for each, and in turn
//! where there are fewer slots than queues. Pure.

use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::time::Instant;

use super::TURN;
use crate::event::QueueCount;

/// So many consecutive counts, a second apart, must find a queue empty before it lends its share to the others. A queue that is filled in
/// bursts keeps its slots over the gaps.
const EMPTY_COUNTS_UNTIL_IDLE: u8 = 3;

/// One queue's state for dividing slots.
#[derive(Clone, Copy, Debug)]
struct SharingQueue {
    weight: NonZeroU32,
    /// It cannot be consumed, and has no slots.
    is_missing: bool,
    /// Counts in a row that found nothing waiting.
    empty_counts: u8,
    /// The sum of the slots that it had at each count while it had jobs, divided by its weight. The queue with the least goes first. A
    /// queue without jobs is raised to the least of the others, so that it cannot claim later what they had meanwhile.
    slots_had: f64,
}

impl SharingQueue {
    fn new(weight: NonZeroU32) -> Self {
        let empty_counts = EMPTY_COUNTS_UNTIL_IDLE - 1;
        Self { weight, is_missing: false, empty_counts, slots_had: 0.0 }
    }

    fn has_jobs(&self) -> bool {
        !self.is_missing && self.empty_counts < EMPTY_COUNTS_UNTIL_IDLE
    }
}

/// The queues of a model, in their order.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    queues: Vec<SharingQueue>,
    /// The queues in the order in which they get a slot when there are fewer slots than queues.
    order: Vec<usize>,
    /// When the first queue of `order` last changed, or kept its place at the end of a turn.
    turn_since: Option<Instant>,
}

impl Shares {
    /// Until the first count every queue counts as having jobs. A single empty count then marks it as empty.
    pub(super) fn new(weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        let queues: Vec<_> = weights.into_iter().map(SharingQueue::new).collect();
        Self { order: (0..queues.len()).collect(), queues, turn_since: None }
    }

    /// The broker has counted what waits in each queue. `taken`: the slots that each has now.
    pub(super) fn queues_counted(
        &mut self,
        counts: &[QueueCount],
        now: Instant,
        taken: impl Fn(usize) -> usize,
    ) {
        self.note_counts(counts, taken);
        self.move_idle_ahead();
        self.order_queues(now);
    }

    fn note_counts(&mut self, counts: &[QueueCount], taken: impl Fn(usize) -> usize) {
        for (at, queue) in self.queues.iter_mut().enumerate() {
            let is_empty = counts.get(at).is_none_or(|count| count.waiting == 0);
            queue.empty_counts = match is_empty {
                true => queue.empty_counts.saturating_add(1).min(EMPTY_COUNTS_UNTIL_IDLE),
                false => 0,
            };
            if queue.has_jobs() {
                queue.slots_had += taken(at) as f64 / f64::from(queue.weight.get());
            }
        }
    }

    fn move_idle_ahead(&mut self) {
        let of_busy = self.queues.iter().filter(|queue| queue.has_jobs()).map(|queue| queue.slots_had);
        let Some(least) = of_busy.min_by(f64::total_cmp) else { return };
        for queue in self.queues.iter_mut().filter(|queue| !queue.has_jobs()) {
            queue.slots_had = queue.slots_had.max(least);
        }
    }

    /// At the end of a turn, sorts the queues by the slots that they had, fewest first. Queues without jobs go to the end at once.
    /// Otherwise the order stays, because each change cancels a consumer.
    fn order_queues(&mut self, now: Instant) {
        let (queues, first) = (&self.queues, self.order.first().copied());
        let since = *self.turn_since.get_or_insert(now);
        let is_over = now.saturating_duration_since(since) >= TURN;
        if is_over {
            let slots_had = |at: usize| queues[at].slots_had;
            self.order.sort_by(|a, b| slots_had(*a).total_cmp(&slots_had(*b)).then(a.cmp(b)));
        }
        self.order.sort_by_key(|at| !queues[*at].has_jobs());
        if is_over || self.order.first().copied() != first {
            self.turn_since = Some(now);
        }
    }

    /// Marks a queue as missing or found. After it is found, a single empty count marks it as empty.
    pub(super) fn set_missing(&mut self, at: usize, is_missing: bool) {
        let queue = &mut self.queues[at];
        (queue.is_missing, queue.empty_counts) = (is_missing, EMPTY_COUNTS_UNTIL_IDLE - 1);
    }

    /// There are enough slots for all queues, so no queue waits for a turn.
    pub(super) fn forget_turns(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.slots_had = 0.0);
    }

    /// Divides `slots` among the queues. The shares add up to `slots`, unless no queue is present.
    pub(super) fn divide(&self, slots: u16) -> Vec<u16> {
        let present: Vec<usize> =
            self.order.iter().copied().filter(|at| !self.queues[*at].is_missing).collect();
        let mut shares = vec![0; self.queues.len()];
        present.iter().take(slots.into()).for_each(|at| shares[*at] = 1);
        if usize::from(slots) <= present.len() {
            return shares;
        }
        let is_busy = |at: &usize| self.queues[*at].has_jobs();
        let has_busy = present.iter().any(is_busy);
        let mut busy: Vec<usize> = present.iter().copied().filter(|at| !has_busy || is_busy(at)).collect();
        busy.sort_unstable();
        let idle = u16::try_from(present.len() - busy.len()).unwrap_or(u16::MAX);
        self.divide_by_weight(slots.saturating_sub(idle), &busy, &mut shares);
        shares
    }

    /// Divides so many slots among some queues, by largest remainder, at least one for each.
    fn divide_by_weight(&self, slots: u16, among: &[usize], shares: &mut [u16]) {
        let weight = |at: usize| f64::from(self.queues[at].weight.get());
        let total: f64 = among.iter().map(|at| weight(*at)).sum();
        let exact = |at: usize| f64::from(slots) * weight(at) / total;
        for at in among {
            shares[*at] = (exact(*at).floor() as u16).max(1);
        }
        // Rounding down leaves less than one slot for each queue. The slots of shares that were raised to one come from the others.
        loop {
            let missing = |at: &usize| exact(*at) - f64::from(shares[*at]);
            let by_missing = |a: &usize, b: &usize| missing(a).total_cmp(&missing(b));
            let given: u32 = among.iter().map(|at| u32::from(shares[*at])).sum();
            match given.cmp(&slots.into()) {
                Ordering::Equal => return,
                Ordering::Less => {
                    let Some(at) = among.iter().copied().max_by(by_missing) else { return };
                    shares[at] += 1;
                }
                Ordering::Greater => {
                    let may_give = among.iter().copied().filter(|at| shares[*at] > 1);
                    let Some(at) = may_give.min_by(by_missing) else { return };
                    shares[at] -= 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn shares(weights: &[u32]) -> Shares {
        Shares::new(weights.iter().filter_map(|weight| NonZeroU32::new(*weight)))
    }

    fn counts(waiting: &[u32]) -> Vec<QueueCount> {
        waiting.iter().map(|waiting| QueueCount { waiting: *waiting, consumers: 1 }).collect()
    }

    #[test]
    fn slots_are_divided_by_weight_among_queues_with_jobs() {
        let (mut shares, now) = (shares(&[3, 1]), Instant::now());
        assert_eq!(shares.divide(64), [48, 16], "before the first count");
        shares.queues_counted(&counts(&[9, 9]), now, |_| 1);
        assert_eq!(shares.divide(64), [48, 16]);
        assert_eq!(shares.divide(3), [2, 1]);
        assert_eq!(shares.divide(0), [0, 0]);
        assert_eq!(self::shares(&[10, 1]).divide(16), [15, 1], "14.5 and 1.45: the largest remainder first");
        assert_eq!(self::shares(&[1000, 1, 1]).divide(u16::MAX), [65404, 65, 66]);
        assert_eq!(self::shares(&[1000, 1, 1]).divide(4), [2, 1, 1], "one for each comes first");
    }

    #[test]
    fn a_queue_without_jobs_keeps_one_slot_and_lends_the_others() {
        let (mut shares, now) = (shares(&[3, 1]), Instant::now());
        shares.queues_counted(&counts(&[0, 9]), now, |_| 1);
        assert_eq!(shares.divide(64), [1, 63], "the first count is enough");
        shares.queues_counted(&counts(&[1, 9]), now, |_| 1);
        assert_eq!(shares.divide(64), [48, 16], "at once");
        shares.queues_counted(&counts(&[0, 9]), now, |_| 1);
        shares.queues_counted(&counts(&[0, 9]), now, |_| 1);
        assert_eq!(shares.divide(64), [48, 16], "it may just have been emptied");
        shares.queues_counted(&counts(&[0, 9]), now, |_| 1);
        assert_eq!(shares.divide(64), [1, 63]);
        shares.queues_counted(&counts(&[0, 0]), now, |_| 1);
        (0..3).for_each(|_| shares.queues_counted(&counts(&[0, 0]), now, |_| 1));
        assert_eq!(shares.divide(64), [48, 16], "nobody has jobs: by weight");
    }

    /// Counts full queues once a second, with a single slot. Returns how often each queue had the slot, and how often the slot changed
    /// queues.
    fn single_slot(shares: &mut Shares, start: Instant, seconds: u64) -> ([u16; 2], usize) {
        let (mut had, mut changes, mut before) = ([0, 0], 0, None);
        for second in 0..seconds {
            let held = shares.divide(1);
            had[0] += held[0];
            had[1] += held[1];
            shares
                .queues_counted(&counts(&[5, 5]), start + Duration::from_secs(second), |at| held[at].into());
            changes += usize::from(before.as_ref().is_some_and(|before| *before != held));
            before = Some(held);
        }
        (had, changes)
    }

    #[test]
    fn a_single_slot_goes_to_the_queues_in_turn_by_weight() {
        let (mut shares, mut now) = (shares(&[3, 1]), Instant::now());
        let (had, changes) = single_slot(&mut shares, now, 400);
        assert!((290..=310).contains(&had[0]), "{had:?}");
        assert!((10..=40).contains(&changes), "{changes} changes");
        now += Duration::from_secs(400);
        // One of them has no jobs.
        (0..EMPTY_COUNTS_UNTIL_IDLE).for_each(|_| shares.queues_counted(&counts(&[0, 5]), now, |_| 0));
        assert_eq!(shares.divide(1), [0, 1]);
        (0..100).for_each(|_| shares.queues_counted(&counts(&[0, 5]), now, |at| at));
        let (had, _) = single_slot(&mut shares, now, 400);
        assert!(
            (280..=310).contains(&had[0]),
            "it does not make up for what the other had meanwhile: {had:?}"
        );
    }

    #[test]
    fn a_queue_that_gets_the_single_slot_of_an_idle_one_has_it_for_a_whole_turn() {
        let (mut shares, start) = (shares(&[1, 1]), Instant::now());
        let mut holder = |second: u64, waiting: [u32; 2]| {
            // What the second queue has had counts for more.
            shares.queues_counted(&counts(&waiting), start + Duration::from_secs(second), |at| 100 * at);
            shares.divide(1)
        };
        assert_eq!(holder(0, [5, 5]), [1, 0]);
        assert_eq!([holder(7, [0, 5]), holder(8, [0, 5]), holder(9, [0, 5])][2], [0, 1]);
        assert_eq!([holder(11, [5, 5]), holder(18, [5, 5])], [[0, 1], [0, 1]]);
        assert_eq!(holder(19, [5, 5]), [1, 0]);
    }

    #[test]
    fn slots_had_while_there_were_enough_for_all_give_no_queue_precedence() {
        let (mut shares, now) = (shares(&[3, 1]), Instant::now());
        for second in 0..1000 {
            shares.queues_counted(&counts(&[5, 5]), now + Duration::from_secs(second), |_| 1);
            shares.forget_turns();
        }
        let (had, _) = single_slot(&mut shares, now + Duration::from_secs(1000), 80);
        assert!((45..=70).contains(&had[0]), "{had:?}");
    }

    proptest! {
        /// All slots are given, none twice. Each share is by weight to within one slot, except shares that were raised to one.
        #[test]
        fn all_slots_are_divided_and_each_share_is_by_weight(
            queues in prop::collection::vec((1u32..=1000, 0u32..2), 1..=8),
            slots in 0u16..2000,
            times in 0usize..5,
        ) {
            let weights: Vec<_> = queues.iter().map(|(weight, _)| *weight).collect();
            let (mut shares, now) = (shares(&weights), Instant::now());
            let waiting: Vec<_> = queues.iter().map(|(_, waiting)| *waiting).collect();
            (0..times).for_each(|_| shares.queues_counted(&counts(&waiting), now, |_| 1));
            let given = shares.divide(slots);
            prop_assert_eq!(given.iter().sum::<u16>(), slots);
            prop_assert!(usize::from(slots) < queues.len() || given.iter().all(|share| *share >= 1));
            if times == 0 || usize::from(slots) <= queues.len() {
                return Ok(());
            }
            let busy: Vec<_> = (0..queues.len()).filter(|at| waiting[*at] > 0).collect();
            for at in (0..queues.len()).filter(|at| !busy.is_empty() && !busy.contains(at)) {
                prop_assert_eq!(given[at], 1);
            }
            let total: u32 = busy.iter().map(|at| weights[*at]).sum();
            let idle = queues.len() - busy.len();
            for at in &busy {
                let exact = f64::from(slots - idle as u16) * f64::from(weights[*at]) / f64::from(total);
                let raised = busy.iter().filter(|at| given[**at] == 1).count() as f64;
                let share = f64::from(given[*at]);
                prop_assert!(given[*at] == 1 || (share - exact).abs() <= 1.0 + raised, "{share} of {exact}");
            }
        }
    }
}
