//! The report of `vramq-worker doctor`: the device, memory, weights, bytes per job and slots that a worker would start with, and how fast
//! the device is.

pub mod cuda;
mod throughput;

use std::fmt;
use std::path::Path;

use serde::Serialize;
use vramq_core::device::PassShape;
use vramq_core::learned_limits::{LearnedLimit, LearnedLimits, LimitKey};
use vramq_core::settings::UNKNOWN_BYTES;
use vramq_core::units::Mib;
use vramq_inference::process::cgroup::{Cgroups, NotDelegated};
use vramq_inference::process::{Need, Pool};
use vramq_schemas::status::QueueStatus;

use super::open::Opened;
use crate::device::any::AnyDevice;
use crate::model::{Fit, Model};
use crate::unix_ms;

use cuda::CudaReport;
use throughput::Throughput;

/// The report. All sizes in bytes.
#[derive(Debug, Serialize)]
pub struct Report {
    device: DeviceReport,
    models: Vec<ModelReport>,
    /// How many models could not be loaded; they are not in `models`.
    not_loaded: usize,
    /// Only with models that are programs.
    cgroups: Option<CgroupsReport>,
    cuda: CudaReport,
}

/// Whether each program has a control group of its own.
#[derive(Debug, Serialize)]
struct CgroupsReport {
    delegated: bool,
    /// Whether the groups limit host memory.
    memory: bool,
    in_words: String,
}

impl CgroupsReport {
    fn new(cgroups: &Result<Cgroups, NotDelegated>) -> Self {
        match cgroups {
            Ok(cgroups) => {
                Self { delegated: true, memory: cgroups.has_memory(), in_words: cgroups.to_string() }
            }
            Err(reason) => {
                let in_words = format!("programs run in the cgroup of the worker: {reason}");
                Self { delegated: false, memory: false, in_words }
            }
        }
    }
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
    /// The queues that its jobs come from, if it has further queues.
    queues: Vec<QueueStatus>,
    weights: u64,
    job_items: usize,
    job_tokens: usize,
    per_job: u64,
    /// The types and units that compute passes, as text.
    computes: Option<String>,
    /// Of a model that is a program.
    program: Option<ProgramReport>,
    slots: Option<u16>,
    /// Why there are no slots.
    problem: Option<String>,
    /// `None` for programs, and where it could not be measured.
    throughput: Option<Throughput>,
    /// Why it could not be measured, in words.
    unmeasured: Option<String>,
    /// Learned limits, in words.
    ceilings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ProgramReport {
    /// The most processes at once, as far as is known now.
    instances: usize,
    /// The unit that its memory depends on.
    per: &'static str,
    /// Bytes of a pass with one such unit; `None` while unknown.
    per_item: Option<u64>,
    /// The measured needs of passes.
    learned: Vec<LearnedNeed>,
    revision: String,
    /// What the revision tells apart, in words.
    revision_covers: String,
}

/// The bytes of a pass that costs at most `cost`, in the unit that the program's memory depends on.
#[derive(Debug, Serialize)]
struct LearnedNeed {
    cost: f64,
    bytes: u64,
}

impl ProgramReport {
    fn new(pool: &Pool) -> Self {
        let need = match pool.need_of(1.0) {
            Need::Bytes(bytes) => Some(bytes),
            Need::Unknown => None,
        };
        let per = pool.config().vram.per.as_str();
        let learned = pool.learned().known().into_iter().map(|(cost, bytes)| LearnedNeed { cost, bytes });
        let (revision, revision_covers) = (pool.revision(), pool.revision_covers().to_string());
        let (instances, learned) = (pool.instances(), learned.collect());
        Self { instances, per, per_item: need, learned, revision, revision_covers }
    }
}

impl fmt::Display for ProgramReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { instances, per, per_item, learned, revision, revision_covers } = self;
        write!(f, "a program, loaded; up to {instances} process(es); ")?;
        let need = |need: &LearnedNeed| format!("{:.0} {per} takes {}", need.cost, Mib(need.bytes));
        match (&learned[..], per_item) {
            ([only], _) => write!(f, "as measured, a pass of up to {}", need(only))?,
            ([least, .., most], _) => {
                write!(f, "as measured, a pass of up to {}, and one of up to {}", need(least), need(most))?;
            }
            ([], Some(bytes)) => {
                write!(f, "as declared, a pass takes {} for each of its {per}", Mib(*bytes))?;
            }
            ([], None) => write!(f, "what a pass takes is not known yet: the first ones run alone")?,
        }
        write!(f, "; revision {revision} ({revision_covers})")
    }
}

