//! Decides which pass may start while the device lacks memory for all of them. A turn is a pass that could start: a model, and which of its
//! jobs lead. Turns come in, with what holds the memory that they need. How much memory the pass of a turn must leave free goes out.
//!
//! A turn without memory does not stop other turns, but they must not delay it for ever. So the first such turn is reserved: it waits only
//! for the passes that are in flight at that moment. Meanwhile passes may start that leave enough memory for it, or that are expected to
//! end soon. When the passes that it waits for have ended, nothing starts before the reserved turn. Batch systems call this backfilling.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::batcher::Lead;
use crate::ids::{ModelIndex, PassId};
use crate::sizes::Size;

/// How long a pass that would fit without other processes waits for them; then it runs, and the device decides. Slots adapt within the same
/// time, so that the unacknowledged jobs can go to another worker.
const SHORTAGE_MAX: Duration = Duration::from_secs(2);

/// While a reserved turn waits for a running pass, other passes may start if they take at most this part of the time that the pass has run
/// already. So they prolong the wait by at most that part, even if they outlast the pass.
const BESIDE: u32 = 4;

/// The longest pass of a model counts for this much less after each shorter one, so that old figures are forgotten.
const FORGET: f64 = 0.9;

/// A pass that could start: of which model, and led by which kind of job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Turn {
    pub(crate) model: ModelIndex,
    pub(crate) lead: Lead,
}

/// Who holds the memory that a pass needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// Passes in flight, or the reserved turn. The pass needs so many bytes.
    Passes(u64),
    /// Other processes, which may free it within moments.
    Processes,
}

/// The memory of a pass in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassMemory {
    pub(super) pass: PassId,
    /// How long ago the executor received the pass.
    pub(super) runs_for: Duration,
    pub(super) bytes: u64,
}

/// The reserved turn. No other turn can take its memory.
#[derive(Debug)]
struct Reservation {
    turn: Turn,
    /// The least bytes that its pass needs.
    bytes: u64,
    /// The passes that were in flight when the turn was reserved.
    blockers: Vec<PassId>,
}

/// The turns of all models, as far as they lack memory.
#[derive(Debug, Default)]
pub(super) struct Turns {
    reservation: Option<Reservation>,
    /// Turns that found no memory in this round.
    refused: Vec<Turn>,
    /// Since when other processes have held the memory of a turn.
    short_since: HashMap<Turn, Instant>,
    /// Approximately the longest recent pass of each model.
    longest: HashMap<ModelIndex, Duration>,
}

impl Turns {
    /// Passes are about to start. Turns that found no memory before may be tried again, and turns without a waiting job are forgotten.
    pub(super) fn begin_round(&mut self, waits: impl Fn(Turn) -> bool) {
        self.refused.clear();
        self.reservation.take_if(|reservation| !waits(reservation.turn));
        self.short_since.retain(|turn, _| waits(*turn));
    }

    /// The session is over, so no turn waits. The measured times are kept.
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

    /// A turn found no memory. It is reserved unless other processes hold the memory: they may free it at any time.
    pub(super) fn refused(&mut self, turn: Turn, holder: Holder, in_flight: impl Iterator<Item = PassId>) {
        self.refused.push(turn);
        if let Holder::Passes(bytes) = holder
            && self.reservation.is_none()
        {
            self.reservation = Some(Reservation { turn, bytes, blockers: in_flight.collect() });
        }
    }

    /// Bytes that the pass of a turn must leave for the reserved turn, out of a budget of `limit` bytes.
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

    /// Other processes hold the memory of a turn. Returns whether to wait for them any longer.
    pub(super) fn waits_for_processes(&mut self, turn: Turn, now: Instant) -> bool {
        let since = *self.short_since.entry(turn).or_insert(now);
        now.saturating_duration_since(since) < SHORTAGE_MAX
    }

