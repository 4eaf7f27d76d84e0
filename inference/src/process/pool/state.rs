//! What the tasks of a pool share: passes that wait, and what is known of the model and its processes.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::Notify;

use super::status::{SlotState, SlotStatus, Unavailable};
use crate::process::need::Learned;
use crate::process::pass::{PassEnd, PassJob};
use crate::process::warm::{LoadError, Ready};

/// What changes of a pool.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) waiting: VecDeque<PassJob>,
    pub(super) slots: Vec<Slot>,
    pub(super) learned: Learned,
    /// What the model said of itself when it was last loaded.
    pub(super) ready: Option<Ready>,
    /// The model's. It stays the same once a process was loaded, because outputs of several revisions must not have the same name.
    pub(super) revision: String,
    /// The revision that the program has by now, if the pool serves another one: no process with it is used.
    pub(super) other_revision: Option<String>,
    pub(super) unavailable: Option<Unavailable>,
    /// The slot that set it last.
    pub(super) unavailable_by: usize,
    pub(super) closed: bool,
}

/// A place for a process.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) status: SlotStatus,
    /// Notified when there is work.
    pub(super) wake: Arc<Notify>,
    /// Notified when an idle process should give cached memory back.
    pub(super) trim: Arc<Notify>,
}

impl State {
    /// Whether a process is loaded or loads.
    pub(super) fn has_process(&self) -> bool {
        let has = |state: SlotState| state.is_loaded() || state == SlotState::Loading;
        self.slots.iter().any(|slot| has(slot.status.state))
    }

    /// Whether a process is loaded.
    pub(super) fn is_loaded(&self) -> bool {
        self.slots.iter().any(|slot| slot.status.state.is_loaded())
    }

    /// Takes what a process says that was just loaded. The first one decides the revision, also if two are loaded at the same time.
    ///
    /// # Errors
    /// Earlier processes had another revision: the program or its files have changed on the disk.
    pub(super) fn accept(&mut self, revision: String, ready: &Ready) -> Result<(), LoadError> {
        if self.ready.is_some() && self.revision != revision {
            self.other_revision = Some(revision.clone());
            return Err(LoadError::OtherRevision { found: revision, served: self.revision.clone() });
        }
        (self.revision, self.ready) = (revision, Some(ready.clone()));
        Ok(())
    }

    /// Whether the pool has to start a process: passes wait, or the pool has to find out when the model can be loaded again.
    pub(super) fn wants_process(&self) -> bool {
        !self.waiting.is_empty() || self.unavailable.is_some()
    }

    /// Ends the waiting passes that were cancelled.
    pub(super) fn drop_cancelled(&mut self) {
        let (cancelled, waiting): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(|job| job.cancellation.is_cancelled());
        self.waiting = waiting;
        cancelled.into_iter().for_each(|job| job.end(PassEnd::Cancelled { killed: false }));
    }

    /// Ends all passes that wait.
    pub(super) fn refuse_waiting(&mut self, reason: &str) {
        for job in std::mem::take(&mut self.waiting) {
            job.end(PassEnd::NotRun { reason: reason.to_owned() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_decides_the_revision() {
        let mut state = State { revision: "of the program".to_owned(), ..State::default() };
        let ready = |weights| Ready { weights, ..Ready::default() };
        state.accept("one".to_owned(), &ready(1)).unwrap();
        // Both were loaded before either was accepted.
        let error = state.accept("two".to_owned(), &ready(2)).unwrap_err();
        assert!(
            matches!(error, LoadError::OtherRevision { found, served } if (&*found, &*served) == ("two", "one"))
        );
        assert_eq!((&*state.revision, state.other_revision.as_deref()), ("one", Some("two")));
        assert_eq!(state.ready, Some(ready(1)));
        state.accept("one".to_owned(), &ready(3)).unwrap();
        assert_eq!(state.ready, Some(ready(3)));
    }
}
