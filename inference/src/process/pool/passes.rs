//! Gives a slot's process one pass after the other until the process has to end, and ends it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep_until};

use super::leak::Leak;
use super::pass_watch::{LOOK_EVERY, beside_pass};
use super::room::PATIENCE;
use super::slot::{SlotTask, closed};
use super::status::SlotState;
use crate::process::accepts::Accepts;
use crate::process::cost::{Costs, of_pass};
use crate::process::memory::{Entry, RunningPass};
use crate::process::pass::{PassEnd, PassJob};
use crate::process::peak::Measuring;
use crate::process::protocol::FailureKind;
use crate::process::warm::{PassLimits, Warm};

/// How often to ping an idle process, and to read what it holds on the device.
const PING_EVERY: Duration = Duration::from_secs(10);

/// How long an idle process keeps memory for its next pass, if others could use it. What it keeps counts as free for passes.
const TRIM_AFTER: Duration = Duration::from_secs(1);

/// The reason that a process is asked to end for.
const EVICTED: &str = "another model needs the memory";

/// Why a process is no longer wanted, or no longer there.
pub(super) enum EndReason {
    /// It is alive, and is asked to end.
    Asked(&'static str),
    /// It is dead or unusable.
    Failed,
    /// It died in a pass, or right after one.
    Crashed,
    /// It was killed because it did not stop a cancelled pass. This is not a failure: programs need not support `cancel`.
    Killed,
    Closing,
}

/// How a pass ended, as far as its process and the next one are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunOutcome {
    /// `killed`: its process was killed over it.
    Cancelled { killed: bool },
    /// A disk had no room. `is_in_the_way`: it would have room without the files of this process.
    DiskFull { is_in_the_way: bool },
    /// In another way.
    Ended,
}

/// A pass that may begin.
struct Begun {
    /// In the account, until the pass has ended.
    entry: Option<Entry>,
    /// What it costs, if it is measured.
    cost: Option<f64>,
    measuring: Measuring,
}

/// How a pass ends that does not begin, and what follows for its process.
type NotBegun = (PassEnd, Result<RunOutcome, EndReason>);

impl SlotTask {
    /// Gives a process passes until it is to end, and ends it.
    pub(super) async fn use_process(&mut self, mut warm: Warm, entry: &Entry) -> EndReason {
        let config = self.shared.config.clone();
        let reason = self.serve_passes(&mut warm, entry).await;
        self.update(SlotState::Ending { since: Instant::now() });
        match &reason {
            EndReason::Asked(why) => {
                tracing::info!(
                    model = config.name,
                    pid = warm.pid(),
                    why,
                    passes = warm.passes,
                    "ending a process"
                );
                self.snapshot(&warm).await;
                self.until_ended(entry, config.kill * 2 + PATIENCE, warm.end(config.kill, &config.name))
                    .await;
            }
            EndReason::Failed | EndReason::Crashed => {
                self.until_ended(entry, config.kill + PATIENCE, warm.end_now(config.kill, &config.name))
                    .await;
                let now = Instant::now();
                if matches!(reason, EndReason::Crashed) {
                    self.backoff.crashed(now);
                } else {
                    self.backoff.failed(now);
                }
            }
            EndReason::Killed => {
                tracing::info!(
                    model = config.name,
                    pid = warm.pid(),
                    "a cancelled pass did not stop: its process was killed"
                );
                self.until_ended(entry, config.kill + PATIENCE, warm.end_now(config.kill, &config.name))
                    .await;
            }
            EndReason::Closing => warm.end(config.kill, &config.name).await,
        }
        reason
    }

    async fn serve_passes(&mut self, warm: &mut Warm, entry: &Entry) -> EndReason {
        let mut looked = Instant::now();
        let mut leak = Leak::default();
        loop {
            let job = match self.next_job(warm, entry).await {
                Ok(job) => job,
                Err(reason) => return reason,
            };
            let number = self.shared.passes.fetch_add(1, Ordering::Relaxed);
            self.update(SlotState::Running { pass: number });
            self.shared.state().slots[self.index].status.keeps_memory = true;
            let ran = match self.run(warm, number, job).await {
                Ok(ran) => ran,
                Err(reason) => return reason,
            };
            let is_closing = *self.closing.borrow();
            if !warm.is_alive() {
                return match ran {
                    // Closing the pool ended the process.
                    _ if is_closing => EndReason::Closing,
                    RunOutcome::Cancelled { killed: true } => EndReason::Killed,
                    _ => EndReason::Crashed,
                };
            }
            if ran == (RunOutcome::DiskFull { is_in_the_way: true }) {
                tracing::warn!(
                    model = self.shared.config.name,
                    pid = warm.pid(),
                    "the files of the process leave no room for the files of a pass, or its scratch folder is gone or does not answer: replacing the process"
                );
                // As a failure, so that the next process waits if this is repeated.
                return EndReason::Failed;
            }
            if self.shared.config.recycle_after.is_some_and(|passes| warm.passes >= passes) {
                return EndReason::Asked("recycle_after");
            }
            if Leak::is_due(warm.passes) {
                if let Some(reason) = self.look_for_leak(warm, &mut leak).await {
                    return reason;
                }
                looked = Instant::now();
            }
            if looked.elapsed() > PING_EVERY {
                self.snapshot(warm).await;
                looked = Instant::now();
            }
        }
    }

