//! The metric families with labels, each with its name and its help text. Their series are created when models and devices are known.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::callers::CallerFamilies;
use super::{Labels, Ratio, Seconds};

/// Upper bounds of pass times: from 1 ms, doubling 15 times to half a minute.
const PASS_BUCKETS: (f64, u16) = (0.001, 16);

/// Of the times of jobs, which may wait for hours: 1 ms to more than four hours, each four times the one before.
const JOB_BUCKETS: (f64, u16) = (0.001, 13);

/// Of the times of a caller's jobs, of which there is one histogram for each caller: 1 ms to more than four minutes, each eight
/// times the one before.
const CALLER_BUCKETS: (f64, u16) = (0.001, 7);

/// All metrics with labels.
pub(super) struct Families {
    pub(super) jobs: JobFamilies,
    pub(super) passes: PassFamilies,
    pub(super) device: DeviceFamilies,
    pub(super) callers: CallerFamilies,
}

/// Metrics of a model's jobs.
pub(super) struct JobFamilies {
    pub(super) received: Family<Labels, Counter>,
    pub(super) received_by_queue: Family<Labels, Counter>,
    pub(super) queue_missing: Family<Labels, Gauge>,
    pub(super) untrusted_headers: Family<Labels, Counter>,
    pub(super) answered: Family<Labels, Counter>,
    pub(super) dead_lettered: Family<Labels, Counter>,
    pub(super) requeued: Family<Labels, Counter>,
    pub(super) given_back: Family<Labels, Counter>,
    pub(super) already_settled: Family<Labels, Counter>,
    pub(super) withdrawn: Family<Labels, Counter>,
    pub(super) acks_lost: Family<Labels, Counter>,
    pub(super) parts: Family<Labels, Counter>,
    pub(super) quarantined: Family<Labels, Counter>,
    pub(super) queued_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    pub(super) run_seconds: Family<Labels, Histogram, fn() -> Histogram>,
    pub(super) slots: Family<Labels, Gauge>,
    pub(super) unacked: Family<Labels, Gauge>,
    pub(super) waiting: Family<Labels, Gauge>,
    pub(super) consuming: Family<Labels, Gauge>,
}

/// Metrics of a model's passes and their items.
pub(super) struct PassFamilies {
    pub(super) items: Family<Labels, Counter>,
    pub(super) recomputed: Family<Labels, Counter>,
    pub(super) cost: Family<Labels, Counter>,
    pub(super) passes: Family<Labels, Counter>,
    pub(super) out_of_memory: Family<Labels, Counter>,
    pub(super) out_of_memory_foreign: Family<Labels, Counter>,
    pub(super) pass_seconds: Family<Labels, Histogram, fn() -> Histogram>,
}

/// Metrics of a device.
pub(super) struct DeviceFamilies {
    pub(super) admitted: Family<Labels, Counter>,
    pub(super) blocked_seconds: Family<Labels, Seconds>,
    pub(super) busy_seconds: Family<Labels, Seconds>,
    pub(super) resident: Family<Labels, Gauge>,
    pub(super) pressure: Family<Labels, Ratio>,
    pub(super) pressure_seconds: Family<Labels, Ratio>,
    pub(super) leaked: Family<Labels, Gauge>,
    pub(super) leaked_per_job: Family<Labels, Gauge>,
    pub(super) circuit_open: Family<Labels, Gauge>,
    pub(super) probes: Family<Labels, Counter>,
}

impl Families {
    pub(super) fn registered(registry: &mut Registry) -> Self {
        let mut all = Registered(registry);
        Self {
            jobs: JobFamilies::registered(&mut all),
            passes: PassFamilies::registered(&mut all),
            device: DeviceFamilies::registered(&mut all),
            callers: CallerFamilies::registered(&mut all),
        }
    }
}

impl JobFamilies {
    fn registered(all: &mut Registered<'_>) -> Self {
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
            given_back: all.family("jobs_handed_back", "Jobs that went back to the broker unsettled"),
            already_settled: all
                .family("jobs_already_settled", "Jobs that were redelivered after they were settled"),
            withdrawn: all.family("jobs_withdrawn", "Jobs that their callers withdrew"),
            acks_lost: all.family("acks_lost", "Acknowledgements that did not reach the broker"),
            parts: all.family("reply_parts", "Replies with some of a job's items"),
            quarantined: all.family("suspects", "Jobs taken from the quarantine to be run alone"),
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
        }
    }
}

impl PassFamilies {
    fn registered(all: &mut Registered<'_>) -> Self {
        Self {
            items: all.family("items", "Items computed"),
            recomputed: all.family("items_recomputed", "Items whose outputs were lost with their job"),
            cost: all.family("cost", "Cost of all items that ran: tokens, for an encoder"),
            passes: all.family("passes", "Passes by their outcome"),
            out_of_memory: all.family("out_of_memory", "Passes that ran out of device memory"),
            out_of_memory_foreign: all.family(
                "out_of_memory_foreign",
                "Passes that ran out of device memory because other processes held it",
            ),
            pass_seconds: all.histogram("pass_duration", "Time of a pass on the device", pass_histogram),
        }
    }
}

impl DeviceFamilies {
    fn registered(all: &mut Registered<'_>) -> Self {
        Self {
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
        }
    }
}

impl CallerFamilies {
    fn registered(all: &mut Registered<'_>) -> Self {
        Self {
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

fn pass_histogram() -> Histogram {
    let (first, count) = PASS_BUCKETS;
    Histogram::new(exponential_buckets(first, 2.0, count))
}

fn job_histogram() -> Histogram {
    let (first, count) = JOB_BUCKETS;
    Histogram::new(exponential_buckets(first, 4.0, count))
}

pub(super) fn caller_histogram() -> Histogram {
    let (first, count) = CALLER_BUCKETS;
    Histogram::new(exponential_buckets(first, 8.0, count))
}
