//! The plan of a history: workers, devices, callers and faults, all chosen from its seed. A plan is data, so that a history can
//! be shortened to its cause, and kept in a file (`plan_file.rs`).

use serde::{Deserialize, Serialize};

use super::agenda::{HOUR, MILLI, MINUTE, Micros, SECOND};
use super::broker::{Generation, QueueKind};
use super::odds::Odds;
use super::sharing::Sharing;
use super::shell::Sabotage;
use super::{Random, disks};

pub use super::fault::{Fault, FaultKind};

pub const MIB: u64 = 1 << 20;

/// Jobs that the callers of a history publish in an hour, all together.
const JOBS_PER_HOUR: usize = 1_150;

/// Faults in an hour.
const FAULTS_PER_HOUR: usize = 14;

/// Separate random numbers for programs, so that a seed without programs gives the same history as before.
const PROGRAMS: u64 = 0x0070_726f_6772_616d;

/// The same for withdrawals.
pub const WITHDRAWALS: u64 = 0x7769_7468_6472_6177;

/// The same for inputs in stores.
pub const STORES: u64 = 0x0073_746f_7265_7300;

/// The same for operators' commands.
pub const OPERATORS: u64 = 0x6f70_6572_6174_6f72;

/// The same for leaks.
const LEAKS: u64 = 0x6c65_616b_7300_0000;

/// The same for caps on replies.
const REPLY_CAPS: u64 = 0x7265_706c_7963_6170;

/// The same for large jobs.
const LARGE_JOBS: u64 = 0x006c_6172_6765_0000;

