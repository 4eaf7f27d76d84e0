//! From a configuration to loaded models with slots.

use std::num::NonZeroU16;
use std::sync::Arc;

use crate::admission::{Budget, DoesNotFit};
use crate::config::{Config, CpuConfig, EngineConfig, ModelConfig};
use crate::device::Device;
use crate::device::cpu::{self, CpuDevice};
use crate::engine::Engine;
use crate::engine::echo::Echo;
use crate::engine::encoder::{Encoder, LoadError};
use crate::model::{Fit, Model};

/// A device with its models loaded.
#[derive(Debug)]
pub struct Opened {
    pub device: Arc<CpuDevice>,
    pub models: Vec<(Arc<Model>, Fit)>,
    /// Bytes for passes: what was free after loading, less the reserve.
    pub budget: Budget,
}

/// Why a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Device(#[from] cpu::OpenError),
    #[error("load model `{model}` from {folder}")]
    Load {
        model: String,
        folder: String,
        #[source]
        error: Box<LoadError>,
    },
    #[error("model `{model}` on {device}: {error}")]
    DoesNotFit { model: String, device: String, error: DoesNotFit },
}

impl Opened {
    /// Loads every model; the slots come last, when all weights are in place.
    ///
    /// # Errors
    /// A model that cannot be loaded. A model without slots is no error here: see [`slots`](Self::slots).
    pub fn open(config: &Config) -> Result<Self, OpenError> {
        let CpuConfig { memory, reserve, threads, ref file, fault } = config.device;
        let device = match file {
            None => CpuDevice::new(memory, threads)?,
            Some(file) => CpuDevice::shared(memory, threads, file)?,
        };
        let mut models = Vec::with_capacity(config.models.len());
        for (index, model) in config.models.iter().enumerate() {
            models.push(Arc::new(Model::new(index, model, load(model, &device)?)));
        }
        if let Some(fault) = fault {
            tracing::warn!(?fault, "allocations of passes are made to fail, as the configuration asks");
            device.inject(fault);
        }
        let (free, count) = (device.memory().free, models.len() as u64);
        let fit = |model: Arc<Model>| {
            let fit = model.fit(free, reserve, count);
            (model, fit)
        };
        let models = models.into_iter().map(fit).collect();
        Ok(Self { device, models, budget: Budget::new(free.saturating_sub(reserve)) })
    }

    /// The models with their slots.
    ///
    /// # Errors
    /// The first model without room for one job, with the arithmetic.
    pub fn slots(&self) -> Result<Vec<(Arc<Model>, NonZeroU16)>, OpenError> {
        self.models
            .iter()
            .map(|(model, fit)| match fit.slots {
                Ok(slots) => Ok((Arc::clone(model), slots)),
                Err(error) => Err(OpenError::DoesNotFit {
                    model: model.name.clone(),
                    device: self.device.name().to_owned(),
                    error,
                }),
            })
            .collect()
    }
}

fn load(model: &ModelConfig, device: &Arc<CpuDevice>) -> Result<Box<dyn Engine>, OpenError> {
    Ok(match &model.engine {
        EngineConfig::Echo => Box::new(Echo::new(Arc::clone(device))),
        EngineConfig::Encoder(source) => {
            Box::new(Encoder::load(source, Arc::clone(device)).map_err(|error| OpenError::Load {
                model: model.name.clone(),
                folder: source.to_string(),
                error: Box::new(error),
            })?)
        }
    })
}
