//! A pass that an executor has received. Owns its permit until the pass has ended, and divides the pass's time among callers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Caller, Draft};
use crate::admission::Permit;
use crate::device::{PassShape, counted};
use crate::event::OutputSize;
use crate::ids::{ExecutorIndex, Fingerprint, ItemIndex, JobKey, ModelIndex};
use crate::observation::PassShare;

/// A pass that an executor has received.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) model: ModelIndex,
    /// Job, index within the job and cost of each item; empty for a health probe.
    pub(crate) items: Vec<(JobKey, ItemIndex, usize)>,
    pub(crate) shape: PassShape,
    pub(crate) exclusive: bool,
    executor: ExecutorIndex,
    /// Whether another pass of this worker was on the device at some time during this pass.
    pub(crate) overlapped: bool,
    /// The jobs' messages and callers.
    jobs: Vec<PassJob>,
    /// Held until the device is done with the memory.
    permit: Permit,
    since: Instant,
}

impl InFlight {
    /// A pass of a model's executor that is about to start.
    pub(super) fn new(
        model: ModelIndex,
        executor: ExecutorIndex,
        Draft { items, shape, exclusive }: Draft,
        permit: Permit,
        now: Instant,
    ) -> Self {
        let (overlapped, jobs, since) = (false, Vec::new(), now);
        Self { model, items, shape, exclusive, executor, overlapped, jobs, permit, since }
    }

    /// How long ago the executor received it.
    pub(super) fn runs(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    pub(super) fn executor(&self) -> ExecutorIndex {
        self.executor
    }

    /// Bytes of the budget that it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.permit.bytes()
    }

    pub(super) fn set_jobs(&mut self, jobs: Vec<PassJob>) {
        self.jobs = jobs;
    }

    pub(crate) fn is_probe(&self) -> bool {
        self.items.is_empty()
    }

    /// The jobs in the pass, each once.
    pub(crate) fn jobs(&self) -> Vec<JobKey> {
        let mut jobs: Vec<_> = self.items.iter().map(|(job, ..)| *job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }

    pub(crate) fn has(&self, message: Fingerprint) -> bool {
        self.jobs.iter().any(|job| job.message == message)
    }

    /// Whether it is of one job.
    pub(crate) fn is_of_one(&self) -> bool {
        self.jobs.len() == 1
    }

    /// A job's share of the pass's time, by cost.
    pub(crate) fn time_of(&self, job: JobKey, took: Duration) -> Duration {
        let of_job = self.items.iter().filter(|(of, ..)| *of == job);
        self.part_of(took, of_job.map(|(.., cost)| cost).sum())
    }

    /// The share of an amount of cost in the time of the pass.
    fn part_of(&self, took: Duration, cost: usize) -> Duration {
        took.mul_f64(cost as f64 / self.shape.cost.max(1) as f64)
    }

    /// The costs of its items, as metrics count them.
    pub(crate) fn counted_cost(&self) -> usize {
        self.items.iter().map(|(.., cost)| counted(*cost)).sum()
    }

    /// Each caller's share. `outputs`: by item; a share counts the items that have one.
    pub(crate) fn shares(&self, outputs: &[Option<OutputSize>], took: Duration) -> Vec<PassShare> {
        let mut shares: Vec<PassShare> = Vec::new();
        let callers: HashMap<_, _> = self.jobs.iter().map(|job| (job.key, &job.caller)).collect();
        let mut place_of: HashMap<&Caller, usize> = HashMap::new();
        // The time is divided by these.
        let mut costs: Vec<usize> = Vec::new();
        for (at, (job, _, cost)) in self.items.iter().enumerate() {
            let Some(caller) = callers.get(job).copied() else { continue };
            let place = *place_of.entry(caller).or_insert(shares.len());
            if place == shares.len() {
                let (items, cost, took) = (0, 0, Duration::ZERO);
                costs.push(0);
                shares.push(PassShare { caller: caller.clone(), items, cost, took });
            }
            let share = &mut shares[place];
            costs[place] += cost;
            share.cost += counted(*cost);
            share.items += usize::from(outputs.get(at).is_some_and(Option::is_some));
        }
        for (share, cost) in shares.iter_mut().zip(costs) {
            share.took = self.part_of(took, cost);
        }
        shares
    }
}

/// What a pass keeps of each of its jobs. It identifies the job even after its session was lost.
#[derive(Clone, Debug)]
pub(crate) struct PassJob {
    pub(crate) key: JobKey,
    pub(crate) message: Fingerprint,
    pub(crate) caller: Caller,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::Budget;
    use crate::device::UNKNOWN_COST;

    #[test]
    fn unknown_costs_count_as_one_and_have_their_share_of_the_time() {
        let (known, unknown) = (JobKey(1), JobKey(2));
        let items = vec![
            (unknown, ItemIndex(0), UNKNOWN_COST),
            (known, ItemIndex(0), 600),
            (known, ItemIndex(1), 400),
            (unknown, ItemIndex(1), 7),
        ];
        let shape = items.iter().map(|(.., cost)| *cost).collect();
        let permit = Budget::new(1).try_acquire(1).unwrap();
        let draft = Draft { items, shape, exclusive: true };
        let mut pass = InFlight::new(ModelIndex(0), ExecutorIndex(0), draft, permit, Instant::now());
        let job = |(key, caller): (JobKey, &str)| PassJob {
            key,
            message: Fingerprint(key.0),
            caller: Some(caller.into()),
        };
        pass.set_jobs([(known, "known"), (unknown, "unknown")].map(job).to_vec());
        assert_eq!(pass.counted_cost(), 1008);
        let shares = pass.shares(&[], Duration::from_secs(100));
        let costs: Vec<_> = shares.iter().map(|share| share.cost).collect();
        assert_eq!(costs, [8, 1000]);
        // Nearly all of it is the unknown item's.
        assert!(shares[0].took > Duration::from_secs(99), "{shares:?}");
    }
}
