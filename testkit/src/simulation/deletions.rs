//! Takes jobs out of the ledger that waited in a further queue when its owner deleted it: no worker lost them.

use std::collections::BTreeSet;

use super::ledger::{JobNumber, Kind, Ledger, Letter};

impl Ledger {
    /// A further queue was deleted. Workers hold the letters in `held`, which may come from it; what else was published to it and not
    /// acknowledged is gone.
    pub fn queue_deleted(&mut self, model: usize, queue: usize, held: &BTreeSet<Letter>) {
        let mut gone = Vec::new();
        for (at, letter) in self.letters.iter_mut().enumerate() {
            let spec = &self.jobs[letter.job.0].spec;
            let is_of_queue = letter.is_original && (spec.model, spec.queue) == (model, queue);
            if !is_of_queue || letter.acked || !matches!(letter.kind, Kind::Job { .. }) {
                continue;
            }
            let is_held = u32::try_from(at).is_ok_and(|at| held.contains(&Letter(at)));
            match is_held {
                true => letter.is_orphan = true,
                false => gone.push(letter.job),
            }
        }
        gone.into_iter().for_each(|job| self.forgive_job(job));
    }

    /// A worker no longer holds a message that the broker would keep, or dead-letter, if its queue were there.
    pub fn gone_with_its_queue(&mut self, letter: Letter) {
        let record = self.letter(letter);
        if record.is_orphan && !record.acked {
            self.forgive_job(record.job);
        }
    }

    /// Nobody answers for the end of a job any more.
    pub(super) fn forgive_job(&mut self, job: JobNumber) {
        let record = &mut self.jobs[job.0];
        let was_open = record.is_open();
        record.is_forgiven = true;
        self.open -= usize::from(was_open);
        self.unstarted.remove(&job);
    }
}
