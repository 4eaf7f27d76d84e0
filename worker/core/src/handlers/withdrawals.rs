//! Jobs that their callers withdrew: no further pass, a `failed` reply, no dead letter.

use crate::Core;
use crate::action::Action;
use crate::disposition::JobOutcome;
use crate::event::Withdrawn;
use crate::ids::JobKey;
use crate::jobs::{Leaving, Received, Running};

impl Core {
    /// A job that is not here yet, or is still being read, is checked later. A job whose inputs are being fetched ends now. A job
    /// whose last reply, dead letter or next attempt is being published is not changed; its next attempt is checked when it is
    /// delivered.
    pub(crate) fn withdrawn(&mut self, withdrawn: Withdrawn) {
        let is_meant = |job: &Received| {
            let delivery = &job.delivery;
            delivery.id.as_ref() == Some(&withdrawn.id) && delivery.withdrawal == Some(withdrawn.digest)
        };
        let jobs = self.jobs.running_where(|_, job| is_meant(&job.received) && !job.is_withdrawn());
        let fetching = self.jobs.fetching_where(is_meant);
        self.withdrawals.remember(withdrawn, self.now.at);
        for job in fetching {
            let Some(received) = self.jobs.take_received(job) else { continue };
            self.settle(received.settle(JobOutcome::Withdrawn, self.now.at));
        }
        for job in jobs {
            let Some(model) = self.jobs.running(job).map(|job| job.received.delivery.model) else { continue };
            self.stop_job(job, Leaving::Withdrawn);
            let is_withdrawn = |job: JobKey| self.jobs.running(job).is_some_and(Running::is_withdrawn);
            for pass in self.scheduler.passes_of(job, is_withdrawn) {
                self.act(Action::SkipPass { pass, model });
            }
        }
    }

    /// Nothing of a withdrawn job waits or runs any more. Outputs that were not published are dropped.
    pub(crate) fn end_withdrawn(&mut self, job: JobKey) {
        let Some(running) = self.jobs.take_running(job) else { return };
        self.settle(running.settle_without_results(JobOutcome::Withdrawn, self.now.at));
    }
}
