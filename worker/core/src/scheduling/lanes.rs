//! Decides whose items go into a pass next: the queues of a model share its passes by weight, and the callers within a queue
//! share equally.
//!
//! Each queue has a lane. A lane's clock runs by the cost that it takes, divided by its weight, and the lane whose clock is
//! behind goes next: start-time fair queuing (Goyal, Vin, Cheng, 1996). A lane without waiting items gets no claim on what others
//! took meanwhile, and its own past cost still counts. So a queue of which the worker holds one job at a time keeps exactly its
//! share.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::Caller;
use crate::ids::{JobKey, QueueIndex};

/// Between two passes, so many callers of a lane that had nothing waiting and now have a small job go before its others: at most
/// half a pass, so that a flood of callers starves nobody.
const FRESH_MAX: usize = super::batcher::TURNS_PER_PASS / 2;

/// One caller's waiting jobs that may share a pass with others.
#[derive(Debug, Default)]
pub(super) struct CallerQueue {
    /// Cost that it may still take in this round. Below zero after an item larger than what was left.
    deficit: i64,
    /// Jobs of at most a turn's cost, oldest first.
    small: VecDeque<JobKey>,
    /// The others take turns.
    large: VecDeque<JobKey>,
    /// The last turn went to a small job.
    small_had_turn: bool,
    /// Nothing of it fits the pass that is being formed.
    is_out: bool,
}

impl CallerQueue {
    fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }

    /// Whether a small job goes next.
    pub(super) fn small_is_next(&self) -> bool {
        self.large.is_empty() || (!self.small.is_empty() && !self.small_had_turn)
    }

    /// Its small jobs, or the others, in the order of their turns.
    pub(super) fn jobs(&self, is_small: bool) -> &VecDeque<JobKey> {
        if is_small { &self.small } else { &self.large }
    }

    fn jobs_mut(&mut self, is_small: bool) -> &mut VecDeque<JobKey> {
        if is_small { &mut self.small } else { &mut self.large }
    }

    /// The job at this place waits elsewhere from now on.
    pub(super) fn take_out(&mut self, is_small: bool, at: usize) {
        self.jobs_mut(is_small).remove(at);
    }

    /// The job at this place had its turn. One that is not done keeps its place if it is small, else it goes behind the others.
    pub(super) fn had_turn(&mut self, is_small: bool, at: usize, is_done: bool) {
        self.small_had_turn = is_small;
        if is_done {
            self.take_out(is_small, at);
        } else if !is_small {
            let job = self.large.remove(at);
            self.large.extend(job);
        }
    }

    fn next(&self) -> Option<JobKey> {
        if self.small_is_next() { self.small.front() } else { self.large.front() }.copied()
    }
}

/// The waiting jobs of one queue that may share a pass with others.
#[derive(Debug)]
pub(super) struct Lane {
    weight: f64,
    /// The cost that it took, divided by its weight, and what it had no claim on.
    clock: f64,
    callers: HashMap<Caller, CallerQueue>,
    /// Its callers, in the order of their turns.
    turns: VecDeque<Caller>,
    /// Callers that went before others since the last pass.
    fresh: usize,
    /// Callers of which nothing fits the pass that is being formed.
    out: usize,
}

/// A job, as far as its place matters.
pub(super) struct Place<'a> {
    pub(super) key: JobKey,
    pub(super) caller: &'a Caller,
    /// It costs at most a turn.
    pub(super) is_small: bool,
    /// It was in a pass and waits before all others.
    pub(super) again: bool,
}

impl Lane {
    fn new(weight: NonZeroU32) -> Self {
        Self {
            weight: weight.get().into(),
            clock: 0.0,
            callers: HashMap::new(),
            turns: VecDeque::new(),
            fresh: 0,
            out: 0,
        }
    }

    /// Whether a caller is left of which something may fit the pass that is being formed.
    pub(super) fn may_add(&self) -> bool {
        self.turns.len() > self.out
    }

    pub(super) fn caller_mut(&mut self, caller: &Caller) -> Option<&mut CallerQueue> {
        self.callers.get_mut(caller)
    }

    /// The caller that goes next.
    pub(super) fn front(&self) -> Option<&Caller> {
        self.turns.front()
    }

