//! Forms passes of one model from the items of waiting jobs, fairly. Jobs with prepared items come in; the content of a pass goes out. Owns
//! the items that no pass has taken yet.
//!
//! The queues that jobs come from share passes by weight (`fair_queue.rs`). Within a queue callers take turns (`flow.rs`: deficit round
//! robin, in units of item cost), and within a caller its jobs do. A caller's small and large jobs take turns too, so that a job of one
//! text does not wait behind jobs of thousands. A job's items run in order, so that its finished items are always consecutive from the
//! start. The batcher never holds items back to fill a pass: if any item waits, there is a pass.
//!
//! Some jobs cannot join the pass that is being formed: because of a batch hint, or because they are exclusive or isolated. Such a job
//! leads a pass of its own, and every second pass belongs to the next of them. Jobs whose caller or queue took more than its share come
//! last.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::draft::{Caller, Draft, Forming, PassLimits, Waiting};
use super::fair_queue::FairQueue;
use super::flow::{JobClass, Placement, Position};
use crate::device::PassShape;
use crate::ids::{ItemIndex, JobKey, QueueIndex};

/// A quantum, the cost that a caller may take in a turn, is a pass divided by this. So a pass serves about so many callers, and so many
/// jobs of a caller.
pub(super) const QUANTA_PER_PASS: usize = 8;

/// The most turns in forming a pass, and the most jobs of a caller that are tried in a turn. Both bound the work of forming one pass.
const TURNS_MAX: usize = 512;
const JOBS_TRIED_MAX: usize = 64;

/// Which job leads a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lead {
    /// A job that cannot join the shared pass.
    Alone,
    /// The jobs that share passes, in their turns.
    Shared,
}

/// The waiting jobs of one model.
#[derive(Debug)]
pub(crate) struct Batcher {
    limits: PassLimits,
    jobs: HashMap<JobKey, Waiting>,
    /// Jobs that may share a pass.
    shared: FairQueue,
    /// Jobs that lead a pass of their own, in the order of their turns.
    leaders: VecDeque<JobKey>,
    /// Whether one of these led the last pass.
    leader_had_pass: bool,
    /// Sum of the costs of all waiting items.
    cost: usize,
}

impl Batcher {
    /// `weights`: of the queues that jobs come from.
    pub(crate) fn new(limits: PassLimits, weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        Self {
            limits,
            jobs: HashMap::new(),
            shared: FairQueue::new(weights),
            leaders: VecDeque::new(),
            leader_had_pass: false,
            cost: 0,
        }
    }

    /// The cost that a caller may take in its turn.
    fn quantum(&self) -> usize {
        (self.limits.cost_max / QUANTA_PER_PASS).max(1)
    }

    pub(crate) fn push(&mut self, job: Waiting) {
        if job.items.is_empty() {
            return;
        }
        self.cost += job.cost();
        self.queue(&job, Position::Behind);
        self.jobs.insert(job.key, job);
    }

    /// Adds prepared items to a job. If passes have taken all its earlier items, the job waits as if it were new.
    pub(crate) fn extend(&mut self, job: Waiting) {
        let Some(waiting) = self.jobs.get_mut(&job.key) else { return self.push(job) };
        waiting.more = job.more;
        self.cost += job.cost();
        waiting.items.extend(job.items);
    }

    /// The cost of a job's waiting items.
    pub(crate) fn cost_of(&self, key: JobKey) -> usize {
        self.jobs.get(&key).map_or(0, Waiting::cost)
    }

    /// Puts a job among those of its kind: before all of them, or behind.
    fn queue(&mut self, job: &Waiting, position: Position) {
        if job.is_alone() {
            let at = self.place_among_leaders(job, position);
            return self.leaders.insert(at, job.key);
        }
        let quantum = self.quantum();
        let is_small = !job.more && job.cost() <= quantum;
        let class = if is_small { JobClass::Small } else { JobClass::Large };
        let placement = Placement { key: job.key, caller: &job.caller, class, position };
        self.shared.push(job.queue, &placement, quantum);
    }

    /// The index in `leaders` for a job. An exclusive job lost its place when it went through the broker's queue. Among exclusive jobs it
    /// gets the place of its first attempt.
    fn place_among_leaders(&self, job: &Waiting, position: Position) -> usize {
        if position == Position::Before {
            return 0;
        }
        let is_later =
            |other: &Waiting| job.exclusive && other.exclusive && other.tried_at_ms > job.tried_at_ms;
        let first_later = self.leaders.iter().position(|key| self.jobs.get(key).is_some_and(is_later));
        first_later.unwrap_or(self.leaders.len())
    }

