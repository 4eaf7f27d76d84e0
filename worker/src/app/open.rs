//! Opens the device and loads the models that the configuration names, and computes their slots.

use std::num::{NonZeroU16, NonZeroUsize};
use std::sync::Arc;

use tokio::runtime::Handle;
use vramq_core::ids::ModelIndex;
use vramq_core::slots::DoesNotFit;
use vramq_core::units::Mib;
use vramq_inference::process::{self, ProcessConfig, ProcessModel};

use crate::config::{Config, CpuConfig, DeviceKind, EngineConfig, ModelConfig};
use crate::device::any::AnyDevice;
use crate::device::cpu::{self, CpuDevice};
use crate::device::cuda::{self, CudaDevice};
use crate::engine::Engine;
use crate::engine::echo::Echo;
use crate::engine::encoder::cuda::{CudaOptions, ElementType};
use crate::engine::encoder::{ComputeType, Encoder, LoadError, Source};
use crate::executor::process::programs::Programs;
use crate::model::{Fit, Model, PASS_TOKENS_DEFAULT};
use crate::state_file::StateFile;

/// A device with its models loaded.
#[derive(Debug)]
pub struct Opened {
    pub device: AnyDevice,
    pub models: Vec<(Arc<Model>, Fit)>,
    /// Models that could not be loaded.
    pub not_loaded: usize,
    /// The processes of models that are programs.
    pub programs: Arc<Programs>,
    /// Bytes for passes: what was free after loading, less the reserve.
    pub budget: u64,
}

/// Why a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Cpu(#[from] cpu::OpenError),
    #[error(transparent)]
    Cuda(#[from] cuda::OpenError),
    /// This many models could not be loaded. [`Opened::open`] has already passed a text for each to `tell`.
    #[error("{0} model(s) cannot be loaded")]
    NotLoaded(usize),
    /// The models that cannot be served.
    #[error("{} model(s) cannot be served", .0.len())]
    Models(Vec<ModelError>),
}

impl OpenError {
    /// Texts that are still to be printed, one for each model that cannot be served. Excludes those that `tell` has received.
    pub fn in_words(self) -> Vec<String> {
        match self {
            Self::NotLoaded(_) => Vec::new(),
            Self::Models(models) => models.into_iter().map(ModelError::in_words).collect(),
            other => vec![in_full(other.into())],
        }
    }
}

/// An error with its causes, as text.
fn in_full(error: anyhow::Error) -> String {
    format!("{error:#}")
}

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("load model `{model}` from {folder}")]
    Load {
        model: String,
        folder: String,
        #[source]
        error: Box<LoadError>,
    },
    #[error("load model `{model}`: {error}{}", printed(error.stderr()))]
    Program { model: String, error: Box<process::warm::LoadError> },
    #[error("model `{model}` on {device}: {error}")]
    DoesNotFit { model: String, device: String, error: DoesNotFit },
}

impl ModelError {
    fn in_words(self) -> String {
        in_full(self.into())
    }
}

impl Opened {
    /// Loads every model, programs last, and computes slots when all weights are loaded. Blocks; call it on a thread that may wait for
    /// `runtime`, on which programs run. Calls `tell` with the text for each model that cannot be loaded, before it tries the next one:
    /// that may take minutes, and the process may end meanwhile.
    ///
    /// # Errors
    /// The device cannot be used. A model that cannot be loaded is no error here, nor is one without slots: see
    /// [`complete`](Self::complete) and [`slots`](Self::slots).
    pub fn open(config: &Config, runtime: &Handle, tell: fn(&str)) -> Result<Self, OpenError> {
        log_host_slots(config);
        let device = open(&config.device.kind)?;
        let mut programs = Programs::new(
            device.shared(),
            StateFile::in_folder(config.state.as_deref()),
            config.models.len() > 1,
        );
        let mut models = load_all(config, &device, &mut programs, runtime, tell)?;
        models.sort_by_key(|model| model.index);
        if let Some(fault) = config.device.fault {
            tracing::warn!(
                ?fault,
                "device.cpu.fault or device.cuda.fault is set: allocations of passes are made to fail on purpose"
            );
            device.inject(fault);
        }
        device.read().map_err(cuda::OpenError::from)?;
        let (free, reserve) = (device.shared().memory().free, config.device.reserve);
        let count = models.len() as u64;
        let fit = |model: Arc<Model>| {
            let fit = model.fit(free, reserve, count);
            (model, fit)
        };
        let not_loaded = config.models.len() - models.len();
        let models = models.into_iter().map(fit).collect();
        let programs = Arc::new(programs);
        Ok(Self { device, models, not_loaded, programs, budget: free.saturating_sub(reserve) })
    }

    /// The same value, if every model was loaded.
    ///
    /// # Errors
    /// Some model was not loaded.
    pub fn complete(self) -> Result<Self, OpenError> {
        if self.not_loaded == 0 { Ok(self) } else { Err(OpenError::NotLoaded(self.not_loaded)) }
    }

    /// The models with their slots.
    ///
    /// # Errors
    /// The models that have no room for one job, with the calculation.
    pub fn slots(&self) -> Result<Vec<(Arc<Model>, NonZeroU16)>, OpenError> {
        let (mut models, mut unusable) = (Vec::with_capacity(self.models.len()), Vec::new());
        for (model, fit) in &self.models {
            match fit.slots {
                Ok(slots) => models.push((Arc::clone(model), slots)),
                Err(error) => unusable.push(ModelError::DoesNotFit {
                    model: model.name.clone(),
                    device: self.device.shared().name().to_owned(),
                    error,
                }),
            }
        }
        if unusable.is_empty() { Ok(models) } else { Err(OpenError::Models(unusable)) }
    }
}

