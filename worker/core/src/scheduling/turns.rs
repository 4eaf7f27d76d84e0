//! Decides which pass may start while the device has no memory for all of them. A turn is a pass that could start: a model, and which
//! of its jobs lead. What comes in are turns and who holds the memory that they need; what goes out is how much memory the pass of a
//! turn must leave free.
//!
//! A turn that finds no memory stops no other turn, and the others do not keep it waiting for ever: the first turn that finds none is
//! reserved. It waits for the passes that are in flight at that moment, and for no others. Meanwhile passes may start that leave it the
//! memory that it needs. Passes that are expected to end soon may also start beside those in flight. When the passes in flight have ended,
//! nothing starts before the reserved turn. Batch systems call this backfilling.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::batcher::Lead;
use crate::ids::{ModelIndex, PassId};
use crate::sizes::Size;

/// How long a pass that would fit without other processes waits for them, before the device decides. Slots follow the memory
/// within as much; then the unacknowledged jobs should go where there is room.
const SHORTAGE_MAX: Duration = Duration::from_secs(2);

/// Beside a pass that a reserved one waits for, passes start that take at most this part of the time that it has run already: they
/// prolong the wait by no more than that, also where they take longer than it does from then on.
const BESIDE: u32 = 4;

/// What a model's longest pass counts for after each shorter one.
const FORGET: f64 = 0.9;

/// A pass that could start: a model's, led by a job of this kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Turn {
    pub(crate) model: ModelIndex,
    pub(crate) lead: Lead,
}

/// Who holds the memory that a pass needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Passes in flight; or it is kept for a reserved one. So many bytes are needed.
    Passes(u64),
    /// Other processes, which may give it back within moments.
    Processes,
}

/// The memory of a pass in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassMemory {
    pub(super) pass: PassId,
    /// How long the executor has had it.
    pub(super) runs_for: Duration,
    pub(super) bytes: u64,
}

/// The turn that is reserved: nothing takes it away.
#[derive(Debug)]
struct Reservation {
    turn: Turn,
    /// What its pass needs, at least.
    bytes: u64,
    /// The passes that were in flight when it was made.
    blockers: Vec<PassId>,
}

/// The turns of all models that found no memory.
#[derive(Debug, Default)]
pub(super) struct Turns {
    reservation: Option<Reservation>,
    /// Those that found no memory in this round.
    refused: Vec<Turn>,
    /// Since when other processes hold what a turn needs.
    short_since: HashMap<Turn, Instant>,
    /// About the longest of each model's latest passes.
    longest: HashMap<ModelIndex, Duration>,
}

impl Turns {
    /// Passes are about to start: turns that found no memory before are tried again. Those that no job `waits` for any more are
    /// forgotten.
    pub(super) fn begin_round(&mut self, waits: impl Fn(Turn) -> bool) {
        self.refused.clear();
        self.reservation.take_if(|reservation| !waits(reservation.turn));
        self.short_since.retain(|turn, _| waits(*turn));
    }

    /// The session is over: nothing waits. How long passes take is still true.
    pub(super) fn session_closed(&mut self) {
        *self = Self { longest: std::mem::take(&mut self.longest), ..Self::default() };
    }

    /// Given so many models.
    pub(super) fn size(&self, models: usize) -> Size {
        let turns = self.refused.len().max(self.short_since.len()).max(self.longest.len());
        Size::of("turns", turns, 2 * models)
    }

    pub(super) fn reserved(&self) -> Option<Turn> {
        self.reservation.as_ref().map(|reservation| reservation.turn)
    }

    /// Whether a turn can be tried in this round.
    pub(super) fn is_open(&self, turn: Turn) -> bool {
        !self.refused.contains(&turn)
    }

    /// Whether any turn found no memory in this round.
    pub(super) fn is_any_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    pub(super) fn started(&mut self, turn: Turn) {
        self.reservation.take_if(|reservation| reservation.turn == turn);
        self.short_since.remove(&turn);
    }

    /// A turn found no memory. It is not reserved if other processes hold the memory: they may give it back at any time.
    pub(super) fn refused(&mut self, turn: Turn, holder: Holder, in_flight: impl Iterator<Item = PassId>) {
        self.refused.push(turn);
        if let Holder::Passes(bytes) = holder
            && self.reservation.is_none()
        {
            self.reservation = Some(Reservation { turn, bytes, blockers: in_flight.collect() });
        }
    }

    /// Bytes that the pass of a turn must leave for the reserved one, of a budget of `limit` bytes.
    pub(super) fn kept(
        &self,
        turn: Turn,
        limit: u64,
        in_flight: impl Iterator<Item = PassMemory> + Clone,
    ) -> u64 {
        let Some(reservation) = self.reservation.as_ref().filter(|reserved| reserved.turn != turn) else {
            return 0;
        };
        let blockers = in_flight.filter(|held| reservation.blockers.contains(&held.pass));
        let longest_blocker = blockers.clone().map(|held| held.runs_for).max();
        let ends_soon = |longest: &Duration| {
            longest_blocker.is_some_and(|runs_for| longest.saturating_mul(BESIDE) <= runs_for)
        };
        if self.longest.get(&turn.model).is_some_and(ends_soon) {
            return 0;
        }
        // The blockers' memory will be free.
        let freed: u64 = blockers.map(|held| held.bytes).sum();
        reservation.bytes.min(limit).saturating_sub(freed)
    }

    /// A pass of a model took so long.
    pub(super) fn pass_took(&mut self, model: ModelIndex, took: Duration) {
        let longest = self.longest.entry(model).or_default();
        *longest = longest.mul_f64(FORGET).max(took);
    }

    /// Other processes hold what a turn needs. Whether to wait for them still.
    pub(super) fn waits_for_processes(&mut self, turn: Turn, now: Instant) -> bool {
        let since = *self.short_since.entry(turn).or_insert(now);
        now.saturating_duration_since(since) < SHORTAGE_MAX
    }

    pub(super) fn is_not_short(&mut self, turn: Turn) {
        self.short_since.remove(&turn);
    }
}
