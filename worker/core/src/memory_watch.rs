//! The device's memory over time. Readings of the device and ends of passes come in. Slots and learned limits go out, and whether the
//! worker must restart because the device stays nearly full.

use std::time::Instant;

use crate::device::{Memory, OutOfMemory, PassShape};
use crate::event::Reading;
use crate::learned_limits::LearnedLimits;
use crate::model_slots::ModelSlots;
use crate::pressure::{Leak, Leaking, Pressure};
use crate::settings::{ModelFacts, Settings, UNKNOWN_BYTES};
use crate::status::MemoryStatus;
use crate::units::Mib;

/// After so many ticks without a pass, memory that is kept for the next one goes back to the system. That is long enough not to pay for it
/// again in every pause of the load.
const TRIM_AFTER_TICKS: u32 = 10;

/// The state of the device's memory.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    slots: ModelSlots,
    limits: LearnedLimits,
    pressure: Pressure,
    leak: Leak,
    idle_ticks: u32,
    /// Jobs whose last reply was confirmed since the start.
    jobs_answered: u64,
}

impl MemoryWatch {
    pub(crate) fn new(settings: &Settings, models: &[ModelFacts], limits: LearnedLimits) -> Self {
        Self {
            slots: ModelSlots::new(models, settings.started_at),
            limits,
            pressure: Pressure::new(
                settings.pressure_percent,
                settings.pressure_tolerated,
                settings.resident,
            ),
            leak: Leak::default(),
            idle_ticks: 0,
            jobs_answered: 0,
        }
    }

    /// The most jobs of a model that may be unacknowledged; none while not even one item fits.
    pub(crate) fn slots(&self, model: usize) -> u16 {
        self.slots.of(model)
    }

    pub(crate) fn has_no_slots(&self) -> bool {
        self.slots.are_none()
    }

    pub(crate) fn limits(&self) -> &LearnedLimits {
        &self.limits
    }

    /// Adjusts the slots to the free memory. `wanted`: for each model that has jobs, how many it wants to hold.
    pub(crate) fn follow(
        &mut self,
        free: u64,
        reserve: u64,
        models: &[ModelFacts],
        wanted: &[Option<u16>],
        now: Instant,
    ) {
        self.slots.follow(free, reserve, models, wanted, now);
    }

    /// True once the device was nearly full for too long.
    pub(crate) fn is_under_pressure(&mut self, reading: &Reading, now: Instant) -> bool {
        let starved = self.has_no_slots();
        self.pressure.observe(reading.memory, reading.passes, starved, now)
    }

    /// A second has passed. True when kept memory should go back to the system.
    pub(crate) fn tick(&mut self, passes: usize) -> bool {
        self.idle_ticks = if passes > 0 { 0 } else { self.idle_ticks.saturating_add(1) };
        self.idle_ticks == TRIM_AFTER_TICKS
    }

    pub(crate) fn pass_made(&mut self) {
        self.idle_ticks = 0;
    }

    /// The last reply of a job was confirmed.
    pub(crate) fn job_answered(&mut self) {
        self.jobs_answered += 1;
    }

    /// Checks for a leak after a pass. No other pass of this worker may hold device memory at the reading.
    pub(crate) fn look_for_leak(&mut self, device: &str, memory: Memory) {
        if let Some(Leaking { grown, bytes_per_job, jobs_left }) =
            self.leak.observe(memory, self.jobs_answered)
        {
            let grown = Mib(grown);
            tracing::warn!(
                device, %grown, bytes_per_job, jobs_left,
                "device memory leaks: it grows with each job. The device will be full after about as many further jobs as jobs_left says"
            );
        }
    }

    /// Learns from a pass that fitted. True if a limit moved.
    pub(crate) fn learn_fit(&mut self, model: &ModelFacts, shape: PassShape, unix_ms: u64) -> bool {
        let bytes = (model.pass_bytes)(shape);
        bytes != UNKNOWN_BYTES && self.limits.fitted(&model.name, shape.longest, bytes, unix_ms)
    }

