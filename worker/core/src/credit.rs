//! How many jobs a worker should hold: as many as keep its device busy, so that the rest wait at the broker, where another
//! worker can take them. Pure. Slots (memory) stay the cap.

use std::time::Duration;

/// The work that a worker wants to hold: two passes, one that runs and one that is ready, and what runs in this time. It covers
/// the way to the broker and back, and the time to decode.
const PASSES_AHEAD: f64 = 2.0;
const TIME_AHEAD: Duration = Duration::from_millis(500);

/// Jobs that a worker holds while their cost is unknown: enough to learn it, and few if they turn out to be large.
const JOBS_UNKNOWN: f64 = 4.0;

/// The weight of a new figure in its average: after some ten jobs or passes an old load is forgotten.
const WEIGHT: f64 = 0.2;

/// What is known of a model's load.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Credit {
    /// Average cost of a job.
    job_cost: Option<f64>,
    /// Average cost that the device runs in a second.
    cost_per_second: Option<f64>,
}

impl Credit {
    /// A job of so much cost was decoded.
    pub(crate) fn job_decoded(&mut self, cost: usize) {
        blend(&mut self.job_cost, cost.max(1) as f64);
    }

    /// A pass of so much cost took so long.
    pub(crate) fn pass_ended(&mut self, cost: usize, took: Duration) {
        if !took.is_zero() {
            blend(&mut self.cost_per_second, cost as f64 / took.as_secs_f64());
        }
    }

    /// How many jobs to hold, at least one.
    pub(crate) fn jobs(&self, pass_cost_max: usize) -> u16 {
        let jobs = match self.job_cost {
            None => JOBS_UNKNOWN,
            Some(job_cost) => {
                let running = self.cost_per_second.unwrap_or(0.0) * TIME_AHEAD.as_secs_f64();
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
        (0..200).for_each(|_| credit.pass_ended(2000, Duration::from_millis(2)));
        let jobs = f64::from(credit.jobs(2048));
        assert!((4500.0..6000.0).contains(&jobs), "{jobs}");
    }
}
