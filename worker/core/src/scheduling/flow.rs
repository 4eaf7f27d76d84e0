//! The jobs of one queue that may share a pass: the callers of the queue take turns. What comes in are jobs, and the cost of the items that
//! passes took from them; what goes out is the caller whose turn it is.
//!
//! A turn is a quantum of cost: deficit round robin (Shreedhar, Varghese, 1995). Within a caller, small jobs and large ones take turns,
//! and large ones take turns with each other.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;

use super::Caller;
use crate::ids::JobKey;

/// Between two passes, so many callers of a flow that had nothing waiting and now have a small job go before its others: at most
/// half a pass, so that a flood of callers starves nobody. A pass that a hint cut short had no other half, and does not count.
const FRESH_MAX: usize = super::batcher::QUANTA_PER_PASS / 2;

/// A caller owes at most so many quanta, four full passes: whatever it took, its next job does not wait for more than that of each
/// other caller.
pub(super) const DEBT_QUANTA_MAX: i64 = 4 * super::batcher::QUANTA_PER_PASS as i64;

/// Debts of callers without jobs that a flow keeps. Each is of a caller that had a job a short while ago.
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

/// Where a job goes among those that wait.
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
    /// Cost that it may still take in this round. Below zero after an item larger than what was left.
    deficit: i64,
    /// Oldest first.
    small: VecDeque<JobKey>,
    /// They take turns.
    large: VecDeque<JobKey>,
    /// The class of the job that had the last turn.
    last: JobClass,
    /// Nothing of it fits the pass that is being formed.
    is_out: bool,
}

impl CallerQueue {
    /// Whether it may take something of the pass that is being formed, in this round.
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

    /// The job at this place waits elsewhere from now on.
    pub(super) fn take_out(&mut self, class: JobClass, at: usize) {
        self.jobs_mut(class).remove(at);
    }

    /// The job at this place had its turn. One that is not done keeps its place if it is small, else it goes behind the others.
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
    /// The cost that it took, divided by its weight; moved ahead whenever it had nothing waiting. By it queues share passes.
    pub(super) virtual_time: f64,
    callers: HashMap<Caller, CallerQueue>,
    /// Its callers, in the order of their turns.
    order: VecDeque<Caller>,
    /// Callers that went before others since the last pass that no hint cut short.
    fresh: usize,
    /// Callers of which nothing fits the pass that is being formed.
    out: usize,
    /// The first caller's next job did not fit the last pass: nobody goes before it.
    keeps_first: bool,
    /// What callers took beyond their quanta with their last job, below zero, while others have jobs waiting: or one that sends a
    /// job after the other, each larger than a quantum, would have more than its share.
    debts: HashMap<Caller, i64>,
}

/// A job, as far as its place matters.
pub(super) struct Place<'a> {
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

    /// A flow without jobs does not make up for what others took until `now`.
    pub(super) fn catch_up(&mut self, now: f64) {
        if self.is_empty() {
            self.virtual_time = self.virtual_time.max(now);
        }
    }

    /// Whether a caller is left of which something may fit the pass that is being formed.
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

    pub(super) fn push(&mut self, job: &Place<'_>, quantum: usize) {
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
                // It does not prolong the round, for whose end callers in debt wait.
                self.order.push_back(job.caller.clone());
            }
        }
        let jobs = queue.jobs_mut(job.class);
        match job.position {
            Position::Before => jobs.push_front(job.key),
            Position::Behind => jobs.push_back(job.key),
        }
    }

    /// Takes a job of a caller out of its place.
    pub(super) fn remove(&mut self, caller: &Caller, key: JobKey) {
        if let Some(of_caller) = self.callers.get_mut(caller) {
            of_caller.small.retain(|other| *other != key);
            of_caller.large.retain(|other| *other != key);
            self.forget_if_empty(caller);
        }
    }

    /// Forgets a caller without jobs, but not what it owes to others.
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

    /// Whether a caller took more than its turns, and others wait.
    pub(super) fn owes(&self, caller: &Caller) -> bool {
        match self.callers.get(caller) {
            Some(queue) => queue.deficit < 0,
            None => self.debts.contains_key(caller),
        }
    }

    /// Whether the flow took more than one at this virtual time, by more than this cost.
    pub(super) fn is_ahead(&self, of: f64, cost: usize) -> bool {
        self.virtual_time > of + cost as f64 / self.weight
    }

    /// A caller took so much in a pass that one of its jobs led.
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

    /// Whether the caller that goes next has taken all that it may in this round, or all that fits.
    pub(super) fn is_round_over(&self) -> bool {
        let front = self.front().and_then(|caller| self.callers.get(caller));
        front.is_none_or(|queue| !queue.may_take())
    }

    /// Brings a caller to the front that may take something in this round. If none may, the next round begins: as many quanta
    /// for each caller as the first of them needs to take something. Callers of which nothing fits the pass keep
    /// nobody waiting.
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

    /// A pass was formed; a hint cut it short. The next one starts with a caller that may take something in this round.
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

    /// A caller took so much in its turn. It is over if that was nothing, or all that it may take in this round.
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

    /// An item that costs more than a caller may owe counts as so much for its queue, too: the queue's other callers did not ask for it.
    fn charge(&mut self, cost: usize, quantum: usize) {
        let most = quantum.saturating_mul(DEBT_QUANTA_MAX.unsigned_abs() as usize);
        self.virtual_time += cost.min(most) as f64 / self.weight;
    }

    /// The next job of this caller did not fit a pass: it starts the next one, if the caller may take something in this round.
    pub(super) fn put_first(&mut self, caller: Option<&Caller>) {
        let may_take = |caller: &&Caller| self.callers.get(*caller).is_some_and(|queue| queue.deficit > 0);
        let at =
            caller.filter(may_take).and_then(|caller| self.order.iter().position(|other| other == caller));
        self.keeps_first = at.is_some();
        let caller = at.and_then(|at| self.order.remove(at));
        caller.into_iter().for_each(|caller| self.order.push_front(caller));
    }
}

/// What a caller may still take in this round when it has taken so much.
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
