//! Remembers reply queues that refuse replies or do not confirm them, so that their callers' jobs do not take the slots of other callers.
//! The broker's answers to replies come in. Whether a job must wait unrun goes out, and whether slots are too scarce to publish refused
//! replies again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use crate::event::{Delivery, PublicationOutcome};
use crate::ids::{JobKey, ModelIndex};
use crate::sizes::Size;

/// How long a reply queue counts as full after it refused a reply. During that time no job tries it; afterwards one job at a time does.
/// Each further refusal doubles the time, up to [`FULL_FOR_MAX`]. So a hundred full queues cost one or two slots. Jobs wait for half an
/// hour before they are dead-lettered, which is long enough to notice that a queue takes replies again.
const FULL_FOR: Duration = Duration::from_secs(10);
const FULL_FOR_MAX: Duration = Duration::from_secs(120);

/// How much longer a queue is tried by one job at a time only. This must be longer than a job may wait for its try, or the queue would be
/// forgotten before it is tried.
const FULL_REMEMBERED: Duration = Duration::from_secs(600);

/// The most jobs that a worker holds for a queue that did not confirm a reply once.
const HELD_MAX: usize = 2;

/// How long a reply queue counts as silent after it did not confirm a reply, as a multiple of the confirm timeout, which each new try
/// costs. From the third time in a row on, each time doubles it, up to [`SILENT_MAX`]. That is less than a job waits before it is
/// dead-lettered, so a queue that confirms again is noticed in time.
const SILENT_FOR: u32 = 4;
const SILENT_MAX: Duration = Duration::from_secs(600);

/// The most full or silent reply queues that are remembered.
const FAULTY_MAX: usize = 1024;

/// The part of a model's slots for jobs that try full or silent queues, all queues together, and the least number of these jobs. A caller
/// has at most half of them, so that its full queues do not keep another caller's from being tried.
const TRYING_PART: usize = 8;
const TRYING_MIN: usize = 2;

/// If jobs for full and silent queues take more than this part of a model's slots, the refused replies of a caller with more than an equal
/// share of that part are not published again, but each caller may have one job. This bounds the slots of full queues that no worker has
/// tried before. Another caller's full queues must not cost this one a computed result.
const OFFERED_PART: usize = 4;

/// What is wrong with a reply queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// It refuses replies.
    Full,
    /// It does not confirm them.
    Silent,
}

/// A reply queue that is full or silent.
#[derive(Clone, Copy, Debug)]
struct FaultyQueue {
    fault: Fault,
    /// When that was noticed last.
    at: Instant,
    /// For how long it counts as full or silent.
    lasts: Duration,
    /// How many times in a row it was found full or silent.
    times: u32,
}

impl FaultyQueue {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= self.lasts
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        let longer = match self.fault {
            Fault::Full => FULL_REMEMBERED,
            Fault::Silent => self.lasts,
        };
        now.saturating_duration_since(self.at) >= self.lasts.saturating_add(longer)
    }

    /// How many jobs may try the queue at a time. After the first silence is over any number may, because the whole broker may have been
    /// silent. After later ones only one may: RabbitMQ blocks a channel for a minute on a first reply to a quorum queue without its
    /// majority, and a worker has few channels for first replies.
    fn tries(&self, now: Instant) -> usize {
        match (self.fault, self.times, self.is_over(now)) {
            (Fault::Silent, 1, true) => usize::MAX,
            (Fault::Silent, 1, false) => HELD_MAX,
            (_, _, true) => 1,
            (_, _, false) => 0,
        }
    }
}

/// An unacknowledged job that has run for its reply queue, or may run.
#[derive(Clone, Debug)]
struct HeldJob {
    job: JobKey,
    model: ModelIndex,
    caller: Option<String>,
}

/// What the worker knows of reply queues.
#[derive(Debug)]
pub(crate) struct Destinations {
    /// How long a confirm may take.
    confirm_max: Duration,
    /// Those that are full or silent.
    faulty: HashMap<String, FaultyQueue>,
    /// The jobs that have run or may run for each reply queue, in the order of delivery, which is about the order in which they end. Bounded
    /// by the slots.
    held: HashMap<String, VecDeque<HeldJob>>,
}

