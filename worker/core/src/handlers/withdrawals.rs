//! Jobs that their callers withdrew: no further pass, a `failed` reply, no dead letter. A pass in flight that only such jobs need is
//! cancelled.

use crate::Core;
use crate::disposition::JobOutcome;
use crate::event::Withdrawn;
use crate::ids::JobKey;
use crate::jobs::{Received, StopReason};

impl Core {
    /// A job that is not here yet, or is being read, is checked later. A job that waits to be read ends now: its inputs are being fetched,
    /// or it is the next attempt of one that is still here. A job whose last reply, dead letter or next attempt is being published
    /// is not changed; its next attempt is checked when it is delivered.
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
            let Some(received) = self.jobs.take_received(job) else { continue };
            self.successors.ended_unread(job);
            self.settle(received.settle(JobOutcome::Withdrawn, self.now.at));
        }
        jobs.into_iter().for_each(|job| self.stop_job(job, StopReason::Withdrawn));
    }

    /// Takes a job that is not read yet, for its next step. A withdrawn one ends instead.
    pub(crate) fn take_unless_withdrawn(&mut self, job: JobKey) -> Option<Received> {
        let received = self.jobs.take_received(job)?;
        if !self.withdrawals.has(&received.delivery, self.now.at) {
            return Some(received);
        }
        self.settle(received.settle(JobOutcome::Withdrawn, self.now.at));
        None
    }

    /// Nothing of a withdrawn job waits or runs any more. Outputs that were not published are dropped.
    pub(crate) fn end_withdrawn(&mut self, job: JobKey) {
        let Some(running) = self.jobs.take_running(job) else { return };
        self.settle(running.settle_without_results(JobOutcome::Withdrawn, self.now.at));
    }
}