    /// The job that goes next.
    fn next(&self) -> Option<JobKey> {
        self.callers.get(self.turns.front()?)?.next()
    }

    fn push(&mut self, job: &Place<'_>, turn: usize) {
        let queue = self.callers.entry(job.caller.clone()).or_default();
        if queue.is_empty() {
            queue.deficit = turn.cast_signed() as i64;
            if job.again || (job.is_small && self.fresh < FRESH_MAX) {
                let at = if job.again { 0 } else { self.fresh.min(self.turns.len()) };
                self.fresh += 1;
                self.turns.insert(at, job.caller.clone());
            } else {
                self.turns.push_back(job.caller.clone());
            }
        }
        let jobs = queue.jobs_mut(job.is_small);
        if job.again { jobs.push_front(job.key) } else { jobs.push_back(job.key) }
    }

    pub(super) fn forget_if_empty(&mut self, caller: &Caller) {
        if self.callers.get(caller).is_some_and(CallerQueue::is_empty) {
            let was_out = self.callers.remove(caller).is_some_and(|queue| queue.is_out);
            self.out -= usize::from(was_out);
            self.turns.retain(|other| other != caller);
        }
    }

    /// Whether the caller that goes next has taken all that it may in this round, or all that fits.
    pub(super) fn is_round_over(&self) -> bool {
        let front = self.front().and_then(|caller| self.callers.get(caller));
        front.is_none_or(|queue| queue.deficit <= 0 || queue.is_out)
    }

    /// Brings a caller to the front that may take something in this round. If none may, the next round begins: as many turns
    /// for each caller as the first of them needs to take something. Those of which nothing fits keep nobody waiting, and their claim.
    pub(super) fn next_round(&mut self, turn: usize) {
        let may_take = |caller: &Caller| {
            self.callers.get(caller).is_some_and(|queue| queue.deficit > 0 && !queue.is_out)
        };
        if let Some(at) = self.turns.iter().position(may_take) {
            return self.turns.rotate_left(at);
        }
        let turn = turn.cast_signed() as i64;
        let left = self.callers.values_mut().filter(|queue| !queue.is_out);
        let most = left.map(|queue| queue.deficit).max().unwrap_or(0);
        let rounds = -most / turn + 1;
        self.callers
            .values_mut()
            .filter(|queue| !queue.is_out)
            .for_each(|queue| queue.deficit += rounds * turn);
    }

    /// A caller took so much in its turn. It is over if that was nothing, or all that it may take in this round.
    pub(super) fn took(&mut self, caller: &Caller, cost: usize) {
        self.charge(cost);
        if let Some(queue) = self.callers.get_mut(caller) {
            if cost == 0 && !std::mem::replace(&mut queue.is_out, true) {
                self.out += 1;
            }
            queue.deficit -= cost.cast_signed() as i64;
            if (cost == 0 || queue.deficit <= 0) && self.turns.front() == Some(caller) {
                self.turns.rotate_left(1);
            }
        }
    }

    fn charge(&mut self, cost: usize) {
        self.clock += cost as f64 / self.weight;
    }

    /// Puts a caller before the others.
    pub(super) fn put_first(&mut self, caller: &Caller) {
        if let Some(at) = self.turns.iter().position(|other| other == caller) {
            let caller = self.turns.remove(at);
            caller.into_iter().for_each(|caller| self.turns.push_front(caller));
        }
    }
}

/// The lanes of a model, one for each queue that its jobs come from.
#[derive(Debug)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    /// The clock of the lane that went last, when it did.
    now: f64,
}

impl Lanes {
    /// A lane of each weight.
    pub(super) fn new(weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        Self { lanes: weights.into_iter().map(Lane::new).collect(), now: 0.0 }
    }

    pub(super) fn get_mut(&mut self, queue: QueueIndex) -> Option<&mut Lane> {
        self.lanes.get_mut(queue.0)
    }

