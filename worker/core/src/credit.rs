//! How many jobs a worker should hold: as many as keep its device busy. The rest wait at the broker, where another worker can take them.
//! What comes in are the costs of jobs, the times of passes, and how many jobs wait for the broker to take their replies, or for a store.
//! Pure. Slots (memory) stay the cap.

use std::time::Duration;

/// The passes and the time that the jobs of a worker should cover: one pass that runs and one that is ready, plus half a second for the way
/// to the broker and back and for decoding.
const PASSES_AHEAD: f64 = 2.0;
pub(crate) const TIME_AHEAD: Duration = Duration::from_millis(500);

/// Jobs that a worker holds while their cost is unknown: enough to learn it, and few if they turn out to be large.
const JOBS_UNKNOWN: f64 = 4.0;

/// The weight of a new figure in its average: after some ten jobs or passes an old load is forgotten.
const WEIGHT: f64 = 0.2;

/// A pass counts as at most so many times slower than the average: one that waited for another process's pass says little of the device. A
/// device that became slower is known after a few passes all the same.
const SLOWER_MAX: f64 = 4.0;

/// The least time of an average large job for which a second one is not held. The second one only bridges the tens of milliseconds between
/// two jobs. For longer jobs this gap is a few hundredths of the time at most, and the second job should go to an idle worker.
const LARGE_IS_SHORT: Duration = Duration::from_secs(2);

/// Large jobs count as short until an average one takes this long. The distance between the two limits saves consumers from being started
/// and stopped again and again.
const LARGE_IS_LONG: Duration = Duration::from_secs(4);

/// How many jobs to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// From the queues that jobs come from.
    pub(crate) jobs: u16,
    /// Additional jobs, one for each job that waits for the broker to take its messages or for a store, but not more than `jobs`. More would
    /// hurt: when these waits end, the broker sends as many new jobs, and a worker that joins must find some too.
    pub(crate) beside: u16,
    /// From the queue of large jobs.
    pub(crate) large: u16,
}

impl Wanted {
    pub(crate) const NONE: Self = Self { jobs: 0, beside: 0, large: 0 };
}

/// What is known of a model's load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Credit {
    /// Average cost of a job.
    job_cost: Option<f64>,
    /// The same of a large job.
    large_job_cost: Option<f64>,
    /// Average cost of a pass, and average time of one, in seconds. The device's speed is their ratio: an average of the speeds of passes
    /// would be far too high after a single one that took almost no time.
    pass_cost: Option<f64>,
    pass_seconds: Option<f64>,
    /// Whether an average large job is so short that another one should be ready when it ends.
    large_is_short: bool,
    /// Jobs that have waited for a while for the broker to take their messages, or for a store. They do not keep the device busy.
    stalled: u16,
}

impl Credit {
    /// Sets how many jobs, large ones not counted, have waited for a while for the broker or for a store.
    pub(crate) fn set_stalled(&mut self, jobs: usize) {
        self.stalled = u16::try_from(jobs).unwrap_or(u16::MAX);
    }

    /// A job of so much cost was decoded.
    pub(crate) fn job_decoded(&mut self, cost: usize) {
        blend(&mut self.job_cost, cost.max(1) as f64);
    }

    /// A job of the queue of large jobs was decoded: so much cost of it is left.
    pub(crate) fn large_job_decoded(&mut self, cost: usize) {
        blend(&mut self.large_job_cost, cost.max(1) as f64);
        self.compare_large();
    }

    /// Learns from a pass of this cost that took so long.
    pub(crate) fn learn_speed(&mut self, cost: usize, took: Duration) {
        if !took.is_zero() {
            let (cost, seconds) = (cost as f64, took.as_secs_f64());
            let most = self.cost_per_second().map_or(seconds, |speed| SLOWER_MAX * cost / speed);
            blend(&mut self.pass_cost, cost);
            blend(&mut self.pass_seconds, seconds.min(most));
            self.compare_large();
        }
    }

    /// Cost that the device runs in a second.
    fn cost_per_second(&self) -> Option<f64> {
        Some(self.pass_cost? / self.pass_seconds?)
    }

    fn compare_large(&mut self) {
        if let (Some(cost), Some(per_second)) = (self.large_job_cost, self.cost_per_second()) {
            let most = if self.large_is_short { LARGE_IS_LONG } else { LARGE_IS_SHORT };
            self.large_is_short = cost < per_second * most.as_secs_f64();
        }
    }

