//! The loop's last steps with a job: a verdict, its settlement, and what is counted and remembered of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramq_schemas::Reason;

use super::{Event, INLINE_BYTES_MAX, Loop};
use crate::amqp::message::{self, Identity};
use crate::amqp::settle::{End, Settled, Settlement, Verdict, settle};
use crate::batcher::JobKey;
use crate::job::{Decoded, Executed, Received, Refusal};
use crate::model::Model;

impl Loop<'_> {
    /// Takes a job out of the table and settles it with the verdict that `verdict` gives.
    pub(super) fn end(&mut self, key: JobKey, verdict: impl FnOnce(&Decoded) -> Verdict) {
        let Some((model, job)) = self.jobs.remove(&key) else {
            return;
        };
        let verdict = verdict(&job);
        let model = Arc::clone(&self.host.models[model]);
        self.settle(Settlement { received: job.received, model, verdict });
    }

    /// Encodes the replies of a complete job, large ones off the runtime, then settles it.
    pub(super) fn finish(&mut self, model: usize, job: Decoded, key: JobKey) {
        let Ok(job) = job.executed() else {
            tracing::error!(job = key, "incomplete job taken for complete");
            return;
        };
        self.host.totals.items += job.outputs.len() as u64;
        let model = Arc::clone(&self.host.models[model]);
        let identity = Arc::clone(&self.host.identity);
        if message::reply_bytes(&job) <= INLINE_BYTES_MAX {
            return self.settle(answer(job, model, &identity));
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || {
            let _ = sender.blocking_send(Event::Encoded(answer(job, model, &identity)));
        });
    }

    pub(super) fn bury(&mut self, model: usize, received: Received, refusal: Refusal) {
        let model = Arc::clone(&self.host.models[model]);
        self.settle(Settlement { received, model, verdict: Verdict::Bury(refusal) });
    }

    pub(super) fn settle(&mut self, settlement: Settlement) {
        if let Verdict::Bury(refusal) = &settlement.verdict {
            let (job, model) = (settlement.received.id(), &settlement.model.name);
            tracing::warn!(job, model, reason = %refusal.reason, error = refusal.error, "job dead-lettered");
        }
        let identity = Arc::clone(&self.host.identity);
        self.settling.push(Box::pin(settle(self.session.publisher.clone(), identity, settlement)));
    }

    pub(super) fn settled(&mut self, settled: Settled) {
        self.in_hand -= 1;
        let totals = &mut self.host.totals;
        match settled.end {
            End::Answered => totals.answered += 1,
            End::Requeued => totals.requeued += 1,
            End::Dead(reason) => {
                totals.dead += 1;
                tracing::debug!(job = settled.id, %reason, "dead letter confirmed");
            }
            End::Forgotten => {}
            End::HandedBack => totals.handed_back += 1,
        }
        if !settled.acked {
            totals.acks_lost += 1;
            // Requeued jobs must run again, answered and dead ones must not.
            if matches!(settled.end, End::Answered | End::Dead(_)) {
                self.host.finished.remember(settled.fingerprint);
            }
        }
    }
}

/// Encodes the replies of a complete job. CPU work.
fn answer(mut job: Executed, model: Arc<Model>, identity: &Identity) -> Settlement {
    let replies = catch_unwind(AssertUnwindSafe(|| message::replies(&mut job, &model, identity)))
        .unwrap_or_else(|_| {
            Err(Refusal::new(Reason::EngineFailed, "encoding the reply panicked; see the worker's log"))
        });
    let verdict = match replies {
        Ok(replies) => Verdict::Answer(replies),
        Err(refusal) => Verdict::Bury(refusal),
    };
    Settlement { received: job.received, model, verdict }
}
