//! A slot for one process: starts the process when there is work and memory, lets it run passes (`passes.rs`) until it ends, and waits
//! until the device has its memory back.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt as _;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Duration, Instant, timeout};

use super::Shared;
use super::backoff::Backoff;
use super::passes::EndReason;
use super::room::{Admitted, PATIENCE};
use super::state::State;
use super::status::{SlotState, Unavailable};
use crate::process::aside::Aside;
use crate::process::child::START_LIMIT;
use crate::process::config::Mode;
use crate::process::difference::{Estimate, Evidence};
use crate::process::load_watch::LoadWatch;
use crate::process::memory::{Claim, Entry, Snapshot};
use crate::process::program_revision::RevisionOfFiles;
use crate::process::warm::{LoadError, Warm};

/// The task of a slot. `first` receives how the first process was loaded; with it the slot starts a process without waiting for work.
pub(super) async fn serve(
    shared: Arc<Shared>,
    index: usize,
    wake: Arc<Notify>,
    first: Option<oneshot::Sender<Result<(), LoadError>>>,
) {
    let closing = shared.closing.subscribe();
    let mut slot = SlotTask {
        shared,
        index,
        wake,
        closing,
        backoff: Backoff::default(),
        last: None,
        base: 0,
        estimated: None,
        aside: Aside::default(),
    };
    let is_once = matches!(slot.shared.config.mode, Mode::Once(_));
    let mut first = first;
    loop {
        let serving = async {
            if !is_once {
                return slot.serve_warm(first.take()).await;
            }
            if let Some(first) = first.take() {
                let _ = first.send(Ok(()));
            }
            slot.serve_once().await;
        };
        // The panic dropped the process, which ended it, and the pass, which failed.
        if AssertUnwindSafe(serving).catch_unwind().await.is_ok() {
            return;
        }
        let model = &slot.shared.config.name;
        tracing::error!(
            model,
            "bug: the task that runs a process of the model panicked (see above): the process is replaced"
        );
        slot.backoff.failed(Instant::now());
        // A panic in here must not end the slot either.
        let _ = AssertUnwindSafe(slot.reclaim(None)).catch_unwind().await;
    }
}

pub(super) struct SlotTask {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) wake: Arc<Notify>,
    pub(super) closing: watch::Receiver<bool>,
    pub(super) backoff: Backoff,
    /// What the current or last process held at the last snapshot.
    pub(super) last: Option<Claim>,
    /// What the process held when it was loaded.
    pub(super) base: u64,
    /// What was estimated when it was loaded, on a device that does not tell processes apart.
    pub(super) estimated: Option<Estimated>,
    /// Where the files of its programs are written.
    pub(super) aside: Aside,
}

/// What was estimated of a process by difference.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimated {
    /// What its load was recorded to need.
    pub(super) needed: u64,
    /// The device when it was loaded.
    pub(super) loaded: Snapshot,
}

