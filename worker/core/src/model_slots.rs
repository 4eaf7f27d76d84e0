//! The slots of all models on a device. The free memory comes in every second, with the number of jobs that each model wants to hold; the
//! models' slots go out. They follow the memory with hysteresis, and models share it by need.
//!
//! A model that needs less than an equal part of the memory lends the rest to models that need more. When it needs its part again, it gets
//! it back at once; the others lose what they borrowed within seconds. Meanwhile passes still stay within the device's budget, because
//! slots only limit how many jobs wait here.

use std::time::{Duration, Instant};

use crate::settings::{ModelFacts, UNKNOWN_BYTES};
use crate::slot_controller::SlotController;
use crate::units::FreeMib;

/// How long after its last job a model keeps its slots, so that a load with pauses does not lend and take back all the time.
const NEEDED_FOR: Duration = Duration::from_secs(30);

/// The jobs for which a model always keeps room, if its equal part has it: one, and a large one.
const JOBS_MIN: u16 = 2;

/// A model needs slots for this many times the jobs that it wants to hold now, so that it can grow before it waits for slots.
const HEADROOM: u16 = 2;

/// The slots of one model.
#[derive(Clone, Copy, Debug)]
struct OfModel {
    controller: SlotController,
    /// The slots that it would have with equal parts.
    equal: SlotController,
    /// When it last had a job, and how many it wanted to hold then.
    busy_at: Instant,
    wanted: u16,
    /// The number of jobs that it needed room for a second ago.
    needed: u16,
    /// Whether the bytes of a job were known at the last adjustment.
    is_known: bool,
}

/// The slots of all models.
#[derive(Debug)]
pub(crate) struct ModelSlots(Vec<OfModel>);

impl ModelSlots {
    pub(crate) fn new(models: &[ModelFacts], now: Instant) -> Self {
        let of_model = |model: &ModelFacts| OfModel {
            controller: SlotController::new(model.slots.get()),
            equal: SlotController::new(model.slots.get()),
            busy_at: now,
            wanted: 0,
            needed: JOBS_MIN,
            is_known: is_known(model),
        };
        Self(models.iter().map(of_model).collect())
    }

    /// The most jobs of a model that may be unacknowledged.
    pub(crate) fn of(&self, model: usize) -> u16 {
        self.0.get(model).map_or(0, |of| of.controller.slots())
    }

    pub(crate) fn are_none(&self) -> bool {
        self.0.iter().all(|of| of.controller.slots() == 0)
    }

    /// Adjusts the slots to the free memory and the models' needs. `wanted`: for each model that has jobs, how many it wants to hold.
    pub(crate) fn follow(
        &mut self,
        free: u64,
        reserve: u64,
        models: &[ModelFacts],
        wanted: &[Option<u16>],
        now: Instant,
    ) {
        let total = free.saturating_sub(reserve);
        let equal = total / (models.len() as u64).max(1);
        for (of, wanted) in self.0.iter_mut().zip(wanted) {
            of.note_wanted(*wanted, now);
        }
        let needs: Vec<_> = models.iter().zip(&self.0).map(|(model, of)| of.need(model, equal)).collect();
        for ((model, of), part) in models.iter().zip(&mut self.0).zip(parts(total, &needs)) {
            let before = of.controller.slots();
            of.follow(model, part, equal, now);
            log_change(&model.name, before, of.controller.slots(), free);
        }
    }
}

impl OfModel {
    /// Records how many jobs the model wants to hold, if it has jobs.
    fn note_wanted(&mut self, wanted: Option<u16>, now: Instant) {
        if let Some(wanted) = wanted {
            (self.busy_at, self.wanted) = (now, wanted);
        } else if now.saturating_duration_since(self.busy_at) >= NEEDED_FOR {
            self.wanted = 0;
        }
    }

    fn jobs_needed(&self) -> u16 {
        self.wanted.saturating_mul(HEADROOM).max(JOBS_MIN)
    }

    /// Bytes that the model needs. `equal`: an equal part of the memory.
    fn need(&self, model: &ModelFacts, equal: u64) -> u64 {
        match model.job_passes().room_for(self.jobs_needed().min(model.slots_max.get()).into()) {
            // Its passes run one by one, each with the device for itself.
            UNKNOWN_BYTES => equal,
            bytes => bytes,
        }
    }

    /// Adjusts the slots. `part`: bytes that the model may have now; `equal`: bytes of an equal part.
    fn follow(&mut self, model: &ModelFacts, part: u64, equal: u64, now: Instant) {
        let (needed, fitting, fitting_equal) =
            (self.jobs_needed(), model.slots_in(part), model.slots_in(equal));
        self.equal.observe(fitting_equal, now);
        let is_known = is_known(model);
        if is_known && !std::mem::replace(&mut self.is_known, is_known) {
            // The memory itself has not changed, so the slots grow without a wait.
            self.equal.raise(fitting_equal);
            self.controller.raise(fitting);
        }
        if needed > std::mem::replace(&mut self.needed, needed) {
            self.controller.raise(fitting.min(self.equal.slots()));
        }
        self.controller.observe(fitting, now);
    }
}

/// Whether the bytes of a job are known.
fn is_known(model: &ModelFacts) -> bool {
    model.job_passes().job_bytes(0) != UNKNOWN_BYTES
}

