//! The jobs of one queue that may share a pass; the callers of the queue take turns. Jobs come in, and the cost of the items that passes
//! took from them; the next caller goes out.
//!
//! In a turn a caller takes a quantum of cost: deficit round robin (Shreedhar, Varghese, 1995). Within a caller, small and large jobs
//! alternate, and large jobs take turns.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::Caller;
use crate::ids::JobKey;

/// A caller that had nothing waiting and now sends a small job goes before the others. Between two passes, at most so many callers do: half
/// a pass, so that a flood of new callers starves nobody. A pass that a hint cut short has no second half for the others, and does not
/// reset the count.
const FRESH_MAX: usize = super::batcher::QUANTA_PER_PASS / 2;

/// The most quanta that a caller can owe: four full passes. Whatever it took, its next job waits at most for so much of each other caller.
pub(super) const DEBT_QUANTA_MAX: i64 = 4 * super::batcher::QUANTA_PER_PASS as i64;

/// The most debts of callers without jobs that a flow keeps. Such a caller had a job a short while ago.
const DEBTS_MAX: usize = 1024;

/// The size of a job. A caller's small jobs and its large ones take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum JobClass {
    /// It costs at most a quantum.
    Small,
    #[default]
    Large,
}

impl JobClass {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Small => Self::Large,
            Self::Large => Self::Small,
        }
    }
}

/// Where a job goes among the waiting jobs of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Position {
    /// It is new.
    Behind,
    /// It was in a pass: before all others.
    Before,
}

/// One caller's waiting jobs that may share a pass with others.
#[derive(Debug, Default)]
pub(super) struct CallerQueue {
    /// The cost that the caller may still take in this round. Negative after an item that was larger than the rest.
    deficit: i64,
    /// Oldest first.
    small: VecDeque<JobKey>,
    /// In the order of their turns.
    large: VecDeque<JobKey>,
    /// The class of the job that had the last turn.
    last: JobClass,
    /// Whether none of its jobs fits the pass that is being formed.
    is_out: bool,
}

impl CallerQueue {
    /// Whether it may still add to the pass that is being formed, in this round.
    fn may_take(&self) -> bool {
        self.deficit > 0 && !self.is_out
    }

    fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }

    /// The class of the job that goes next.
    pub(super) fn next_class(&self) -> JobClass {
        let has_small = !self.small.is_empty();
        if self.large.is_empty() || (has_small && self.last == JobClass::Large) {
            JobClass::Small
        } else {
            JobClass::Large
        }
    }

    /// Its jobs of a class, in the order of their turns.
    pub(super) fn jobs(&self, class: JobClass) -> &VecDeque<JobKey> {
        match class {
            JobClass::Small => &self.small,
            JobClass::Large => &self.large,
        }
    }

    fn jobs_mut(&mut self, class: JobClass) -> &mut VecDeque<JobKey> {
        match class {
            JobClass::Small => &mut self.small,
            JobClass::Large => &mut self.large,
        }
    }

    /// Removes the job at this index, which waits elsewhere from now on.
    pub(super) fn take_out(&mut self, class: JobClass, at: usize) {
        self.jobs_mut(class).remove(at);
    }

    /// Records that the job at this index had its turn. If it has items left, a small job keeps its place, and a large one goes behind the
    /// others.
    pub(super) fn had_turn(&mut self, class: JobClass, at: usize, is_done: bool) {
        self.last = class;
        if is_done {
            self.take_out(class, at);
        } else if class == JobClass::Large {
            let job = self.large.remove(at);
            self.large.extend(job);
        }
    }

    fn next(&self) -> Option<JobKey> {
        self.jobs(self.next_class()).front().copied()
    }
}

/// The waiting jobs of one queue that may share a pass with others.
#[derive(Debug)]
pub(super) struct Flow {
    weight: f64,
    /// The cost that the flow took, divided by its weight. Moved ahead whenever it had nothing waiting. Queues share passes by this value.
    pub(super) virtual_time: f64,
    callers: HashMap<Caller, CallerQueue>,
    /// Its callers, in the order of their turns.
    order: VecDeque<Caller>,
    /// How many callers went before the others since the last pass that no hint cut short.
    fresh: usize,
    /// How many callers have no job that fits the pass that is being formed.
    out: usize,
    /// The first caller's next job did not fit the last pass, so new callers do not go before it.
    keeps_first: bool,
    /// What callers without waiting jobs took beyond their quanta (negative), while others wait. Without it, a caller that sends one job
    /// after the other, each larger than a quantum, would get more than its share.
    debts: HashMap<Caller, i64>,
}