impl SlotTask {
    async fn serve_warm(&mut self, mut first: Option<oneshot::Sender<Result<(), LoadError>>>) {
        // After a panic one slot has to find out when an unavailable model can be loaded again.
        let mut wanted = first.is_some() || self.shared.state().unavailable.is_some();
        loop {
            if !wanted && !self.wait_for_work().await {
                return;
            }
            let loaded = match self.admit(first.is_some()).await {
                Ok(Admitted::Room(reserved)) => self.load(reserved, first.is_some()).await,
                Ok(Admitted::Unwanted) => {
                    wanted = false;
                    continue;
                }
                Ok(Admitted::Closing) => return,
                Err(error) => Err(error),
            };
            let (warm, entry) = match loaded {
                Ok(loaded) => loaded,
                Err(error) => {
                    if !*self.closing.borrow() {
                        self.load_failed(&error);
                    }
                    if let Some(first) = first.take() {
                        let _ = first.send(Err(error));
                        return;
                    }
                    self.reclaim(None).await;
                    // One slot must find out when the model can be loaded again.
                    wanted = self.shared.state().unavailable.is_some();
                    continue;
                }
            };
            if let Some(first) = first.take() {
                let _ = first.send(Ok(()));
            }
            let reason = self.use_process(warm, &entry).await;
            if matches!(reason, EndReason::Closing) {
                return;
            }
            self.reclaim(Some(entry)).await;
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
                state.drop_cancelled();
                if let Some(found) = state.other_revision.clone()
                    && !state.is_loaded()
                {
                    // What waits for a process, and what comes until the worker restarts, is for other workers.
                    let served = state.revision.clone();
                    self.mark_unavailable(&mut state, &LoadError::OtherRevision { found, served });
                }
                // A process of another revision would only be refused again.
                let is_wanted = !state.waiting.is_empty() && state.other_revision.is_none();
                self.set(&mut state, if is_wanted { SlotState::Starting } else { SlotState::Unloaded });
                if is_wanted {
                    return true;
                }
            }
            tokio::select! {
                () = self.wake.notified() => {}
                () = closed(&mut self.closing) => return false,
            }
        }
    }

    /// Starts a process, and takes it into use. Its `reserved` room is kept until the process has taken it.
    async fn load(&mut self, reserved: Entry, is_first: bool) -> Result<(Warm, Entry), LoadError> {
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        self.update(SlotState::Loading);
        let files = self.revision_of_files().await?;
        let before = shared.options.account.snapshot().await;
        let began = Instant::now();
        let mut reserved = Some(reserved);
        let (mut warm, entry) = self.start(&mut reserved, before, is_first).await?;
        let needed = self.enter_loaded(&warm, &entry, reserved, before).await;
        let revision = files.with(warm.ready().revision.as_deref());
        let accepted = shared.state().accept(revision, warm.ready());
        if let Err(error) = accepted {
            self.until_ended(&entry, config.kill * 2 + PATIENCE, warm.end(config.kill, &config.name)).await;
            return Err(error);
        }
        let held_bytes = self.base;
        let mut state = shared.state();
        needed.into_iter().for_each(|bytes| state.learned.loaded(bytes));
        if state.unavailable.take().is_some() {
            tracing::info!(model = config.name, "the model has a process again");
        }
        state.slots[self.index].status.loaded(warm.pid(), held_bytes);
        drop(state);
        let took_ms = began.elapsed().as_millis();
        tracing::info!(model = config.name, pid = warm.pid(), held_bytes, took_ms, "process loaded");
        Ok((warm, entry))
    }

    /// Limited in time: the files may be on a file system that hangs, and the reserved room is lost to others meanwhile.
    async fn revision_of_files(&self) -> Result<RevisionOfFiles, LoadError> {
        let config = &self.shared.config;
        let mut closing = self.closing.clone();
        tokio::select! {
            files = timeout(config.load, config.revision_of_files()) => {
                files.unwrap_or_else(|_| Err(slow_files(config.load))).map_err(LoadError::Start)
            }
            () = closed(&mut closing) => Err(LoadError::Start("the worker is ending".to_owned())),
        }
    }

    /// Starts a process, and waits until it is loaded. Gives its `reserved` room up if it is to end, and does not.
    async fn start(
        &mut self,
        reserved: &mut Option<Entry>,
        before: Option<Snapshot>,
        is_first: bool,
    ) -> Result<(Warm, Entry), LoadError> {
        let shared = Arc::clone(&self.shared);
        let (config, account) = (&shared.config, &shared.options.account);
        let (entered, index) = (OnceLock::new(), self.index);
        let started = |keeper| {
            entered.get_or_init(|| account.enter(keeper));
            shared.state().slots[index].status.loading_under = Some(keeper);
        };
        let holds = |keeper, bytes| {
            account.note_held(keeper, bytes);
            shared.state().slots[index].status.holds(bytes);
        };
        let mut watch = LoadWatch::new(account, before, holds);
        let mut closing = self.closing.clone();
        let (options, stop) = (&shared.options, closed(&mut closing));
        let loading = Warm::load(config, options, &self.aside, started, &mut watch, is_first, stop);
        let does_not_end = || {
            // What it has taken of its room is in its entry.
            drop(reserved.take());
            entered.get().into_iter().for_each(Entry::is_stuck);
            self.update(SlotState::Ending { since: Instant::now() });
        };
        let limit = START_LIMIT * 2 + config.load + config.kill * 2 + PATIENCE;
        let loaded = self.unless_long(limit, loading, does_not_end).await;
        let warm = loaded.inspect_err(|_| self.last = watch.claim())?;
        let entry = entered.into_inner().unwrap_or_else(|| account.enter(warm.keeper_pid()));
        Ok((warm, entry))
    }

    /// Enters what a process holds that was just loaded; then its `reserved` room is no longer needed. What its load needed, if anything is
    /// known.
    async fn enter_loaded(
        &mut self,
        warm: &Warm,
        entry: &Entry,
        reserved: Option<Entry>,
        before: Option<Snapshot>,
    ) -> Option<u64> {
        let (Estimate { held, sure, needed }, is_estimated) = self.loaded(warm, before).await;
        entry.holds(held, is_estimated);
        drop(reserved);
        if self.shared.state().unavailable.is_some() {
            entry.is_kept();
        }
        entry.is_loaded();
        let snapshot = self.shared.options.account.snapshot().await.or(before);
        self.last = snapshot.map(|alive| Claim { alive, held, sure });
        self.estimated = snapshot
            .filter(|_| is_estimated)
            .map(|loaded| Estimated { needed: needed.unwrap_or_default(), loaded });
        self.base = held;
        needed
    }

    /// What the process holds that was just loaded, and whether that is an estimate. `before` is from before it was started.
    async fn loaded(&self, warm: &Warm, before: Option<Snapshot>) -> (Estimate, bool) {
        let account = &self.shared.options.account;
        let told = account.held_under(warm.keeper_pid()).await;
        let now = account.snapshot().await;
        let (declared, said) = (self.shared.config.vram.base_bytes, warm.ready().weights);
        // Nothing, although it should hold something: it takes the memory in a process that is not its own, as a client of a daemon does.
        let is_elsewhere = told == Some(0) && (declared.is_some_and(|bytes| bytes > 0) || said > 0);
        if let Some(held) = told.filter(|_| !is_elsewhere) {
            return (Estimate { held, sure: held, needed: Some(held) }, false);
        }
        let evidence = Evidence {
            // Not the difference of free memory, so that what the worker itself or another of its programs took meanwhile does not count.
            taken: now.zip(before).map(|(now, before)| now.taken_since(&before)),
            declared,
            said,
            earlier: self.shared.state().learned.least_load(),
        };
        let estimate = evidence.estimate();
        let total = now.map_or(u64::MAX, |now| now.reading.total);
        (Estimate { needed: estimate.needed.map(|bytes| bytes.min(total)), ..estimate }, true)
    }

    fn load_failed(&mut self, error: &LoadError) {
        self.backoff.failed(Instant::now());
        let name = &self.shared.config.name;
        tracing::warn!(
            model = name,
            error = error.to_string(),
            stderr = error.stderr(),
            "cannot load the model"
        );
        self.unavailable(error, true);
    }

    /// Marks the model as unavailable, unless another process of it is loaded. Jobs of its passes go to other workers until it is
    /// loaded again. `replaces`: the reason replaces an earlier one.
    pub(super) fn unavailable(&self, error: &LoadError, replaces: bool) {
        let mut state = self.shared.state();
        if state.is_loaded() || (state.unavailable.is_some() && !replaces) {
            return;
        }
        self.mark_unavailable(&mut state, error);
    }

    /// Marks the model as unavailable whatever its other processes do.
    pub(super) fn mark_unavailable(&self, state: &mut State, error: &LoadError) {
        let since = state.unavailable.as_ref().map_or_else(Instant::now, |unavailable| unavailable.since);
        let (reason, stderr) = (error.to_string(), error.stderr().to_owned());
        let attempts = self.backoff.failures();
        state.unavailable_by = self.index;
        state.unavailable = Some(Unavailable { reason: reason.clone(), stderr, since, attempts });
        state.refuse_waiting(&reason);
    }

    pub(super) fn update(&self, to: SlotState) {
        self.set(&mut self.shared.state(), to);
    }

    pub(super) fn set(&self, state: &mut State, to: SlotState) {
        state.slots[self.index].status.state = to;
    }
}

fn slow_files(limit: Duration) -> String {
    format!("reading the files of the model's revision took longer than {} s (load_s)", limit.as_secs_f64())
}

pub(super) async fn closed(closing: &mut watch::Receiver<bool>) {
    // `Err` means that the pool is gone.
    let _ = closing.wait_for(|closing| *closing).await;
}