    /// How many jobs to hold: at least one of each kind.
    pub(crate) fn wanted(&self, pass_cost_max: usize) -> Wanted {
        let jobs = self.jobs(pass_cost_max);
        let large = if self.large_is_short { 2 } else { 1 };
        Wanted { jobs, beside: self.stalled.min(jobs), large }
    }

    /// How many jobs, large ones not counted, keep the device busy; at least one.
    fn jobs(&self, pass_cost_max: usize) -> u16 {
        let jobs = match self.job_cost {
            None => JOBS_UNKNOWN,
            Some(job_cost) => {
                let running = self.cost_per_second().unwrap_or(0.0) * TIME_AHEAD.as_secs_f64();
                (PASSES_AHEAD * pass_cost_max as f64 + running) / job_cost
            }
        };
        // A cast of a float saturates.
        jobs.ceil().max(1.0) as u16
    }
}

fn blend(average: &mut Option<f64>, value: f64) {
    *average = Some(average.map_or(value, |old| old + WEIGHT * (value - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_jobs_fill_the_passes_and_large_ones_come_one_by_one() {
        let mut credit = Credit::default();
        assert_eq!(credit.jobs(2048), 4);
        credit.job_decoded(1);
        assert_eq!(credit.jobs(2048), 4096);
        (0..50).for_each(|_| credit.job_decoded(1_000_000));
        assert_eq!(credit.jobs(2048), 1);
        // A device that runs a million a second holds half a second of them.
        (0..200).for_each(|_| credit.job_decoded(100));
        (0..200).for_each(|_| credit.learn_speed(2000, Duration::from_millis(2)));
        let jobs = f64::from(credit.jobs(2048));
        assert!((4500.0..6000.0).contains(&jobs), "{jobs}");
    }

    /// Also where a pass takes a single job, as those of some programs do.
    #[test]
    fn of_jobs_that_take_milliseconds_at_least_64_are_held() {
        for (pass_cost_max, millis) in [(1, 1), (1, 8), (2048, 1), (2048, 8)] {
            let mut credit = Credit::default();
            for _ in 0..50 {
                credit.job_decoded(pass_cost_max);
                credit.learn_speed(pass_cost_max, Duration::from_millis(millis));
            }
            let jobs = credit.jobs(pass_cost_max);
            assert!(jobs >= 64, "{jobs} jobs of {millis} ms");
        }
    }

    /// A fast one, as of a program that remembers its answers; a slow one, as where another process has the device.
    #[test]
    fn a_single_pass_changes_little() {
        let mut credit = Credit::default();
        for _ in 0..50 {
            credit.job_decoded(2048);
            credit.learn_speed(2048, Duration::from_millis(10));
        }
        assert_eq!(credit.jobs(2048), 52);
        let after = |passes: usize, took: Duration| {
            let mut credit = credit;
            (0..passes).for_each(|_| credit.learn_speed(2048, took));
            credit.jobs(2048)
        };
        assert_eq!(after(1, Duration::from_micros(1)), 65);
        assert_eq!(after(1, Duration::from_secs(10)), 34);
        // It does become slower.
        assert_eq!(after(10, Duration::from_millis(500)), 4);
    }

    #[test]
    fn beside_jobs_that_wait_for_others_at_most_as_many_again_are_held() {
        let mut credit = Credit::default();
        for (stalled, beside) in [(3, 3), (10, 4), (usize::MAX, 4), (0, 0)] {
            credit.set_stalled(stalled);
            let wanted = credit.wanted(2048);
            assert_eq!((wanted.jobs, wanted.beside), (4, beside), "{stalled}");
        }
    }

    #[test]
    fn a_second_large_job_is_held_only_while_large_jobs_are_short() {
        let mut credit = Credit::default();
        let large = |credit: &Credit| credit.wanted(2048).large;
        credit.large_job_decoded(10_000);
        assert_eq!(large(&credit), 1, "nobody knows how long it takes");
        // 10,000 a second.
        credit.learn_speed(1000, Duration::from_millis(100));
        assert_eq!(large(&credit), 2);
        (0..50).for_each(|_| credit.large_job_decoded(30_000));
        assert_eq!(large(&credit), 2, "three seconds are not worth a change");
        (0..50).for_each(|_| credit.large_job_decoded(600_000));
        assert_eq!(large(&credit), 1);
        (0..50).for_each(|_| credit.large_job_decoded(30_000));
        assert_eq!(large(&credit), 1, "nor are they now");
        (0..50).for_each(|_| credit.learn_speed(10_000, Duration::from_millis(100)));
        assert_eq!(large(&credit), 2, "the device is faster than before");
    }
}
