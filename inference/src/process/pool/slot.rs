//! A slot for one process: starts the process when there is work and memory, gives it passes, ends it, and waits until its memory
//! returned.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep_until};

use super::backoff::Backoff;
use super::leak::Leak;
use super::room::PATIENCE;
use super::status::{SlotState, Unavailable};
use super::{Shared, State, refuse_waiting};
use crate::process::accepts::Accepts;
use crate::process::config::Mode;
use crate::process::cost::{Costs, of_pass};
use crate::process::memory::{Claim, Entry};
use crate::process::pass::{PassEnd, PassJob};
use crate::process::peak::Sampler;
use crate::process::protocol::FailureKind;
use crate::process::warm::{LoadError, PassLimits, Warm};

/// How often an idle process is asked whether it is there, and the device what it holds.
const PING_EVERY: Duration = Duration::from_secs(10);

/// Why a process ends that was asked to.
const EVICTED: &str = "another model needs the memory";

/// The task of a slot. `first` receives how the first process was loaded; with it the slot starts a process without waiting for work.
pub(super) async fn serve(
    shared: Arc<Shared>,
    index: usize,
    bell: Arc<Notify>,
    first: Option<oneshot::Sender<Result<(), LoadError>>>,
) {
    let closing = shared.closing.subscribe();
    let mut slot = SlotTask {
        shared,
        index,
        bell,
        closing,
        backoff: Backoff::default(),
        last: None,
        base: 0,
        reserved: None,
    };
    if matches!(slot.shared.config.mode, Mode::Once(_)) {
        if let Some(first) = first {
            let _ = first.send(Ok(()));
        }
        return slot.serve_once().await;
    }
    slot.serve_warm(first).await;
}

pub(super) struct SlotTask {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) bell: Arc<Notify>,
    pub(super) closing: watch::Receiver<bool>,
    pub(super) backoff: Backoff,
    /// What the process that lives, or lived last, held when it was last looked.
    pub(super) last: Option<Claim>,
    /// What the process held when it was loaded.
    pub(super) base: u64,
    /// Room on the device for the next process.
    pub(super) reserved: Option<Entry>,
}

/// Why a process is no longer wanted, or no longer there.
pub(super) enum Leave {
    /// It is alive, and is asked to end.
    Asked(&'static str),
    /// It is dead or unusable.
    Failed,
    /// It was killed because it did not stop a cancelled pass. That is no failure: a program need not hear `cancel`.
    Killed,
    Closing,
}

/// How a pass ended, as far as its process and the next one are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ran {
    Done,
    Cancelled,
    Failed,
}

impl SlotTask {
    async fn serve_warm(&mut self, mut first: Option<oneshot::Sender<Result<(), LoadError>>>) {
        let mut wanted = first.is_some();
        loop {
            if !wanted && !self.wait_for_work().await {
                return;
            }
            let loaded = match self.admit(first.is_some()).await {
                Ok(true) => self.load().await,
                Ok(false) => return,
                Err(error) => Err(error),
            };
            let (warm, entry) = match loaded {
                Ok(loaded) => loaded,
                Err(error) => {
                    self.load_failed(&error);
                    self.reclaim().await;
                    if let Some(first) = first.take() {
                        let _ = first.send(Err(error));
                        return;
                    }
                    // One slot has to find out when it can be loaded again.
                    wanted = self.shared.state().unavailable.is_some();
                    continue;
                }
            };
            if let Some(first) = first.take() {
                let _ = first.send(Ok(()));
            }
            let leave = self.use_process(warm, entry).await;
            if matches!(leave, Leave::Closing) {
                return;
            }
            self.reclaim().await;
            wanted = self.shared.state().unavailable.is_some();
        }
    }

    /// Waits until there is work that no other slot takes; false when the pool is closing.
    async fn wait_for_work(&mut self) -> bool {
        loop {
            {
                let mut state = self.shared.state();
                if state.closed {
                    return false;
                }
                let is_wanted = !state.waiting.is_empty();
                self.set(&mut state, if is_wanted { SlotState::Starting } else { SlotState::Unloaded });
                if is_wanted {
                    return true;
                }
            }
            tokio::select! {
                () = self.bell.notified() => {}
                () = closed(&mut self.closing) => return false,
            }
        }
    }

