//! Checks what a worker counts for metrics and heartbeats, event by event.

use std::sync::Arc;
use std::time::Duration;

use vramq_core::action::{PassOrder, Run};
use vramq_core::device::{OutOfMemory, PassError};
use vramq_core::device_health::ProbeResult;
use vramq_core::event::{Event, PassEnd, PassResult, PublicationOutcome, Source};
use vramq_core::ids::{ItemIndex, JobKey, ModelIndex, QueueIndex};
use vramq_core::observation::{Cause, End, Observation, PassOutcome, PassShare};

use super::Shell;
use super::as_known::caller_as_known;
use super::frames::id_of;
use super::passes::{Flight, OUTPUT_BYTES};
use super::stored_job::StoredJob;
use crate::simulation::agenda::Micros;
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;

/// The tolerated rounding error of callers' shares of a pass.
const SHARE_ERROR: Duration = Duration::from_micros(2);

/// A pass that has just come back from its executor.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) flight: Flight,
    /// The caller and cost of each item, in order, and whether it has an output.
    items: Vec<(Option<Arc<str>>, usize, bool)>,
    took: Duration,
    /// Whether the session in which it started is still open.
    is_ours: bool,
}

/// The observations counted for one event, and the facts to compare them with.
#[derive(Debug, Default)]
pub(super) struct Observations {
    counted: Vec<Observation>,
    ended: Option<Ended>,
    /// Bytes of the next pass to start.
    pub(super) admitted: u64,
    /// Lost outputs of the job that is published next.
    pub(super) recomputed: usize,
    /// When a pass was last started, or the session opened.
    pub(super) busy_at: Micros,
}

/// The observations that an event must cause.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Expected {
    received: Option<(ModelIndex, Option<QueueIndex>, bool)>,
    busy: Option<Duration>,
    /// Model, outcome, time, items and cost of the pass.
    pass: Option<(ModelIndex, PassOutcome, Duration, usize, usize)>,
    probe: Option<ProbeResult>,
    out_of_memory: Option<(OutOfMemory, bool)>,
    parts: Option<(ModelIndex, u32)>,
}

impl Observations {
    /// A pass comes back from its executor.
    pub(super) fn pass_ended(&mut self, env: &Env, flight: Flight, end: &PassEnd, is_ours: bool) {
        let item = |(at, ((_, item), job)): (usize, (&(_, ItemIndex), &_))| {
            let spec = &env.ledger.job(*job).spec;
            let cost = spec.costs.get(item.0 as usize).copied().unwrap_or(0).max(1);
            (caller_as_known(env, spec), cost, end.outputs.get(at).is_some_and(Option::is_some))
        };
        let items = flight.order.items.iter().zip(&flight.jobs).enumerate().map(item).collect();
        self.ended = Some(Ended { flight, items, took: end.took, is_ours });
    }
}

impl Ended {
    fn expect(&self, end: &PassEnd) -> Expected {
        let mut expected = Expected { busy: Some(end.took), ..Expected::default() };
        let PassOrder { model, shape, items, .. } = &self.flight.order;
        let is_probe = items.is_empty();
        let pass = |outcome, items| Some((*model, outcome, end.took, items, shape.cost));
        match &end.result {
            _ if !self.is_ours => {}
            PassResult::DeviceLostBefore(_) | PassResult::Skipped => {}
            PassResult::Cancelled => expected.pass = pass(PassOutcome::Cancelled, 0),
            PassResult::Done if is_probe => expected.probe = Some(ProbeResult::Passed),
            PassResult::Failed(PassError::OutOfMemory { .. }) if is_probe => {
                expected.probe = Some(ProbeResult::OutOfMemory);
            }
            PassResult::Failed(_) | PassResult::Unavailable(_) if is_probe => {
                expected.probe = Some(ProbeResult::Failed);
            }
            PassResult::Failed(PassError::DeviceLost(_)) | PassResult::Unavailable(_) => {}
            PassResult::Done => expected.pass = pass(PassOutcome::Done, end.outputs.iter().flatten().count()),
            PassResult::Failed(PassError::OutOfMemory { oom, .. }) => {
                expected.pass = pass(PassOutcome::OutOfMemory, 0);
                expected.out_of_memory = Some((*oom, self.flight.was_alone(oom)));
            }
            PassResult::Failed(_) => expected.pass = pass(PassOutcome::Failed, 0),
        }
        expected
    }

