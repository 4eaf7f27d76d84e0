//! Removes jobs from the ledger that waited in a further queue when its owner deleted it. No worker has lost these.

use std::collections::BTreeSet;

use super::ledger::{JobNumber, Kind, Ledger, Letter};

impl Ledger {
    /// A further queue was deleted. `held`: messages that workers hold and that may come from it. Other unacknowledged messages that were
    /// published to it are gone.
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

    /// A worker no longer holds a message of a deleted queue. Otherwise the broker would keep or dead-letter it.
    pub fn gone_with_its_queue(&mut self, letter: Letter) {
        let record = self.letter(letter);
        if record.is_orphan && !record.acked {
            self.forgive_job(record.job);
        }
    }

    /// Ends the check of how a job ends.
    pub(super) fn forgive_job(&mut self, job: JobNumber) {
        let record = &mut self.jobs[job.0];
        let was_open = record.is_open();
        record.is_forgiven = true;
        self.open -= usize::from(was_open);
        self.unstarted.remove(&job);
    }
}
