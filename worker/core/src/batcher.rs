//! Items of waiting jobs to passes, by cost.
//!
//! Jobs go in the order in which they came, and a job's items in their own order, so that what is finished of a job
//! is always a run from its start (a `part`) and nobody starves. A pass is filled past an item that does not fit by
//! smaller ones of later jobs. Inside a pass the longest item is first, which is how an engine deals items to
//! parallel lanes evenly. Nothing is held back to wait for company: whoever asks gets a pass if anything waits.

use std::collections::VecDeque;

use crate::engine::{Item, PassShape};

/// How many waiting jobs a pass may take items from, or look at in vain. Bounds the work of forming one pass.
const LOOKAHEAD: usize = 512;

/// A job's number within this process.
pub type JobKey = u64;

/// What bounds a pass besides memory.
#[derive(Clone, Copy, Debug)]
pub struct PassLimits {
    /// The most cost of a pass (tokens, for an encoder). One item alone may exceed it.
    pub cost_max: usize,
}

/// The items of one job that no pass has taken yet.
#[derive(Debug)]
pub struct Waiting {
    pub key: JobKey,
    /// The most items that may share a pass with this job.
    pub hint: Option<u32>,
    /// Only passes that hold the whole device.
    pub exclusive: bool,
    /// When the job was first tried, in Unix milliseconds: exclusive jobs go in this order.
    pub tried_at_ms: u64,
    /// Only passes without items of other jobs.
    pub isolated: bool,
    /// Index within the job, and the item; in order.
    pub items: VecDeque<(u32, Item)>,
}

impl Waiting {
    fn cost(&self) -> usize {
        self.items.iter().map(|(_, item)| item.cost()).sum()
    }
}

/// One item chosen for a pass.
#[derive(Debug)]
pub struct Pick {
    pub job: JobKey,
    /// The item's index within its job.
    pub index: u32,
    pub item: Item,
}

/// The content of a pass, longest item first.
#[derive(Debug)]
pub struct Draft {
    pub picks: Vec<Pick>,
    pub shape: PassShape,
    /// The pass must have the device to itself.
    pub exclusive: bool,
}

/// The waiting jobs of one model, oldest first.
#[derive(Debug)]
pub struct Batcher {
    limits: PassLimits,
    waiting: VecDeque<Waiting>,
    /// Sum of the costs of all waiting items.
    cost: usize,
}

impl Batcher {
    pub fn new(limits: PassLimits) -> Self {
        Self { limits, waiting: VecDeque::new(), cost: 0 }
    }

    pub fn push(&mut self, job: Waiting) {
        self.cost += job.cost();
        if job.items.is_empty() {
            return;
        }
        // A job that waits for the whole device has been through the queue before: what it lost there it has back here,
        // against its like. Nobody else is overtaken.
        let later = |other: &Waiting| job.exclusive && other.exclusive && other.tried_at_ms > job.tried_at_ms;
        let at = self.waiting.iter().position(later).unwrap_or(self.waiting.len());
        self.waiting.insert(at, job);
    }

    /// Puts items of a pass back, before all others. `jobs`, which bring no items, say of which jobs and how they wait
    /// from now on; items of other jobs are dropped.
    pub fn give_back(&mut self, jobs: Vec<Waiting>, items: impl IntoIterator<Item = ((JobKey, u32), Item)>) {
        let mut again = jobs;
        for job in &mut again {
            let rest = self.waiting.iter().position(|other| other.key == job.key);
            if let Some(rest) = rest.and_then(|at| self.waiting.remove(at)) {
                job.isolated |= rest.isolated;
                job.items = rest.items;
            }
        }
        for ((key, index), item) in items {
            if let Some(job) = again.iter_mut().find(|job| job.key == key) {
                self.cost += item.cost();
                job.items.push_back((index, item));
            }
        }
        for mut job in again.into_iter().rev() {
            job.items.make_contiguous().sort_by_key(|(index, _)| *index);
            self.waiting.push_front(job);
        }
    }

    /// A pass of a job fitted: what waits of it may go with this hint, and need not have the device to itself.
    pub fn relax(&mut self, key: JobKey, hint: Option<u32>) {
        if let Some(job) = self.waiting.iter_mut().find(|job| job.key == key) {
            (job.hint, job.exclusive) = (hint, false);
        }
    }

