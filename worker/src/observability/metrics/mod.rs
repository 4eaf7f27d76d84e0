//! The worker's metrics: served at `/metrics`, and reported in heartbeats and in the log line `totals` at its end. docs/metrics.md
//! explains each.

mod callers;
mod collectors;
mod families;
mod meters;
mod programs;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use vramq_core::admission::BudgetView;

use super::status_board::StatusBoard;
use crate::device::Device;
use crate::executor::process::programs::Programs;
use crate::identity::Identity;
use crate::model::Model;
use programs::ProgramMetrics;

pub use callers::Callers;
use collectors::{DeviceMemory, Log, Process, Sensors, States};
use families::Families;
pub use meters::{DeviceMeters, Kind, Meters, ModelMeters, WorkerMeters};

/// Label names and values of a series. Values are names of models and devices, fixed words, and a limited number of callers.
pub type Labels = Vec<(&'static str, String)>;

/// Seconds and fractions of them.
pub type Seconds = Counter<f64, std::sync::atomic::AtomicU64>;

/// A gauge of fractions.
pub type Ratio = Gauge<f64, std::sync::atomic::AtomicU64>;

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
        registry.register_collector(Box::new(Log));
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
            device: DeviceMeters::of(&self.families.device, name),
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
