//! Forms the next pass within the memory that it may take. A turn (a model, and which of its jobs lead) comes in. The pass with its permit
//! goes out, or nothing if passes in flight, a reserved turn or other processes hold the memory.

use std::cell::Cell;
use std::time::Instant;

use super::draft::Draft;
use super::turns::{Holder, PassMemory};
use super::{InFlight, Scheduler, Turn};
use crate::admission::Permit;
use crate::device::PassShape;
use crate::learned_limits::LearnedLimits;
use crate::settings::ModelFacts;

impl Scheduler {
    /// Forms the pass of a turn and gets its permit, if the device has the memory. `budget_max`: the budget if no other process held
    /// memory.
    pub(crate) fn admit(
        &mut self,
        turn: Turn,
        model: &ModelFacts,
        limits: &LearnedLimits,
        budget_max: u64,
        now: Instant,
    ) -> Option<Box<InFlight>> {
        match self.form(turn, &Conditions { model, limits, budget_max, now }) {
            Ok((draft, permit)) => {
                self.turns.started(turn);
                Some(Box::new(InFlight::new(turn.model, model.executor, draft, permit, now)))
            }
            Err(holder) => {
                self.turns.refused(turn, holder, self.in_flight.keys().copied());
                None
            }
        }
    }

    /// Forms the pass of a turn; the error says what holds the memory that it needs.
    fn form(&mut self, turn: Turn, conditions: &Conditions<'_>) -> Result<(Draft, Permit), Holder> {
        let Conditions { model, limits, now, .. } = *conditions;
        let (shape, exclusive) =
            self.batchers[turn.model.0].first_shape(turn.lead).ok_or(Holder::Processes)?;
        let first = FirstItem { bytes: (model.pass_bytes)(shape), exclusive };
        self.wait_for_processes(turn, first, conditions)?;
        let room = self.room(turn, first, now)?;
        let most = room.bytes();
        // The estimate for a program can change while the pass is formed. So the permit is for the value that was found to fit.
        let fitted = Cell::new(first.bytes);
        let fits = |shape: PassShape| {
            let bytes = (model.pass_bytes)(shape);
            let fits = bytes <= most.min(limits.limit(&model.name, shape.longest));
            if fits {
                fitted.set(bytes);
            }
            fits
        };
        let draft = self.batchers[turn.model.0].next_pass(turn.lead, fits).ok_or(Holder::Processes)?;
        let permit = match room {
            Room::Whole(permit) => permit,
            // Still available: nothing else takes from the budget meanwhile.
            Room::Part(_) => self.budget.try_acquire(fitted.get()).ok_or(Holder::Processes)?,
        };
        Ok((draft, permit))
    }

    /// Waits for a while if other processes hold the memory that a pass needs: they may free it within moments, and until then the pass
    /// would only run out of memory.
    fn wait_for_processes(
        &mut self,
        turn: Turn,
        first: FirstItem,
        conditions: &Conditions<'_>,
    ) -> Result<(), Holder> {
        if first.bytes <= self.budget.limit() {
            self.turns.is_not_short(turn);
            return Ok(());
        }
        let would_fit_alone = !first.exclusive && first.bytes <= conditions.budget_max;
        if would_fit_alone && self.turns.waits_for_processes(turn, conditions.now) {
            return Err(Holder::Processes);
        }
        Ok(())
    }

    /// The part of the budget that a pass may take. A pass that is larger than the device, or has waited in vain, gets the whole budget;
    /// the device then reports what is missing.
    fn room(&self, turn: Turn, first: FirstItem, now: Instant) -> Result<Room, Holder> {
        let limit = self.budget.limit();
        if first.exclusive || first.bytes > limit {
            return self.budget.try_acquire_all().map(Room::Whole).ok_or(Holder::Passes(u64::MAX));
        }
        let in_flight = self.in_flight.iter().map(|(id, pass)| PassMemory {
            pass: *id,
            runs_for: pass.runs(now),
            bytes: pass.bytes(),
        });
        let available = self.budget.available().saturating_sub(self.turns.kept(turn, limit, in_flight));
        if first.bytes > available { Err(Holder::Passes(first.bytes)) } else { Ok(Room::Part(available)) }
    }
}

/// What decides whether a pass gets memory, besides its items.
#[derive(Clone, Copy)]
struct Conditions<'a> {
    model: &'a ModelFacts,
    limits: &'a LearnedLimits,
    /// The budget if no other process held memory.
    budget_max: u64,
    now: Instant,
}

/// What the first item of a pass needs.
#[derive(Clone, Copy)]
struct FirstItem {
    /// The bytes of a pass of this item alone.
    bytes: u64,
    exclusive: bool,
}

/// What a pass may take of the budget.
enum Room {
    /// All of it; no other pass has any.
    Whole(Permit),
    /// So many bytes at most.
    Part(u64),
}

impl Room {
    fn bytes(&self) -> u64 {
        match self {
            Self::Whole(permit) => permit.bytes(),
            Self::Part(bytes) => *bytes,
        }
    }
}