    /// Drops what waits of a job.
    pub fn remove(&mut self, key: JobKey) {
        if let Some(at) = self.waiting.iter().position(|job| job.key == key) {
            self.cost -= self.waiting.remove(at).map_or(0, |job| job.cost());
        }
    }

    /// The jobs that wait with more than a pass can take.
    pub fn large(&self) -> Vec<JobKey> {
        let large = self.waiting.iter().filter(|job| job.cost() > self.limits.cost_max);
        large.map(|job| job.key).collect()
    }

    /// How many jobs wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether what waits fills a pass.
    pub fn has_full_pass(&self) -> bool {
        self.cost >= self.limits.cost_max
    }

    /// The shape of the next pass's first item alone, and whether the pass must be exclusive.
    pub fn first(&self) -> Option<(PassShape, bool)> {
        let job = self.waiting.front()?;
        let (_, item) = job.items.front()?;
        Some((PassShape::default().with(item.cost()), job.exclusive))
    }

    /// The job that the next pass starts with.
    pub fn oldest(&self) -> Option<JobKey> {
        self.waiting.front().map(|job| job.key)
    }

    /// The next pass: the oldest job's next item, and all that goes with it.
    ///
    /// `fits` tells whether the device has memory now for a pass of a shape. The first item is taken in any case:
    /// whether to wait for memory or to let the device refuse it is the caller's to decide.
    pub fn next_pass(&mut self, fits: impl Fn(PassShape) -> bool) -> Option<Draft> {
        let oldest = self.waiting.front()?;
        let mut draft = Draft { picks: Vec::new(), shape: PassShape::default(), exclusive: oldest.exclusive };
        let alone = oldest.exclusive || oldest.isolated;
        let mut items_max = usize::MAX;
        for job in self.waiting.iter_mut().take(if alone { 1 } else { LOOKAHEAD }) {
            if !draft.picks.is_empty() && (job.exclusive || job.isolated) {
                continue;
            }
            let hint = job.hint.map_or(usize::MAX, |hint| hint.max(1) as usize);
            while let Some((_, item)) = job.items.front() {
                let shape = draft.shape.with(item.cost());
                let first = draft.picks.is_empty();
                let within =
                    shape.items <= items_max.min(hint) && shape.cost <= self.limits.cost_max && fits(shape);
                if !first && !within {
                    break;
                }
                if let Some((index, item)) = job.items.pop_front() {
                    draft.picks.push(Pick { job: job.key, index, item });
                    draft.shape = shape;
                    items_max = items_max.min(hint);
                }
            }
            if draft.shape.items >= items_max || draft.shape.cost >= self.limits.cost_max {
                break;
            }
        }
        self.waiting.retain(|job| !job.items.is_empty());
        self.cost -= draft.shape.cost;
        draft.picks.sort_by_key(|pick| std::cmp::Reverse(pick.item.cost()));
        Some(draft)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use proptest::prelude::*;
    use vramq_schemas::EmbeddingFormat;

    fn item(cost: usize) -> Item {
        Item::Tokens { ids: vec![0; cost].into(), format: EmbeddingFormat::default() }
    }

    fn job(key: JobKey, costs: &[usize]) -> Waiting {
        let items = costs.iter().enumerate().map(|(i, cost)| (i as u32, item(*cost))).collect();
        Waiting { key, hint: None, exclusive: false, tried_at_ms: 0, isolated: false, items }
    }

    fn picks(draft: &Draft) -> Vec<(JobKey, u32)> {
        draft.picks.iter().map(|pick| (pick.job, pick.index)).collect()
    }

    #[test]
    fn a_lone_job_goes_at_once_with_what_there_is() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 100 });
        batcher.push(job(1, &[3]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 0)]);
        assert!(batcher.next_pass(|_| true).is_none());
    }

    #[test]
    fn jobs_share_a_pass_longest_item_first() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 20 });
        batcher.push(job(1, &[4, 9]));
        batcher.push(job(2, &[6, 6]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 1), (2, 0), (1, 0)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(2, 1)]);
    }

    #[test]
    fn a_gap_is_filled_from_later_jobs_but_the_oldest_goes_first() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 10 });
        batcher.push(job(1, &[7, 8]));
        batcher.push(job(2, &[3]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 0), (2, 0)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 1)]);
    }

    #[test]
    fn a_hint_bounds_the_whole_pass_in_either_order() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 100 });
        batcher.push(Waiting { hint: Some(2), ..job(1, &[1, 1, 1]) });
        batcher.push(job(2, &[1]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 0), (1, 1)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 2), (2, 0)]);

        batcher.push(job(3, &[1, 1]));
        batcher.push(Waiting { hint: Some(2), ..job(4, &[1]) });
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(3, 0), (3, 1)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(4, 0)]);
    }

    #[test]
    fn exclusive_and_isolated_jobs_are_alone_in_their_pass() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 100 });
        batcher.push(job(1, &[1]));
        batcher.push(Waiting { exclusive: true, ..job(2, &[1]) });
        batcher.push(Waiting { isolated: true, ..job(3, &[1, 1]) });
        batcher.push(job(4, &[1]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 0), (4, 0)]);
        let exclusive = batcher.next_pass(|_| true).unwrap();
        assert!(exclusive.exclusive);
        assert_eq!(picks(&exclusive), [(2, 0)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(3, 0), (3, 1)]);
    }

    #[test]
    fn exclusive_jobs_go_in_the_order_of_their_first_attempts_and_overtake_nobody_else() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 1 });
        batcher.push(job(1, &[1]));
        for (key, tried_at_ms) in [(2, 20), (3, 10), (4, 15)] {
            batcher.push(Waiting { exclusive: true, tried_at_ms, ..job(key, &[1]) });
        }
        batcher.push(job(5, &[1]));
        let order: Vec<_> = (0..5).map(|_| batcher.next_pass(|_| true).unwrap().picks[0].job).collect();
        assert_eq!(order, [1, 3, 4, 2, 5]);
    }

    #[test]
    fn items_given_back_go_first_and_in_order() {
        let mut batcher = Batcher::new(PassLimits { cost_max: 3 });
        batcher.push(Waiting { hint: Some(2), ..job(1, &[1, 1, 1]) });
        batcher.push(job(2, &[1, 1]));
        let draft = batcher.next_pass(|_| true).unwrap();
        assert_eq!(picks(&draft), [(1, 0), (1, 1)]);
        batcher.push(job(3, &[1]));
        // Job 2 is not among those that go on, so an item of it would be dropped.
        let items = draft.picks.into_iter().map(|pick| ((pick.job, pick.index), pick.item));
        let shell = Waiting { hint: Some(2), ..job(1, &[]) };
        batcher.give_back(vec![shell], items.chain([((9, 0), item(1))]));
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 0), (1, 1)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(1, 2), (2, 0)]);
        assert_eq!(picks(&batcher.next_pass(|_| true).unwrap()), [(2, 1), (3, 0)]);
        assert!(!batcher.has_full_pass() && batcher.oldest().is_none());
    }

    proptest! {
        #[test]
        fn every_item_goes_once_within_the_limits_and_in_its_jobs_order(
            jobs in prop::collection::vec((prop::collection::vec(1usize..40, 1..30), prop::option::of(1u32..9)), 1..30),
            cost_max in 1usize..100,
            memory in 1usize..100,
        ) {
            let mut batcher = Batcher::new(PassLimits { cost_max });
            let mut expected = HashSet::new();
            for (key, (costs, hint)) in jobs.iter().enumerate() {
                expected.extend((0..costs.len()).map(|i| (key as JobKey, i as u32)));
                batcher.push(Waiting { hint: *hint, ..job(key as JobKey, costs) });
            }
            let mut next_index = vec![0; jobs.len()];
            while let Some(oldest) = batcher.oldest() {
                let draft = batcher.next_pass(|shape| shape.cost <= memory).unwrap();
                let hints = draft.picks.iter().filter_map(|p| jobs[p.job as usize].1).min();
                prop_assert!(draft.picks.iter().any(|p| p.job == oldest));
                prop_assert!(draft.picks.len() == 1 || draft.shape.cost <= cost_max.min(memory));
                prop_assert!(hints.is_none_or(|hint| draft.picks.len() <= hint as usize));
                prop_assert_eq!(draft.shape, draft.picks.iter().map(|p| &p.item).collect::<PassShape>());
                let mut taken = picks(&draft);
                taken.sort_unstable();
                for (job, index) in taken {
                    prop_assert_eq!(next_index[job as usize], index);
                    next_index[job as usize] += 1;
                    prop_assert!(expected.remove(&(job, index)));
                }
            }
            prop_assert!(expected.is_empty());
        }
    }
}