/// Loads every model that can be loaded, programs last. A model that cannot be loaded does not stop the loading of others.
fn load_all(
    config: &Config,
    device: &AnyDevice,
    programs: &mut Programs,
    runtime: &Handle,
    tell: fn(&str),
) -> Result<Vec<Arc<Model>>, OpenError> {
    let mut models = Vec::with_capacity(config.models.len());
    let is_program = |model: &ModelConfig| matches!(model.engine, EngineConfig::Process(_));
    let (last, first): (Vec<_>, Vec<_>) =
        config.models.iter().enumerate().partition(|(_, model)| is_program(model));
    for (index, model) in first.into_iter().chain(last) {
        let (slots_max, reserve) = (config.host_slots[index], config.device.reserve);
        let index = ModelIndex(index);
        let loaded = match &model.engine {
            EngineConfig::Process(process) => {
                device.read().map_err(cuda::OpenError::from)?;
                runtime.block_on(start(index, model, slots_max, process, device, reserve, programs))
            }
            EngineConfig::Echo => {
                Ok(Model::new(index, model, slots_max, Arc::new(Echo::new(device.clone()))))
            }
            EngineConfig::Encoder { source, dtype } => load(model, source, *dtype, device, config)
                .map(|encoder| Model::new(index, model, slots_max, encoder)),
        };
        match loaded {
            Ok(loaded) => models.push(Arc::new(loaded)),
            Err(error) => tell(&error.in_words()),
        }
    }
    Ok(models)
}

/// Logs how many slots the host's memory allows each model that it allows fewer than the configuration.
fn log_host_slots(config: &Config) {
    for (model, slots) in config.limited_by_host() {
        let (host_memory, body_max) = (Mib(config.host_memory), Mib(model.body_max));
        let held = Mib(model.body_max.saturating_mul(slots.get().into()));
        let (model, configured) = (&model.name, model.slots_max);
        tracing::info!(
            model, %host_memory, %body_max, slots, configured, %held,
            "worker.host_memory_mib limits the slots: with more slots, jobs with the largest bodies would need more host memory than that"
        );
    }
}

fn open(kind: &DeviceKind) -> Result<AnyDevice, OpenError> {
    Ok(match kind {
        DeviceKind::Cpu(CpuConfig { memory, threads, file: None }) => {
            AnyDevice::Cpu(CpuDevice::new(*memory, *threads)?)
        }
        DeviceKind::Cpu(CpuConfig { memory, threads, file: Some(file) }) => {
            AnyDevice::Cpu(CpuDevice::shared(*memory, *threads, file)?)
        }
        DeviceKind::Cuda(options) => AnyDevice::Cuda(CudaDevice::open(options)?),
    })
}

/// Starts the first process of a program.
async fn start(
    index: ModelIndex,
    model: &ModelConfig,
    slots_max: NonZeroU16,
    process: &ProcessConfig,
    device: &AnyDevice,
    reserve: u64,
    programs: &mut Programs,
) -> Result<Model, ModelError> {
    let budget = device.shared().memory().free.saturating_sub(reserve);
    let started = programs.start(index, process.clone(), budget).await;
    let pool =
        started.map_err(|error| ModelError::Program { model: model.name.clone(), error: Box::new(error) })?;
    let pass_tokens = ProcessModel::pass_cost_max(&pool, budget);
    let config = ModelConfig { pass_tokens: Some(pass_tokens), ..model.clone() };
    Ok(Model::new(index, &config, slots_max, Arc::new(ProcessModel::new(pool))))
}

/// The last output of a program, for the line that says why the worker cannot start.
fn printed(stderr: &str) -> String {
    let stderr = stderr.trim_end();
    if stderr.is_empty() { String::new() } else { format!(". The program printed last:\n{stderr}") }
}

fn load(
    model: &ModelConfig,
    source: &Source,
    dtype: ComputeType,
    device: &AnyDevice,
    config: &Config,
) -> Result<Arc<dyn Engine>, ModelError> {
    let loaded = match device {
        AnyDevice::Cpu(device) => Encoder::load_dtype(source, Arc::clone(device), dtype),
        AnyDevice::Cuda(device) => {
            // The default pass size, which keeps the device busy, suits a model that is alone on it. With several models, such passes would
            // take memory that models loaded later need.
            let default_tokens = || (config.models.len() > 1).then_some(PASS_TOKENS_DEFAULT);
            let options = CudaOptions {
                element: ElementType::configured(dtype),
                cache: config.device.kernels.clone(),
                own_products: false,
                pass_tokens: model.pass_tokens.or_else(default_tokens),
                warm_up: true,
            };
            Encoder::load_cuda(source, Arc::clone(device), &options, cores())
        }
    };
    let failed = |error| ModelError::Load {
        model: model.name.clone(),
        folder: source.to_string(),
        error: Box::new(error),
    };
    Ok(Arc::new(loaded.map_err(failed)?))
}

/// Threads for tokenising, the only CPU work when passes run on a GPU.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}