    pub(super) fn is_not_short(&mut self, turn: Turn) {
        self.short_since.remove(&turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Turn = Turn { model: ModelIndex(0), lead: Lead::Shared };
    const OTHER: Turn = Turn { model: ModelIndex(1), lead: Lead::Alone };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Turns of which the first is reserved: it needs 80 bytes, and waits for pass 1.
    fn reserved() -> Turns {
        let mut turns = Turns::default();
        turns.refused(FIRST, Holder::Passes(80), [PassId(1)].into_iter());
        turns
    }

    /// The bytes that the other turn must leave free while pass 1 has run for so long and holds 30 bytes.
    fn kept(turns: &Turns, runs_for: Duration) -> u64 {
        let held = |pass| PassMemory { pass: PassId(pass), runs_for, bytes: 30 };
        // Pass 2 came later: the reserved turn does not wait for it, and may not count on its memory.
        turns.kept(OTHER, 100, [held(1), held(2)].into_iter())
    }

    #[test]
    fn a_turn_waits_two_seconds_for_other_processes_and_then_no_longer() {
        let (mut turns, start) = (Turns::default(), Instant::now());
        assert!(turns.waits_for_processes(FIRST, start));
        let last = start + SHORTAGE_MAX - Duration::from_millis(1);
        assert!(turns.waits_for_processes(FIRST, last));
        assert!(!turns.waits_for_processes(FIRST, start + SHORTAGE_MAX));
        assert!(turns.waits_for_processes(OTHER, start + SHORTAGE_MAX), "each turn has its own wait");
        turns.is_not_short(FIRST);
        assert!(turns.waits_for_processes(FIRST, start + SHORTAGE_MAX), "a new wait");
        turns.started(FIRST);
        assert!(turns.waits_for_processes(FIRST, start + 2 * SHORTAGE_MAX), "a new wait after its pass");
    }

    #[test]
    fn a_turn_whose_jobs_are_gone_keeps_nothing() {
        let (mut turns, start) = (reserved(), Instant::now());
        turns.waits_for_processes(FIRST, start);
        turns.begin_round(|turn| turn == FIRST);
        assert_eq!((turns.reserved(), turns.is_any_refused()), (Some(FIRST), false), "it may be tried again");
        assert!(!turns.waits_for_processes(FIRST, start + SHORTAGE_MAX));
        turns.begin_round(|_| false);
        assert_eq!(turns.reserved(), None);
        assert!(turns.waits_for_processes(FIRST, start + SHORTAGE_MAX));
    }

    #[test]
    fn another_pass_beside_the_reserved_turn_may_last_a_quarter_of_what_was_waited() {
        let mut turns = reserved();
        // 80 bytes, of which pass 1 will free 30.
        assert_eq!(kept(&turns, seconds(1000)), 50, "nothing is known of the other model's passes");
        turns.pass_took(OTHER.model, seconds(10));
        assert_eq!(kept(&turns, seconds(39)), 50);
        assert_eq!(kept(&turns, seconds(40)), 0);
        turns.started(OTHER);
        assert_eq!(turns.reserved(), Some(FIRST), "only its own pass ends the reservation");
        turns.started(FIRST);
        assert_eq!(turns.reserved(), None);
    }

    #[test]
    fn a_long_pass_is_remembered_over_shorter_ones_and_forgotten_in_time() {
        let mut turns = reserved();
        turns.pass_took(OTHER.model, seconds(100));
        turns.pass_took(OTHER.model, seconds(1));
        turns.session_closed();
        turns.refused(FIRST, Holder::Passes(80), [PassId(1)].into_iter());
        // 90 s: a tenth less.
        assert_eq!((kept(&turns, seconds(359)), kept(&turns, seconds(361))), (50, 0));
        (0..60).for_each(|_| turns.pass_took(OTHER.model, seconds(1)));
        assert_eq!(kept(&turns, seconds(4)), 0);
    }

    #[test]
    fn memory_that_processes_hold_reserves_nothing() {
        let mut turns = Turns::default();
        turns.refused(FIRST, Holder::Processes, [PassId(1)].into_iter());
        assert_eq!((turns.reserved(), turns.is_open(FIRST), turns.is_open(OTHER)), (None, false, true));
        turns.refused(OTHER, Holder::Passes(80), [PassId(1)].into_iter());
        turns.refused(FIRST, Holder::Passes(80), [PassId(1)].into_iter());
        assert_eq!(turns.reserved(), Some(OTHER), "the first one that passes keep waiting");
    }
}