/// What decides where a job is placed.
pub(super) struct Placement<'a> {
    pub(super) key: JobKey,
    pub(super) caller: &'a Caller,
    pub(super) class: JobClass,
    pub(super) position: Position,
}

impl Flow {
    pub(super) fn new(weight: NonZeroU32) -> Self {
        Self {
            weight: weight.get().into(),
            virtual_time: 0.0,
            callers: HashMap::new(),
            order: VecDeque::new(),
            fresh: 0,
            out: 0,
            keeps_first: false,
            debts: HashMap::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Raises the virtual time of a flow without jobs to `now`, so that it cannot claim what others took.
    pub(super) fn catch_up(&mut self, now: f64) {
        if self.is_empty() {
            self.virtual_time = self.virtual_time.max(now);
        }
    }

    /// Whether some caller may still have a job that fits the pass that is being formed.
    pub(super) fn may_add(&self) -> bool {
        self.order.len() > self.out
    }

    pub(super) fn caller_mut(&mut self, caller: &Caller) -> Option<&mut CallerQueue> {
        self.callers.get_mut(caller)
    }

    /// The caller that goes next.
    pub(super) fn front(&self) -> Option<&Caller> {
        self.order.front()
    }

    /// The job that goes next.
    pub(super) fn next(&self) -> Option<JobKey> {
        self.callers.get(self.order.front()?)?.next()
    }

    pub(super) fn push(&mut self, job: &Placement<'_>, quantum: usize) {
        let queue = self.callers.entry(job.caller.clone()).or_default();
        if queue.is_empty() {
            queue.deficit = self.debts.remove(job.caller).unwrap_or(0);
            let is_fresh = job.class == JobClass::Small && queue.deficit == 0 && self.fresh < FRESH_MAX;
            if job.position == Position::Before || is_fresh {
                queue.deficit += quantum.cast_signed() as i64;
                let fresh = self.fresh + usize::from(self.keeps_first);
                let at = match job.position {
                    Position::Before => 0,
                    Position::Behind => fresh.min(self.order.len()),
                };
                self.fresh += 1;
                self.order.insert(at, job.caller.clone());
            } else {
                // A new caller behind the others must not prolong the round: callers in debt wait for its end.
                self.order.push_back(job.caller.clone());
            }
        }
        let jobs = queue.jobs_mut(job.class);
        match job.position {
            Position::Before => jobs.push_front(job.key),
            Position::Behind => jobs.push_back(job.key),
        }
    }

    /// Removes a job of a caller.
    pub(super) fn remove(&mut self, caller: &Caller, key: JobKey) {
        if let Some(of_caller) = self.callers.get_mut(caller) {
            of_caller.small.retain(|other| *other != key);
            of_caller.large.retain(|other| *other != key);
            self.forget_if_empty(caller);
        }
    }

    /// Removes a caller without jobs, but keeps its debt.
    pub(super) fn forget_if_empty(&mut self, caller: &Caller) {
        let Some(CallerQueue { deficit, is_out, .. }) =
            self.callers.get(caller).filter(|queue| queue.is_empty())
        else {
            return;
        };
        let deficit = *deficit;
        self.out -= usize::from(*is_out);
        self.callers.remove(caller);
        self.order.retain(|other| other != caller);
        if self.order.is_empty() {
            self.debts.clear();
        } else if deficit < 0 && self.debts.len() < DEBTS_MAX {
            self.debts.insert(caller.clone(), deficit);
        }
    }

    /// Whether a caller exceeded its turns while others wait.
    pub(super) fn owes(&self, caller: &Caller) -> bool {
        match self.callers.get(caller) {
            Some(queue) => queue.deficit < 0,
            None => self.debts.contains_key(caller),
        }
    }

    /// Whether the flow's virtual time exceeds `of` by more than this cost.
    pub(super) fn is_ahead(&self, of: f64, cost: usize) -> bool {
        self.virtual_time > of + cost as f64 / self.weight
    }

    /// Charges a caller for a pass that one of its jobs led.
    pub(super) fn led(&mut self, caller: &Caller, cost: usize, quantum: usize) {
        self.charge(cost, quantum);
        if let Some(queue) = self.callers.get_mut(caller) {
            queue.deficit = less(queue.deficit, cost, quantum);
        } else if !self.order.is_empty() && (self.debts.len() < DEBTS_MAX || self.debts.contains_key(caller))
        {
            let debt = self.debts.entry(caller.clone()).or_default();
            *debt = less(*debt, cost, quantum);
        }
    }

    /// Whether the next caller can take no more in this round: its quantum is used up, or nothing of it fits.
    pub(super) fn is_round_over(&self) -> bool {
        let front = self.front().and_then(|caller| self.callers.get(caller));
        front.is_none_or(|queue| !queue.may_take())
    }

    /// Brings a caller to the front that may take something in this round. If there is none, a new round begins: every caller gets as many
    /// quanta as the first that can go needs. Callers without a job that fits the pass do not hold up the others.
    pub(super) fn next_round(&mut self, quantum: usize) {
        let may_take = |caller: &Caller| self.callers.get(caller).is_some_and(CallerQueue::may_take);
        if let Some(at) = self.order.iter().position(may_take) {
            return self.order.rotate_left(at);
        }
        let quantum = quantum.cast_signed() as i64;
        let most = self.callers.values().filter(|queue| !queue.is_out).map(|queue| queue.deficit).max();
        let rounds = -most.unwrap_or(0) / quantum + 1;
        self.callers.values_mut().for_each(|queue| queue.deficit += rounds * quantum);
        self.debts.retain(|_, debt| {
            *debt += rounds * quantum;
            *debt < 0
        });
    }

    /// A pass was formed; `is_cut`: a hint cut it short. Brings a caller to the front that may take something in this round.
    pub(super) fn pass_formed(&mut self, quantum: usize, is_cut: bool) {
        if !is_cut {
            self.fresh = 0;
        }
        if std::mem::take(&mut self.out) > 0 {
            self.callers.values_mut().for_each(|queue| queue.is_out = false);
        }
        while !self.order.is_empty() && self.is_round_over() {
            self.next_round(quantum);
        }
    }

    /// Charges a caller for its turn. The turn is over if the caller took nothing, or all that it may take in this round.
    pub(super) fn took(&mut self, caller: &Caller, cost: usize, quantum: usize) {
        self.charge(cost, quantum);
        if let Some(queue) = self.callers.get_mut(caller) {
            if cost == 0 && !std::mem::replace(&mut queue.is_out, true) {
                self.out += 1;
            }
            queue.deficit = less(queue.deficit, cost, quantum);
            if (cost == 0 || queue.deficit <= 0) && self.order.front() == Some(caller) {
                self.order.rotate_left(1);
            }
        }
    }

    /// Charges the queue. An item that exceeds the largest debt of a caller counts only as that much: the queue's other callers did not ask
    /// for it.
    fn charge(&mut self, cost: usize, quantum: usize) {
        let most = quantum.saturating_mul(DEBT_QUANTA_MAX.unsigned_abs() as usize);
        self.virtual_time += cost.min(most) as f64 / self.weight;
    }

    /// Lets this caller start the next pass, because its next job did not fit the last one. Only if it may take something in this round.
    pub(super) fn put_first(&mut self, caller: Option<&Caller>) {
        let may_take = |caller: &&Caller| self.callers.get(*caller).is_some_and(|queue| queue.deficit > 0);
        let at =
            caller.filter(may_take).and_then(|caller| self.order.iter().position(|other| other == caller));
        self.keeps_first = at.is_some();
        let caller = at.and_then(|at| self.order.remove(at));
        caller.into_iter().for_each(|caller| self.order.push_front(caller));
    }
}

/// The rest of a caller's `deficit` after it took `cost`; not below the largest debt.
fn less(deficit: i64, cost: usize, quantum: usize) -> i64 {
    let quantum = quantum.cast_signed() as i64;
    let least = -quantum.saturating_mul(DEBT_QUANTA_MAX);
    deficit.saturating_sub(cost.cast_signed() as i64).max(least)
}

#[cfg(test)]
impl Flow {
    pub(super) fn has_callers(&self) -> bool {
        !self.callers.is_empty() || !self.is_empty()
    }

    /// Small jobs that a caller has waiting.
    pub(super) fn small(&self, caller: &Caller) -> usize {
        self.callers.get(caller).map_or(0, |of_caller| of_caller.small.len())
    }
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
