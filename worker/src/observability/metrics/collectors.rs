//! Metrics that are read when they are scraped: the device's memory and sensors, the worker's state, its log, the process.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use vramq_core::admission::BudgetView;
use vramq_schemas::status::WorkerState;

use super::labels;
use crate::device::Device;
use crate::observability::status_board::StatusBoard;

/// A device's memory and its budget.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    device: Arc<dyn Device>,
    budget: BudgetView,
}

impl DeviceMemory {
    pub(super) fn new(device: Arc<dyn Device>, budget: BudgetView) -> Self {
        Self { device, budget }
    }
}

impl Collector for DeviceMemory {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let memory = self.device.memory();
        let labels = labels([("device", self.device.name())]);
        for (name, help, bytes) in [
            ("device_memory_size", "Memory of the device.", memory.total),
            ("device_memory_free", "Free memory of the device.", memory.free),
            ("device_memory_foreign", "Device memory of other processes.", memory.foreign),
            ("device_memory_own", "Device memory of this worker.", memory.own()),
            ("device_budget", "Device memory that all passes together may take.", self.budget.limit()),
            ("device_budget_held", "Device memory that running passes hold.", self.budget.used()),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
            ConstGauge::new(bytes.cast_signed()).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The latest readings of a device's sensors. A device without sensors has no series, instead of zeros.
#[derive(Debug)]
pub(super) struct Sensors(pub(super) Arc<dyn Device>);

impl Collector for Sensors {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(readings) = self.0.telemetry() else { return Ok(()) };
        let device = self.0.name();
        let scaled = |figure: Option<u32>, by: f64| figure.map(|figure| f64::from(figure) * by);
        let [watts, hertz] = ["watts", "hertz"].map(|unit| Unit::Other(unit.to_owned()));
        for (name, help, unit, value) in [
            (
                "device_memory_used",
                "Device memory of all processes and the driver.",
                Some(&Unit::Bytes),
                readings.memory_used.map(|used| used as f64),
            ),
            (
                "device_utilization_ratio",
                "Part of the last sampling period in which a kernel ran.",
                None,
                scaled(readings.gpu_percent, 0.01),
            ),
            (
                "device_memory_utilization_ratio",
                "Part of the last sampling period in which memory was read or written.",
                None,
                scaled(readings.memory_percent, 0.01),
            ),
            (
                "device_temperature",
                "Temperature of the device.",
                Some(&Unit::Celsius),
                scaled(readings.temperature_celsius, 1.0),
            ),
            (
                "device_power",
                "Power that the device draws.",
                Some(&watts),
                scaled(readings.power_milliwatt, 0.001),
            ),
            (
                "device_power_limit",
                "Power limit of the device.",
                Some(&watts),
                scaled(readings.power_limit_milliwatt, 0.001),
            ),
            (
                "device_sm_clock",
                "Clock of the device's processors.",
                Some(&hertz),
                scaled(readings.sm_clock_mhz, 1e6),
            ),
            (
                "device_memory_clock",
                "Clock of the device's memory.",
                Some(&hertz),
                scaled(readings.memory_clock_mhz, 1e6),
            ),
        ] {
            let Some(value) = value else { continue };
            let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            ConstGauge::new(value).encode(metric.encode_family(&labels([("device", device)]))?)?;
        }
        if readings.throttles.is_empty() {
            return Ok(());
        }
        let help = "1 while the device's clocks are reduced for this reason.";
        let mut metric = encoder.encode_descriptor("device_throttled", help, None, MetricType::Gauge)?;
        for (reason, now) in readings.throttles {
            let labels = labels([("device", device), ("reason", reason)]);
            ConstGauge::new(i64::from(now)).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// What the worker does.
#[derive(Debug)]
pub(super) struct States(pub(super) Arc<StatusBoard>);

impl Collector for States {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let now = self.0.now().state;
        let help = "1 for the current state of the worker, 0 for the others.";
        let mut metric = encoder.encode_descriptor("worker_state", help, None, MetricType::Gauge)?;
        // `gone` cannot be scraped: the process ends with it.
        for state in WorkerState::ALL.into_iter().filter(|state| *state != WorkerState::Gone) {
            let labels = labels([("state", state.as_str())]);
            ConstGauge::new(i64::from(state == now)).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// The log.
#[derive(Debug)]
pub(super) struct Log;

impl Collector for Log {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Lines of the log that were dropped, because standard error was not read fast enough.";
        let metric = encoder.encode_descriptor("log_lines_dropped", help, None, MetricType::Counter)?;
        ConstCounter::new(vramq_program::dropped_log_lines()).encode(metric)
    }
}

/// Figures of the process from the system, under the names that all Prometheus clients use.
#[derive(Debug)]
pub(super) struct Process {
    started: SystemTime,
}

impl Process {
    pub(super) fn started(started: SystemTime) -> Self {
        Self { started }
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let started = self.started.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let help = "Start time of the process since the Unix epoch.";
        let metric =
            encoder.encode_descriptor("process_start_time", help, Some(&Unit::Seconds), MetricType::Gauge)?;
        ConstGauge::new(started).encode(metric)?;
        if let Some(time) = processor_time() {
            let help = "Processor time of the process, user and system.";
            let metric =
                encoder.encode_descriptor("process_cpu", help, Some(&Unit::Seconds), MetricType::Counter)?;
            ConstCounter::new(time.as_secs_f64()).encode(metric)?;
        }
        if let Some(bytes) = resident_bytes() {
            let help = "Resident host memory of the process.";
            let unit = Some(&Unit::Bytes);
            let metric =
                encoder.encode_descriptor("process_resident_memory", help, unit, MetricType::Gauge)?;
            ConstGauge::new(bytes.cast_signed()).encode(metric)?;
        }
        for (name, help, count) in [
            ("process_open_fds", "Open file descriptors of the process.", open_files()),
            ("process_max_fds", "Limit of open file descriptors of the process.", files_max()),
        ] {
            if let Some(count) = count {
                let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
                ConstGauge::new(count.cast_signed()).encode(metric)?;
            }
        }
        Ok(())
    }
}

/// User and system time of all threads, from proc_pid_stat(5).
fn processor_time() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the program's name, may contain any characters. It ends at the last parenthesis.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut times = rest.split(' ').skip(11);
    let ticks = times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?;
    Some(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

fn open_files() -> Option<u64> {
    // Without the descriptor of this directory.
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as u64)
}

fn files_max() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}
