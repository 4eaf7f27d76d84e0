//! Forms passes of one model from the items of waiting jobs, fairly.
//!
//! Callers take turns (deficit round robin with the items' cost as currency), and within a caller its jobs do. Small jobs and
//! large ones of a caller take turns, too, so that a job of one text does not wait behind jobs of thousands. A job's items go in
//! their own order, so that its finished items are always a run from the start. Nothing is held back to wait for company: if
//! anything waits, there is a pass.
//!
//! Jobs that cannot share a pass with those chosen so far (a batch hint, `exclusive`, isolated) lead a pass of their own: every
//! second pass belongs to the next of them.

use std::collections::{HashMap, VecDeque};

use crate::device::PassShape;
use crate::ids::JobKey;

/// A caller's turn is worth this part of a pass: a pass serves so many callers, and so many jobs of a caller.
const TURNS_PER_PASS: usize = 8;

/// How many turns a pass may take, and how many jobs of a caller a turn looks at. They bound the work of forming one pass.
const TURNS_MAX: usize = 512;
const LOOKS_MAX: usize = 64;

/// Between two passes, so many callers that had nothing waiting and now have a small job go before the others: at most half a
/// pass, so that a flood of callers starves nobody.
const FRESH_MAX: usize = TURNS_PER_PASS / 2;

/// Who published a job, as far as the broker vouches for it. Nobody in particular is one caller.
pub(crate) type Caller = Option<String>;

/// What limits a pass besides memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassLimits {
    /// The most cost of a pass (tokens, for an encoder). One item alone may exceed it.
    pub(crate) cost_max: usize,
}

/// The items of one job that no pass has taken yet.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) key: JobKey,
    pub(crate) caller: Caller,
    /// The most items that may share a pass with this job.
    pub(crate) hint: Option<u32>,
    /// Only passes that hold the whole device.
    pub(crate) exclusive: bool,
    /// When the job was first tried, in Unix milliseconds: exclusive jobs go in this order.
    pub(crate) tried_at_ms: u64,
    /// Only passes without items of other jobs.
    pub(crate) isolated: bool,
    /// Index within the job and cost of each item that is prepared; in order.
    pub(crate) items: VecDeque<(u32, usize)>,
    /// More items of the job are to be prepared.
    pub(crate) more: bool,
}

impl Waiting {
    fn cost(&self) -> usize {
        self.items.iter().map(|(_, cost)| cost).sum()
    }

    fn items_max(&self) -> usize {
        self.hint.map_or(usize::MAX, |hint| hint.max(1) as usize)
    }

    /// It may not join a pass of others.
    fn is_alone(&self) -> bool {
        self.exclusive || self.isolated
    }
}

/// The content of a pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Draft {
    /// Job and index of each item, the longest item first: that is how an engine spreads items over parallel lanes evenly.
    pub(crate) items: Vec<(JobKey, u32, usize)>,
    pub(crate) shape: PassShape,
    /// The pass must have the device to itself.
    pub(crate) exclusive: bool,
}

/// One caller's waiting jobs that may share a pass with others.
#[derive(Debug, Default)]
struct CallerQueue {
    /// Cost that it may still take in this round. Below zero after an item larger than what was left.
    deficit: i64,
    /// Jobs of at most a turn's cost, oldest first.
    small: VecDeque<JobKey>,
    /// The others take turns.
    large: VecDeque<JobKey>,
    /// The last turn went to a small job.
    small_had_turn: bool,
}

impl CallerQueue {
    fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }

    /// Whether a small job goes next.
    fn small_is_next(&self) -> bool {
        self.large.is_empty() || (!self.small.is_empty() && !self.small_had_turn)
    }

    fn queue(&mut self, is_small: bool) -> &mut VecDeque<JobKey> {
        if is_small { &mut self.small } else { &mut self.large }
    }

    fn next(&self) -> Option<JobKey> {
        if self.small_is_next() { self.small.front() } else { self.large.front() }.copied()
    }
}

/// The waiting jobs of one model.
#[derive(Debug)]
pub(crate) struct Batcher {
    limits: PassLimits,
    jobs: HashMap<JobKey, Waiting>,
    callers: HashMap<Caller, CallerQueue>,
    /// Callers with jobs that may share a pass, in the order of their turns.
    turns: VecDeque<Caller>,
    /// Callers that went before others since the last pass.
    fresh: usize,
    /// Jobs that lead a pass of their own, in the order of their turns.
    leaders: VecDeque<JobKey>,
    /// The last pass was led by one of those.
    leader_had_pass: bool,
    /// Sum of the costs of all waiting items.
    cost: usize,
}

