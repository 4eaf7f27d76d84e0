//! Metrics of programs: the processes of each model, and the device memory that they hold.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use vramq_inference::process::Status;

use super::labels;
use crate::executor::process::programs::Programs;

/// The words of [`SlotState::as_str`](vramq_inference::process::SlotState::as_str).
const STATES: [&str; 9] = [
    "unloaded",
    "starting",
    "backing-off",
    "waiting-for-memory",
    "loading",
    "idle",
    "running",
    "ending",
    "withheld",
];

#[derive(Debug)]
pub(super) struct ProgramMetrics(pub(super) Arc<Programs>);

impl ProgramMetrics {
    /// One row for each possible process, at most the configured number of instances.
    fn encode_instances(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        models: &[(String, Status)],
    ) -> fmt::Result {
        let places = || {
            models.iter().flat_map(|(model, status)| {
                status
                    .processes()
                    .into_iter()
                    .map(move |process| (model, process.instance.to_string(), process))
            })
        };
        let help = "Device memory of the process of this instance.";
        let mut metric = encoder.encode_descriptor(
            "program_instance_held",
            help,
            Some(&Unit::Bytes),
            MetricType::Gauge,
        )?;
        for (model, instance, process) in places() {
            let labels = labels([("model", model), ("instance", &instance)]);
            ConstGauge::new(process.held.cast_signed()).encode(metric.encode_family(&labels)?)?;
        }
        let help = "Passes that the process of this instance ran; restarts at 0 with each process.";
        let mut metric =
            encoder.encode_descriptor("program_instance_passes", help, None, MetricType::Gauge)?;
        for (model, instance, process) in places() {
            let labels = labels([("model", model), ("instance", &instance)]);
            ConstGauge::new(process.passes.cast_signed()).encode(metric.encode_family(&labels)?)?;
        }
        let help = "Processes that were started for this instance: all but the first are restarts.";
        let mut metric =
            encoder.encode_descriptor("program_instance_starts", help, None, MetricType::Counter)?;
        for (model, instance, process) in places() {
            let labels = labels([("model", model), ("instance", &instance)]);
            ConstCounter::new(process.starts).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

impl Collector for ProgramMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let models: Vec<(String, Status)> =
            self.0.pools().map(|(_, pool)| (pool.config().name.clone(), pool.status())).collect();
        let help = "Process instances of the model, by state.";
        let mut metric = encoder.encode_descriptor("program_processes", help, None, MetricType::Gauge)?;
        for (model, status) in &models {
            for state in STATES {
                let count = status.slots.iter().filter(|slot| slot.state.as_str() == state).count();
                let labels = labels([("model", model), ("state", state)]);
                ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX))
                    .encode(metric.encode_family(&labels)?)?;
            }
        }
        let help = "Processes of the model that were started.";
        let mut metric = encoder.encode_descriptor("program_starts", help, None, MetricType::Counter)?;
        for (model, status) in &models {
            let starts: u64 = status.slots.iter().map(|slot| slot.starts).sum();
            ConstCounter::new(starts).encode(metric.encode_family(&labels([("model", model)]))?)?;
        }
        self.encode_instances(&mut encoder, &models)?;
        for (name, help, bytes) in [
            (
                "program_held",
                "Device memory of the model's processes.",
                Status::held_bytes as fn(&Status) -> u64,
            ),
            (
                "program_withheld",
                "Device memory of ended processes that is not back.",
                Status::withheld_bytes,
            ),
        ] {
            let mut metric = encoder.encode_descriptor(name, help, Some(&Unit::Bytes), MetricType::Gauge)?;
            for (model, status) in &models {
                let gauge = ConstGauge::new(bytes(status).cast_signed());
                gauge.encode(metric.encode_family(&labels([("model", model)]))?)?;
            }
        }
        Ok(())
    }
}
