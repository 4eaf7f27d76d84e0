//! The device memory of one process slot: reserved for its next process, held by its process, or not yet returned.

use std::sync::Arc;

use tokio::time::{Duration, Instant, sleep};

use super::leak::Leak;
use super::slot::{Leave, SlotTask, closed};
use super::status::SlotState;
use crate::process::memory::{Claim, Entry};
use crate::process::warm::Warm;

/// How often a warning names memory that has not come back.
const TELL_EVERY: Duration = Duration::from_secs(60);

impl SlotTask {
    /// Waits until a process may be started, and the device has room for it; false when the pool is closing.
    pub(super) async fn admit(&mut self) -> bool {
        let mut closing = self.closing.clone();
        tokio::select! {
            reserved = self.wait_for_room() => {
                self.reserved = Some(reserved);
                true
            }
            () = closed(&mut closing) => false,
        }
    }

    async fn wait_for_room(&self) -> Entry {
        let wait = self.backoff.wait();
        if !wait.is_zero() {
            self.update(SlotState::BackingOff { until: Instant::now() + wait });
            sleep(wait).await;
        }
        let shared = Arc::clone(&self.shared);
        let config = &shared.config;
        let book = &shared.options.book;
        let bytes = shared.resident(&shared.state()).unwrap_or(0);
        let mut logged = false;
        let admitted = book.admit(bytes, |reading| {
            if !logged {
                tracing::info!(
                    model = config.name,
                    bytes,
                    free = reading.free,
                    "waiting for device memory to load"
                );
                self.update(SlotState::WaitingForMemory { bytes });
            }
            logged = true;
        });
        admitted.await
    }

    /// Looks at what the process holds.
    pub(super) async fn look(&mut self, warm: &Warm) {
        let book = &self.shared.options.book;
        let alive = book.look().await;
        let before = self.last.map_or(0, |last| last.held);
        let held = book.held_under(warm.keeper_pid()).await.unwrap_or(before);
        self.last = Some(Claim { alive, held });
        self.shared.state().slots[self.index].status.held_bytes = held;
    }

    /// Makes the process return its caches, reads its memory, and returns the reason why it should end, if there is one.
    pub(super) async fn look_for_leak(&mut self, warm: &mut Warm, leak: &mut Leak) -> Option<Leave> {
        let model = self.shared.config.name.clone();
        warm.trim().await;
        // Answered after the trimming.
        if let Err(error) = warm.ping().await {
            tracing::warn!(model, pid = warm.pid(), error, "ping a process");
            return Some(Leave::Failed);
        }
        self.look(warm).await;
        let held_bytes = self.last.map_or(0, |last| last.held);
        let bytes_per_pass = leak.look(warm.passes, held_bytes, self.base)?;
        tracing::warn!(
            model,
            pid = warm.pid(),
            held_bytes,
            bytes_per_pass,
            "the process leaks device memory, and is replaced"
        );
        Some(Leave::Asked("a leak"))
    }

    /// Waits until the memory of the process that ended is back.
    pub(super) async fn reclaim(&mut self) {
        {
            let mut state = self.shared.state();
            let status = &mut state.slots[self.index].status;
            (status.pid, status.held_bytes) = (None, 0);
        }
        let Some(claim) = self.last.take() else { return };
        let (since, model) = (Instant::now(), &self.shared.config.name);
        let mut logged_at: Option<Instant> = None;
        let back = self.shared.options.book.reclaim(claim, |bytes| {
            self.update(SlotState::Withheld { bytes, since });
            if logged_at.is_none_or(|logged_at| logged_at.elapsed() > TELL_EVERY) {
                let seconds = since.elapsed().as_secs();
                tracing::error!(
                    model,
                    bytes,
                    seconds,
                    "memory of an ended process has not come back; its slot is withheld"
                );
                logged_at = Some(Instant::now());
            }
        });
        let mut closing = self.closing.clone();
        tokio::select! {
            () = back => {}
            () = closed(&mut closing) => {}
        }
        if logged_at.is_some() {
            tracing::info!(model, seconds = since.elapsed().as_secs(), "the memory is back");
        }
    }
}