    /// Takes a job out of its place.
    fn unqueue(&mut self, job: &Waiting) {
        self.leaders.retain(|key| *key != job.key);
        self.shared.remove(job.queue, &job.caller, job.key);
    }

    /// Puts items of a pass back, before all others. `jobs` (without items) are the jobs that continue, and how they wait from now on.
    /// Items of other jobs are dropped.
    pub(crate) fn put_back(
        &mut self,
        jobs: Vec<Waiting>,
        items: impl IntoIterator<Item = (JobKey, ItemIndex, usize)>,
    ) {
        let mut again = jobs;
        for job in &mut again {
            if let Some(rest) = self.jobs.remove(&job.key) {
                self.unqueue(&rest);
                job.isolated |= rest.isolated;
                job.items = rest.items;
            }
        }
        for (key, index, cost) in items {
            if let Some(job) = again.iter_mut().find(|job| job.key == key) {
                self.cost += cost;
                job.items.push_back((index, cost));
            }
        }
        for mut job in again.into_iter().rev().filter(|job| !job.items.is_empty()) {
            job.items.make_contiguous().sort_by_key(|(index, _)| *index);
            self.queue(&job, Position::Before);
            self.jobs.insert(job.key, job);
        }
    }

    /// A pass of a job fitted. Sets the hint of the job's waiting items, and whether they still need the device to themselves.
    pub(crate) fn relax(&mut self, key: JobKey, hint: Option<u32>, exclusive: bool) {
        if let Some(mut job) = self.jobs.remove(&key) {
            let was_alone = job.is_alone();
            (job.hint, job.exclusive) = (hint, exclusive);
            if was_alone && !job.is_alone() {
                self.unqueue(&job);
                self.queue(&job, Position::Before);
            }
            self.jobs.insert(key, job);
        }
    }

    /// Drops a job's waiting items.
    pub(crate) fn remove(&mut self, key: JobKey) {
        if let Some(job) = self.jobs.remove(&key) {
            self.cost -= job.cost();
            self.unqueue(&job);
        }
    }

    /// The jobs whose waiting items cost more than a pass.
    pub(crate) fn large(&self) -> Vec<JobKey> {
        let large = self.jobs.values().filter(|job| job.cost() > self.limits.cost_max);
        let mut keys: Vec<_> = large.map(|job| job.key).collect();
        keys.sort_unstable();
        keys
    }

