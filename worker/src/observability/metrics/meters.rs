//! Handles of the metric series, created once, so that counting costs only an atomic addition.

use std::sync::Arc;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use vramq_core::device::OutOfMemory;
use vramq_core::device_health::ProbeResult;
use vramq_core::observation::{Cause, PassOutcome};
use vramq_schemas::Reason;
use vramq_schemas::status::Counters;

use super::callers::Callers;
use super::families::{DeviceFamilies, Families};
use super::{Labels, Ratio, Seconds, labels};
use crate::model::Model;

/// Whether a pass that ran out of memory had the device to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Alone,
    Shared,
}

/// Counters that differ in one label.
#[derive(Clone, Debug)]
pub struct LabelledCounters<K>(Vec<(K, Counter)>);

impl<K: Copy + PartialEq> LabelledCounters<K> {
    fn of<const N: usize, const L: usize>(
        family: &Family<Labels, Counter>,
        common: [(&'static str, &str); L],
        name: &'static str,
        words: [(K, &str); N],
    ) -> Self {
        let series = words.map(|(key, word)| {
            let mut labels = labels(common);
            labels.push((name, word.to_owned()));
            (key, family.get_or_create_owned(&labels))
        });
        Self(series.to_vec())
    }

    pub fn inc(&self, key: K) {
        if let Some((_, counter)) = self.0.iter().find(|(of, _)| *of == key) {
            counter.inc();
        }
    }

    pub fn get(&self, key: K) -> u64 {
        self.0.iter().filter(|(of, _)| *of == key).map(|(_, counter)| counter.get()).sum()
    }

    pub fn sum(&self) -> u64 {
        self.0.iter().map(|(_, counter)| counter.get()).sum()
    }
}

/// The possible last answers to each command.
const LAST_ANSWERS: [(&str, &str); 13] = [
    ("pause", "done"),
    ("pause", "refused"),
    ("resume", "done"),
    ("resume", "refused"),
    ("drain", "done"),
    ("drain", "refused"),
    ("cancel", "memory-back"),
    ("cancel", "too-late"),
    ("cancel", "not-here"),
    ("cancel", "refused"),
    ("set", "done"),
    ("set", "refused"),
    ("unknown", "refused"),
];

/// The meters of a worker with its models loaded.
#[derive(Clone, Debug)]
pub struct Meters {
    pub worker: WorkerMeters,
    /// In the order of the models.
    pub models: Vec<ModelMeters>,
    pub device: DeviceMeters,
    pub callers: Arc<Callers>,
}

/// Meters without labels.
#[derive(Clone, Debug)]
pub struct WorkerMeters {
    pub sessions_opened: Counter,
    pub sessions_lost: Counter,
    pub connected: Gauge,
    pub blocked: Gauge,
    pub heartbeats: Counter,
    commands: Family<Labels, Counter>,
}

/// Meters of a model's jobs.
#[derive(Clone, Debug)]
pub struct ModelMeters {
    pub received: Counter,
    /// In the order of the queues that its jobs come from.
    pub received_by_queue: Vec<Counter>,
    /// For each of these queues: whether it cannot be consumed.
    pub queue_missing: Vec<Gauge>,
    pub untrusted_headers: Counter,
    pub answered: Counter,
    pub dead: LabelledCounters<Reason>,
    pub requeued: LabelledCounters<Cause>,
    pub given_back: Counter,
    pub already_settled: Counter,
    pub withdrawn: Counter,
    pub acks_lost: Counter,
    pub parts: Counter,
    pub items: Counter,
    pub recomputed: Counter,
    pub cost: Counter,
    pub passes: LabelledCounters<PassOutcome>,
    pub quarantined: Counter,
    pub out_of_memory: LabelledCounters<Kind>,
    pub out_of_memory_foreign: Counter,
    pub pass_seconds: Histogram,
    pub queued_seconds: Histogram,
    pub run_seconds: Histogram,
    pub slots: Gauge,
    pub unacked: Gauge,
    pub waiting: Gauge,
    pub consuming: Gauge,
}

/// Meters of a device.
#[derive(Clone, Debug)]
pub struct DeviceMeters {
    pub admitted_bytes: Counter,
    pub blocked_seconds: Seconds,
    pub busy_seconds: Seconds,
    pub resident_bytes: Gauge,
    pub pressure_ratio: Ratio,
    pub pressure_seconds: Ratio,
    pub leaked_bytes: Gauge,
    pub leaked_per_job: Gauge,
    pub circuit_open: Gauge,
    /// Health probes by their result.
    pub probes: LabelledCounters<ProbeResult>,
}

impl WorkerMeters {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let meters = Self {
            sessions_opened: Counter::default(),
            sessions_lost: Counter::default(),
            connected: Gauge::default(),
            blocked: Gauge::default(),
            heartbeats: Counter::default(),
            commands: Family::default(),
        };
        registry.register("sessions_opened", "Sessions with the broker", meters.sessions_opened.clone());
        registry.register("sessions_lost", "Sessions that were lost", meters.sessions_lost.clone());
        registry.register("broker_connected", "Whether a session stands", meters.connected.clone());
        registry.register(
            "broker_blocked",
            "1 while the broker blocks publishers, by a memory or disk alarm",
            meters.blocked.clone(),
        );
        registry.register("heartbeats", "Heartbeats published", meters.heartbeats.clone());
        for (command, outcome) in LAST_ANSWERS {
            drop(meters.commands.get_or_create(&labels([("command", command), ("outcome", outcome)])));
        }
        registry.register("control_commands", "Commands by their last answer", meters.commands.clone());
        meters
    }

    /// Counts a command by its last answer. Both labels come from this program, so they are bounded.
    pub fn command(&self, command: &'static str, outcome: &'static str) {
        self.commands.get_or_create(&labels([("command", command), ("outcome", outcome)])).inc();
    }
}

impl ModelMeters {
    pub(super) fn of(families: &Families, model: &Model, device: &str) -> Self {
        let Model { name: model, queues, .. } = model;
        let model = model.as_str();
        let all = [("model", model)];
        let of_model = labels(all);
        let on_device = [("model", model), ("device", device)];
        let counter = |family: &Family<Labels, Counter>| family.get_or_create_owned(&of_model);
        let gauge = |family: &Family<Labels, Gauge>| family.get_or_create_owned(&of_model);
        let reasons = Reason::ALL.map(|reason| (reason, reason.as_str()));
        let causes = Cause::ALL.map(|cause| (cause, cause.as_str()));
        let outcomes = [
            (PassOutcome::Done, "done"),
            (PassOutcome::OutOfMemory, "out-of-memory"),
            (PassOutcome::Failed, "failed"),
            (PassOutcome::Cancelled, "cancelled"),
        ];
        let of_queue = |name: &str| labels([("model", model), ("queue", name)]);
        let of_queues: Vec<_> = queues.iter().map(|queue| of_queue(&queue.name)).collect();
        let kinds = [(Kind::Alone, "alone"), (Kind::Shared, "shared")];
        let Families { jobs, passes, .. } = families;
        Self {
            received: counter(&jobs.received),
            received_by_queue: of_queues
                .iter()
                .map(|of_queue| jobs.received_by_queue.get_or_create_owned(of_queue))
                .collect(),
            queue_missing: of_queues
                .iter()
                .map(|of_queue| jobs.queue_missing.get_or_create_owned(of_queue))
                .collect(),
            untrusted_headers: counter(&jobs.untrusted_headers),
            answered: counter(&jobs.answered),
            dead: LabelledCounters::of(&jobs.dead_lettered, all, "reason", reasons),
            requeued: LabelledCounters::of(&jobs.requeued, all, "cause", causes),
            given_back: counter(&jobs.given_back),
            already_settled: counter(&jobs.already_settled),
            withdrawn: counter(&jobs.withdrawn),
            acks_lost: counter(&jobs.acks_lost),
            parts: counter(&jobs.parts),
            items: counter(&passes.items),
            recomputed: counter(&passes.recomputed),
            cost: counter(&passes.cost),
            passes: LabelledCounters::of(&passes.passes, all, "outcome", outcomes),
            quarantined: counter(&jobs.quarantined),
            out_of_memory: LabelledCounters::of(&passes.out_of_memory, on_device, "kind", kinds),
            out_of_memory_foreign: passes.out_of_memory_foreign.get_or_create_owned(&labels(on_device)),
            pass_seconds: passes.pass_seconds.get_or_create_owned(&of_model),
            queued_seconds: jobs.queued_seconds.get_or_create_owned(&of_model),
            run_seconds: jobs.run_seconds.get_or_create_owned(&of_model),
            slots: gauge(&jobs.slots),
            unacked: gauge(&jobs.unacked),
            waiting: gauge(&jobs.waiting),
            consuming: gauge(&jobs.consuming),
        }
    }

