//! Whose pass starts next while the device has no room for all of them. A pass that finds no room stops no other, and the others do
//! not keep it waiting for ever.
//!
//! The first pass that finds no room has its turn reserved. It waits for the passes that are in flight at that moment, whatever
//! else happens. So others start meanwhile that leave it the memory that it needs, and beside these passes also others that are
//! expected to be over soon. When they have ended, nothing starts before the reserved one. Batch systems call this backfilling.

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

/// A turn that nothing takes away.
#[derive(Debug)]
struct Reservation {
    turn: Turn,
    /// What its pass needs, at least.
    bytes: u64,
    /// The passes that were in flight when it was made.
    blockers: Vec<PassId>,
}

/// The turns of all models.
#[derive(Debug, Default)]
pub(super) struct Turns {
    reservation: Option<Reservation>,
    /// Turns that found no room in this round.
    refused: Vec<Turn>,
    /// Since when other processes hold what a turn's pass needs.
    short_since: HashMap<Turn, Instant>,
    /// About the longest of each model's latest passes.
    longest: HashMap<ModelIndex, Duration>,
}

impl Turns {
    /// Passes are about to start: what found no room before is tried again. Turns that nobody `waits` for any more are forgotten.
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

    /// Whether any pass found no room in this round.
    pub(super) fn is_any_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    pub(super) fn started(&mut self, turn: Turn) {
        self.reservation.take_if(|reservation| reservation.turn == turn);
        self.short_since.remove(&turn);
    }

    /// A turn's pass found no room. What other processes may give back is not waited for by reserving anything.
    pub(super) fn refused(&mut self, turn: Turn, holder: Holder, in_flight: impl Iterator<Item = PassId>) {
        self.refused.push(turn);
        if let Holder::Passes(bytes) = holder
            && self.reservation.is_none()
        {
            self.reservation = Some(Reservation { turn, bytes, blockers: in_flight.collect() });
        }
    }

    /// Bytes that the pass of a turn must leave of the budget, of which `limit` is all, for the one that has its turn reserved. Passes
    /// in flight come with how long they are and their bytes.
    pub(super) fn kept<'a>(
        &self,
        turn: Turn,
        limit: u64,
        in_flight: impl Iterator<Item = (&'a PassId, Duration, u64)> + Clone,
    ) -> u64 {
        let Some(reservation) = self.reservation.as_ref().filter(|reserved| reserved.turn != turn) else {
            return 0;
        };
        let blockers = in_flight.filter(|(pass, ..)| reservation.blockers.contains(*pass));
        let runs = blockers.clone().map(|(_, runs, _)| runs).max();
        let is_over_soon =
            |longest: &Duration| runs.is_some_and(|runs| longest.saturating_mul(BESIDE) <= runs);
        if self.longest.get(&turn.model).is_some_and(is_over_soon) {
            return 0;
        }
        // The blockers' memory will be free.
        let freed: u64 = blockers.map(|(.., bytes)| bytes).sum();
        reservation.bytes.min(limit).saturating_sub(freed)
    }

    /// A pass of a model took so long.
    pub(super) fn pass_took(&mut self, model: ModelIndex, took: Duration) {
        let longest = self.longest.entry(model).or_default();
        *longest = longest.mul_f64(FORGET).max(took);
    }

    /// Other processes hold what a turn's pass needs. Whether to wait for them still.
    pub(super) fn waits_for_processes(&mut self, turn: Turn, now: Instant) -> bool {
        let since = *self.short_since.entry(turn).or_insert(now);
        now.saturating_duration_since(since) < SHORTAGE_MAX
    }

    pub(super) fn is_not_short(&mut self, turn: Turn) {
        self.short_since.remove(&turn);
    }
}