impl ModelReport {
    fn new(opened: &Opened, limits: &LearnedLimits, model: &Model, fit: &Fit) -> Self {
        let pool = opened.programs.pools().find(|(index, _)| *index == model.index).map(|(_, pool)| pool);
        let measured = match (fit.slots, pool) {
            (Ok(_), None) => Throughput::measure(model, opened.budget),
            _ => Ok(None),
        };
        let unmeasured = measured.as_ref().err();
        Self {
            name: model.name.clone(),
            queues: model.queue_statuses(|_| false),
            weights: fit.inputs.weights,
            job_items: model.job_shape.items,
            job_tokens: model.job_shape.cost,
            // JSON has no number for an unknown size. Zero bytes and one slot show it.
            per_job: if fit.inputs.per_job == UNKNOWN_BYTES { 0 } else { fit.inputs.per_job },
            computes: model.engine.computes(),
            program: pool.map(|pool| ProgramReport::new(pool)),
            slots: fit.slots.ok().map(std::num::NonZeroU16::get),
            problem: fit.slots.err().map(|e| e.to_string()),
            unmeasured: unmeasured.map(|error| format!("jobs per second were not measured: {error}")),
            throughput: measured.ok().flatten(),
            ceilings: limits
                .known()
                .filter(|(key, _)| key.model == model.name)
                .map(|(key, limit)| in_words(model, key, limit))
                .collect(),
        }
    }

    fn queues_in_words(&self) -> String {
        let named: Vec<_> =
            self.queues.iter().map(|queue| format!("{} (weight {})", queue.queue, queue.weight)).collect();
        let in_turn = match self.slots {
            Some(slots) if usize::from(slots) < named.len() => {
                "; they are more than the slots, and are consumed in turn"
            }
            _ => "",
        };
        format!("jobs come from {}{in_turn}", named.join(", "))
    }
}

impl Report {
    /// `libraries` is a folder of CUDA's libraries, before all others.
    pub fn new(opened: &Opened, limits: &LearnedLimits, reserve: u64, libraries: Option<&Path>) -> Self {
        let cuda = match &opened.device {
            AnyDevice::Cuda(device) => Some(&**device),
            AnyDevice::Cpu(_) => None,
        };
        let device = opened.device.shared();
        let memory = device.memory();
        let models = opened.models.iter().map(|(model, fit)| ModelReport::new(opened, limits, model, fit));
        Self {
            device: DeviceReport {
                name: device.name().to_owned(),
                total: memory.total,
                free: memory.free,
                reserve,
                budget: opened.budget,
            },
            models: models.collect(),
            not_loaded: opened.not_loaded,
            cgroups: opened.programs.cgroups().map(CgroupsReport::new),
            cuda: CudaReport::new(cuda, libraries),
        }
    }

    /// Whether a worker would start.
    pub fn is_well(&self) -> bool {
        self.not_loaded == 0 && self.models.iter().all(|model| model.problem.is_none())
    }
}

fn in_words(model: &Model, key: &LimitKey, limit: &LearnedLimit) -> String {
    let LimitKey { longest_max, .. } = *key;
    let LearnedLimit { limit, failed, failed_at_ms, .. } = *limit;
    let mut words = format!(
        "passes with items of cost {} to {longest_max} are held to {}: one of {} ran out of memory, alone on the device, \
         {} ago",
        longest_max / 2 + 1,
        Mib(limit),
        Mib(failed),
        age(unix_ms().saturating_sub(failed_at_ms)),
    );
    let tokens = model.pass_cost_max;
    let items = (tokens / longest_max).max(1);
    let full = model.engine.pass_bytes(PassShape { items, cost: items * longest_max, longest: longest_max });
    if full > limit {
        let fitting = (u128::from(limit) * tokens as u128 / u128::from(full)).max(longest_max as u128);
        words += &format!(
            "; pass_tokens = {tokens} asks for {}, which is too large for this device: about {fitting} would fit",
            Mib(full)
        );
    }
    words
}

/// A time as text, in its largest unit.
fn age(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
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
        if self.not_loaded > 0 {
            let what = "what they would take is counted as free";
            writeln!(f, "\n{} model(s) could not be loaded: {what}", self.not_loaded)?;
        }
        write!(f, "\n{}", self.cuda)?;
        if let Some(cgroups) = &self.cgroups {
            writeln!(f, "\n{}", cgroups.in_words)?;
        }
        for model in &self.models {
            if !model.queues.is_empty() {
                writeln!(f, "\n{}: {}", model.name, model.queues_in_words())?;
            }
            if let Some(computes) = &model.computes {
                writeln!(f, "\n{}: computed in {computes}", model.name)?;
            }
            if let Some(program) = &model.program {
                writeln!(f, "\n{}: {program}", model.name)?;
            }
            if let Some(throughput) = &model.throughput {
                writeln!(f, "\n{}: {throughput}", model.name)?;
            }
            for words in model.problem.iter().chain(&model.unmeasured).chain(&model.ceilings) {
                writeln!(f, "\n{}: {words}", model.name)?;
            }
        }
        Ok(())
    }
}