impl Destinations {
    /// A confirm of a reply may take so long.
    pub(crate) fn new(confirm_max: Duration) -> Self {
        Self { confirm_max, faulty: HashMap::new(), held: HashMap::new() }
    }

    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let faulty = Size::of("full reply queues", self.faulty.len(), FAULTY_MAX);
        [faulty, Size::of("reply queues of jobs", self.held.len(), unacked)]
    }

    /// A session begins: no job is held.
    pub(crate) fn session_opened(&mut self) {
        self.held.clear();
    }

    pub(crate) fn delivered(&mut self, delivery: &Delivery) {
        let Some(queue) = &delivery.reply_queue else { return };
        let held = HeldJob { job: delivery.job, model: delivery.model, caller: delivery.caller.clone() };
        match self.held.get_mut(queue) {
            Some(held_jobs) => held_jobs.push_back(held),
            None => drop(self.held.insert(queue.clone(), VecDeque::from([held]))),
        }
    }

    /// The job has ended here, or waits elsewhere from now on: it no longer counts for its reply queue.
    pub(crate) fn released(&mut self, delivery: &Delivery) {
        let Some(queue) = &delivery.reply_queue else { return };
        let Some(held_jobs) = self.held.get_mut(queue) else { return };
        if let Some(at) = held_jobs.iter().position(|held| held.job == delivery.job) {
            held_jobs.remove(at);
        }
        if held_jobs.is_empty() {
            self.held.remove(queue);
        }
    }

    /// Records how the broker answered a reply to the queue.
    pub(crate) fn published(&mut self, queue: Option<&str>, outcome: &PublicationOutcome, now: Instant) {
        let Some(queue) = queue else { return };
        let fault = match outcome {
            PublicationOutcome::Refused { .. } => Fault::Full,
            PublicationOutcome::Unreachable { .. } => Fault::Silent,
            PublicationOutcome::Confirmed { .. } if !self.faulty.is_empty() => {
                self.faulty.remove(queue);
                return;
            }
            _ => return,
        };
        let faulty = self.found(queue, fault, now);
        self.faulty.retain(|_, faulty| !faulty.is_forgotten(now));
        if self.faulty.len() >= FAULTY_MAX && !self.faulty.contains_key(queue) {
            self.forget_one();
        }
        self.faulty.insert(queue.to_owned(), faulty);
    }

    /// The new entry for a queue that did not take a reply.
    fn found(&self, queue: &str, fault: Fault, now: Instant) -> FaultyQueue {
        let known = self.known(queue, now).filter(|faulty| faulty.fault == fault);
        // Replies that were in flight together, or published again, count as one time.
        let is_same = |faulty: &&FaultyQueue| match fault {
            Fault::Full => !faulty.is_over(now),
            Fault::Silent => now.saturating_duration_since(faulty.at) < self.confirm_max,
        };
        if let Some(faulty) = known.filter(is_same) {
            return *faulty;
        }
        let times = known.map_or(0, |faulty| faulty.times).saturating_add(1);
        let (first, most, same) = match fault {
            Fault::Full => (FULL_FOR, FULL_FOR_MAX, 1),
            Fault::Silent => (self.confirm_max.saturating_mul(SILENT_FOR), SILENT_MAX, 2),
        };
        let longer = 2_u32.saturating_pow(times.saturating_sub(same));
        FaultyQueue { fault, at: now, lasts: first.saturating_mul(longer).min(most), times }
    }

    /// Makes room for another queue. Forgets full queues before silent ones: a silent queue costs more.
    fn forget_one(&mut self) {
        let least = self.faulty.iter().min_by_key(|(_, faulty)| (faulty.fault == Fault::Silent, faulty.at));
        if let Some(queue) = least.map(|(queue, _)| queue.clone()) {
            self.faulty.remove(&queue);
        }
    }

    fn known(&self, queue: &str, now: Instant) -> Option<&FaultyQueue> {
        self.faulty.get(queue).filter(|faulty| !faulty.is_forgotten(now))
    }

    /// Whether the queue was silent more than once in a row and must not be tried now.
    pub(crate) fn is_silent(&self, queue: &str, now: Instant) -> bool {
        let faulty = self.faulty.get(queue).filter(|faulty| faulty.fault == Fault::Silent);
        faulty.is_some_and(|faulty| faulty.tries(now) == 0)
    }

    /// Whether a job that was just delivered must wait unrun. `slots`: those of its model.
    pub(crate) fn must_wait(&self, delivery: &Delivery, slots: u16, now: Instant) -> bool {
        let Some(queue) = &delivery.reply_queue else { return false };
        let Some(faulty) = self.known(queue, now) else { return false };
        let is_other = |held: &&HeldJob| held.job != delivery.job;
        let of_queue = self.held.get(queue).map_or(0, |held_jobs| held_jobs.iter().filter(is_other).count());
        if of_queue >= faulty.tries(now) {
            return true;
        }
        let most = (usize::from(slots) / TRYING_PART).max(TRYING_MIN);
        let (all, own) = count(self.trying(delivery.model, now).filter(is_other), delivery);
        all >= most || own >= most / 2
    }

    /// Whether jobs for full and silent queues take so many of a model's slots, and this caller's jobs so many of these, that its refused
    /// replies must not be published again.
    pub(crate) fn hold_too_many(&self, delivery: &Delivery, slots: u16, now: Instant) -> bool {
        if self.faulty.is_empty() {
            return false;
        }
        let most = (usize::from(slots) / OFFERED_PART).max(TRYING_MIN);
        let (all, own) = count(self.trying(delivery.model, now), delivery);
        let callers: HashSet<_> = self.trying(delivery.model, now).map(|held| &held.caller).collect();
        all > most && own > (most / callers.len()).max(1)
    }

    /// The unacknowledged jobs of a model that have run, or may run, for full or silent reply queues.
    fn trying(&self, model: ModelIndex, now: Instant) -> impl Iterator<Item = &HeldJob> {
        let of_faulty = self.held.iter().filter(move |(queue, _)| self.known(queue, now).is_some());
        of_faulty.flat_map(|(_, held_jobs)| held_jobs).filter(move |held| held.model == model)
    }
}

/// Counts these jobs, and those of them whose caller is the delivery's.
fn count<'a>(held_jobs: impl Iterator<Item = &'a HeldJob>, delivery: &Delivery) -> (usize, usize) {
    held_jobs.fold((0, 0), |(all, own), held| (all + 1, own + usize::from(held.caller == delivery.caller)))
}

#[cfg(test)]
#[path = "destinations_tests.rs"]
mod tests;
