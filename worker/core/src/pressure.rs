//! Detects a device that stays nearly full, and a process whose memory grows with every job. Readings of the device come in. Pure.

use std::time::{Duration, Instant};

use crate::device::Memory;
use crate::event::PassBytes;

/// Detects a device that stays nearly full because of memory that a restart would free. Other processes' memory and weights alone cause no
/// restart; slots and delays handle them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pressure {
    /// From this percentage in use on, the device counts as nearly full.
    percent: u8,
    /// How long that may last; zero disables the check.
    tolerated: Duration,
    /// Bytes that the worker held when it started.
    resident: u64,
    since: Option<Instant>,
    /// The part of the device in use at the last reading.
    ratio: f64,
}

impl Pressure {
    pub(crate) fn new(percent: u8, tolerated: Duration, resident: u64) -> Self {
        Self { percent, tolerated, resident, since: None, ratio: 0.0 }
    }

    /// Adds a reading. `passes`: the bytes that passes hold of it; `starved`: no model has room for a job, which counts as nearly full.
    /// True once the device was nearly full for too long.
    pub(crate) fn observe(&mut self, memory: Memory, passes: PassBytes, starved: bool, now: Instant) -> bool {
        let used = memory.total.saturating_sub(memory.free).saturating_sub(passes.total());
        let grown = memory.own().saturating_sub(passes.own).saturating_sub(self.resident);
        self.ratio = used as f64 / memory.total.max(1) as f64;
        let full = u128::from(used) * 100 >= u128::from(memory.total) * u128::from(self.percent);
        if !(full || starved) || grown <= memory.total / NOISE {
            self.since = None;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        !self.tolerated.is_zero() && now.duration_since(since) >= self.tolerated
    }

    /// The part of the device that was in use at the last reading, without what passes held.
    pub(crate) fn ratio(&self) -> f64 {
        self.ratio
    }

    /// How long the device has been nearly full.
    pub(crate) fn lasted(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }
}

/// After so many passes the process's memory is taken as its normal: libraries allocate on first use.
const WARM_UP_PASSES: u64 = 20;

/// Growth below this part of the device is noise.
const NOISE: u64 = 256;

/// Detects a process whose memory keeps growing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Leak {
    passes: u64,
    /// Bytes held and jobs answered, after the warm-up.
    baseline: Option<(u64, u64)>,
    /// The bytes of the last report.
    reported: u64,
    /// Growth since the warm-up at the last reading: bytes, and bytes per job.
    growth: (u64, u64),
}

/// The size of a leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaking {
    /// Bytes more than after the warm-up.
    pub(crate) grown: u64,
    pub(crate) bytes_per_job: u64,
    /// How many more jobs fit until the device is full, at this rate.
    pub(crate) jobs_left: u64,
}

impl Leak {
    /// Adds a reading taken after a pass, when no pass holds memory. Returns a leak whenever it has doubled since the last report.
    pub(crate) fn observe(&mut self, memory: Memory, jobs: u64) -> Option<Leaking> {
        self.passes += 1;
        let own = memory.own();
        let (baseline, since) = match self.baseline {
            // Less memory than at the baseline: a better baseline.
            Some((held, since)) if own >= held => (held, since),
            _ if self.passes < WARM_UP_PASSES => return None,
            _ => {
                self.baseline = Some((own, jobs));
                (self.reported, self.growth) = (0, (0, 0));
                return None;
            }
        };
        let grown = own - baseline;
        let bytes_per_job = grown.div_ceil((jobs - since.min(jobs)).max(1));
        self.growth = if grown < memory.total / NOISE { (grown, 0) } else { (grown, bytes_per_job) };
        if grown < (memory.total / NOISE).max(2 * self.reported) || jobs <= since {
            return None;
        }
        self.reported = grown;
        Some(Leaking { grown, bytes_per_job, jobs_left: memory.free / bytes_per_job.max(1) })
    }