impl Batcher {
    pub(crate) fn new(limits: PassLimits) -> Self {
        Self {
            limits,
            jobs: HashMap::new(),
            callers: HashMap::new(),
            turns: VecDeque::new(),
            fresh: 0,
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
        let queue = self.callers.entry(job.caller.clone()).or_default();
        let is_small = !job.more && job.cost() <= turn;
        if queue.is_empty() {
            queue.deficit = turn.cast_signed() as i64;
            if again || (is_small && self.fresh < FRESH_MAX) {
                let at = if again { 0 } else { self.fresh.min(self.turns.len()) };
                self.fresh += 1;
                self.turns.insert(at, job.caller.clone());
            } else {
                self.turns.push_back(job.caller.clone());
            }
        }
        let queue = queue.queue(is_small);
        if again { queue.push_front(job.key) } else { queue.push_back(job.key) }
    }

    /// Takes a job out of its place.
    fn unqueue(&mut self, job: &Waiting) {
        self.leaders.retain(|key| *key != job.key);
        if let Some(queue) = self.callers.get_mut(&job.caller) {
            queue.small.retain(|key| *key != job.key);
            queue.large.retain(|key| *key != job.key);
            self.forget_if_empty(&job.caller);
        }
    }

    fn forget_if_empty(&mut self, caller: &Caller) {
        if self.callers.get(caller).is_some_and(CallerQueue::is_empty) {
            self.callers.remove(caller);
            self.turns.retain(|other| other != caller);
        }
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

    /// The job that the next pass starts with.
    pub(crate) fn first(&self) -> Option<JobKey> {
        let leader = self.leaders.front().copied();
        let sharing = self.turns.front().and_then(|caller| self.callers.get(caller)?.next());
        if self.leader_had_pass { sharing.or(leader) } else { leader.or(sharing) }
    }

    /// The shape of the next pass's first item alone, and whether the pass must be exclusive.
    pub(crate) fn first_shape(&self) -> Option<(PassShape, bool)> {
        let job = self.jobs.get(&self.first()?)?;
        let (_, cost) = job.items.front()?;
        Some((PassShape::default().with(*cost), job.exclusive))
    }

    /// The next pass. `fits` tells whether the device has memory now for a pass of a shape. The first item is taken in any case:
    /// to wait for memory, or to let the device refuse the item, is the caller's decision.
    pub(crate) fn next_pass(&mut self, fits: impl Fn(PassShape) -> bool) -> Option<Draft> {
        let first = self.first()?;
        let job = self.jobs.get(&first)?;
        let (exclusive, may_be_joined) = (job.exclusive, !job.is_alone());
        let leads = self.leaders.front() == Some(&first);
        let mut forming = Forming { items: Vec::new(), shape: PassShape::default(), items_max: usize::MAX };
        if leads {
            self.lead(first, &mut forming, &fits);
        }
        if may_be_joined {
            self.share(&mut forming, &fits);
        }
        (self.leader_had_pass, self.fresh) = (leads, 0);
        self.cost -= forming.shape.cost;
        forming.items.sort_by_key(|(_, _, cost)| std::cmp::Reverse(*cost));
        Some(Draft { items: forming.items, shape: forming.shape, exclusive })
    }

    /// A job that cannot join others takes a pass of its own.
    fn lead(&mut self, key: JobKey, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        self.leaders.pop_front();
        let Some(job) = self.jobs.get_mut(&key) else { return };
        forming.take(job, usize::MAX, self.limits, fits);
        if job.items.is_empty() {
            self.jobs.remove(&key);
        } else {
            // It leads again after all others that wait to lead.
            self.leaders.push_back(key);
        }
    }

    /// Callers take turns until the pass is full. The first whose next job did not fit starts the next pass.
    fn share(&mut self, forming: &mut Forming, fits: &impl Fn(PassShape) -> bool) {
        let turn = self.turn();
        let mut passed_over: Option<Caller> = None;
        // Callers in a row that could add nothing: when each has tried, nothing more fits.
        let mut in_vain = 0;
        for _ in 0..TURNS_MAX {
            if forming.is_full(self.limits) || in_vain >= self.turns.len() {
                break;
            }
            let Some(caller) = self.turns.front().cloned() else { break };
            // The pass starts with the job that `first` names.
            let is_over = self.callers.get(&caller).is_none_or(|queue| queue.deficit <= 0);
            if is_over && !forming.items.is_empty() {
                self.next_round(turn);
                continue;
            }
            let Turn { taken, passed_over_first } = self.take_turn(&caller, turn, forming, fits);
            in_vain = if taken == 0 { in_vain + 1 } else { 0 };
            if passed_over_first {
                passed_over.get_or_insert_with(|| caller.clone());
            }
            if let Some(queue) = self.callers.get_mut(&caller) {
                queue.deficit -= taken.cast_signed() as i64;
                if (taken == 0 || queue.deficit <= 0) && self.turns.front() == Some(&caller) {
                    self.turns.rotate_left(1);
                }
            }
        }
        if let Some(at) = passed_over.and_then(|caller| self.turns.iter().position(|other| *other == caller))
        {
            let caller = self.turns.remove(at);
            caller.into_iter().for_each(|caller| self.turns.push_front(caller));
        }
    }

    /// Brings a caller to the front that may take something in this round. If none may, the next round begins: as many turns
    /// for each caller as the first of them needs to take something.
    fn next_round(&mut self, turn: usize) {
        let may_take = |caller: &Caller| self.callers.get(caller).is_some_and(|queue| queue.deficit > 0);
        if let Some(at) = self.turns.iter().position(may_take) {
            return self.turns.rotate_left(at);
        }
        let turn = turn.cast_signed() as i64;
        let most = self.callers.values().map(|queue| queue.deficit).max().unwrap_or(0);
        let rounds = -most / turn + 1;
        self.callers.values_mut().for_each(|queue| queue.deficit += rounds * turn);
    }

    /// The first job of a caller that can add something takes up to a turn's cost.
    fn take_turn(
        &mut self,
        caller: &Caller,
        turn: usize,
        forming: &mut Forming,
        fits: &impl Fn(PassShape) -> bool,
    ) -> Turn {
        let mut result = Turn { taken: 0, passed_over_first: false };
        let is_lone = self.jobs.len() == 1;
        let Some(queue) = self.callers.get_mut(caller) else { return result };
        let first_class = queue.small_is_next();
        for is_small in [first_class, !first_class] {
            let mut at = 0;
            while at < queue.queue(is_small).len().min(LOOKS_MAX) {
                let Some(key) = queue.queue(is_small).get(at).copied() else { break };
                let Some(job) = self.jobs.get_mut(&key) else { break };
                let before = forming.shape.cost;
                // Nobody waits behind a lone job: it takes all it can.
                forming.take(job, if is_lone { usize::MAX } else { turn }, self.limits, fits);
                result.taken = forming.shape.cost - before;
                if result.taken == 0 {
                    if forming.shape.items >= job.items_max() {
                        // Passes become larger than its hint allows: it leads one of its own.
                        queue.queue(is_small).remove(at);
                        self.leaders.push_back(key);
                    } else {
                        result.passed_over_first |= at == 0 && is_small == first_class;
                        at += 1;
                    }
                    continue;
                }
                queue.small_had_turn = is_small;
                if job.items.is_empty() {
                    queue.queue(is_small).remove(at);
                    self.jobs.remove(&key);
                } else if !is_small {
                    queue.large.remove(at);
                    queue.large.push_back(key);
                }
                self.forget_if_empty(caller);
                return result;
            }
        }
        self.forget_if_empty(caller);
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

/// A pass in the making.
struct Forming {
    items: Vec<(JobKey, u32, usize)>,
    shape: PassShape,
    /// The smallest hint of the jobs in it.
    items_max: usize,
}

impl Forming {
    fn is_full(&self, limits: PassLimits) -> bool {
        self.shape.items >= self.items_max || self.shape.cost >= limits.cost_max
    }

    /// Takes items of a job: at least one if the pass is empty, no more than fit, and no more once `share` is spent.
    fn take(
        &mut self,
        job: &mut Waiting,
        share: usize,
        limits: PassLimits,
        fits: impl Fn(PassShape) -> bool,
    ) {
        let (hint, start) = (job.items_max(), self.shape.cost);
        while let Some((_, cost)) = job.items.front() {
            let shape = self.shape.with(*cost);
            let within =
                shape.items <= self.items_max.min(hint) && shape.cost <= limits.cost_max && fits(shape);
            if !self.items.is_empty() && (!within || self.shape.cost - start >= share) {
                return;
            }
            if let Some((index, cost)) = job.items.pop_front() {
                self.items.push((job.key, index, cost));
                self.shape = shape;
                self.items_max = self.items_max.min(hint);
            }
        }
    }
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;
