//! The configuration: the only reader of files, flags and environment.
//!
//! Environment variables override a TOML file, and flags override both. All faults are reported at once; unknown keys are errors.

mod broker;
pub mod cli;
mod device;
mod dotted;
mod gpus;
mod listen;
mod process;
mod publishers;
mod queues;
mod read;
mod section;
mod stores;

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::Table;
use vramq_core::poison_policy::PoisonPolicy;
use vramq_core::settings::QueueFacts;
use vramq_program::{NAME, toml_fault};

use crate::engine::encoder::ComputeType;
use crate::engine::encoder::Source;
use crate::failpoint::Failpoint;
use crate::publishers::PublisherRules;
use crate::stores::StoreConfig;
use crate::stores::outputs::OutputConfig;
use vramq_inference::process::{Place, ProcessConfig};

pub use broker::{BrokerConfig, QueueType};
pub use device::{CpuConfig, DeviceConfig, DeviceKind};
pub use gpus::{Gpu, Gpus};
pub use listen::Listen;
pub use read::host_name;
pub use section::Fault as ConfigFault;
use section::{Faults, Section};

/// A worker's configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub broker: BrokerConfig,
    /// Where `/livez`, `/readyz` and `/metrics` are; nowhere, if it is off.
    pub http: Option<Listen>,
    /// The interval of heartbeats.
    pub heartbeat: Duration,
    /// This worker's name, in replies, logs and the broker's list of connections.
    pub name: String,
    /// How long a drain may take.
    pub drain: Duration,
    /// How long a job may be unacknowledged.
    pub job_limit: Duration,
    /// Device time that a large job may have in one go while others wait in their queue.
    pub large_turn: Duration,
    pub poison: PoisonPolicy,
    pub failpoint: Option<Failpoint>,
    /// Where learned state is kept; `None` if there is no folder.
    pub state: Option<PathBuf>,
    pub pressure: PressureConfig,
    /// Bytes of host memory that the bodies of unacknowledged jobs may take.
    pub host_memory: u64,
    /// The most slots of each model, in the order of `models`, that this memory allows.
    pub host_slots: Vec<NonZeroU16>,
    /// Bytes of host memory for inputs that are fetched from stores. Zero without stores.
    pub fetch_memory: u64,
    pub stores: Vec<StoreConfig>,
    pub device: DeviceConfig,
    pub publishers: PublisherRules,
    /// The most callers with separate series in the metrics.
    pub callers_max: usize,
    /// At least one.
    pub models: Vec<ModelConfig>,
    /// Files and folders that do not exist on this machine. The configuration leaves them out, so it is only to be checked.
    pub absent: Vec<ConfigFault>,
}

/// When the worker restarts because the device is nearly full.
#[derive(Clone, Copy, Debug)]
pub struct PressureConfig {
    pub percent: u8,
    /// Zero disables the restart.
    pub tolerated: Duration,
}

/// One model to serve.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    pub name: String,
    /// Routing key of its jobs, and suffix of its queues' names.
    pub key: String,
    /// Where its jobs come from: first its own queue.
    pub queues: Vec<QueueFacts>,
    pub engine: EngineConfig,
    pub reply_queue: String,
    /// Routing key for jobs of which not even one item fits this device.
    pub larger: Option<String>,
    pub job_items: u32,
    /// The most tokens of a pass; `None`: the engine's choice, or a default.
    pub pass_tokens: Option<usize>,
    pub slots_max: NonZeroU16,
    /// Its share of the device's time while several models have work.
    pub weight: NonZeroU32,
    /// Bytes of the largest body of a job.
    pub body_max: u64,
    /// Bytes that the replies to a job may take together.
    pub reply_max: u64,
    /// The most bytes of all fetched inputs of a job.
    pub fetch_max: u64,
    pub outputs: Option<OutputConfig>,
}

/// What runs a model.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineConfig {
    /// The built-in text encoder, and the type that it computes in.
    Encoder { source: Source, dtype: ComputeType },
    /// Returns each input as its output, for trying out and measuring the message path.
    Echo,
    /// A user's program in separate processes.
    Process(Box<ProcessConfig>),
}

impl EngineConfig {
    /// A text saying that the folder in the key `path` does not exist on this machine, if so.
    pub fn missing_folder(&self) -> Option<String> {
        match self {
            Self::Encoder { source: Source::Folder(folder), .. } if !folder.is_dir() => {
                Some(format!("is {folder:?}, which is not a folder on this machine"))
            }
            _ => None,
        }
    }
}

