//! Jobs that their callers withdrew. They get no further pass, a `failed` reply and no dead letter. Their passes in flight are cancelled
//! unless another job needs them.

use crate::Core;
use crate::disposition::JobOutcome;
use crate::event::Withdrawn;
use crate::ids::JobKey;
use crate::jobs::{Received, StopReason};

impl Core {
    /// Ends or stops the jobs that a withdrawal names. Jobs that wait to be read (for their inputs, or as the next attempt of a job still
    /// here) end now. Jobs that are being read, or not here yet, are checked later. A job whose last reply, dead letter or next attempt is
    /// being published is not changed; its next attempt is checked when it is delivered.
    pub(crate) fn withdrawn(&mut self, withdrawn: Withdrawn) {
        let is_meant = |job: &Received| {
            let delivery = &job.delivery;
            delivery.id.as_ref() == Some(&withdrawn.id) && delivery.withdrawal == Some(withdrawn.digest)
        };
        let jobs = self.jobs.running_where(|_, job| is_meant(&job.received) && !job.is_withdrawn());
        let waits = |job: &Received| job.is_fetching() || self.successors.is_held(job.delivery.job);
        let unread = self.jobs.received_where(|job| is_meant(job) && waits(job));
        self.withdrawals.remember(withdrawn, self.now.at);
        for job in unread {
            self.successors.ended_unread(job);
            let Some(received) = self.jobs.take_received(job) else { continue };
            self.settle(received.settle(JobOutcome::Withdrawn, self.now.at));
        }
        jobs.into_iter().for_each(|job| self.stop_job(job, StopReason::Withdrawn));
    }

    /// Removes a job that is not read yet and returns it for its next step. A withdrawn or cancelled job ends instead.
    pub(crate) fn take_unless_given_up(&mut self, job: JobKey) -> Option<Received> {
        let received = self.jobs.take_received(job)?;
        if self.withdrawals.has(&received.delivery, self.now.at) {
            self.settle(received.settle(JobOutcome::Withdrawn, self.now.at));
            return None;
        }
        if self.session.commands().is_cancelled(received.delivery.id.as_deref()) {
            self.end_cancelled_unread(received);
            return None;
        }
        Some(received)
    }

    /// Ends a withdrawn job of which nothing waits or runs any more. Outputs that were not published are dropped.
    pub(crate) fn end_withdrawn(&mut self, job: JobKey) {
        let Some(running) = self.jobs.take_running(job) else { return };
        self.settle(running.settle_without_results(JobOutcome::Withdrawn, self.now.at));
    }
}