    /// Starts a process. The room for it is kept until it has taken it.
    async fn load(&mut self) -> Result<(Warm, Entry), LoadError> {
        let reserved = self.reserved.take();
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        let book = &shared.options.book;
        let declared = config.vram.base_bytes.unwrap_or(0);
        self.update(SlotState::Loading);
        let before = book.look().await;
        self.last = Some(Claim { alive: before, held: 0 });
        let mut entry = None;
        let began = Instant::now();
        let mut closing = self.closing.clone();
        let started = |keeper| entry = Some(book.enter(keeper));
        let loading = Warm::load(&shared.options.launcher, config, book, started, closed(&mut closing));
        let warm = self.unless_long(config.load + config.kill * 2 + PATIENCE, loading).await?;
        let entry = entry.unwrap_or_else(|| book.enter(warm.keeper_pid()));
        let look = book.look().await;
        let held = match book.held_under(warm.keeper_pid()).await {
            Some(held) => held,
            // By difference, which counts what others took meanwhile too: then it waits for more than it must. Or as the program
            // says, whichever is more; but no more than there is.
            None => {
                let taken = before.reading.free.saturating_sub(look.reading.free);
                taken.max(declared).max(warm.ready().weights).min(look.reading.total)
            }
        };
        entry.holds(held);
        if shared.state().unavailable.is_some() {
            entry.is_kept();
        }
        entry.is_loaded();
        let look = book.look().await;
        drop(reserved);
        self.last = Some(Claim { alive: look, held });
        self.base = held;
        let revision = warm.ready().revision.clone().unwrap_or_else(|| config.revision());
        let mut state = shared.state();
        state.learned.loaded(held);
        state.revision = revision;
        state.ready = Some(warm.ready().clone());
        if state.unavailable.take().is_some() {
            tracing::info!(model = config.name, "the model can be loaded again");
        }
        let status = &mut state.slots[self.index].status;
        (status.pid, status.held_bytes, status.passes) = (Some(warm.pid()), held, 0);
        status.starts += 1;
        drop(state);
        let took_ms = began.elapsed().as_millis();
        tracing::info!(model = config.name, pid = warm.pid(), held_bytes = held, took_ms, "process loaded");
        Ok((warm, entry))
    }

    fn load_failed(&mut self, error: &LoadError) {
        self.backoff.failed();
        let name = &self.shared.config.name;
        tracing::warn!(model = name, %error, stderr = error.stderr(), "cannot load the model");
        self.unavailable(error, true);
    }

    /// The model has no process now, unless others of its processes are loaded: they go on. The jobs of its passes go to other
    /// workers, until it is loaded again. `replaces`: the reason takes the place of an earlier one.
    pub(super) fn unavailable(&self, error: &LoadError, replaces: bool) {
        let mut state = self.shared.state();
        if state.is_loaded() || (state.unavailable.is_some() && !replaces) {
            return;
        }
        let since = state.unavailable.as_ref().map_or_else(Instant::now, |unavailable| unavailable.since);
        let (reason, stderr) = (error.to_string(), error.stderr().to_owned());
        let attempts = self.backoff.failures();
        state.unavailable = Some(Unavailable { reason: reason.clone(), stderr, since, attempts });
        refuse_waiting(&mut state, &reason);
    }

    /// Gives a process passes until it is to end, and ends it.
    async fn use_process(&mut self, mut warm: Warm, entry: Entry) -> Leave {
        let config = self.shared.config.clone();
        let leave = self.serve_passes(&mut warm, &entry).await;
        self.update(SlotState::Ending { since: Instant::now() });
        match &leave {
            Leave::Asked(why) => {
                tracing::info!(
                    model = config.name,
                    pid = warm.pid(),
                    why,
                    passes = warm.passes,
                    "ending a process"
                );
                self.look(&warm).await;
                self.unless_long(config.kill * 2 + PATIENCE, warm.end(config.kill, &config.name)).await;
            }
            Leave::Failed => {
                self.backoff.failed();
                self.unless_long(config.kill + PATIENCE, warm.end_now(config.kill, &config.name)).await;
            }
            Leave::Killed => {
                tracing::info!(
                    model = config.name,
                    pid = warm.pid(),
                    "a cancelled pass did not stop: its process was killed"
                );
                self.unless_long(config.kill + PATIENCE, warm.end_now(config.kill, &config.name)).await;
            }
            Leave::Closing => warm.end(config.kill, &config.name).await,
        }
        drop(entry);
        leave
    }

    async fn serve_passes(&mut self, warm: &mut Warm, entry: &Entry) -> Leave {
        let mut looked = Instant::now();
        let mut leak = Leak::default();
        loop {
            let job = match self.next_job(warm, entry).await {
                Ok(job) => job,
                Err(leave) => return leave,
            };
            let number = self.shared.passes.fetch_add(1, Ordering::Relaxed);
            self.update(SlotState::Running { pass: number });
            let ran = self.run(warm, number, job).await;
            if !warm.is_alive() {
                return if ran == Ran::Cancelled { Leave::Killed } else { Leave::Failed };
            }
            if ran == Ran::Done {
                self.backoff.succeeded();
            }
            if self.shared.config.recycle_after.is_some_and(|passes| warm.passes >= passes) {
                return Leave::Asked("recycle_after");
            }
            if Leak::is_due(warm.passes) {
                if let Some(leave) = self.look_for_leak(warm, &mut leak).await {
                    return leave;
                }
                looked = Instant::now();
            }
            if looked.elapsed() > PING_EVERY {
                self.look(warm).await;
                looked = Instant::now();
            }
        }
    }