    /// Growth since the warm-up: bytes, and bytes per job; the latter is 0 while the growth is noise.
    pub(crate) fn growth(&self) -> (u64, u64) {
        self.growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: u64 = 1000 << 10;

    fn memory(own: u64) -> Memory {
        Memory { free: TOTAL - own, total: TOTAL, foreign: 0 }
    }

    #[test]
    fn only_lasting_pressure_counts() {
        let start = Instant::now();
        let mut pressure = Pressure::new(90, Duration::from_secs(300), TOTAL / 2);
        let mut at = |second, used, own| {
            let passes = PassBytes { own, programs: 0 };
            pressure.observe(memory(used), passes, false, start + Duration::from_secs(second))
        };
        assert!(!at(0, TOTAL * 9 / 10, 0));
        assert!(!at(299, TOTAL, 0));
        assert!(at(300, TOTAL, 0));
        // Memory of passes does not count, and a moment of relief restarts the time.
        assert!(!at(301, TOTAL, TOTAL / 5));
        assert!(!at(302, TOTAL, 0));
        assert!(!at(601, TOTAL, 0));
        assert!(at(602, TOTAL, 0));
        assert_eq!(pressure.lasted(start + Duration::from_secs(610)), Duration::from_secs(308));
    }

    #[test]
    fn memory_that_a_restart_does_not_free_is_no_pressure() {
        let start = Instant::now();
        let lasting = |memory: Memory| {
            let mut pressure = Pressure::new(90, Duration::from_secs(2), TOTAL / 2);
            (0..10).any(|second| {
                pressure.observe(memory, PassBytes::default(), false, start + Duration::from_secs(second))
            })
        };
        let with_weights = memory(TOTAL / 2);
        assert!(!lasting(Memory { free: 0, foreign: TOTAL / 2, ..with_weights }));
        assert!(lasting(Memory { free: 0, foreign: TOTAL / 4, ..with_weights }));
    }

    #[test]
    fn passes_of_programs_hide_no_leak_of_the_worker() {
        let start = Instant::now();
        let lasting = |memory: Memory, passes: PassBytes| {
            let mut pressure = Pressure::new(90, Duration::from_secs(2), TOTAL / 4);
            (0..10).any(|second| pressure.observe(memory, passes, false, start + Duration::from_secs(second)))
        };
        // A leak as large as the memory that programs' passes hold.
        let leaking = Memory { free: 0, total: TOTAL, foreign: TOTAL * 7 / 10 };
        assert!(lasting(leaking, PassBytes { own: 0, programs: TOTAL / 20 }));
        // The same bytes, held by the worker's own passes.
        assert!(!lasting(leaking, PassBytes { own: TOTAL / 20, programs: 0 }));
        // Memory that programs will give back does not count.
        assert!(!lasting(leaking, PassBytes { own: 0, programs: TOTAL / 5 }));
    }

    #[test]
    fn a_leak_that_leaves_no_room_for_anything_is_pressure() {
        let start = Instant::now();
        let mut pressure = Pressure::new(90, Duration::from_secs(2), TOTAL / 2);
        let mut at = |second| {
            let now = start + Duration::from_secs(second);
            pressure.observe(memory(TOTAL * 3 / 4), PassBytes::default(), true, now)
        };
        assert_eq!((at(0), at(1), at(2)), (false, false, true));
    }

    #[test]
    fn the_ratio_is_the_part_of_the_device_that_is_used_without_passes() {
        let mut pressure = Pressure::new(90, Duration::ZERO, 0);
        let passes = PassBytes { own: TOTAL / 8, programs: TOTAL / 8 };
        pressure.observe(memory(TOTAL), passes, false, Instant::now());
        assert!((pressure.ratio() - 0.75).abs() < 1e-9, "{}", pressure.ratio());
    }

    #[test]
    fn growth_of_less_than_a_256th_of_the_memory_is_no_pressure() {
        let start = Instant::now();
        let lasting = |grown: u64| {
            let mut pressure = Pressure::new(90, Duration::from_secs(1), TOTAL - grown);
            (0..3).any(|second| {
                pressure.observe(
                    memory(TOTAL),
                    PassBytes::default(),
                    false,
                    start + Duration::from_secs(second),
                )
            })
        };
        assert!(!lasting(TOTAL / NOISE) && lasting(TOTAL / NOISE + 1));
    }

    #[test]
    fn pressure_may_be_ignored() {
        let mut pressure = Pressure::new(90, Duration::ZERO, 0);
        let start = Instant::now();
        assert!(!(0..1000).any(|s| pressure.observe(
            memory(TOTAL),
            PassBytes::default(),
            false,
            start + Duration::from_secs(s)
        )));
    }

    #[test]
    fn a_leak_is_reported_with_its_slope_and_each_time_it_doubles() {
        let mut leak = Leak::default();
        let reported: Vec<_> = (0..1000)
            .filter_map(|job| Some((job, leak.observe(memory(100_000 + 100 * job), job)?)))
            .collect();
        let (_, first) = reported[0];
        assert_eq!((first.bytes_per_job, first.grown), (100, 4000));
        assert!(first.jobs_left > 8000 && first.jobs_left < 9300, "{first:?}");
        assert!((3..=6).contains(&reported.len()), "{reported:?}");
    }

    #[test]
    fn growth_per_job_is_given_from_a_256th_of_the_memory_on() {
        let (mut leak, noise) = (Leak::default(), TOTAL / NOISE);
        assert!((0..WARM_UP_PASSES).all(|_| leak.observe(memory(100_000), 0).is_none()));
        leak.observe(memory(100_000 + noise - 1), 10);
        assert_eq!(leak.growth(), (noise - 1, 0));
        leak.observe(memory(100_000 + noise), 10);
        assert_eq!(leak.growth(), (noise, noise / 10));
    }

    #[test]
    fn warming_up_and_levelling_off_is_no_leak() {
        let mut leak = Leak::default();
        let held = |job: u64| 100_000 + 50_000 * job.min(10) / 10 + job % 7 * 100;
        assert!((0..1000).all(|job| leak.observe(memory(held(job)), job).is_none()));
    }
}
