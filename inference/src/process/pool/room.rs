//! The device memory of one process slot: reserved for its next process, held by its process, or not yet returned.

use std::sync::Arc;

use tokio::time::{Duration, Instant, sleep, timeout};

use super::leak::Leak;
use super::passes::EndReason;
use super::slot::{Estimated, SlotTask, closed};
use super::status::SlotState;
use crate::process::device_view::Reading;
use crate::process::memory::{Claim, Entry};
use crate::process::warm::{LoadError, Warm};

/// Memory that comes back within this time is nobody's concern: drivers take a moment.
const BACK_SOON: Duration = Duration::from_secs(1);

/// How often an error names memory that has not come back.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// If what a process holds without caches changes by more than this, its passes are measured again.
const CHANGED: u64 = 64 << 20;

/// How long a model without a process waits for memory before its jobs go to other workers. They hold slots here, and its passes
/// hold permits that other models need.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// What a slot does after waiting for room.
pub(super) enum Admitted {
    /// Start a process, for which this room is reserved.
    Room(Entry),
    /// Start none: the passes that it was for were cancelled.
    Unwanted,
    Closing,
}

/// Why a model that needs so many bytes is not loaded. `reading`: the device's last one; the default if it could not be read.
fn no_memory(bytes: u64, reading: Reading) -> LoadError {
    if reading == Reading::default() {
        let reason = "the memory of the device cannot be read, so it is not known whether the model has room";
        return LoadError::Start(reason.to_owned());
    }
    LoadError::NoMemory { bytes, reading }
}

impl SlotTask {
    /// Waits until a process may be started, and the device has room for it. The first process has `load_s` for that, and is started
    /// even if no pass waits.
    ///
    /// # Errors
    /// The device is too small; or the first process has waited for too long.
    pub(super) async fn admit(&self, is_first: bool) -> Result<Admitted, LoadError> {
        let mut closing = self.closing.clone();
        let mut room = std::pin::pin!(self.wait_for_room(is_first));
        loop {
            tokio::select! {
                // Do not take room that nobody wants any more.
                biased;
                () = closed(&mut closing) => return Ok(Admitted::Closing),
                () = self.wake.notified(), if !is_first => {
                    if !self.shared.state().wants_process() {
                        return Ok(Admitted::Unwanted);
                    }
                }
                reserved = &mut room => return Ok(Admitted::Room(reserved?)),
            }
        }
    }

    async fn wait_for_room(&self, is_first: bool) -> Result<Entry, LoadError> {
        self.back_off().await;
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        let bytes = shared.resident(&shared.state()).unwrap_or(0);
        let is_only = || !shared.state().has_process();
        let no_memory = |reading| no_memory(bytes, reading);
        let mut last = Reading::default();
        let mut logged = false;
        let admitted = shared.options.account.admit(bytes, is_only, |reading, waited| {
            last = reading;
            if !logged {
                let free = reading.free;
                tracing::info!(model = config.name, bytes, free, "waiting for device memory to load");
                self.update(SlotState::WaitingForMemory { bytes });
            }
            logged = true;
            if waited > PATIENCE {
                self.unavailable(&no_memory(reading), false);
            }
        });
        if !is_first {
            return admitted.await.map_err(no_memory);
        }
        match timeout(config.load, admitted).await {
            Ok(admitted) => admitted.map_err(no_memory),
            Err(_) => Err(no_memory(last)),
        }
    }

    /// Waits after failures. Meanwhile the jobs of a model that has no other process go to other workers, as in [`PATIENCE`].
    pub(super) async fn back_off(&self) {
        let wait = self.backoff.wait(Instant::now());
        if wait.is_zero() {
            return;
        }
        let seconds = wait.as_secs_f64().ceil();
        let reason = format!(
            "its process failed {} times in a row; it is started again in {seconds} s",
            self.backoff.failures()
        );
        self.unavailable(&LoadError::Start(reason), false);
        self.update(SlotState::BackingOff { until: Instant::now() + wait });
        sleep(wait).await;
    }

    /// Waits for the end of a process, which may never come. After this long its memory is no longer expected to come back.
    pub(super) async fn until_ended(&self, entry: &Entry, limit: Duration, end: impl Future<Output = ()>) {
        self.unless_long(limit, end, || entry.is_stuck()).await;
    }

    /// Waits for something that may never end. After this long calls `is_long`, once, and the model's jobs go to other workers, as in
    /// [`PATIENCE`].
    pub(super) async fn unless_long<T>(
        &self,
        limit: Duration,
        what: impl Future<Output = T>,
        is_long: impl FnOnce(),
    ) -> T {
        let (mut what, mut is_long) = (std::pin::pin!(what), Some(is_long));
        loop {
            if let Ok(done) = timeout(limit, &mut what).await {
                return done;
            }
            is_long.take().into_iter().for_each(|is_long| is_long());
            let reason = "its last process does not end although it was killed".to_owned();
            self.unavailable(&LoadError::Start(reason), false);
        }
    }

