//! Forms passes of one model from the items of waiting jobs, fairly.
//!
//! The queues that jobs come from share by weight (`lanes.rs`). Within a queue callers take turns (deficit round robin with the
//! items' cost as currency), and within a caller its jobs do. Small jobs and large ones of a caller take turns, too, so that a
//! job of one text does not wait behind jobs of thousands. A job's items go in their own order, so that its finished items are
//! always a run from the start. The batcher never holds items back to fill a pass: if any item waits, there is a pass.
//!
//! Jobs that cannot share a pass with those chosen so far (a batch hint, `exclusive`, isolated) lead a pass of their own: every
//! second pass belongs to the next of them.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::draft::{Caller, Draft, Forming, PassLimits, Waiting};
use super::lanes::{Lanes, Place};
use crate::device::PassShape;
use crate::ids::{JobKey, QueueIndex};

/// A caller's turn is worth this part of a pass: a pass serves so many callers, and so many jobs of a caller.
pub(super) const TURNS_PER_PASS: usize = 8;

/// How many turns a pass may take, and how many jobs of a caller a turn looks at. They bound the work of forming one pass.
const TURNS_MAX: usize = 512;
const LOOKS_MAX: usize = 64;

/// Who leads a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lead {
    /// A job that cannot join those that share passes.
    Alone,
    /// Those that share passes, in their turns.
    Shared,
}

/// The waiting jobs of one model.
#[derive(Debug)]
pub(crate) struct Batcher {
    limits: PassLimits,
    jobs: HashMap<JobKey, Waiting>,
    /// Those that may share a pass.
    lanes: Lanes,
    /// Jobs that lead a pass of their own, in the order of their turns.
    leaders: VecDeque<JobKey>,
    /// The last pass was led by one of those.
    leader_had_pass: bool,
    /// Sum of the costs of all waiting items.
    cost: usize,
}

impl Batcher {
    /// For jobs of queues with these weights.
    pub(crate) fn new(limits: PassLimits, weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        Self {
            limits,
            jobs: HashMap::new(),
            lanes: Lanes::new(weights),
            leaders: VecDeque::new(),
            leader_had_pass: false,
            cost: 0,
        }
    }

    /// A caller's turn, in cost.
    fn turn(&self) -> usize {
        (self.limits.cost_max / TURNS_PER_PASS).max(1)
    }

    pub(crate) fn push(&mut self, job: Waiting) {
        if job.items.is_empty() {
            return;
        }
        self.cost += job.cost();
        self.queue(&job, false);
        self.jobs.insert(job.key, job);
    }

    /// More items of a job were prepared. If a pass has taken all that waited, the job waits as if it were new.
    pub(crate) fn extend(&mut self, job: Waiting) {
        let Some(waiting) = self.jobs.get_mut(&job.key) else { return self.push(job) };
        waiting.more = job.more;
        self.cost += job.cost();
        waiting.items.extend(job.items);
    }

    /// The cost of what waits of a job.
    pub(crate) fn cost_of(&self, key: JobKey) -> usize {
        self.jobs.get(&key).map_or(0, Waiting::cost)
    }

    /// Puts a job where it waits; `again` before others of its kind.
    fn queue(&mut self, job: &Waiting, again: bool) {
        if job.is_alone() {
            // An exclusive job has been through the broker's queue before; among exclusive jobs it has its place back.
            let later = |key: &JobKey| {
                let other = self.jobs.get(key);
                other.is_some_and(|other| {
                    job.exclusive && other.exclusive && other.tried_at_ms > job.tried_at_ms
                })
            };
            let at = if again { Some(0) } else { self.leaders.iter().position(later) };
            return self.leaders.insert(at.unwrap_or(self.leaders.len()), job.key);
        }
        let turn = self.turn();
        let is_small = !job.more && job.cost() <= turn;
        let place = Place { key: job.key, caller: &job.caller, is_small, again };
        self.lanes.push(job.queue, &place, turn);
    }

    /// Takes a job out of its place.
    fn unqueue(&mut self, job: &Waiting) {
        self.leaders.retain(|key| *key != job.key);
        self.lanes.remove(job.queue, &job.caller, job.key);
    }