fn log_change(model: &str, before: u16, after: u16, free: u64) {
    let free = FreeMib(free);
    if after == before {
        return;
    }
    if after == 0 {
        tracing::warn!(model, before, %free, "not even one item fits the device's free memory: not consuming the model's jobs until one does");
    } else {
        tracing::info!(model, before, slots = after, %free, "slots changed with the device's free memory");
    }
}

/// Divides `total` bytes among models with these needs. If equal parts are enough for all, each gets one. Otherwise models that need less
/// get what they need, and the others share the rest.
fn parts(total: u64, needs: &[u64]) -> Vec<u64> {
    let count = (needs.len() as u64).max(1);
    let equal = total / count;
    let mut parts = vec![equal; needs.len()];
    if needs.iter().all(|need| *need <= equal) {
        return parts;
    }
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|at| needs[*at]);
    let mut left = total;
    for (done, at) in order.into_iter().enumerate() {
        let most = left / (needs.len() - done) as u64;
        parts[at] = needs[at].min(most);
        left -= parts[at];
    }
    // All needs are met, and something is left.
    parts.iter_mut().for_each(|part| *part += left / count);
    parts
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use proptest::prelude::*;

    use super::*;

    /// A model whose jobs need so many bytes each.
    fn model(per_job: u64, slots: u16) -> ModelFacts {
        ModelFacts {
            name: per_job.to_string(),
            slots: NonZeroU16::new(slots).unwrap(),
            pass_bytes: Arc::new(move |shape| per_job * shape.cost as u64),
            ..ModelFacts::for_tests()
        }
    }

    struct Device {
        models: Vec<ModelFacts>,
        slots: ModelSlots,
        start: Instant,
        second: u64,
    }

    impl Device {
        /// Two models that have 50 slots each.
        fn new() -> Self {
            let (models, start) = (vec![model(10, 50), model(10, 50)], Instant::now());
            Self { slots: ModelSlots::new(&models, start), models, start, second: 0 }
        }

        /// Runs so many seconds in which the models want so many jobs. Returns the slots at the end.
        fn after(&mut self, seconds: u64, wanted: [Option<u16>; 2]) -> [u16; 2] {
            for _ in 0..seconds {
                self.second += 1;
                let now = self.start + Duration::from_secs(self.second);
                self.slots.follow(1_100, 100, &self.models, &wanted, now);
            }
            [self.slots.of(0), self.slots.of(1)]
        }
    }

    #[test]
    fn an_idle_model_lends_its_part_and_has_it_back_at_once() {
        let mut device = Device::new();
        assert_eq!(device.after(60, [None, None]), [50, 50], "nobody needs more");
        assert_eq!(device.after(60, [Some(20), Some(2)]), [50, 50]);
        // 2 x 2 jobs are enough for the second.
        assert_eq!(device.after(15, [Some(100), Some(2)]), [96, 4]);
        // It needs more: it has its part back at once, and the first model loses what it had borrowed.
        assert_eq!(device.after(1, [Some(100), Some(100)]), [96, 50]);
        assert_eq!(device.after(2, [Some(100), Some(100)]), [50, 50]);
        // In a short pause of its load a model keeps its slots.
        assert_eq!(device.after(25, [Some(100), None]), [50, 50]);
        assert_eq!(device.after(20, [Some(100), None]), [98, 2]);
        assert_eq!(device.after(15, [None, None]), [98, 2]);
        // After half a minute without jobs it needs no more than the other, whose slots grow ten seconds later.
        assert_eq!(device.after(20, [None, None]), [50, 2]);
        assert_eq!(device.after(20, [None, None]), [50, 50]);
    }

    #[test]
    fn a_model_has_its_slots_as_soon_as_it_is_known_what_a_job_takes() {
        let learned = Arc::new(AtomicU64::new(UNKNOWN_BYTES));
        let bytes = Arc::clone(&learned);
        let learning = ModelFacts {
            pass_bytes: Arc::new(move |shape| {
                bytes.load(Ordering::Relaxed).saturating_mul(shape.cost as u64)
            }),
            ..model(10, 1)
        };
        let (models, start) = ([learning], Instant::now());
        let mut slots = ModelSlots::new(&models, start);
        let mut after = |second| {
            slots.follow(1_100, 100, &models, &[Some(50)], start + Duration::from_secs(second));
            slots.of(0)
        };
        assert_eq!(after(1), 1);
        learned.store(10, Ordering::Relaxed);
        assert_eq!(after(2), 100);
        // A later change of the figure goes through the usual delay.
        learned.store(5, Ordering::Relaxed);
        assert_eq!(after(3), 100);
    }

    #[test]
    fn a_single_model_has_all_the_memory() {
        assert_eq!(parts(1000, &[7]), [1000]);
        assert_eq!(parts(1000, &[u64::MAX]), [1000]);
        assert_eq!(parts(0, &[5, 5]), [0, 0]);
        assert_eq!(parts(100, &[10, u64::MAX, 60]), [10, 45, 45]);
        assert_eq!(parts(100, &[10, 60, 0]), [20, 70, 10]);
    }

    proptest! {
        #[test]
        fn each_model_has_at_least_an_equal_part_or_what_it_needs(
            total in 0u64..10_000,
            needs in prop::collection::vec(0u64..20_000, 1..8),
        ) {
            let parts = parts(total, &needs);
            let equal = total / needs.len() as u64;
            prop_assert!(parts.iter().sum::<u64>() <= total);
            prop_assert!(parts.iter().zip(&needs).all(|(part, need)| *part >= equal.min(*need)));
        }
    }
}