    /// Reads what the process holds. What was seen before stays if the device cannot be read.
    pub(super) async fn snapshot(&mut self, warm: &Warm) {
        let account = &self.shared.options.account;
        let Some(alive) = account.snapshot().await else { return };
        let before = self.last.map_or(0, |last| last.held);
        // Where the load was estimated, the device does not report all that the process holds: its memory may be in a daemon.
        let told = account.held_under(warm.keeper_pid()).await.filter(|_| self.estimated.is_none());
        let held = told.unwrap_or(before);
        account.note_held(warm.keeper_pid(), held);
        let sure = match (self.last, self.estimated) {
            // Memory that is free by now is not the process's, whoever freed it.
            (Some(last), Some(Estimated { loaded, .. })) if told.is_none() => {
                last.sure.min(held.saturating_sub(loaded.taken_since(&alive)))
            }
            _ => held,
        };
        self.last = Some(Claim { alive, held, sure });
        self.shared.state().slots[self.index].status.holds(held);
    }

    /// Makes the process give its caches back, and looks at what it holds then.
    pub(super) async fn trim(&mut self, warm: &mut Warm) -> Result<(), EndReason> {
        warm.trim().await;
        // The answer comes after the trimming.
        self.ping(warm).await?;
        self.snapshot(warm).await;
        let mut state = self.shared.state();
        let status = &mut state.slots[self.index].status;
        let before = status.resident_bytes;
        status.gave_back();
        if status.resident_bytes.abs_diff(before) > CHANGED {
            state.learned.measure_again();
        }
        Ok(())
    }

    /// Asks the process whether it is there.
    pub(super) async fn ping(&self, warm: &mut Warm) -> Result<(), EndReason> {
        warm.ping().await.map(drop).map_err(|error| {
            let (model, pid) = (&self.shared.config.name, warm.pid());
            tracing::warn!(model, pid, error, "a process did not answer a ping: replacing it");
            EndReason::Failed
        })
    }

    /// Makes the process return its caches, reads its memory, and returns the reason why it should end, if there is one.
    pub(super) async fn look_for_leak(&mut self, warm: &mut Warm, leak: &mut Leak) -> Option<EndReason> {
        if let Err(reason) = self.trim(warm).await {
            return Some(reason);
        }
        let model = &self.shared.config.name;
        let held_bytes = self.last.map_or(0, |last| last.held);
        let bytes_per_pass = leak.snapshot(warm.passes, held_bytes, self.base)?;
        tracing::warn!(
            model,
            pid = warm.pid(),
            held_bytes,
            bytes_per_pass,
            "the process leaks device memory: replacing it"
        );
        Some(EndReason::Asked("a leak"))
    }

    /// Waits until the memory of the process that ended is back. `entry`: that of the process, if it still has one.
    pub(super) async fn reclaim(&mut self, entry: Option<Entry>) {
        {
            self.shared.state().slots[self.index].status.ended();
        }
        let Some(claim) = self.last.take() else { return };
        let (since, model) = (Instant::now(), &self.shared.config.name);
        let mut logged_at: Option<Instant> = None;
        let account = &self.shared.options.account;
        let returning = match entry {
            Some(entry) => entry.ended(claim, Instant::now()),
            None => account.returning(claim),
        };
        let back = returning.until_back(|bytes| {
            self.update(SlotState::Withheld { bytes, since });
            if since.elapsed() > PATIENCE {
                let mib = bytes >> 20;
                let reason = format!("{mib} MiB of device memory that its last process held are not free yet");
                self.unavailable(&LoadError::Start(reason), false);
            }
            let is_due = logged_at.map_or(since.elapsed() > BACK_SOON, |at| at.elapsed() > TELL_EVERY);
            if is_due {
                let seconds = since.elapsed().as_secs();
                tracing::error!(
                    model,
                    bytes,
                    seconds,
                    "device memory of an ended process is not free yet; its slot is withheld: no other process starts there until the memory is free"
                );
                logged_at = Some(Instant::now());
            }
        });
        let mut closing = self.closing.clone();
        let returned = tokio::select! {
            returned = back => Some(returned),
            () = closed(&mut closing) => None,
        };
        if let (Some(returned), Some(Estimated { needed, .. })) = (returned, self.estimated.take()) {
            self.correct(needed, returned);
        }
        // Not where the pool closes meanwhile.
        if logged_at.is_some() && returned.is_some() {
            tracing::info!(
                model,
                seconds = since.elapsed().as_secs(),
                "the device memory of the ended process is free"
            );
        }
    }

    /// Corrects what the load of the ended process was recorded to need. If less has returned, others took the rest while it was loaded,
    /// and the next process must not wait for it. Not while a program is loading, which may have taken what has returned.
    fn correct(&self, estimated: u64, returned: u64) {
        if self.shared.options.account.is_loading() {
            return;
        }
        let declared = self.shared.config.vram.base_bytes.unwrap_or(0);
        let mut state = self.shared.state();
        let said = state.ready.as_ref().map_or(0, |ready| ready.weights);
        let needed = returned.max(declared).max(said);
        if needed < estimated {
            state.learned.load_was(estimated, needed);
        }
    }
}
