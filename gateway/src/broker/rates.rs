//! Estimates from heartbeats how many jobs a worker answers in a second, for each of its models. Pure.

use std::collections::HashMap;

use vramq_schemas::status::{Heartbeat, ModelStatus};

/// How much an interval between two heartbeats counts: the last five make up two thirds.
const RATE_WEIGHT: f64 = 0.2;

/// Jobs a second of a worker and a model.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub per_s: f64,
    /// The rate was measured while the worker was fully loaded, so it is the worker's capacity. Otherwise it is a lower bound, from which
    /// no wait can be estimated.
    pub is_full: bool,
}

/// What was measured of a worker and a model.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    /// The rate of the fully loaded worker; `None` until it was measured.
    full_per_s: Option<f64>,
    /// The highest rate seen while the worker was not fully loaded.
    least_per_s: Option<f64>,
    /// Since the last job ended on a fully loaded worker. `None`: no job has ended under full load yet.
    quiet: Option<Quiet>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Quiet {
    seconds: f64,
    heartbeats: i32,
    /// Jobs that the worker has: all of them may end together.
    held: u64,
}

impl Measured {
    /// Records `ended` jobs in an interval of full load, in which the worker held at most `held` jobs. The rate is measured from one end to
    /// the next, because a job may take longer than the interval between heartbeats.
    fn full(&mut self, ended: u64, held: u64, seconds: f64) {
        let Quiet { seconds: before, heartbeats, .. } = self.quiet.unwrap_or_default();
        let quiet = Quiet { seconds: before + seconds, heartbeats: heartbeats + 1, held };
        if ended == 0 {
            self.quiet = self.quiet.map(|_| quiet);
            return;
        }
        let measured = ended as f64 / quiet.seconds;
        // The first interval may begin in the middle of a job. It counts only if short jobs dominate: more ended than the worker held at
        // its beginning.
        let is_known = self.quiet.replace(Quiet::default()).is_some() || ended >= 2 * held.max(1);
        if is_known {
            let known = self.full_per_s.unwrap_or(measured);
            let weight = 1.0 - (1.0 - RATE_WEIGHT).powi(quiet.heartbeats);
            self.full_per_s = Some(known + weight * (measured - known));
        }
    }

    /// Records `ended` jobs in an interval in which the worker was idle for a part of the time.
    fn not_full(&mut self, ended: u64, seconds: f64) {
        self.quiet = None;
        let measured = ended as f64 / seconds;
        match &mut self.full_per_s {
            Some(known) => *known = known.max(measured),
            None if ended > 0 => {
                self.least_per_s = Some(self.least_per_s.map_or(measured, |least| least.max(measured)));
            }
            None => {}
        }
    }

    fn rate(&self) -> Option<Rate> {
        let Some(known) = self.full_per_s else {
            return self.least_per_s.map(|per_s| Rate { per_s, is_full: false });
        };
        let Quiet { seconds, heartbeats, held } = self.quiet.unwrap_or_default();
        // Without ended jobs the rate decays. It does not decay while the held jobs may simply take their usual time.
        let slowed = known * (1.0 - RATE_WEIGHT).powi(heartbeats);
        let per_s = if seconds > 0.0 { known.min(slowed.max(held as f64 / seconds)) } else { known };
        Some(Rate { per_s, is_full: true })
    }
}

/// The rates of one worker, by model.
#[derive(Debug, Default)]
pub struct Rates(HashMap<String, Measured>);

impl Rates {
    pub fn get(&self, model: &str) -> Option<Rate> {
        self.0.get(model)?.rate()
    }

    /// Records the next heartbeat of a worker. A worker that was fully loaded at both heartbeats shows its capacity; any other shows only a
    /// lower bound.
    pub fn update(&mut self, before: &Heartbeat, now: &Heartbeat, backlog: impl Fn(&str) -> bool) {
        let seconds = now.sent_at_ms.saturating_sub(before.sent_at_ms) as f64 / 1000.0;
        // A change of state sends an extra heartbeat. The interval before it is too short to compute a rate.
        if seconds < 0.5 {
            return;
        }
        self.0.retain(|name, _| now.models.iter().any(|model| model.model == *name));
        for model in &now.models {
            let Some(earlier) = before.models.iter().find(|earlier| earlier.key == model.key) else {
                continue;
            };
            // Saturating, because a heartbeat may hold any value.
            let ended = |m: &ModelStatus| {
                let failed = m.counters.dead_lettered.saturating_add(m.counters.withdrawn);
                m.counters.answered.saturating_add(failed)
            };
            let ended = ended(model).saturating_sub(ended(earlier));
            let has_backlog = backlog(&model.model);
            let measured = self.0.entry(model.model.clone()).or_default();
            if is_full(earlier, has_backlog) && is_full(model, has_backlog) {
                measured.full(ended, earlier.in_hand, seconds);
            } else {
                measured.not_full(ended, seconds);
            }
        }
    }
}

/// Whether a worker is fully loaded: jobs wait for a pass, no slot is left, or it holds jobs while others waited in the queue a moment ago.
fn is_full(model: &ModelStatus, has_backlog: bool) -> bool {
    model.waiting > 0 || model.in_hand >= u64::from(model.slots.max(1)) || (model.in_hand > 0 && has_backlog)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lowest and highest estimate, relative to the true rate, for a fully loaded worker that runs `at_a_time` jobs of `job_s` seconds,
    /// all begun together.
    fn estimates(job_s: u64, at_a_time: u64) -> (f64, f64) {
        let mut measured = Measured::default();
        let truth = at_a_time as f64 / job_s as f64;
        let (mut least, mut most) = (f64::MAX, 0.0_f64);
        for second in (5..3_600).step_by(5) {
            // The first heartbeat of the full worker comes in the middle of a job.
            let ends = |second: u64| (second + job_s / 2) / job_s * at_a_time;
            measured.full(ends(second) - ends(second - 5), at_a_time, 5.0);
            if let Some(Rate { per_s, .. }) = measured.rate() {
                (least, most) = (least.min(per_s / truth), most.max(per_s / truth));
            }
        }
        (least, most)
    }

    #[test]
    fn the_rate_of_long_jobs_is_within_twice_the_truth_at_each_moment() {
        for job_s in [1, 7, 30, 60, 120, 600] {
            for at_a_time in [1, 8] {
                let (least, most) = estimates(job_s, at_a_time);
                assert!(least > 0.5 && most < 2.0, "{at_a_time} jobs of {job_s} s: {least} to {most}");
            }
        }
    }

    #[test]
    fn a_worker_that_ends_nothing_more_slows_down() {
        let mut measured = Measured { full_per_s: Some(10.0), ..Measured::default() };
        measured.full(50, 4, 5.0);
        let mut before = 10.0;
        for _ in 0..100 {
            measured.full(0, 4, 5.0);
            let Rate { per_s, .. } = measured.rate().unwrap();
            assert!(per_s < before);
            before = per_s;
        }
        assert!(before < 0.01, "{before}");
    }
}