    /// Puts items of a pass back, before all others. `jobs`, which bring no items, tell of which jobs and how they wait from now
    /// on; items of other jobs are dropped.
    pub(crate) fn give_back(
        &mut self,
        jobs: Vec<Waiting>,
        items: impl IntoIterator<Item = (JobKey, u32, usize)>,
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
            self.queue(&job, true);
            self.jobs.insert(job.key, job);
        }
    }

    /// A pass of a job fitted: what waits of it may go with this hint, and need not have the device to itself.
    pub(crate) fn relax(&mut self, key: JobKey, hint: Option<u32>) {
        if let Some(mut job) = self.jobs.remove(&key) {
            let was_alone = job.is_alone();
            (job.hint, job.exclusive) = (hint, false);
            if was_alone && !job.is_alone() {
                self.unqueue(&job);
                self.queue(&job, true);
            }
            self.jobs.insert(key, job);
        }
    }

    /// Drops what waits of a job.
    pub(crate) fn remove(&mut self, key: JobKey) {
        if let Some(job) = self.jobs.remove(&key) {
            self.cost -= job.cost();
            self.unqueue(&job);
        }
    }

    /// The jobs that wait with more than a pass can take.
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

    /// Whether what waits fills a pass.
    pub(crate) fn has_full_pass(&self) -> bool {
        self.cost >= self.limits.cost_max
    }

    /// Who may lead the next pass; first whose turn it is.
    pub(crate) fn leads(&self) -> impl Iterator<Item = Lead> {
        let turns =
            if self.leader_had_pass { [Lead::Shared, Lead::Alone] } else { [Lead::Alone, Lead::Shared] };
        turns.into_iter().filter(|lead| self.first(*lead).is_some())
    }

    /// The job that a pass starts with.
    pub(crate) fn first(&self, lead: Lead) -> Option<JobKey> {
        match lead {
            Lead::Alone => self.leaders.front().copied(),
            Lead::Shared => self.lanes.next_job(),
        }
    }

    /// The shape of a pass's first item alone, and whether the pass must be exclusive.
    pub(crate) fn first_shape(&self, lead: Lead) -> Option<(PassShape, bool)> {
        let job = self.jobs.get(&self.first(lead)?)?;
        let (_, cost) = job.items.front()?;
        Some((PassShape::default().with(*cost), job.exclusive))
    }

    /// The next pass. `fits` says whether the device has memory now for a pass of a shape. The first item is taken in any case:
    /// to wait for memory, or to let the device refuse the item, is the caller's decision.
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
        self.lanes.pass_formed();
        self.cost -= forming.shape.cost;
        Some(forming.finish(exclusive))
    }

    /// A job that cannot join others takes a pass of its own.
    fn lead(&mut self, key: JobKey, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        self.leaders.pop_front();
        let Some(job) = self.jobs.get_mut(&key) else { return };
        forming.take(job, usize::MAX, self.limits, fits);
        self.lanes.charge(job.queue, forming.shape.cost);
        if job.items.is_empty() {
            self.jobs.remove(&key);
        } else {
            // It leads again after all others that wait to lead.
            self.leaders.push_back(key);
        }
    }

    /// Queues and their callers take turns until the pass is full. The first caller of a queue whose next job did not fit starts
    /// that queue's part of the next pass.
    fn share(&mut self, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        let turn = self.turn();
        // Of each queue: the first caller whose next job did not fit.
        let mut passed_over: Vec<Option<Caller>> = vec![None; self.lanes.len()];
        for _ in 0..TURNS_MAX {
            if forming.is_full(self.limits) {
                break;
            }
            let Some(queue) = self.lanes.next(|_, lane| lane.may_add()) else { break };
            self.lanes.goes(queue);
            let Some(lane) = self.lanes.get_mut(queue) else { break };
            // The pass starts with the job that `first` names.
            if lane.is_round_over() && !forming.is_empty() {
                lane.next_round(turn);
                continue;
            }
            let Some(caller) = lane.front().cloned() else { break };
            let Turn { taken, passed_over_first } = self.take_turn(queue, &caller, turn, forming, fits);
            if passed_over_first {
                passed_over[queue.0].get_or_insert_with(|| caller.clone());
            }
            if let Some(lane) = self.lanes.get_mut(queue) {
                lane.took(&caller, taken);
            }
        }
        for (at, caller) in passed_over.into_iter().enumerate() {
            if let (Some(caller), Some(lane)) = (caller, self.lanes.get_mut(QueueIndex(at))) {
                lane.put_first(&caller);
            }
        }
    }

    /// The first job of a caller that can add something takes up to a turn's cost.
    fn take_turn(
        &mut self,
        queue: QueueIndex,
        caller: &Caller,
        turn: usize,
        forming: &mut Forming,
        fits: &impl Fn(PassShape) -> bool,
    ) -> Turn {
        let mut result = Turn { taken: 0, passed_over_first: false };
        let is_lone = self.jobs.len() == 1;
        let Some(lane) = self.lanes.get_mut(queue) else { return result };
        let Some(of_caller) = lane.caller_mut(caller) else { return result };
        let first_class = of_caller.small_is_next();
        for is_small in [first_class, !first_class] {
            let mut at = 0;
            while at < of_caller.jobs(is_small).len().min(LOOKS_MAX) {
                let Some(key) = of_caller.jobs(is_small).get(at).copied() else { break };
                let Some(job) = self.jobs.get_mut(&key) else { break };
                let before = forming.shape.cost;
                // Nobody waits behind a lone job: it takes all it can.
                forming.take(job, if is_lone { usize::MAX } else { turn }, self.limits, fits);
                result.taken = forming.shape.cost - before;
                if result.taken == 0 {
                    if forming.shape.items >= job.items_max() {
                        // Passes become larger than its hint allows: it leads one of its own.
                        of_caller.take_out(is_small, at);
                        self.leaders.push_back(key);
                    } else {
                        result.passed_over_first |= at == 0 && is_small == first_class;
                        at += 1;
                    }
                    continue;
                }
                let is_done = job.items.is_empty();
                of_caller.had_turn(is_small, at, is_done);
                if is_done {
                    self.jobs.remove(&key);
                }
                lane.forget_if_empty(caller);
                return result;
            }
        }
        lane.forget_if_empty(caller);
        result
    }
}

/// What became of a caller's turn.
struct Turn {
    /// Cost that it took.
    taken: usize,
    /// The job that was to go next did not fit.
    passed_over_first: bool,
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;