    /// Counts a pass that ran out of memory.
    pub fn ran_out(&self, oom: &OutOfMemory, alone: bool) {
        self.out_of_memory.inc(if alone { Kind::Alone } else { Kind::Shared });
        if oom.foreign > 0 && oom.asked <= oom.free.saturating_add(oom.foreign) {
            self.out_of_memory_foreign.inc();
        }
    }

    /// The counters that heartbeats report.
    pub fn counters(&self) -> Counters {
        Counters {
            received: self.received.get(),
            answered: self.answered.get(),
            dead_lettered: self.dead.sum(),
            requeued: self.requeued.sum(),
            handed_back: self.given_back.get(),
            already_settled: self.already_settled.get(),
            withdrawn: self.withdrawn.get(),
            items: self.items.get(),
            passes: self.passes.sum(),
            cost: self.cost.get(),
            out_of_memory_alone: self.out_of_memory.get(Kind::Alone),
            out_of_memory_shared: self.out_of_memory.get(Kind::Shared),
            out_of_memory_foreign: self.out_of_memory_foreign.get(),
        }
    }
}

impl DeviceMeters {
    pub(super) fn of(families: &DeviceFamilies, device: &str) -> Self {
        let all = [("device", device)];
        let of_device = labels(all);
        let gauge = |family: &Family<Labels, Gauge>| family.get_or_create_owned(&of_device);
        Self {
            admitted_bytes: families.admitted.get_or_create_owned(&of_device),
            blocked_seconds: families.blocked_seconds.get_or_create_owned(&of_device),
            busy_seconds: families.busy_seconds.get_or_create_owned(&of_device),
            resident_bytes: gauge(&families.resident),
            pressure_ratio: families.pressure.get_or_create_owned(&of_device),
            pressure_seconds: families.pressure_seconds.get_or_create_owned(&of_device),
            leaked_bytes: gauge(&families.leaked),
            leaked_per_job: gauge(&families.leaked_per_job),
            circuit_open: gauge(&families.circuit_open),
            probes: LabelledCounters::of(
                &families.probes,
                all,
                "outcome",
                [
                    (ProbeResult::Passed, "lived"),
                    (ProbeResult::Failed, "died"),
                    (ProbeResult::OutOfMemory, "out-of-memory"),
                ],
            ),
        }
    }
}

impl Meters {
    /// The sum of a figure over all models.
    fn sum(&self, figure: impl Fn(&ModelMeters) -> u64) -> u64 {
        self.models.iter().map(figure).sum()
    }