    /// Whether the shares of the callers add up to the pass.
    fn is_split(&self, shares: &[&PassShare], outcome: PassOutcome) -> bool {
        let total: usize = self.items.iter().map(|(_, cost, _)| cost).sum();
        let is_right = |share: &&PassShare| {
            let own = || self.items.iter().filter(|(of, ..)| of.as_deref() == share.caller.as_deref());
            let cost: usize = own().map(|(_, cost, _)| cost).sum();
            let items = own().filter(|(.., there)| *there && outcome == PassOutcome::Done).count();
            let part = self.took.mul_f64(cost as f64 / total.max(1) as f64);
            share.cost == cost && share.items == items && share.took.abs_diff(part) < SHARE_ERROR
        };
        shares.iter().map(|share| share.cost).sum::<usize>() == total && shares.iter().all(is_right)
    }
}

impl Shell {
    /// What must be counted for an event, given what the worker holds before it.
    pub(super) fn expect(&self, event: &Event) -> Expected {
        match event {
            Event::Delivered(delivery) => {
                let queue = match delivery.source {
                    Source::Jobs(queue, _) => Some(queue),
                    Source::Bulk(_) | Source::Quarantine => None,
                };
                let received = Some((delivery.model, queue, delivery.source == Source::Quarantine));
                Expected { received, ..Expected::default() }
            }
            Event::PassEnded(end) => {
                self.observations.ended.as_ref().map_or_else(Expected::default, |ended| ended.expect(end))
            }
            Event::Published { job, outcome: PublicationOutcome::Confirmed { messages } } => {
                let stored = self.jobs.get(job).filter(|stored| stored.is_part_out);
                Expected { parts: stored.map(|stored| (stored.model, *messages)), ..Expected::default() }
            }
            _ => Expected::default(),
        }
    }

    /// The worker counts something.
    pub(super) fn observe(&mut self, env: &mut Env, observation: Observation) {
        let who = self.life.worker;
        match &observation {
            Observation::Settled(settled) => {
                self.check_settled(env, settled);
                self.settled += u64::from(settled.acked);
                self.leak.answered += u64::from(settled.end == End::Replied);
                if settled.end == End::Requeued(Cause::Turn) {
                    self.handed_over(env, settled.job);
                }
                if let Some(stored) = self.jobs.get_mut(&settled.job) {
                    stored.is_counted = true;
                    self.operators.settled(&id_of(stored.job.0), settled);
                }
            }
            Observation::Admitted { bytes } => self.observations.admitted += bytes,
            Observation::QueueMissing { model, queue, is_missing } => {
                self.shares.told_missing(*model, *queue, *is_missing);
            }
            Observation::Recomputed { items, .. } => self.observations.recomputed += items,
            Observation::Unsettled { model, jobs } => {
                let held = self.jobs.values().filter(|stored| stored.model == *model).count();
                if held != *jobs {
                    env.ledger.fail("counters match events", || {
                        format!("worker-{who}: {jobs} jobs of {model} are not settled, and {held} are held")
                    });
                }
            }
            Observation::BlockedOnMemory { lasted } => {
                let most = Duration::from_micros(env.now - self.observations.busy_at);
                if *lasted > most {
                    env.ledger.fail("counters match events", || {
                        format!("worker-{who}: no pass had room for {lasted:?}, and one started {most:?} ago")
                    });
                }
            }
            _ => self.observations.counted.push(observation),
        }
    }