    /// Records a pass that ran out of memory. True if a limit moved. Limits change only if no other process was on the device.
    pub(crate) fn pass_ran_out(
        &mut self,
        model: &ModelFacts,
        shape: PassShape,
        oom: &OutOfMemory,
        was_alone: bool,
        unix_ms: u64,
    ) -> bool {
        let (bytes, longest) = ((model.pass_bytes)(shape), shape.longest);
        // No pass is smaller than one item of cost 1. Where all items have that cost, another one may fit: this one was too large by its
        // content, which no size tells.
        let is_smallest = shape.cost <= 1;
        // If by the device's own count the pass should have fitted, it teaches nothing about sizes.
        let teaches =
            !is_smallest && was_alone && oom.foreign == 0 && oom.asked > oom.free && bytes != UNKNOWN_BYTES;
        if teaches {
            self.limits.ran_out(&model.name, longest, bytes, unix_ms);
        }
        teaches
    }

    pub(crate) fn status(&self, resident: u64, now: Instant) -> MemoryStatus {
        let (leaked, leaked_per_job) = self.leak.growth();
        MemoryStatus {
            resident,
            pressure_ratio: self.pressure.ratio(),
            pressure_lasted: self.pressure.lasted(now),
            leaked,
            leaked_per_job,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn watch(model: &ModelFacts) -> MemoryWatch {
        MemoryWatch {
            slots: ModelSlots::new(std::slice::from_ref(model), Instant::now()),
            limits: LearnedLimits::new("cpu", 100, Default::default()),
            pressure: Pressure::new(90, std::time::Duration::ZERO, 0),
            leak: Leak::default(),
            idle_ticks: 0,
            jobs_answered: 0,
        }
    }

    /// Whether a pass of one item of cost 8 that ran out of memory shows that such a pass is too large.
    fn teaches(oom: OutOfMemory, was_alone: bool, pass_bytes: u64) -> bool {
        teaches_of(PassShape::default().with(8), oom, was_alone, pass_bytes)
    }

    fn teaches_of(shape: PassShape, oom: OutOfMemory, was_alone: bool, pass_bytes: u64) -> bool {
        let model = ModelFacts { pass_bytes: Arc::new(move |_| pass_bytes), ..ModelFacts::for_tests() };
        watch(&model).pass_ran_out(&model, shape, &oom, was_alone, 0)
    }

    #[test]
    fn only_a_pass_that_had_the_device_alone_and_asked_for_more_than_it_has_teaches_a_limit() {
        let oom = OutOfMemory { asked: 9, free: 8, total: 100, foreign: 0 };
        assert!(teaches(oom, true, 50));
        assert!(!teaches(oom, false, 50), "other passes held memory");
        assert!(!teaches(OutOfMemory { foreign: 1, ..oom }, true, 50), "other processes held memory");
        assert!(!teaches(OutOfMemory { free: 9, ..oom }, true, 50), "it should have fitted");
        assert!(!teaches(oom, true, UNKNOWN_BYTES), "nobody knows what it needs");
        let one = PassShape::default().with(1);
        assert!(!teaches_of(one, oom, true, 50), "the size of no other pass follows from it");
        assert!(teaches_of(one.with(1), oom, true, 50));
    }

    /// The need of a program may be unknown for a while, also after it was known.
    #[test]
    fn a_pass_of_unknown_need_that_fitted_teaches_nothing() {
        let need = Arc::new(AtomicU64::new(50));
        let of_pass = Arc::clone(&need);
        let pass_bytes = Arc::new(move |_: PassShape| of_pass.load(Ordering::Relaxed));
        let model = ModelFacts { pass_bytes, ..ModelFacts::for_tests() };
        let (mut watch, shape) = (watch(&model), PassShape::default().with(8));
        let oom = OutOfMemory { asked: 9, free: 8, total: 100, foreign: 0 };
        assert!(watch.pass_ran_out(&model, shape, &oom, true, 0));
        need.store(30, Ordering::Relaxed);
        watch.learn_fit(&model, shape, 0);
        need.store(UNKNOWN_BYTES, Ordering::Relaxed);
        watch.learn_fit(&model, shape, 0);
        let known: Vec<_> = watch.limits().known().map(|(_, limit)| (limit.fitted, limit.failed)).collect();
        assert_eq!(known, [(30, 50)]);
    }
}
