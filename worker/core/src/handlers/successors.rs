//! The next attempt of a job may be delivered before this worker has settled the message of the previous one. It then waits unread.
//! [`successors`](crate::successors) keeps the state and explains why.

use crate::Core;
use crate::action::Publication;
use crate::ids::JobKey;
use crate::jobs::{Job, Received};

impl Core {
    /// Must be called for every publication about a job. After a requeue, the next attempt may be delivered to this worker at any time.
    pub(crate) fn note_next_attempt(&mut self, job: JobKey, publication: &Publication) {
        let Publication::Requeue { headers, .. } = publication else { return };
        let Some(settling) = self.jobs.settling(job) else { return };
        let id = settling.received().delivery.id.as_deref();
        self.successors.published_again(job, id, headers);
    }

    /// Requests that a delivered job be read. If it is the next attempt of a job whose message this worker still holds, it waits first.
    pub(crate) fn read_in_turn(&mut self, received: Received) {
        let delivery = &received.delivery;
        if self.successors.hold(delivery, self.now.at) {
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::debug!(
                job,
                trace_id,
                "the job's next attempt was delivered before its publish was confirmed: it waits until the message before it is acknowledged"
            );
            return self.jobs.insert(Job::Received(Box::new(received)));
        }
        self.read(received);
    }

    /// A job's message was acknowledged or given back, so its next attempt may run.
    pub(crate) fn read_successors_of(&mut self, job: JobKey) {
        self.successors.take_freed_by(job).into_iter().for_each(|next| self.read_held(next));
    }

    /// Every second: reads next attempts that have waited longer than a confirm normally takes. While the broker blocks publishers, a
    /// confirm may take any time.
    pub(crate) fn read_overdue_successors(&mut self) {
        let overdue = self.successors.overdue(self.settings.confirm_max, self.now.at);
        overdue.into_iter().for_each(|next| self.read_held(next));
    }

    fn read_held(&mut self, job: JobKey) {
        let Some(received) = self.take_unless_given_up(job) else { return };
        self.read(received);
    }
}

#[cfg(test)]
#[path = "successors_tests.rs"]
mod tests;