    /// The next pass, while the process is idle.
    async fn next_job(&mut self, warm: &mut Warm, entry: &Entry) -> Result<PassJob, EndReason> {
        if entry.is_asked_to_end() {
            return Err(EndReason::Asked(EVICTED));
        }
        if let Some(job) = self.take_job_for(warm).await? {
            return Ok(job);
        }
        let config = self.shared.config.clone();
        let ending = config.idle.map(|idle| Instant::now() + idle);
        // A process that has run no pass keeps nothing.
        let mut trimming =
            (warm.passes > 0 && self.shared.is_beside_others()).then(|| Instant::now() + TRIM_AFTER);
        let (_idle, evict) = (entry.idle(), entry.evict_signal());
        let trim = Arc::clone(&self.shared.state().slots[self.index].trim);
        let mut pings = interval(PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pings.reset();
        loop {
            tokio::select! {
                () = self.wake.notified() => {
                    if let Some(job) = self.take_job_for(warm).await? {
                        return Ok(job);
                    }
                }
                _ = pings.tick() => {
                    self.ping(warm).await?;
                    self.snapshot(warm).await;
                }
                error = warm.misbehaved() => return Err(self.failed_idle(warm, &error)),
                () = trim.notified() => self.trim(warm).await?,
                () = at(trimming) => {
                    trimming = None;
                    self.trim(warm).await?;
                }
                () = evict.notified() => return Err(EndReason::Asked(EVICTED)),
                () = at(ending) => return Err(EndReason::Asked("idle_s")),
                () = closed(&mut self.closing) => return Err(EndReason::Closing),
            }
        }
    }

    /// Takes a waiting pass, unless the process has failed since its last one: the pass would be blamed for that.
    async fn take_job_for(&self, warm: &mut Warm) -> Result<Option<PassJob>, EndReason> {
        self.look_at_idle(warm).await?;
        Ok(self.take_job(warm.passes))
    }

    async fn look_at_idle(&self, warm: &mut Warm) -> Result<(), EndReason> {
        match warm.misbehaved_by_now().await {
            Some(error) => Err(self.failed_idle(warm, &error)),
            None => Ok(()),
        }
    }

    fn failed_idle(&self, warm: &Warm, error: &str) -> EndReason {
        let (model, stderr) = (&self.shared.config.name, warm.stderr_tail());
        tracing::warn!(model, pid = warm.pid(), error, stderr, "an idle process failed: replacing it");
        EndReason::Failed
    }

    /// Takes a waiting pass. If there is none, the slot becomes idle.
    pub(super) fn take_job(&self, passes: u64) -> Option<PassJob> {
        let mut state = self.shared.state();
        state.slots[self.index].status.passes = passes;
        state.drop_cancelled();
        if let Some(job) = state.waiting.pop_front() {
            return Some(job);
        }
        let is_idle = matches!(state.slots[self.index].status.state, SlotState::Idle { .. });
        if !is_idle {
            self.set(&mut state, SlotState::Idle { since: Instant::now() });
        }
        None
    }

    /// Runs a pass. The process has to end where the reason for that comes back: it failed before the pass, or did not answer after it.
    async fn run(&mut self, warm: &mut Warm, number: u64, mut job: PassJob) -> Result<RunOutcome, EndReason> {
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        let Begun { entry: _entry, cost, mut measuring } = match self.begin(warm, &mut job).await {
            Ok(begun) => begun,
            Err((end, ran)) => {
                job.end(end);
                return ran;
            }
        };
        let limits = PassLimits { model: config.name.clone(), item: config.item, kill: config.kill };
        // Its items take memory only until they are sent.
        let request = std::mem::take(&mut job.request);
        let mut end = tokio::select! {
            end = warm.run(number, request, &limits, &job.events, &mut job.cancellation) => end,
            () = closed(&mut self.closing) => {
                warm.end_now(config.kill, &config.name).await;
                PassEnd::Cancelled { killed: true }
            }
            never = beside_pass(&shared.options.account, &mut self.last, self.estimated.is_none(), LOOK_EVERY) => match never {},
            never = measuring.go_on() => match never {},
        };
        if matches!(end, PassEnd::Done { .. }) {
            self.backoff.succeeded();
        }
        let measured = self.measured(measuring, warm).await;
        self.add_memory(&mut end, measured.as_ref().ok().copied().flatten(), cost, warm);
        let ran = match &end {
            PassEnd::Cancelled { killed } => RunOutcome::Cancelled { killed: *killed },
            PassEnd::DiskFull { asked, .. } => {
                RunOutcome::DiskFull { is_in_the_way: warm.is_in_the_way(*asked).await }
            }
            _ => RunOutcome::Ended,
        };
        job.end(end);
        measured.map(|_| ran)
    }

    /// Does what has to be done before a pass, which may be to wait.
    async fn begin(&mut self, warm: &mut Warm, job: &mut PassJob) -> Result<Begun, NotBegun> {
        let shared = Arc::clone(&self.shared);
        if let Some((item, why)) = refused(job, &warm.ready().accepts) {
            let (kind, detail) = (FailureKind::Input, format!("the item {why}"));
            let end = PassEnd::Failed { kind, item: Some(item), detail, stderr: String::new() };
            return Err((end, Ok(RunOutcome::Ended)));
        }
        // The pass is not to blame, and another process may run it.
        let failed = |reason| -> NotBegun {
            (PassEnd::NotRun { reason: "its process failed before it began".to_owned() }, Err(reason))
        };
        let costs: Vec<Costs> = job.request.items.iter().map(Costs::new).collect();
        let cost = of_pass(&costs, shared.config.vram.per).filter(|_| shared.config.vram.learn);
        let cost = cost.filter(|cost| shared.state().learned.should_measure(*cost));
        job.request.measure = cost.is_some();
        if job.request.measure {
            // What an earlier pass left would count for this one.
            self.trim(warm).await.map_err(failed)?;
        }
        let entry = self.enter_pass(warm, job).await;
        if entry.is_none() && job.cancellation.is_cancelled() {
            let ran = RunOutcome::Cancelled { killed: false };
            return Err((PassEnd::Cancelled { killed: false }, Ok(ran)));
        }
        let mut measuring = Measuring::Nothing;
        if job.request.measure {
            let loaded = self.estimated.as_ref().map(|estimated| estimated.loaded);
            let (account, keeper) = (&shared.options.account, warm.keeper_pid());
            measuring = Measuring::start(account, keeper, self.base, loaded.as_ref()).await;
        }
        // To enter it may have taken a minute.
        self.look_at_idle(warm).await.map_err(failed)?;
        Ok(Begun { entry, cost, measuring })
    }

    /// Adds to the end of a pass what was seen of the device. `cost`: of a pass that was to be measured.
    fn add_memory(&self, end: &mut PassEnd, sampled: Option<u64>, cost: Option<f64>, warm: &Warm) {
        match end {
            PassEnd::Done { peak } => {
                *peak = sampled.max(*peak);
                if let Some(cost) = cost {
                    let mut state = self.shared.state();
                    match *peak {
                        Some(peak) => state.learned.took(cost, peak),
                        None => state.learned.missed(cost),
                    }
                }
            }
            // The last figure from before the death: now the process's own memory is free again.
            PassEnd::OutOfMemory { report, .. } if !warm.is_alive() => {
                report.free = report.free.or(self.last.map(|last| last.alive.reading.free));
            }
            _ => {}
        }
    }

    /// Enters a pass in the account, so that no program is loaded into what it may take. `None`: it was cancelled before, or the pool
    /// closes.
    async fn enter_pass(&mut self, warm: &Warm, job: &mut PassJob) -> Option<Entry> {
        let resident = { self.shared.state().slots[self.index].status.resident_bytes };
        let pass = RunningPass {
            keeper: Some(warm.keeper_pid()),
            resident,
            budget: job.request.budget.unwrap_or(0),
            exclusive: job.request.exclusive,
        };
        let account = &self.shared.options.account;
        tokio::select! {
            entry = account.pass(pass) => Some(entry),
            _ = job.cancellation.wait() => None,
            () = closed(&mut self.closing) => None,
        }
    }

    /// What the pass took, if that could be measured. The errors of [`trim`](Self::trim).
    async fn measured(&mut self, measuring: Measuring, warm: &mut Warm) -> Result<Option<u64>, EndReason> {
        match measuring {
            Measuring::Told(sampler) => Ok(Some(sampler.stop().await)),
            Measuring::Lost(mut difference) if warm.is_alive() => {
                difference.snapshot().await;
                self.trim(warm).await?;
                let after = self.shared.options.account.snapshot().await;
                Ok(after.and_then(|after| difference.peak(&after)))
            }
            Measuring::Lost(_) | Measuring::Nothing => Ok(None),
        }
    }
}

/// The first item that the model does not take, and why.
fn refused(job: &PassJob, accepts: &Accepts) -> Option<(usize, String)> {
    job.request.items.iter().enumerate().find_map(|(at, item)| Some((at, accepts.refusal(item)?)))
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}