/// All faults of a configuration that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid(pub Vec<ConfigFault>);

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the configuration has {} fault(s):", self.0.len())?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

impl std::error::Error for Invalid {}

impl Config {
    /// What is no fault of the configuration, because another machine may have what this one lacks.
    pub fn lacking(&self) -> Vec<ConfigFault> {
        let folder = |model: &ModelConfig| {
            let what = model.engine.missing_folder()?;
            let what = format!("{what}: no worker can start there");
            Some(ConfigFault { key: format!("model.{}.path", model.name), what })
        };
        let absent = self.absent.iter().map(|ConfigFault { key, what }| {
            let what = format!("{what}: no worker can start on this machine");
            ConfigFault { key: key.clone(), what }
        });
        absent.chain(self.models.iter().filter_map(folder)).chain(self.device.more_than_machine()).collect()
    }

    /// The models that have fewer slots than `slots_max` because of the host's memory, and how many these have.
    pub fn limited_by_host(&self) -> impl Iterator<Item = (&ModelConfig, NonZeroU16)> {
        let slots = self.models.iter().zip(self.host_slots.iter().copied());
        slots.filter(|(model, slots)| *slots < model.slots_max)
    }

    /// The configuration, to be used on this machine.
    ///
    /// # Errors
    /// The files and folders that it names and this machine lacks. Models' folders are not among them: loading the models reports these.
    pub fn on_this_machine(self) -> Result<Self, Invalid> {
        if self.absent.is_empty() { Ok(self) } else { Err(Invalid(self.absent)) }
    }

    /// Reads a configuration from a file's text and `KEY = value` pairs that override it, in their order. Keys such as `broker.url` are
    /// dotted paths into the file.
    ///
    /// # Errors
    /// Every fault, not only the first; of a file that is not TOML, that alone.
    pub fn read(file: Option<&str>, overrides: &[(String, String)]) -> Result<Self, Invalid> {
        Self::read_in(Path::new("."), "file", file, overrides)
    }

    /// The same for a file in `folder`, which is also the default working folder of programs. Faults call the file `name`.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    fn read_in(
        folder: &Path,
        name: &str,
        text: Option<&str>,
        overrides: &[(String, String)],
    ) -> Result<Self, Invalid> {
        let faults = Faults::default();
        let mut table = match text.map(str::parse::<Table>).transpose() {
            Ok(table) => table.unwrap_or_default(),
            Err(error) => {
                faults.add(name, toml_fault(&error, text.unwrap_or_default()));
                // Without the file's keys, nearly everything would seem to be missing.
                return Err(Invalid(faults.into_vec()));
            }
        };
        for (path, value) in overrides {
            if let Err(what) = dotted::put(&mut table, path, value) {
                faults.add(path, what);
            }
        }
        // An `Err` means that there is no working folder. Reading the program's configuration reports that.
        let folder = std::path::absolute(folder).unwrap_or_default();
        let place = Place { folder, scratch: std::env::temp_dir() };
        let config = read::config(Section::root(table, faults.clone()), &place);
        let absent = faults.absent();
        let faults = faults.into_vec();
        match config {
            Some(config) if faults.is_empty() => Ok(Self { absent, ..config }),
            _ => Err(Invalid(faults)),
        }
    }
}

/// The dotted keys that variables and flags may set, with [`NAME`] for the names of models and stores. What a program's own variables
/// (`model.NAME.env.…`) are called is its affair.
pub fn keys() -> Vec<String> {
    let faults = Faults::default();
    let mut table = Table::new();
    // A model and a store, so that their keys are asked for; the values do not matter.
    for (path, value) in [("model.NAME.engine", "echo"), ("store.NAME.url", "file:///")] {
        let put = dotted::put(&mut table, path, value);
        debug_assert!(put.is_ok(), "{path}");
    }
    let place = Place { folder: PathBuf::new(), scratch: PathBuf::new() };
    read::config(Section::root(table, faults.clone()), &place);
    let of_programs = process::plain_keys().map(|key| format!("model.{NAME}.{key}"));
    faults.asked().into_iter().chain(of_programs).collect()
}

#[cfg(test)]
mod tests;