    pub fn answered(&self) -> u64 {
        self.sum(|model| model.answered.get())
    }

    /// Jobs that ended here.
    pub fn settled(&self) -> u64 {
        self.sum(|model| {
            model.answered.get() + model.requeued.sum() + model.dead.sum() + model.withdrawn.get()
        })
    }

    /// Logs the totals of all models, at the worker's end.
    pub fn log_totals(&self) {
        let requeued = |cause| self.sum(|model| model.requeued.get(cause));
        let out_of_memory = |kind| self.sum(|model| model.out_of_memory.get(kind));
        let blocked = Duration::try_from_secs_f64(self.device.blocked_seconds.get()).unwrap_or_default();
        tracing::info!(
            jobs = self.answered(),
            items = self.sum(|model| model.items.get()),
            passes = self.sum(|model| model.passes.sum()),
            tokens = self.sum(|model| model.cost.get()),
            oom_alone = out_of_memory(Kind::Alone),
            oom_shared = out_of_memory(Kind::Shared),
            oom_foreign = self.sum(|model| model.out_of_memory_foreign.get()),
            requeued = self.sum(|model| model.requeued.sum()),
            exclusive = requeued(Cause::Exclusive),
            delayed = requeued(Cause::Delayed),
            enlarged = requeued(Cause::Larger),
            handed_over = requeued(Cause::Unfinished),
            parts = self.sum(|model| model.parts.get()),
            recomputed = self.sum(|model| model.recomputed.get()),
            bytes_admitted = self.device.admitted_bytes.get(),
            blocked_on_memory_ms = u64::try_from(blocked.as_millis()).unwrap_or(u64::MAX),
            dead = self.sum(|model| model.dead.sum()),
            withdrawn = self.sum(|model| model.withdrawn.get()),
            handed_back = self.sum(|model| model.given_back.get()),
            acks_lost = self.sum(|model| model.acks_lost.get()),
            "totals"
        );
    }
}
