//! What a worker would start with: device, memory, weights, bytes per job, slots.

use std::fmt;

use serde::Serialize;

use crate::admission::Mib;
use crate::device::{Device, cuda};
use crate::open::Opened;

/// The report. All sizes in bytes.
#[derive(Debug, Serialize)]
pub struct Report {
    device: DeviceReport,
    models: Vec<ModelReport>,
    /// What there is of CUDA, in words.
    cuda: Vec<String>,
}

#[derive(Debug, Serialize)]
struct DeviceReport {
    name: String,
    total: u64,
    free: u64,
    reserve: u64,
    budget: u64,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    name: String,
    weights: u64,
    job_items: usize,
    job_tokens: usize,
    per_job: u64,
    slots: Option<u16>,
    /// Why there are no slots.
    problem: Option<String>,
}

impl Report {
    pub fn new(opened: &Opened, reserve: u64) -> Self {
        let memory = opened.device.memory();
        let models = opened.models.iter().map(|(model, fit)| ModelReport {
            name: model.name.clone(),
            weights: fit.room.weights,
            job_items: model.job_shape.items,
            job_tokens: model.job_shape.cost,
            per_job: fit.room.per_job,
            slots: fit.slots.ok().map(std::num::NonZeroU16::get),
            problem: fit.slots.err().map(|e| e.to_string()),
        });
        Self {
            device: DeviceReport {
                name: opened.device.name().to_owned(),
                total: memory.total,
                free: memory.free,
                reserve,
                budget: opened.budget.limit(),
            },
            models: models.collect(),
            cuda: cuda_in_words(),
        }
    }

    /// Whether a worker would start.
    pub fn is_well(&self) -> bool {
        self.models.iter().all(|model| model.problem.is_none())
    }
}

fn cuda_in_words() -> Vec<String> {
    match cuda::find() {
        Ok(devices) if devices.is_empty() => vec!["the driver lists no devices".to_owned()],
        Ok(devices) => {
            let words = |cuda::Found { name, product, total }| format!("{name}: {product}, {}", Mib(total));
            let mut all: Vec<_> = devices.into_iter().map(words).collect();
            all.push("this version has no engine for CUDA devices".to_owned());
            all
        }
        Err(absent) => vec![absent.to_string()],
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceReport { name, total, free, reserve, budget } = &self.device;
        let mib = |bytes: u64| Mib(bytes).to_string();
        writeln!(
            f,
            "{:<16} {:>14} {:>14} {:>14} {:>14}",
            "DEVICE", "TOTAL", "FREE", "RESERVE", "FOR PASSES"
        )?;
        writeln!(
            f,
            "{name:<16} {:>14} {:>14} {:>14} {:>14}",
            mib(*total),
            mib(*free),
            mib(*reserve),
            mib(*budget)
        )?;
        writeln!(f)?;
        writeln!(
            f,
            "{:<16} {:>14} {:>14} {:>14} {:>14}",
            "MODEL", "WEIGHTS", "TOKENS/JOB", "PER JOB", "SLOTS"
        )?;
        for model in &self.models {
            let slots = model.slots.map_or("none".to_owned(), |slots| slots.to_string());
            let (weights, per_job) = (mib(model.weights), mib(model.per_job));
            writeln!(
                f,
                "{:<16} {weights:>14} {:>14} {per_job:>14} {slots:>14}",
                model.name, model.job_tokens
            )?;
        }
        writeln!(f, "\nCUDA: {}", self.cuda.join("; "))?;
        for model in &self.models {
            if let Some(problem) = &model.problem {
                writeln!(f, "\n{}: {problem}", model.name)?;
            }
        }
        Ok(())
    }
}