    /// The lane that goes next, of those with jobs waiting that `may_go`.
    pub(super) fn next(&self, may_go: impl Fn(QueueIndex, &Lane) -> bool) -> Option<QueueIndex> {
        let waiting = self
            .lanes
            .iter()
            .enumerate()
            .filter(|(at, lane)| !lane.turns.is_empty() && may_go(QueueIndex(*at), lane));
        waiting.min_by(|(_, a), (_, b)| a.clock.total_cmp(&b.clock)).map(|(at, _)| QueueIndex(at))
    }

    /// A lane goes now.
    pub(super) fn goes(&mut self, queue: QueueIndex) {
        if let Some(lane) = self.lanes.get(queue.0) {
            self.now = self.now.max(lane.clock);
        }
    }

    /// The job that goes next.
    pub(super) fn next_job(&self) -> Option<JobKey> {
        self.lanes.get(self.next(|_, _| true)?.0)?.next()
    }

    pub(super) fn push(&mut self, queue: QueueIndex, job: &Place<'_>, turn: usize) {
        let now = self.now;
        if let Some(lane) = self.lanes.get_mut(queue.0) {
            if lane.turns.is_empty() {
                lane.clock = lane.clock.max(now);
            }
            lane.push(job, turn);
        }
    }

    /// Takes a job out of its place.
    pub(super) fn remove(&mut self, queue: QueueIndex, caller: &Caller, key: JobKey) {
        let Some(lane) = self.lanes.get_mut(queue.0) else { return };
        if let Some(of_caller) = lane.callers.get_mut(caller) {
            of_caller.small.retain(|other| *other != key);
            of_caller.large.retain(|other| *other != key);
            lane.forget_if_empty(caller);
        }
    }

    /// A job of the queue took so much in a pass of its own.
    pub(super) fn charge(&mut self, queue: QueueIndex, cost: usize) {
        let waiting = self.lanes.iter().filter(|lane| !lane.turns.is_empty());
        let least = waiting.map(|lane| lane.clock).min_by(f64::total_cmp);
        let now = self.now;
        let Some(lane) = self.lanes.get_mut(queue.0) else { return };
        if lane.turns.is_empty() {
            lane.clock = lane.clock.max(now);
        }
        lane.charge(cost);
        // A lane that has nothing waiting meanwhile has no claim on this pass, either.
        self.now = now.max(least.map_or(lane.clock, |least| least.min(lane.clock)));
    }

    /// A pass was formed.
    pub(super) fn pass_formed(&mut self) {
        for lane in &mut self.lanes {
            lane.fresh = 0;
            if std::mem::take(&mut lane.out) > 0 {
                lane.callers.values_mut().for_each(|queue| queue.is_out = false);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.lanes.len()
    }
}

#[cfg(test)]
impl Lanes {
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.iter().all(|lane| lane.callers.is_empty() && lane.turns.is_empty())
    }

    /// Small jobs that a caller has waiting in a lane.
    pub(super) fn small(&self, queue: QueueIndex, caller: &Caller) -> usize {
        self.lanes[queue.0].callers.get(caller).map_or(0, |of_caller| of_caller.small.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: QueueIndex = QueueIndex(0);
    const SECOND: QueueIndex = QueueIndex(1);

    fn lanes() -> Lanes {
        Lanes::new([NonZeroU32::MIN; 2])
    }

    fn push(lanes: &mut Lanes, queue: QueueIndex, key: u64) {
        let place = Place { key: JobKey(key), caller: &None, is_small: true, again: false };
        lanes.push(queue, &place, 1);
    }

    #[test]
    fn passes_of_its_own_give_others_no_claim_on_them_later() {
        let mut lanes = lanes();
        lanes.charge(FIRST, 1000);
        push(&mut lanes, SECOND, 1);
        push(&mut lanes, FIRST, 2);
        assert_eq!(lanes.lanes[0].clock, lanes.lanes[1].clock);
    }

    #[test]
    fn passes_of_its_own_are_charged_to_a_lane_that_had_nothing_before() {
        let mut lanes = lanes();
        push(&mut lanes, FIRST, 1);
        lanes.lanes[0].clock = 500.0;
        lanes.goes(FIRST);
        lanes.charge(SECOND, 100);
        assert_eq!((lanes.lanes[1].clock, lanes.now), (600.0, 500.0), "others wait, and now is theirs");
    }
}