    /// Compares what was counted for an event with what had to be.
    pub(super) fn check_counted(&mut self, env: &mut Env, expected: &Expected) {
        let (counted, ended) =
            (std::mem::take(&mut self.observations.counted), self.observations.ended.take());
        if counted.is_empty() && *expected == Expected::default() {
            return;
        }
        let (mut seen, mut shares, mut times) = (Expected::default(), Vec::new(), 0);
        for observation in &counted {
            times += 1;
            match observation {
                Observation::Received { model, queue, quarantined } => {
                    seen.received = Some((*model, *queue, *quarantined));
                }
                Observation::DeviceBusy { took } => seen.busy = Some(*took),
                Observation::PassEnded { model, outcome, took, items, cost } => {
                    seen.pass = Some((*model, *outcome, *took, *items, *cost));
                }
                Observation::HealthProbe(result) => seen.probe = Some(*result),
                Observation::OutOfMemory { oom, alone, .. } => seen.out_of_memory = Some((*oom, *alone)),
                Observation::Parts { model, count } => seen.parts = Some((*model, *count)),
                Observation::PassShare(share) => shares.push(share),
                // Observations of the start of a pass, or of things that are not simulated.
                _ => {}
            }
        }
        let is_split = match (&ended, &seen.pass) {
            (Some(ended), Some((_, outcome, ..))) => ended.is_split(&shares, *outcome),
            _ => shares.is_empty(),
        };
        if seen != *expected || times != seen.count() + shares.len() || !is_split {
            let who = self.life.worker;
            env.ledger.fail("counters match events", || {
                format!("worker-{who}: {counted:?}, and it should be {expected:?}")
            });
        }
    }

    /// Checks the figures in a reply: the items of the job, the attempts, and the wait.
    pub(super) fn check_run_figures(&self, env: &mut Env, job: JobKey, run: &Run) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let attempt = self.headers_of(env, stored).attempt;
        let first_pass_at = env.micros_of(run.first_pass_at);
        let is_right = run.items_total as usize == stored.outputs.len()
            && run.attempt == attempt
            && run.bytes == run.items as usize * OUTPUT_BYTES
            && first_pass_at == stored.first_pass_at.unwrap_or(stored.delivered_at)
            && run.queued == self.waited(env, stored, first_pass_at);
        if !is_right {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("reply headers match the job", || format!("worker-{who}: job {number}: {run:?}"));
        }
    }

    /// How long a job had waited at `until`: since its publishing, or since its delivery if the publisher gave no time.
    fn waited(&self, env: &Env, stored: &StoredJob, until: Micros) -> Duration {
        let published_ms = match &env.ledger.letter(stored.letter).kind {
            Kind::Job { published_ms, .. } => *published_ms,
            _ => None,
        };
        let before = published_ms.map_or(0, |ms| stored.delivered_ms.saturating_sub(ms));
        Duration::from_millis(before) + Duration::from_micros(until - stored.delivered_at)
    }

    /// A pass starts. Checks the counted waits of jobs that start for the first time.
    pub(super) fn check_first_passes(&mut self, env: &mut Env, order: &PassOrder) {
        let is_first = |counted: &mut Observation| matches!(counted, Observation::FirstPass { .. });
        let told: Vec<_> = self.observations.counted.extract_if(.., is_first).collect();
        let mut keys: Vec<_> = order.items.iter().map(|(job, _)| *job).collect();
        keys.sort_unstable();
        keys.dedup();
        let starting = keys.iter().filter_map(|key| self.jobs.get(key)).filter(|stored| !stored.has_started);
        let mut left = told.iter();
        let mut is_told = true;
        for stored in starting {
            let known = caller_as_known(env, &env.ledger.job(stored.job).spec);
            is_told &= left.next().is_some_and(|counted| match counted {
                Observation::FirstPass { model, caller, waited } => {
                    *model == stored.model
                        && caller.as_deref() == known.as_deref()
                        && *waited == self.waited(env, stored, env.now)
                }
                _ => false,
            });
        }
        if !is_told || left.next().is_some() {
            let who = self.life.worker;
            env.ledger.fail("a job's wait is counted once, and as long as it was", || {
                format!("worker-{who}: {told:?} of {keys:?}")
            });
        }
    }
}

impl Expected {
    fn count(&self) -> usize {
        let parts = [
            self.received.is_some(),
            self.busy.is_some(),
            self.pass.is_some(),
            self.probe.is_some(),
            self.out_of_memory.is_some(),
            self.parts.is_some(),
        ];
        parts.iter().filter(|is_there| **is_there).count()
    }
}
