//! Computes how many jobs a worker may hold. The free memory and the need of a job come in; slots go out, or why no job fits. Pure.

use std::fmt;
use std::num::NonZeroU16;

use crate::device::PassShape;
use crate::units::{FreeMib, Mib};

/// Bytes of a pass or job of which nothing is known yet. Its pass gets the whole device.
pub const UNKNOWN_BYTES: u64 = u64::MAX;

/// The inputs for computing slots, in bytes, read after the weights are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotInputs {
    pub free: u64,
    /// Bytes kept free.
    pub reserve: u64,
    /// Bytes of the model's weights, already taken. Only shown to people, not subtracted again.
    pub weights: u64,
    /// Models that share the device, each with an equal part of the memory.
    pub models: u64,
    /// What one job of the model needs, as [`JobPasses::job_bytes`] computes it.
    pub per_job: u64,
}

/// The passes that a model's jobs may share: of one job, and of two, four, … jobs, as far as their bytes are known.
///
/// A pass of many jobs often needs far less than many passes of one job: libraries have workspaces that do not depend on the size of a
/// pass, and allocators keep memory. So a job's need is its part of the pass with the fewest bytes per job.
#[derive(Clone, Copy, Debug)]
pub struct JobPasses<F> {
    /// The largest pass that one job can ask for.
    pub job: PassShape,
    pub pass_cost_max: usize,
    /// Bytes that a pass of a shape takes.
    pub pass_bytes: F,
}

impl<F: Fn(PassShape) -> u64> JobPasses<F> {
    /// The number of jobs and the bytes of each pass whose bytes are known.
    fn known(&self) -> impl Iterator<Item = (u64, u64)> {
        let jobs_max = (self.pass_cost_max / self.job.cost.max(1)).max(1);
        (0..usize::BITS)
            .map(|doublings| 1_usize << doublings)
            .take_while(move |jobs| *jobs <= jobs_max)
            .map(|jobs| (jobs as u64, (self.pass_bytes)(self.job.times(jobs))))
            .take_while(|(_, bytes)| *bytes != UNKNOWN_BYTES)
    }

    /// Bytes that one job needs where passes may take `room` bytes. If not even one job fits, the bytes of a job alone.
    pub fn job_bytes(&self, room: u64) -> u64 {
        let alone = (self.pass_bytes)(self.job);
        let fitting = self.known().take_while(|(_, bytes)| *bytes <= room);
        fitting.map(|(jobs, bytes)| bytes.div_ceil(jobs)).fold(alone, u64::min)
    }

    /// The bytes in which so many jobs fit: the inverse of [`SlotInputs::slots`].
    pub fn room_for(&self, jobs: u64) -> u64 {
        let room = |(shared, bytes): (u64, u64)| bytes.max(bytes.div_ceil(shared).saturating_mul(jobs));
        self.known().map(room).min().unwrap_or(UNKNOWN_BYTES)
    }
}

impl SlotInputs {
    /// Bytes for this model's jobs: an equal part of the free memory without the reserve.
    pub fn share(&self) -> u64 {
        self.free.saturating_sub(self.reserve) / self.models.max(1)
    }

    /// Sets `per_job` to the result for this model's share of the memory.
    #[must_use]
    pub fn with(self, per_job: impl FnOnce(u64) -> u64) -> Self {
        Self { per_job: per_job(self.share()), ..self }
    }

    /// `floor(share / per_job)`, at most `cap`.
    ///
    /// # Errors
    /// [`DoesNotFit`] when not even one job fits.
    pub fn slots(&self, cap: NonZeroU16) -> Result<NonZeroU16, DoesNotFit> {
        if self.per_job == UNKNOWN_BYTES && self.share() > 0 {
            // Until its passes have shown what they need, they run one by one, each with the whole device.
            return Ok(NonZeroU16::MIN);
        }
        let slots = self.share() / self.per_job.max(1);
        let slots = u16::try_from(slots).unwrap_or(u16::MAX).min(cap.get());
        NonZeroU16::new(slots).ok_or(DoesNotFit(*self))
    }
}