/// A whole history before it happens.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub seed: u64,
    /// How long callers publish and faults happen. After that everything must come to an end.
    pub busy: Micros,
    pub generation: Generation,
    pub queues: QueueKind,
    pub models: Vec<ModelPlan>,
    pub devices: Vec<DevicePlan>,
    pub workers: Vec<WorkerPlan>,
    pub callers: Vec<CallerPlan>,
    pub faults: Vec<Fault>,
    /// How long a worker may hold a job.
    pub job_limit: Micros,
    /// The broker's time limit for a delivery. It may be longer or shorter than the workers assume.
    pub consumer_timeout_ms: u64,
    /// The length limit of the job queue.
    pub jobs_max: u32,
    /// Device time that a large job may have in one go while others wait.
    pub large_turn: Micros,
    /// The most large jobs that a caller publishes at once.
    pub large_at_once: usize,
    /// How many of a hundred jobs their callers withdraw.
    pub withdrawn_percent: usize,
    /// How many of a hundred jobs refer to inputs in a store.
    pub referring_percent: usize,
    /// For each worker, how many of a thousand seconds have an operator's command that changes nothing.
    pub commanded_permille: usize,
    /// Bytes that leak with each pass on the device's own thread.
    pub leaked_by_pass: u64,
    /// Outputs that a job's replies may hold, if they have a limit.
    #[serde(default)]
    pub reply_outputs_max: Option<u32>,
    /// Further queues, weights, and the identities of callers.
    pub sharing: Sharing,
    /// How often rarer things happen.
    pub odds: Odds,
    /// A fault that tests put into every worker.
    pub sabotage: Option<Sabotage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPlan {
    /// Whether its passes run in several processes at once instead of on the device's thread.
    pub concurrent: bool,
    pub slots_max: u16,
    pub pass_cost_max: usize,
    /// Whether jobs that do not fit go to a queue for larger devices. No worker of the history declares it.
    pub larger: bool,
    /// Device microseconds for one unit of cost.
    pub micros_per_cost: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DevicePlan {
    pub total: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerPlan {
    pub device: usize,
    pub drain: Micros,
}

/// How a client uses the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub enum Style {
    /// Small jobs at a steady pace.
    Steady,
    /// Now and then a job of hundreds of items.
    Bulk,
    /// Many at once, then nothing.
    Bursts,
    /// Jobs that cannot be read, kill workers, never end, fail, do not fit, or lie in their headers.
    Hostile,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CallerPlan {
    /// Its index among the callers when the plan was made. Its random choices depend only on this.
    pub number: usize,
    pub style: Style,
    pub model: usize,
    /// Time between two jobs, on average.
    pub pause: Micros,
    /// The most jobs that it publishes.
    pub jobs_max: usize,
}

impl Plan {
    /// The plan of a seed, for so many microseconds.
    pub fn new(seed: u64, busy: Micros) -> Self {
        let mut random = Random::new(seed);
        let r = &mut random;
        let models = (0..1 + r.below(2)).map(|_| model(r)).collect::<Vec<_>>();
        let devices: Vec<_> =
            (0..1 + r.below(2)).map(|_| DevicePlan { total: [2048, 4096][r.below(2)] * MIB }).collect();
        let workers: Vec<_> = (0..1 + r.below(3))
            .map(|_| WorkerPlan {
                device: r.below(devices.len()),
                drain: (5 + r.below(25)) as Micros * SECOND,
            })
            .collect();
        let job_limit = (60 + r.below(120)) as Micros * SECOND;
        let timeout = if r.chance(10) { job_limit / 2 } else { job_limit * 5 / 4 };
        let jobs = usize::try_from((JOBS_PER_HOUR as u64 * busy).div_ceil(HOUR)).unwrap_or(JOBS_PER_HOUR);
        let callers = callers(r, models.len(), busy, jobs);
        let count =
            usize::try_from((FAULTS_PER_HOUR as u64 * busy).div_ceil(HOUR)).unwrap_or(FAULTS_PER_HOUR);
        let mut faults: Vec<_> = (0..count.max(2)).map(|_| fault(r, busy)).collect();
        if models.iter().any(|model| model.concurrent) {
            let mut random = Random::new(seed ^ PROGRAMS);
            faults.extend((0..count.div_ceil(3)).map(|_| program_fault(&mut random, busy)));
            faults.extend(disks::faults(seed, busy));
        }
        let on: Vec<_> = callers.iter().map(|caller| caller.model).collect();
        let sharing = Sharing::new(seed, models.len(), &on);
        faults.extend(sharing.faults(count, busy));
        let odds = Odds::new(seed);
        faults.extend(odds.faults(busy));
        faults.sort_by_key(|fault| fault.at);
        let is_serial = models.iter().all(|model| !model.concurrent);
        let mut of_large_jobs = Random::new(seed ^ LARGE_JOBS);
        Self {
            seed,
            busy,
            generation: if r.chance(50) { Generation::V3_10 } else { Generation::V4_0 },
            queues: if r.chance(60) { QueueKind::Quorum } else { QueueKind::Classic },
            models,
            devices,
            workers,
            callers,
            faults,
            job_limit,
            consumer_timeout_ms: timeout / 1_000,
            large_turn: [100 * MILLI, SECOND, 30 * SECOND][of_large_jobs.below(3)],
            large_at_once: 1 + of_large_jobs.below(6),
            withdrawn_percent: [0, 0, 3, 10, 30][Random::new(seed ^ WITHDRAWALS).below(5)],
            referring_percent: [0, 0, 5, 30][Random::new(seed ^ STORES).below(4)],
            commanded_permille: [0, 5, 30][Random::new(seed ^ OPERATORS).below(3)],
            // Programs return all their memory when they end.
            leaked_by_pass: if is_serial { leaked_by_pass(seed) } else { 0 },
            reply_outputs_max: [None, None, Some(6), Some(100)][Random::new(seed ^ REPLY_CAPS).below(4)],
            sharing,
            odds,
            sabotage: None,
            jobs_max: if r.chance(30) { 60 } else { 100_000 },
        }
    }
}

impl Plan {
    /// The same plan without shares and rare events: one queue for each model, equal parts of the devices, and callers that publish for
    /// themselves.
    #[must_use]
    pub fn plain(mut self) -> Self {
        (self.sharing, self.odds) = (Sharing::default(), Odds::default());
        self.reply_outputs_max = None;
        self.faults.retain(|fault| !fault.kind.is_of_more());
        self
    }

    /// The same with disks that are never full.
    #[must_use]
    pub fn with_empty_disks(mut self) -> Self {
        self.faults.retain(|fault| !matches!(fault.kind, FaultKind::DiskFull { .. }));
        self
    }

    /// Whether the broker closes channels before a worker gives a job up.
    pub fn has_short_timeout(&self) -> bool {
        self.consumer_timeout_ms * 1_000 < self.job_limit
    }
}

fn leaked_by_pass(seed: u64) -> u64 {
    [0, 0, 0, 1, 6][Random::new(seed ^ LEAKS).below(5)] * MIB
}

fn model(r: &mut Random) -> ModelPlan {
    ModelPlan {
        concurrent: r.chance(30),
        slots_max: [2, 8, 32, 64][r.below(4)],
        pass_cost_max: [256, 1024, 4096][r.below(3)],
        larger: r.chance(15),
        micros_per_cost: [20, 100, 300][r.below(3)],
    }
}

fn callers(r: &mut Random, models: usize, busy: Micros, jobs: usize) -> Vec<CallerPlan> {
    let mut styles = vec![Style::Steady, Style::Hostile];
    for _ in 0..r.below(3) {
        styles.push([Style::Steady, Style::Bulk, Style::Bursts][r.below(3)]);
    }
    // Bulk jobs are few, hostile ones some; steady callers make up the number.
    let few = |style: Style| match style {
        Style::Bulk => jobs / 40,
        Style::Hostile => jobs / 15,
        Style::Steady | Style::Bursts => 0,
    };
    let rest: usize = jobs.saturating_sub(styles.iter().map(|style| few(*style)).sum());
    let many = styles.iter().filter(|style| few(**style) == 0).count();
    let caller = |(number, style): (usize, &Style)| {
        let jobs_max = match few(*style) {
            0 => rest / many + 1,
            some => some,
        };
        CallerPlan {
            number,
            style: *style,
            model: r.below(models),
            pause: busy * 7 / 10 / (jobs_max as u64 + 1),
            jobs_max,
        }
    };
    styles.iter().enumerate().map(caller).collect()
}

fn fault(r: &mut Random, busy: Micros) -> Fault {
    let which = r.below(8);
    let mut lasts = (1 + r.below(60)) as Micros * SECOND;
    let kind = match r.below(26) {
        0..=2 => FaultKind::Kill { worker: which, after_actions: r.below(60) as u32 },
        3 => FaultKind::HostLost { worker: which },
        4..=6 => {
            lasts = if r.chance(60) { 0 } else { lasts };
            FaultKind::Cut { worker: which }
        }
        7 => {
            lasts = (1 + r.below(15)) as Micros * SECOND;
            FaultKind::BrokerRestart
        }
        8 => FaultKind::Alarm,
        9 => FaultKind::SlowConfirms,
        10 => FaultKind::Leaderless { model: which },
        11 | 12 => FaultKind::DeafCaller { caller: which },
        13 => FaultKind::RepliesDeleted { caller: which },
        14 => FaultKind::DeadDeleted { model: which },
        15..=17 => FaultKind::Stranger { device: which, percent: (30 + r.below(68)) as u8 },
        18 => FaultKind::Sick { device: which },
        19 => FaultKind::DeviceLost { worker: which, is_late: r.chance(50) },
        20 => FaultKind::Hang { device: which },
        21 => FaultKind::Pause { worker: which },
        22 => FaultKind::Drain { worker: which },
        23 => FaultKind::Stop { worker: which, twice: r.chance(30) },
        _ => FaultKind::Cancel { worker: which },
    };
    let latest = busy.saturating_sub(lasts).max(1);
    Fault { at: (r.bits() % latest).max(MINUTE.min(latest / 8)), lasts, kind }
}

fn program_fault(r: &mut Random, busy: Micros) -> Fault {
    let (worker, lasts) = (r.below(8), (1 + r.below(60)) as Micros * SECOND);
    let kind =
        if r.chance(70) { FaultKind::ProgramDies { worker } } else { FaultKind::CannotLoad { worker } };
    Fault { at: r.bits() % busy.saturating_sub(lasts).max(1), lasts, kind }
}
