//! Counts the core's observations: in metrics, spans, and the status that heartbeats and health pages show.

use std::borrow::Cow;
use std::time::Instant;

use vramq_core::observation::{End, Observation, PassShare, Settled};
use vramq_schemas::status::CeilingStatus;

use crate::event_loop::EventLoop;
use crate::observability::status_board::Status;

impl EventLoop {
    pub(crate) fn observe(&self, observation: Observation) {
        let meters = &self.context.meters;
        let of = |model: vramq_core::ids::ModelIndex| &meters.models[model.0];
        match observation {
            Observation::Received { model, queue, quarantined } => {
                of(model).received.inc();
                if let Some(of_queue) = queue.and_then(|queue| of(model).received_by_queue.get(queue.0)) {
                    of_queue.inc();
                }
                if quarantined {
                    of(model).quarantined.inc();
                }
            }
            Observation::FirstPass { model, caller, waited } => {
                of(model).queued_seconds.observe(waited.as_secs_f64());
                meters.callers.of(caller.as_deref(), |caller| {
                    caller.queued_seconds.observe(waited.as_secs_f64());
                });
            }
            Observation::PassShare(PassShare { caller, items, cost, took }) => {
                meters.callers.of(caller.as_deref(), |caller| {
                    caller.items.inc_by(items as u64);
                    caller.cost.inc_by(cost as u64);
                    caller.device_seconds.inc_by(took.as_secs_f64());
                });
            }
            Observation::Admitted { bytes } => drop(meters.device.admitted_bytes.inc_by(bytes)),
            Observation::PassEnded { model, outcome, took, items, cost } => {
                let meters = of(model);
                meters.passes.inc(outcome);
                meters.pass_seconds.observe(took.as_secs_f64());
                meters.cost.inc_by(cost as u64);
                meters.items.inc_by(items as u64);
            }
            Observation::DeviceBusy { took } => drop(meters.device.busy_seconds.inc_by(took.as_secs_f64())),
            Observation::OutOfMemory { model, oom, alone } => of(model).ran_out(&oom, alone),
            Observation::HealthProbe(result) => meters.device.probes.inc(result),
            Observation::BlockedOnMemory { lasted } => {
                meters.device.blocked_seconds.inc_by(lasted.as_secs_f64());
            }
            Observation::Parts { model, count } => drop(of(model).parts.inc_by(count.into())),
            Observation::Recomputed { model, items } => drop(of(model).recomputed.inc_by(items as u64)),
            Observation::QueueMissing { model, queue, is_missing } => {
                if let Some(gauge) = of(model).queue_missing.get(queue.0) {
                    gauge.set(is_missing.into());
                }
            }
            Observation::Unsettled { model, jobs } => drop(of(model).given_back.inc_by(jobs as u64)),
            Observation::Settled(settled) => self.settled(&settled),
        }
    }

    fn settled(&self, settled: &Settled) {
        let job = self.jobs.get(settled.job);
        if settled.end.counts_for_caller() {
            self.context.meters.callers.of(settled.caller.as_deref(), |caller| {
                caller.jobs.inc();
            });
        }
        let meters = &self.context.meters.models[settled.model.0];
        match settled.end {
            End::Replied => drop(meters.answered.inc()),
            End::Requeued(cause) => meters.requeued.inc(cause),
            End::DeadLettered(reason) | End::Rejected(reason) => {
                meters.dead.inc(reason);
                if let Some(summary) = job.map(|job| &job.summary) {
                    let trace_id = summary.trace.as_ref().map(|trace| trace.parent.trace_id());
                    tracing::debug!(job = summary.id, trace_id, %reason, "dead letter confirmed");
                }
            }
            End::AlreadySettled => drop(meters.already_settled.inc()),
            End::Withdrawn => drop(meters.withdrawn.inc()),
            End::GivenBack => drop(meters.given_back.inc()),
        }
        if let Some(since) = settled.first_pass_at {
            meters.run_seconds.observe(since.elapsed().as_secs_f64());
        }
        if !settled.acked {
            meters.acks_lost.inc();
        }
        if let (Some(spans), Some(job)) = (&self.context.spans, job) {
            let host = self.session.as_ref().map(|live| live.session.host());
            spans.record(settled, &job.summary, &self.context.models[settled.model.0], host);
        }
    }

    /// Publishes the worker's status. Called whenever no other event waits, so it must cost only a comparison and a few stores.
    pub(crate) fn publish_status(&self) {
        let (status, meters) = (self.core.status(), &self.context.meters);
        let reason = status.reason.map(Cow::Borrowed);
        self.context.board.set(Status { state: status.state, reason });
        for (meters, model) in meters.models.iter().zip(&status.models) {
            meters.slots.set(model.slots.into());
            meters.unacked.set(gauge(model.unacked));
            meters.waiting.set(gauge(model.waiting));
            meters.consuming.set(model.is_consuming.into());
        }
        meters.worker.blocked.set(status.is_blocked.into());
        meters.device.circuit_open.set(status.is_sick.into());
    }

    /// Publishes that the event loop runs, and figures that change slowly.
    pub(crate) fn publish_slow_status(&self) {
        let (memory, device) = (self.core.memory_status(Instant::now()), &self.context.meters.device);
        self.context.board.ticked();
        device.resident_bytes.set(memory.resident.cast_signed());
        device.pressure_ratio.set(memory.pressure_ratio);
        device.pressure_seconds.set(memory.pressure_lasted.as_secs_f64());
        device.leaked_bytes.set(memory.leaked.cast_signed());
        device.leaked_per_job.set(memory.leaked_per_job.cast_signed());
        let limits = self.core.learned_limits().known().map(|(key, limit)| CeilingStatus {
            model: key.model.clone(),
            device: key.device.clone(),
            longest_max: key.longest_max as u64,
            limit: limit.limit,
            fitted: limit.fitted,
            failed: limit.failed,
        });
        self.context.board.set_ceilings(limits.collect());
    }
}

fn gauge(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
