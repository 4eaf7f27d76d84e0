//! One-shot models: a slot starts the program for each item, and does not keep a process.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, sleep};

use super::room::PATIENCE;
use super::slot::{SlotTask, closed};
use super::status::SlotState;
use crate::process::memory::RunningPass;
use crate::process::once;
use crate::process::once_memory::Left;
use crate::process::pass::PassEnd;
use crate::process::warm::LoadError;

/// The least wait before a one-shot program that could not be started is tried again.
const ONCE_WAIT_MIN: Duration = Duration::from_secs(2);

impl SlotTask {
    /// Serves by starting the program for each item.
    pub(super) async fn serve_once(&mut self) {
        // After a panic no other code clears it.
        self.available_again();
        loop {
            let job = self.take_job(0);
            let Some(mut job) = job else {
                tokio::select! {
                    () = self.wake.notified() => continue,
                    () = closed(&mut self.closing) => return,
                }
            };
            let number = self.shared.passes.fetch_add(1, Ordering::Relaxed);
            self.update(SlotState::Running { pass: number });
            let shared = Arc::clone(&self.shared);
            let watch = shared.watch.as_ref();
            let entered = {
                let (budget, exclusive) = (job.request.budget.unwrap_or(0), job.request.exclusive);
                let pass = RunningPass { keeper: None, resident: 0, budget, exclusive };
                tokio::select! {
                    entry = shared.options.account.pass(pass) => Some(entry),
                    _ = job.cancellation.wait() => None,
                    () = closed(&mut self.closing) => None,
                }
            };
            if entered.is_none() && job.cancellation.is_cancelled() {
                job.end(PassEnd::Cancelled { killed: false });
                continue;
            }
            let once::Ended { end, started, learnt, left, other_revision } =
                once::run(&shared.config, &shared.options, watch, &self.aside, &mut job, &mut self.closing)
                    .await;
            drop(entered);
            {
                let mut state = shared.state();
                state.slots[self.index].status.starts += started;
                learnt.into_iter().for_each(|(cost, peak)| state.learned.took(cost, peak));
            }
            if let (Some(found), PassEnd::NotRun { reason }) = (other_revision, &end) {
                self.exchanged(found, reason);
                job.end(end);
                if let Some(left) = left {
                    self.wait_for_what_is_left(left).await;
                }
                self.update(SlotState::Unloaded);
                return;
            }
            let not_started = match &end {
                // Otherwise the cause is what a program left behind.
                PassEnd::NotRun { reason } if left.is_none() => Some(reason.clone()),
                _ => None,
            };
            if let Some(reason) = &not_started {
                self.once_failed(reason);
            } else {
                self.backoff.succeeded();
            }
            job.end(end);
            if not_started.is_some() {
                self.try_again_later().await;
            }
            if let Some(left) = left {
                self.wait_for_what_is_left(left).await;
            }
        }
    }

    /// Waits until the last program's processes have ended and its memory is back. The slot starts no other program meanwhile.
    async fn wait_for_what_is_left(&mut self, left: Left) {
        if let Some(ending) = left.ending {
            self.shared.state().slots[self.index].status.holds(left.claim.held);
            self.wait_for_end(ending).await;
        }
        self.last = Some(left.claim);
        self.reclaim(None).await;
        self.available_again();
    }

    /// The program's files have another revision by now: this pool starts none any more. Programs that run are of the old one.
    fn exchanged(&self, found: String, reason: &str) {
        tracing::warn!(model = self.shared.config.name, error = reason, "not starting the program");
        let mut state = self.shared.state();
        state.other_revision = Some(found);
        self.mark_unavailable(&mut state, &LoadError::Start(reason.to_owned()));
    }

    /// The model is available again as far as this slot is concerned. Another slot's reason stays, and so does that of an exchange.
    fn available_again(&self) {
        let mut state = self.shared.state();
        if state.unavailable_by == self.index && state.other_revision.is_none() {
            state.unavailable = None;
        }
    }

    /// Waits for a one-shot program that was killed and does not end.
    async fn wait_for_end(&mut self, ending: JoinHandle<()>) {
        self.update(SlotState::Ending { since: Instant::now() });
        let mut closing = self.closing.clone();
        tokio::select! {
            // An error: the task panicked.
            _ = self.unless_long(PATIENCE, ending, || {}) => {}
            () = closed(&mut closing) => {}
        }
        self.available_again();
    }

    /// A one-shot program cannot be started. The next pass would fail in the same way: its jobs go to other workers for a while.
    fn once_failed(&mut self, reason: &str) {
        self.backoff.failed(Instant::now());
        let model = &self.shared.config.name;
        tracing::error!(
            model,
            error = reason,
            "cannot start the program: not consuming the model's jobs until the next try"
        );
        self.update(SlotState::BackingOff { until: Instant::now() });
        // Other slots, idle or not, could not start it either.
        self.mark_unavailable(&mut self.shared.state(), &LoadError::Start(reason.to_owned()));
    }

    /// Waits, and lets passes come again: the next one shows whether the program starts.
    async fn try_again_later(&mut self) {
        let wait = self.backoff.wait(Instant::now()).max(ONCE_WAIT_MIN);
        self.update(SlotState::BackingOff { until: Instant::now() + wait });
        tokio::select! {
            () = sleep(wait) => {}
            () = closed(&mut self.closing) => {}
        }
        self.available_again();
    }
}
