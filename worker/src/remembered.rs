//! Jobs that were answered but whose ack may not have reached the broker: when they come again, they are acknowledged
//! without running.

use std::collections::{HashSet, VecDeque};

/// How many are remembered: several times the most jobs that one lost connection can leave unacknowledged, at a few
/// dozen bytes each.
const REMEMBERED_MAX: usize = 4096;

/// A bounded memory of jobs by their fingerprints, the oldest forgotten first.
#[derive(Debug, Default)]
pub struct Finished {
    jobs: HashSet<u64>,
    order: VecDeque<u64>,
}

impl Finished {
    pub fn remember(&mut self, job: u64) {
        if !self.jobs.insert(job) {
            return;
        }
        self.order.push_back(job);
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.jobs.remove(&oldest);
        }
    }

    pub fn contains(&self, job: u64) -> bool {
        self.jobs.contains(&job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_the_newest_and_no_more() {
        let mut finished = Finished::default();
        for job in 0..REMEMBERED_MAX as u64 + 10 {
            finished.remember(job);
            finished.remember(job);
        }
        assert!(!finished.contains(9));
        assert!(finished.contains(10) && finished.contains(REMEMBERED_MAX as u64 + 9));
        assert_eq!((finished.jobs.len(), finished.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
    }
}
