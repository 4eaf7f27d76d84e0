//! The end of a running job: what is published, from which item on, and to which queue it is requeued.

use std::time::Instant;

use vramq_schemas::JobHeaders;

use super::Running;
use crate::action::{Route, Run};
use crate::disposition::JobOutcome;
use crate::event::Source;
use crate::jobs::Settling;

impl Running {
    /// The settling stage. The finished items are published first, then what `outcome` requires.
    pub(crate) fn settle(mut self, outcome: JobOutcome, now: Instant) -> Settling {
        let run = match &outcome {
            JobOutcome::AckOnly | JobOutcome::Withdrawn => None,
            JobOutcome::Reply => self.take_run(now),
            // Only the last reply of a complete job says `done`.
            _ => self.take_run(now).filter(|run| run.items > 0).map(|run| Run { is_last: false, ..run }),
        };
        let items_done = self.progress.items_done();
        let outcome = at(outcome, items_done, self.received.delivery.source);
        let headers = run.map(|run| JobHeaders { items_done: run.offset, ..self.headers });
        Settling::new(self.received, outcome, run, headers, now).after_first_pass(self.passes.first_at())
    }

    /// The settling stage of a job whose part was not taken. The part's replies go to the dead letters, with the job.
    pub(crate) fn settle_undeliverable(self, run: Run, outcome: JobOutcome, now: Instant) -> Settling {
        let Self { received, passes, .. } = self;
        let source = received.delivery.source;
        Settling::new(received, at(outcome, run.offset, source), None, None, now)
            .with_dead_replies()
            .after_first_pass(passes.first_at())
    }

    /// The next stage of a job that ends without any more of its results.
    pub(crate) fn settle_without_results(self, outcome: JobOutcome, now: Instant) -> Settling {
        Settling::new(self.received, outcome, None, None, now).after_first_pass(self.passes.first_at())
    }
}

/// Sets the items that are answered when the outcome takes effect, and the queue to go back to.
fn at(mut outcome: JobOutcome, items_done: u32, source: Source) -> JobOutcome {
    outcome.set_items_done(items_done);
    back_to(source, outcome)
}

/// Changes an immediate requeue of a large or quarantined job: it goes back to the queue that it came from.
pub(in crate::jobs) fn back_to(source: Source, mut outcome: JobOutcome) -> JobOutcome {
    if let JobOutcome::Requeue(requeue) = &mut outcome
        && requeue.route == Route::Now
    {
        requeue.route = match source {
            Source::Jobs(..) => Route::Now,
            Source::Bulk(_) => Route::Bulk,
            Source::Quarantine => Route::Quarantine,
        };
    }
    outcome
}
