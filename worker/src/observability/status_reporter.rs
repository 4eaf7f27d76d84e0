//! Builds heartbeats from the status board, the metrics and the device.

use std::sync::Arc;
use std::time::Duration;

use vramq_core::admission::BudgetView;
use vramq_core::ids::QueueIndex;
use vramq_schemas::status::{DeviceStatus, Heartbeat, ModelStatus, WorkerState};

use super::metrics::Meters;
use super::status_board::{Status, StatusBoard};
use crate::device::Device;
use crate::identity::Identity;
use crate::model::Model;
use crate::unix_ms;

/// All that a heartbeat reports.
#[derive(Debug)]
pub struct StatusReporter {
    pub identity: Arc<Identity>,
    pub host: String,
    pub started_at_ms: u64,
    pub interval: Duration,
    pub board: Arc<StatusBoard>,
    pub meters: Arc<Meters>,
    pub models: Vec<Arc<Model>>,
    pub device: Arc<dyn Device>,
    pub budget: BudgetView,
}

impl StatusReporter {
    /// The status now.
    pub fn heartbeat(&self) -> Heartbeat {
        let Status { state, reason } = self.board.now();
        let memory = self.device.memory();
        let sensors = self.device.telemetry().unwrap_or_default();
        Heartbeat {
            worker: self.identity.worker.clone(),
            version: self.identity.version.to_owned(),
            host: self.host.clone(),
            pid: std::process::id(),
            started_at_ms: self.started_at_ms,
            sent_at_ms: unix_ms(),
            interval_ms: u64::try_from(self.interval.as_millis()).unwrap_or(u64::MAX),
            state,
            reason: reason.map(Into::into),
            sessions_opened: self.meters.worker.sessions_opened.get(),
            sessions_lost: self.meters.worker.sessions_lost.get(),
            models: self.models.iter().map(|model| self.model(model)).collect(),
            devices: vec![DeviceStatus {
                device: self.device.name().to_owned(),
                total: memory.total,
                free: memory.free,
                foreign: memory.foreign,
                own: memory.own(),
                budget: self.budget.limit(),
                held: self.budget.used(),
                utilization_percent: sensors.gpu_percent,
                temperature_celsius: sensors.temperature_celsius,
                throttled: sensors.throttled().map(str::to_owned).collect(),
            }],
            ceilings: self.board.ceilings(),
        }
    }

    /// The heartbeat of a worker that ends.
    pub fn last_heartbeat(&self) -> Heartbeat {
        Heartbeat { state: WorkerState::Gone, reason: Some("ended".to_owned()), ..self.heartbeat() }
    }

    fn model(&self, model: &Model) -> ModelStatus {
        let meters = &self.meters.models[model.index.0];
        let gauge = |value: i64| u64::try_from(value).unwrap_or(0);
        let is_missing =
            |queue: QueueIndex| meters.queue_missing.get(queue.0).is_some_and(|missing| missing.get() == 1);
        ModelStatus {
            model: model.name.clone(),
            key: model.key.clone(),
            queues: model.queue_statuses(is_missing),
            slots: u32::try_from(meters.slots.get()).unwrap_or(0),
            in_hand: gauge(meters.unacked.get()),
            waiting: gauge(meters.waiting.get()),
            consuming: meters.consuming.get() == 1,
            revision: model.engine.revision(),
            processes: model.engine.processes(),
            counters: meters.counters(),
        }
    }
}