    /// The next pass, while the process is idle.
    async fn next_job(&mut self, warm: &mut Warm, entry: &Entry) -> Result<PassJob, Leave> {
        if entry.is_asked_to_end() {
            return Err(Leave::Asked(EVICTED));
        }
        if let Some(job) = self.take_job(warm.passes) {
            return Ok(job);
        }
        let config = self.shared.config.clone();
        let ending = config.idle.map(|idle| Instant::now() + idle);
        let (_idle, evict) = (entry.idle(), entry.evict_signal());
        let trim = Arc::clone(&self.shared.state().slots[self.index].trim);
        let mut pings = interval(PING_EVERY);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        pings.reset();
        loop {
            tokio::select! {
                () = self.bell.notified() => {
                    if let Some(job) = self.take_job(warm.passes) {
                        return Ok(job);
                    }
                }
                _ = pings.tick() => {
                    if let Err(error) = warm.ping().await {
                        tracing::warn!(model = config.name, pid = warm.pid(), error, "ping a process");
                        return Err(Leave::Failed);
                    }
                    self.look(warm).await;
                }
                error = warm.misbehaved() => {
                    tracing::warn!(model = config.name, pid = warm.pid(), error, stderr = warm.stderr_tail(), "an idle process failed");
                    return Err(Leave::Failed);
                }
                () = trim.notified() => {
                    warm.trim().await;
                    self.look(warm).await;
                }
                () = evict.notified() => return Err(Leave::Asked(EVICTED)),
                () = at(ending) => return Err(Leave::Asked("idle_s")),
                () = closed(&mut self.closing) => return Err(Leave::Closing),
            }
        }
    }

    /// A pass that waits; without one the slot is idle from here on.
    pub(super) fn take_job(&self, passes: u64) -> Option<PassJob> {
        let mut state = self.shared.state();
        state.slots[self.index].status.passes = passes;
        while let Some(job) = state.waiting.pop_front() {
            if job.cancellation.is_cancelled() {
                job.end(PassEnd::Cancelled { killed: false });
                continue;
            }
            return Some(job);
        }
        let is_idle = matches!(state.slots[self.index].status.state, SlotState::Idle { .. });
        if !is_idle {
            self.set(&mut state, SlotState::Idle { since: Instant::now() });
        }
        None
    }

    /// Runs a pass.
    async fn run(&mut self, warm: &mut Warm, number: u64, mut job: PassJob) -> Ran {
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        if let Some((item, why)) = refused(&job, &warm.ready().accepts) {
            let detail = format!("the item {why}");
            job.end(PassEnd::Failed {
                kind: FailureKind::Input,
                item: Some(item),
                detail,
                stderr: String::new(),
            });
            return Ran::Done;
        }
        let costs: Vec<Costs> = job.request.items.iter().map(Costs::new).collect();
        let cost = of_pass(&costs, config.vram.per).filter(|_| config.vram.learn);
        job.request.measure = cost.is_some_and(|cost| shared.state().learned.should_measure(cost));
        let sampler = if job.request.measure {
            Sampler::start(&shared.options.book, warm.keeper_pid(), self.base).await
        } else {
            None
        };
        let limits = PassLimits { model: config.name.clone(), item: config.item, kill: config.kill };
        let end = tokio::select! {
            end = warm.run(number, &job.request, &limits, &job.events, &mut job.cancellation) => end,
            () = closed(&mut self.closing) => {
                warm.end_now(config.kill, &config.name).await;
                PassEnd::Cancelled { killed: true }
            }
        };
        let sampled = match sampler {
            Some(sampler) => sampler.stop().await,
            None => None,
        };
        if let (PassEnd::Done { peak }, Some(cost)) = (&end, cost.filter(|_| job.request.measure))
            && let Some(peak) = sampled.max(*peak)
        {
            shared.state().learned.took(cost, peak);
        }
        let ran = match end {
            PassEnd::Done { .. } => Ran::Done,
            PassEnd::Cancelled { .. } => Ran::Cancelled,
            _ => Ran::Failed,
        };
        job.end(end);
        ran
    }

    pub(super) fn update(&self, to: SlotState) {
        self.set(&mut self.shared.state(), to);
    }

    fn set(&self, state: &mut State, to: SlotState) {
        state.slots[self.index].status.state = to;
    }
}

/// The first item that the model does not take, and why.
fn refused(job: &PassJob, accepts: &Accepts) -> Option<(usize, String)> {
    job.request.items.iter().enumerate().find_map(|(at, item)| Some((at, accepts.refusal(item)?)))
}

pub(super) async fn closed(closing: &mut watch::Receiver<bool>) {
    // An error: the pool is gone.
    let _ = closing.wait_for(|closing| *closing).await;
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}
