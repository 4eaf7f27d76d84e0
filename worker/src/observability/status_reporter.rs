//! A worker's word on itself, put together from its board and its meters.

use std::sync::Arc;
use std::time::Duration;

use vramq_schemas::status::{DeviceStatus, Heartbeat, ModelStatus, WorkerState};

use crate::admission::Budget;
use crate::amqp::message::Identity;
use crate::board::{Board, Now};
use crate::device::Device;
use crate::job::unix_ms;
use crate::metrics::Meters;
use crate::model::Model;

/// All that a heartbeat tells of.
#[derive(Debug)]
pub struct Teller {
    pub identity: Arc<Identity>,
    pub host: String,
    pub started_at_ms: u64,
    pub interval: Duration,
    pub board: Arc<Board>,
    pub meters: Arc<Meters>,
    pub models: Vec<Arc<Model>>,
    pub device: Arc<dyn Device>,
    pub budget: Budget,
}

impl Teller {
    /// What is so now.
    pub fn heartbeat(&self) -> Heartbeat {
        let Now { state, reason } = self.board.now();
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
            reason,
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

    /// The last one.
    pub fn farewell(&self) -> Heartbeat {
        Heartbeat { state: WorkerState::Gone, reason: Some("ended".to_owned()), ..self.heartbeat() }
    }

    fn model(&self, model: &Model) -> ModelStatus {
        let meters = &self.meters.models[model.index];
        let gauge = |value: i64| u64::try_from(value).unwrap_or(0);
        ModelStatus {
            model: model.name.clone(),
            key: model.key.clone(),
            slots: u32::try_from(meters.slots.get()).unwrap_or(0),
            in_hand: gauge(meters.in_hand.get()),
            waiting: gauge(meters.waiting.get()),
            consuming: meters.consuming.get() == 1,
            counters: meters.counters(),
        }
    }
}