/// A device without room for one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DoesNotFit(pub SlotInputs);

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inputs = &self.0;
        write!(
            f,
            "no job fits: {} free after {} of weights, minus {} reserve",
            FreeMib(inputs.free),
            Mib(inputs.weights),
            Mib(inputs.reserve)
        )?;
        if inputs.models > 1 {
            write!(f, ", shared by {} models", inputs.models)?;
        }
        write!(f, ", leaves {}; one job needs ", FreeMib(inputs.share()))?;
        if inputs.per_job == UNKNOWN_BYTES {
            return write!(
                f,
                "an unknown amount, which has to be measured first. Lower the device's reserve_mib, or give the device more memory"
            );
        }
        let missing = inputs.per_job.saturating_sub(inputs.share()).saturating_mul(inputs.models.max(1));
        write!(
            f,
            "{}: {} are missing. Lower job_items or pass_tokens of the model or the device's reserve_mib, or give the device more \
             memory",
            Mib(inputs.per_job),
            Mib(missing)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn inputs(free: u64, reserve: u64, per_job: u64) -> SlotInputs {
        SlotInputs {
            free: free * MIB,
            reserve: reserve * MIB,
            weights: 90 * MIB,
            models: 1,
            per_job: per_job * MIB,
        }
    }

    #[test]
    fn slots_are_whole_jobs_in_what_the_reserve_leaves() {
        let cap = NonZeroU16::MAX;
        assert_eq!(inputs(1000, 100, 300).slots(cap).unwrap().get(), 3);
        assert_eq!(inputs(1000, 100, 900).slots(cap).unwrap().get(), 1);
        assert_eq!(inputs(1000, 100, 1).slots(NonZeroU16::new(64).unwrap()).unwrap().get(), 64);
        let shared = SlotInputs { models: 2, ..inputs(1000, 100, 300) };
        assert_eq!(shared.slots(cap).unwrap().get(), 1);
    }

    #[test]
    fn the_error_shows_its_arithmetic() {
        let error = inputs(1000, 100, 901).slots(NonZeroU16::MAX).unwrap_err().to_string();
        for figure in [
            "1000.0 MiB free",
            "90.0 MiB of weights",
            "100.0 MiB reserve",
            "needs 901.0 MiB",
            "1.0 MiB are missing",
        ] {
            assert!(error.contains(figure), "{figure} not in: {error}");
        }
        assert!(!error.contains("shared by"), "{error}");
        let shared = SlotInputs { models: 2, ..inputs(1000, 100, 901) };
        let error = shared.slots(NonZeroU16::MAX).unwrap_err().to_string();
        assert!(error.contains("shared by 2 models, leaves 450.0 MiB"), "{error}");
    }

    #[test]
    fn a_job_whose_need_is_unknown_has_one_slot_where_there_is_any_room() {
        let unknown = |free| SlotInputs { per_job: UNKNOWN_BYTES, ..inputs(free, 100, 0) };
        assert_eq!(unknown(1000).slots(NonZeroU16::MAX).unwrap().get(), 1);
        let error = unknown(100).slots(NonZeroU16::MAX).unwrap_err().to_string();
        assert!(error.contains("leaves 0.0 MiB; one job needs an unknown amount"), "{error}");
    }

    fn passes<F: Fn(PassShape) -> u64>(pass_cost_max: usize, pass_bytes: F) -> JobPasses<F> {
        JobPasses { job: PassShape::default().with(1), pass_cost_max, pass_bytes }
    }

    #[test]
    fn jobs_that_share_a_pass_share_what_every_pass_needs() {
        // A workspace of 70 bytes for each pass, and one byte for each item; passes of more than 32 items are unknown.
        let pass = |shape: PassShape| if shape.items > 32 { UNKNOWN_BYTES } else { 70 + shape.cost as u64 };
        assert_eq!(passes(64, pass).job_bytes(1_000), 4, "(70 + 32) / 32, rounded up");
        assert_eq!(passes(4, pass).job_bytes(1_000), 19, "a pass has four items at most");
        assert_eq!(passes(64, pass).job_bytes(75), 19, "a pass of eight does not fit");
        assert_eq!(passes(64, pass).job_bytes(60), 71, "none fits");
        let of_two_items = JobPasses { job: PassShape::default().with(2), ..passes(4, pass) };
        assert_eq!(of_two_items.job_bytes(1_000), 37, "two of them fill a pass");
        // If bytes grow with the number of jobs, sharing changes nothing.
        assert_eq!(passes(64, |shape| 10 * shape.cost as u64).job_bytes(1_000), 10);
        assert_eq!(passes(64, |_| UNKNOWN_BYTES).job_bytes(1_000), UNKNOWN_BYTES);
    }

    #[test]
    fn so_many_jobs_fit_the_room_for_them() {
        for base in [0, 1, 70, 5_000] {
            let passes = passes(64, |shape: PassShape| base + 3 * shape.cost as u64);
            for jobs in 1..200 {
                let room = passes.room_for(jobs);
                assert!(room <= jobs * (base + 3), "{base} {jobs}");
                let inputs = SlotInputs { free: room, ..inputs(0, 0, 0) }.with(|room| passes.job_bytes(room));
                let slots = inputs.slots(NonZeroU16::MAX).unwrap().get();
                assert!(u64::from(slots) >= jobs, "{base}: {slots} of {jobs} jobs in {room}");
            }
        }
        assert_eq!(passes(64, |_| UNKNOWN_BYTES).room_for(1), UNKNOWN_BYTES);
    }

    #[test]
    fn a_reserve_above_the_free_memory_leaves_nothing_and_does_not_wrap() {
        assert_eq!(inputs(10, 100, 1).share(), 0);
        assert!(inputs(10, 100, 1).slots(NonZeroU16::MAX).is_err());
    }
}