    /// How many jobs wait.
    pub(crate) fn waiting(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the waiting items fill a pass.
    pub(crate) fn has_full_pass(&self) -> bool {
        self.cost >= self.limits.cost_max
    }

    /// The possible leads of the next pass, the one whose turn it is first.
    pub(crate) fn leads(&self) -> impl Iterator<Item = Lead> {
        // Without this wait a hint would give its caller or queue more than its share.
        let waits = self.leader_had_pass || self.next_leader().is_some_and(|key| self.owes(key));
        let turns = if waits { [Lead::Shared, Lead::Alone] } else { [Lead::Alone, Lead::Shared] };
        turns.into_iter().filter(|lead| self.first(*lead).is_some())
    }

    /// The job that a pass starts with.
    pub(crate) fn first(&self, lead: Lead) -> Option<JobKey> {
        match lead {
            Lead::Alone => self.next_leader(),
            Lead::Shared => self.shared.next_job(),
        }
    }

    /// The first leader whose caller and queue did not exceed their shares; else the first leader.
    fn next_leader(&self) -> Option<JobKey> {
        let owes_nothing = self.leaders.iter().find(|key| !self.owes(**key));
        owes_nothing.or(self.leaders.front()).copied()
    }

    /// Whether a job's caller or queue took more than its share while others wait.
    fn owes(&self, key: JobKey) -> bool {
        self.jobs.get(&key).is_some_and(|job| self.shared.owes(job.queue, &job.caller, self.limits.cost_max))
    }

    /// The shape of a pass's first item alone, and whether the pass must be exclusive.
    pub(crate) fn first_shape(&self, lead: Lead) -> Option<(PassShape, bool)> {
        let job = self.jobs.get(&self.first(lead)?)?;
        let (_, cost) = job.items.front()?;
        Some((PassShape::default().with(*cost), job.exclusive))
    }

    /// Forms the next pass. `fits`: whether the device has memory for a pass of this shape now. The first item is taken in any case,
    /// because the caller decides whether to wait for memory or to let the device refuse.
    pub(crate) fn next_pass(&mut self, lead: Lead, fits: impl Fn(PassShape) -> bool) -> Option<Draft> {
        let first = self.first(lead)?;
        let job = self.jobs.get(&first)?;
        let (exclusive, may_be_joined) = (job.exclusive, !job.is_alone());
        let leads = lead == Lead::Alone;
        let mut forming = Forming::new();
        if leads {
            self.lead(first, &mut forming, &fits);
        }
        if may_be_joined {
            self.share(&mut forming, &fits);
        }
        self.leader_had_pass = leads;
        self.shared.pass_formed(self.quantum(), forming.is_cut());
        self.cost -= forming.shape.cost;
        Some(forming.finish(exclusive))
    }

    /// Fills a pass with a job that cannot join others.
    fn lead(&mut self, key: JobKey, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        let quantum = self.quantum();
        self.leaders.retain(|other| *other != key);
        let Some(job) = self.jobs.get_mut(&key) else { return };
        forming.take(job, usize::MAX, self.limits, fits);
        self.shared.led(job.queue, &job.caller, forming.shape.cost, quantum);
        if job.items.is_empty() {
            self.jobs.remove(&key);
        } else {
            // The job goes behind all other leaders.
            self.leaders.push_back(key);
        }
    }

    /// Lets queues and their callers take turns until the pass is full. In each queue, the first caller whose next job did not fit goes
    /// first in the next pass.
    fn share(&mut self, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        let quantum = self.quantum();
        // Of each queue: the first caller whose next job did not fit.
        let mut passed_over: Vec<Option<Caller>> = vec![None; self.shared.len()];
        for _ in 0..TURNS_MAX {
            if forming.is_full(self.limits) {
                break;
            }
            let Some(queue) = self.shared.next(|_, flow| flow.may_add()) else { break };
            self.shared.goes(queue);
            let Some(flow) = self.shared.get_mut(queue) else { break };
            // The first item must come from the job that `first` returns.
            if flow.is_round_over() && !forming.is_empty() {
                flow.next_round(quantum);
                continue;
            }
            let Some(caller) = flow.front().cloned() else { break };
            let TurnResult { taken, passed_over_first } =
                self.take_turn(queue, &caller, quantum, forming, fits);
            let Some(flow) = self.shared.get_mut(queue) else { break };
            flow.took(&caller, taken, quantum);
            flow.forget_if_empty(&caller);
            if passed_over_first {
                passed_over[queue.0].get_or_insert(caller);
            }
        }
        for (at, caller) in passed_over.iter().enumerate() {
            if let Some(flow) = self.shared.get_mut(QueueIndex(at)) {
                flow.put_first(caller.as_ref());
            }
        }
    }

    /// Lets the first job of a caller that can add something take up to a quantum. Jobs of the class whose turn it is are tried first. The
    /// caller may have no jobs left afterwards.
    fn take_turn(
        &mut self,
        queue: QueueIndex,
        caller: &Caller,
        quantum: usize,
        forming: &mut Forming,
        fits: &impl Fn(PassShape) -> bool,
    ) -> TurnResult {
        let mut result = TurnResult { taken: 0, passed_over_first: false };
        // A job that waits alone takes all that fits.
        let share = if self.jobs.len() == 1 { usize::MAX } else { quantum };
        let Some(flow) = self.shared.get_mut(queue) else { return result };
        let Some(of_caller) = flow.caller_mut(caller) else { return result };
        let first_class = of_caller.next_class();
        for class in [first_class, first_class.other()] {
            let mut at = 0;
            while at < JOBS_TRIED_MAX
                && let Some(key) = of_caller.jobs(class).get(at).copied()
            {
                let Some(job) = self.jobs.get_mut(&key) else { break };
                let before = forming.shape.cost;
                forming.take(job, share, self.limits, fits);
                result.taken = forming.shape.cost - before;
                if result.taken > 0 {
                    let is_done = job.items.is_empty();
                    of_caller.had_turn(class, at, is_done);
                    if is_done {
                        self.jobs.remove(&key);
                    }
                    return result;
                }
                if forming.shape.items >= job.items_max() {
                    // Passes become larger than its hint allows: it leads one of its own.
                    of_caller.take_out(class, at);
                    self.leaders.push_back(key);
                } else {
                    result.passed_over_first |= at == 0 && class == first_class;
                    at += 1;
                }
            }
        }
        result
    }
}

/// What became of a caller's turn.
struct TurnResult {
    /// Cost that it took.
    taken: usize,
    /// Whether the job whose turn it was did not fit.
    passed_over_first: bool,
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "batcher_properties.rs"]
mod properties;
