//! The worker's metrics: served at `/metrics`, and reported in heartbeats and in the log line `totals` at its end. docs/metrics.md
//! explains each.

mod callers;
mod collectors;
mod meters;
mod programs;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use vramq_core::admission::BudgetView;

use super::status_board::StatusBoard;
use crate::device::Device;
use crate::executor::process::programs::Programs;
use crate::identity::Identity;
use crate::model::Model;
use programs::ProgramMetrics;

use callers::CallerFamilies;
pub use callers::Callers;
use collectors::{DeviceMemory, Process, Sensors, States};
pub use meters::{DeviceMeters, Kind, Meters, ModelMeters, WorkerMeters};

/// Label names and values of a series. Values are names of models and devices, fixed words, and a limited number of callers.
pub type Labels = Vec<(&'static str, String)>;

/// Seconds and fractions of them.
pub type Seconds = Counter<f64, std::sync::atomic::AtomicU64>;

/// A gauge of fractions.
pub type Ratio = Gauge<f64, std::sync::atomic::AtomicU64>;

/// Upper bounds of pass times: from 1 ms, doubling 15 times to half a minute.
const PASS_BUCKETS: (f64, u16) = (0.001, 16);

/// Of the times of jobs, which may wait for hours: 1 ms to more than four hours, each four times the one before.
const JOB_BUCKETS: (f64, u16) = (0.001, 13);

/// Of the times of a caller's jobs, of which there is one histogram for each caller: 1 ms to more than four minutes, each eight
/// times the one before.
const CALLER_BUCKETS: (f64, u16) = (0.001, 7);

/// All metrics of a worker.
pub struct Metrics {
    registry: Mutex<Registry>,
    families: Families,
    started: SystemTime,
    pub worker: WorkerMeters,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// Metrics with labels: the series are made when models and devices are known.
struct Families {
    received: Family<Labels, Counter>,
    received_by_queue: Family<Labels, Counter>,
    queue_missing: Family<Labels, Gauge>,
    answered: Family<Labels, Counter>,
    untrusted_headers: Family<Labels, Counter>,
    dead_lettered: Family<Labels, Counter>,
    requeued: Family<Labels, Counter>,
    returned: Family<Labels, Counter>,
    already_settled: Family<Labels, Counter>,
    withdrawn: Family<Labels, Counter>,
    acks_lost: Family<Labels, Counter>,
    parts: Family<Labels, Counter>,
    items: Family<Labels, Counter>,
    recomputed: Family<Labels, Counter>,
    cost: Family<Labels, Counter>,
    passes: Family<Labels, Counter>,
    quarantined: Family<Labels, Counter>,
    out_of_memory: Family<Labels, Counter>,
    out_of_memory_foreign: Family<Labels, Counter>,
    pass_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    queued_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    run_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    slots: Family<Labels, Gauge>,
    unacked: Family<Labels, Gauge>,
    waiting: Family<Labels, Gauge>,
    consuming: Family<Labels, Gauge>,
    admitted: Family<Labels, Counter>,
    blocked_seconds: Family<Labels, Seconds>,
    busy_seconds: Family<Labels, Seconds>,
    resident: Family<Labels, Gauge>,
    pressure: Family<Labels, Ratio>,
    pressure_seconds: Family<Labels, Ratio>,
    leaked: Family<Labels, Gauge>,
    leaked_per_job: Family<Labels, Gauge>,
    circuit_open: Family<Labels, Gauge>,
    probes: Family<Labels, Counter>,
    callers: CallerFamilies,
}

fn pass_histogram() -> Histogram {
    let (first, count) = PASS_BUCKETS;
    Histogram::new(exponential_buckets(first, 2.0, count))
}

fn job_histogram() -> Histogram {
    let (first, count) = JOB_BUCKETS;
    Histogram::new(exponential_buckets(first, 4.0, count))
}

fn caller_histogram() -> Histogram {
    let (first, count) = CALLER_BUCKETS;
    Histogram::new(exponential_buckets(first, 8.0, count))
}

/// Labels from pairs of name and value.
fn labels<const N: usize>(pairs: [(&'static str, &str); N]) -> Labels {
    pairs.map(|(name, value)| (name, value.to_owned())).to_vec()
}

impl Metrics {
    pub fn new(identity: &Identity, board: &Arc<StatusBoard>) -> Self {
        let (mut root, started) = (Registry::default(), SystemTime::now());
        root.register_collector(Box::new(Process::started(started)));
        let registry = root.sub_registry_with_prefix("vramq");
        registry.register_collector(Box::new(States(Arc::clone(board))));
        let info = Family::<Labels, Gauge>::default();
        info.get_or_create(&labels([("version", identity.version), ("worker", &identity.worker)])).set(1);
        registry.register("build_info", "The worker's version and name", info);
        let worker = WorkerMeters::registered(registry);
        let families = Families::registered(registry);
        Self { registry: Mutex::new(root), families, started, worker }
    }

    /// When the process started, in Unix milliseconds.
    pub fn started_at_ms(&self) -> u64 {
        let since = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    }

    /// The meters of a worker that has loaded its models. Creates all series, except those of callers, of which at most `callers_max` get
    /// separate ones.
    pub fn meters(
        &self,
        models: &[Arc<Model>],
        device: &Arc<dyn Device>,
        budget: &BudgetView,
        callers_max: usize,
    ) -> Arc<Meters> {
        let name = device.name();
        let memory = DeviceMemory::new(Arc::clone(device), budget.clone());
        let mut root = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let registry = root.sub_registry_with_prefix("vramq");
        registry.register_collector(Box::new(memory));
        registry.register_collector(Box::new(Sensors(Arc::clone(device))));
        Arc::new(Meters {
            worker: self.worker.clone(),
            models: models.iter().map(|model| ModelMeters::of(&self.families, model, name)).collect(),
            device: DeviceMeters::of(&self.families, name),
            callers: Arc::new(Callers::new(self.families.callers.clone(), callers_max)),
        })
    }

    /// Adds metrics of the processes of program models, if there are any.
    pub fn watch_programs(&self, programs: &Arc<Programs>) {
        if programs.pools().next().is_some() {
            let mut root = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
            let registry = root.sub_registry_with_prefix("vramq");
            registry.register_collector(Box::new(ProgramMetrics(Arc::clone(programs))));
        }
    }

    /// All metrics in the OpenMetrics text format. Reads files of the system, and possibly the device's sensors.
    pub fn encode(&self) -> String {
        let mut page = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        // Writing to a string cannot fail. A figure that the system does not provide is left out.
        let _ = text::encode(&mut page, &registry);
        page
    }
}

impl Families {
    fn registered(registry: &mut Registry) -> Self {
        let mut all = Registered(registry);
        Self {
            received: all.family("jobs_received", "Jobs that the broker delivered"),
            received_by_queue: all.family(
                "queue_jobs_received",
                "Jobs that the broker delivered, by the queue that they came from",
            ),
            queue_missing: all.family(
                "queue_missing",
                "Whether a queue that jobs come from cannot be consumed: it was deleted, or is not as workers declare it",
            ),
            untrusted_headers: all.family(
                "untrusted_headers",
                "Deliveries whose publisher wrote headers that only workers may write",
            ),
            answered: all.family("jobs_answered", "Jobs whose last reply the broker confirmed"),
            dead_lettered: all.family("jobs_dead_lettered", "Jobs that ended as dead letters"),
            requeued: all
                .family("jobs_requeued", "Jobs that were published again for another attempt, by cause"),
            returned: all.family("jobs_handed_back", "Jobs that went back to the broker unsettled"),
            already_settled: all
                .family("jobs_already_settled", "Jobs that were redelivered after they were settled"),
            withdrawn: all.family("jobs_withdrawn", "Jobs that their callers withdrew"),
            acks_lost: all.family("acks_lost", "Acknowledgements that did not reach the broker"),
            parts: all.family("reply_parts", "Replies with some of a job's items"),
            items: all.family("items", "Items computed"),
            recomputed: all.family("items_recomputed", "Items whose outputs were lost with their job"),
            cost: all.family("cost", "Cost of all items that ran: tokens, for an encoder"),
            passes: all.family("passes", "Passes by their outcome"),
            quarantined: all.family("suspects", "Jobs taken from the quarantine to be run alone"),
            out_of_memory: all.family("out_of_memory", "Passes that ran out of device memory"),
            out_of_memory_foreign: all.family(
                "out_of_memory_foreign",
                "Passes that ran out of device memory because other processes held it",
            ),
            pass_seconds: all.histogram("pass_duration", "Time of a pass on the device", pass_histogram),
            queued_seconds: all.histogram(
                "job_queued",
                "Time from publishing a job to its first pass",
                job_histogram,
            ),
            run_seconds: all.histogram(
                "job_run",
                "Time from the first pass of a job until it is settled",
                job_histogram,
            ),
            slots: all.family("slots", "The most unacknowledged jobs that the worker may hold"),
            unacked: all.family("jobs_in_hand", "Unacknowledged jobs"),
            waiting: all.family("jobs_waiting", "Jobs with items that wait for a pass"),
            consuming: all.family("consuming", "Whether the broker may send jobs"),
            admitted: all.with_unit(
                "admitted",
                "Device memory of all passes that were admitted",
                Unit::Bytes,
            ),
            blocked_seconds: all.with_unit(
                "blocked_on_memory",
                "Time in which items waited because no pass had room on the device",
                Unit::Seconds,
            ),
            busy_seconds: all.with_unit(
                "device_busy",
                "Time of all passes on the device, health probes included",
                Unit::Seconds,
            ),
            resident: all.with_unit(
                "device_resident",
                "Device memory of this worker when its models were loaded",
                Unit::Bytes,
            ),
            pressure: all.family(
                "device_pressure_ratio",
                "The part of the device memory that is in use, without passes",
            ),
            pressure_seconds: all.with_unit(
                "device_pressure",
                "How long the device has been nearly full with memory that a restart would free",
                Unit::Seconds,
            ),
            leaked: all.with_unit(
                "device_leaked",
                "Growth of this worker's device memory since its first passes",
                Unit::Bytes,
            ),
            leaked_per_job: all.family(
                "device_leaked_bytes_per_job",
                "Growth of this worker's device memory per answered job",
            ),
            circuit_open: all
                .family("circuit_open", "Whether a health probe failed and none has succeeded since"),
            probes: all.family("canaries", "Health probes of the device"),
            callers: CallerFamilies {
                jobs: all.family("caller_jobs", "Jobs that were answered or dead-lettered, by caller"),
                items: all.family("caller_items", "Items computed, by caller"),
                cost: all.family("caller_cost", "Cost of all items that ran, by caller"),
                device_seconds: all.with_unit(
                    "caller_device",
                    "Time of passes on the device, by caller; shared passes are divided by cost",
                    Unit::Seconds,
                ),
                queued_seconds: all.histogram(
                    "caller_queued",
                    "Time from publishing a job to its first pass, by caller",
                    caller_histogram,
                ),
            },
        }
    }
}

/// Creates and registers metrics.
struct Registered<'a>(&'a mut Registry);

impl Registered<'_> {
    fn family<M>(&mut self, name: &str, help: &str) -> Family<Labels, M>
    where
        M: Default,
        Family<Labels, M>: prometheus_client::registry::Metric + Clone,
    {
        let family = Family::default();
        self.0.register(name, help, family.clone());
        family
    }

    fn with_unit<M>(&mut self, name: &str, help: &str, unit: Unit) -> Family<Labels, M>
    where
        M: Default,
        Family<Labels, M>: prometheus_client::registry::Metric + Clone,
    {
        let family = Family::default();
        self.0.register_with_unit(name, help, unit, family.clone());
        family
    }

    fn histogram(
        &mut self,
        name: &str,
        help: &str,
        made: fn() -> Histogram,
    ) -> Family<Labels, Histogram, fn() -> Histogram> {
        let family = Family::new_with_constructor(made);
        self.0.register_with_unit(name, help, Unit::Seconds, family.clone());
        family
    }
}
