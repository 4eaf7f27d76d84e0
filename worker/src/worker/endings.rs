//! The loop's last steps with a job: its parts and its end, their settlement, and what is counted and remembered of it.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::StreamExt;
use vramq_schemas::{JobHeaders, Reason, Traceparent};

use super::{Event, INLINE_BYTES_MAX, Loop, Outcome, Published};
use crate::amqp::acks::Acks;
use crate::amqp::message::{self, Identity, Message, Onward};
use crate::amqp::publish::Taken;
use crate::amqp::settle::{
    Answer, Burial, End, Requeue, Settled, Settlement, Verdict, acknowledge, settle, untaken,
};
use crate::batcher::JobKey;
use crate::disposition::Disposition;
use crate::drill::{self, Point};
use crate::job::{Decoded, Executed, Leaving, Results};
use crate::metrics::Cause;
use crate::model::Model;
use crate::refusal::Refusal;
use crate::retry::Waits;

/// How long a job may be published for, as a part of how long it may be in hand: that limit is four fifths of the broker's,
/// and a fifth is room for its end.
const PUBLISHED_WITHIN: f64 = 0.95 / 0.8;

/// The part of a drain that is left for what comes after a full queue: the way by a delay queue.
const DRAIN_RESERVE: f64 = 0.2;

/// How long a session that ends waits for its last acks: they only have to be written.
const LAST_ACKS: Duration = Duration::from_millis(200);

/// A part that was encoded or cannot be: the index of its first item, and the messages or why.
pub(super) type EncodedPart = Result<(u32, Vec<Message>), (u32, Refusal)>;

/// A part that the broker was given.
pub(super) struct SentPart {
    pub key: JobKey,
    /// Index of its first item.
    pub offset: u32,
    pub messages: Vec<Message>,
    pub taken: Taken,
}

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

    /// Outputs of a job came home, or a part of it was taken: ends the job if that was all, sends a part if enough is
    /// finished. One part of a job is under way at a time, so that they come in order.
    pub(super) fn advance(&mut self, key: JobKey) {
        let Some((_, job)) = self.jobs.get_mut(&key) else { return };
        if job.part_under_way || job.ending.is_some() {
            return;
        }
        match job.leaving {
            Some(Leaving::Cancelled) if job.running == 0 => return self.end_cancelled(key),
            Some(Leaving::Cancelled) => return,
            Some(Leaving::Elsewhere) if job.running == 0 && !job.is_complete() => return self.depart(key),
            Some(Leaving::Elsewhere) | None => {}
        }
        if job.is_complete() {
            if let Some((model, job)) = self.jobs.remove(&key) {
                self.finish(model, job, key);
            }
        } else if job.has_part() {
            job.part_under_way = true;
            let results = job.take_results();
            self.encode_part(key, results);
        }
    }

    fn encode_part(&mut self, key: JobKey, results: Results) {
        let Some((model, _)) = self.jobs.get(&key) else { return };
        let model = Arc::clone(&self.host.models[*model]);
        let identity = Arc::clone(&self.host.identity);
        let sender = self.sender.clone();
        self.host.pool.spawn(move || {
            let offset = results.offset;
            let part = encode(results, &model, &identity);
            let part = part.map(|part| (offset, part)).map_err(|refusal| (offset, refusal));
            let _ = sender.blocking_send(Event::PartEncoded(key, part));
        });
    }

    pub(super) fn part_encoded(&mut self, key: JobKey, part: EncodedPart) {
        match part {
            Ok((offset, part)) => {
                let Some((_, job)) = self.jobs.get(&key) else { return };
                let publisher = self.session.publisher.until(self.until(job.received.at));
                self.publishing.push(Box::pin(async move {
                    let taken = publisher.publish_all(&part).await?;
                    Ok(Published::Part(SentPart { key, offset, messages: part, taken }))
                }));
            }
            Err((items_done, refusal)) => {
                self.give_up(key, |job| Burial {
                    headers: Some(JobHeaders { items_done, ..job.headers.clone() }),
                    ..Burial::of(refusal)
                });
            }
        }
    }

    pub(super) fn part_taken(&mut self, part: SentPart) {
        let SentPart { key, offset, messages: part, taken } = part;
        let Some((model, job)) = self.jobs.get_mut(&key) else { return };
        job.part_under_way = false;
        if taken != Taken::Confirmed {
            let model = Arc::clone(&self.host.models[*model]);
            return self.give_up(key, |job| {
                let refusal = untaken(&job.received, &model, &part, taken);
                let headers = Some(JobHeaders { items_done: offset, ..job.headers.clone() });
                Burial { headers, untaken: part, ..Burial::of(refusal) }
            });
        }
        self.host.meters.models[*model].parts.inc_by(part.len() as u64);
        match job.ending.take() {
            Some(disposition) => self.conclude(key, disposition),
            None => self.advance(key),
        }
    }

    /// Ends a job whose items may still wait or run.
    pub(super) fn give_up(&mut self, key: JobKey, burial: impl FnOnce(&Decoded) -> Burial) {
        if let Some((model, _)) = self.jobs.get(&key) {
            self.batchers[*model].remove(key);
            self.end(key, |job| Verdict::Bury(Box::new(burial(job))));
        }
    }

    /// Lets a decision take effect, at once or when the part that is under way has arrived.
    pub(super) fn decided(&mut self, key: JobKey, disposition: Disposition) {
        match self.jobs.get_mut(&key) {
            Some((_, job)) if job.part_under_way => job.ending = Some(disposition),
            Some(_) => self.conclude(key, disposition),
            None => {}
        }
    }

    /// Sends a job onward with what is finished of it.
    fn conclude(&mut self, key: JobKey, disposition: Disposition) {
        let Some((model, mut job)) = self.jobs.remove(&key) else { return };
        self.host.meters.models[model].recomputed.inc_by(job.scattered() as u64);
        let model = Arc::clone(&self.host.models[model]);
        let identity = Arc::clone(&self.host.identity);
        // The body is copied into what goes on.
        let bytes = job.ready_bytes() + job.received.delivery.data.len();
        let results = job.take_results();
        let sent_onward = move || send_onward(job, results, disposition, model, &identity);
        if bytes <= INLINE_BYTES_MAX {
            return self.settle(sent_onward());
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || drop(sender.blocking_send(Event::Encoded(sent_onward()))));
    }

    /// Encodes the replies of a complete job, large ones off the runtime, then settles it.
    pub(super) fn finish(&mut self, model: usize, job: Box<Decoded>, key: JobKey) {
        let bytes = job.ready_bytes();
        let Ok(job) = job.executed() else {
            tracing::error!(job = key, "incomplete job taken for complete");
            return;
        };
        drill::reach(Point::Ran, [job.received.id()]);
        let model = Arc::clone(&self.host.models[model]);
        let identity = Arc::clone(&self.host.identity);
        if bytes <= INLINE_BYTES_MAX {
            return self.settle(answer(job, model, &identity));
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || {
            let _ = sender.blocking_send(Event::Encoded(answer(job, model, &identity)));
        });
    }

    pub(super) fn settle(&mut self, settlement: Settlement) {
        let parts = &self.host.meters.models[settlement.model.index].parts;
        match &settlement.verdict {
            Verdict::Bury(burial) => {
                let (job, model) = (settlement.received.id(), &settlement.model.name);
                let Refusal { reason, error, .. } = &burial.refusal;
                let trace_id = settlement.received.trace_id();
                tracing::warn!(job, trace_id, model, %reason, error, "job dead-lettered");
                parts.inc_by(burial.parts.len() as u64);
            }
            Verdict::Requeue(requeue) => {
                parts.inc_by(requeue.parts.len() as u64);
            }
            Verdict::Answer(_) | Verdict::Forget => {}
        }
        let identity = Arc::clone(&self.host.identity);
        let until = self.until(settlement.received.at);
        let settled = settle(self.session.publisher.until(until), identity, settlement);
        self.publishing.push(Box::pin(async move { settled.await.map(Published::Settled) }));
    }

    /// Remembers a job that is settled, should it come again.
    pub(super) fn remember(&mut self, settled: &Settled) {
        let message = settled.fingerprint;
        if let Some(held) = self.holding.get_mut(&message) {
            held.copies -= 1;
            if held.copies == 0 {
                self.holding.remove(&message);
            }
        }
        match settled.end {
            End::HandedBack => self.host.given_back.remember(message),
            // If the broker has not heard it, the job is still there, and there is no letter: an ack would be its end.
            End::Rejected(_) => {}
            _ => self.settled.remember(message),
        }
    }

    /// How long what is published for a job that came then may be offered again: nearly as long as the broker lets it be in
    /// hand, and while draining not to the end.
    fn until(&self, received: Instant) -> Instant {
        let until = received + self.host.job_limit.mul_f64(PUBLISHED_WITHIN);
        let deadline = self.deadline.map(|at| at.into_std() - self.host.drain.mul_f64(DRAIN_RESERVE));
        deadline.map_or(until, |at| at.min(until))
    }

    /// All that a job ends with is confirmed.
    pub(super) async fn settled(&mut self, settled: Settled) -> ControlFlow<Outcome> {
        self.remember(&settled);
        let acks = &mut self.acks[settled.model];
        if settled.end.is_acked() {
            acks.add(settled.delivery_tag, settled);
            return ControlFlow::Continue(());
        }
        if settled.told {
            acks.told(settled.delivery_tag);
        }
        self.end_of_all([settled]).await
    }

    /// Acknowledges what has been settled since the last time.
    pub(super) fn acknowledge(&mut self) {
        for acks in self.acks.iter_mut().map(Acks::take).filter(|acks| !acks.is_empty()) {
            self.acknowledging.push(Box::pin(acknowledge(acks)));
        }
    }

    pub(super) async fn acknowledged(&mut self, settled: Vec<Settled>) -> ControlFlow<Outcome> {
        self.note_acks(&settled);
        self.end_of_all(settled).await
    }

    fn note_acks(&mut self, sent: &[Settled]) {
        for settled in sent.iter().filter(|settled| settled.told) {
            self.acks[settled.model].told(settled.delivery_tag);
        }
        if let Some(settled) = sent.first() {
            self.acks[settled.model].sent();
        }
    }

    /// Before the session is closed: what is confirmed would run again elsewhere. Where nobody listens any more nothing is
    /// lost, it is remembered.
    pub(super) async fn acknowledge_last(&mut self) {
        let until = tokio::time::Instant::now() + LAST_ACKS;
        self.acknowledge();
        while let Ok(Some(settled)) = tokio::time::timeout_at(until, self.acknowledging.next()).await {
            self.note_acks(&settled);
            settled.iter().for_each(|settled| self.no_more_in_hand(settled));
            self.acknowledge();
        }
    }

    /// The broker was told of jobs.
    async fn end_of_all(&mut self, settled: impl IntoIterator<Item = Settled>) -> ControlFlow<Outcome> {
        let mut all_settled = false;
        for settled in settled {
            self.no_more_in_hand(&settled);
            all_settled |= self.in_hand[settled.model] == 0;
        }
        if all_settled {
            // A consumer whose slots move may have waited for this.
            return self.follow_capacity().await;
        }
        ControlFlow::Continue(())
    }

    fn no_more_in_hand(&mut self, settled: &Settled) {
        self.in_hand[settled.model] -= 1;
        self.count_end(settled);
        self.answer_cancels(settled);
        if let Some(spans) = &self.host.spans {
            spans.record(settled, &self.host.models[settled.model].name);
        }
    }

    fn count_end(&self, settled: &Settled) {
        let meters = &self.host.meters.models[settled.model];
        match settled.end {
            End::Answered => {
                meters.answered.inc();
            }
            End::Requeued(cause) => meters.requeued.inc(cause),
            End::Dead(reason) | End::Rejected(reason) => {
                meters.dead.inc(reason);
                let trace_id = settled.trace.as_ref().map(Traceparent::trace_id);
                tracing::debug!(job = settled.id, trace_id, %reason, "dead letter confirmed");
            }
            End::Forgotten => {
                meters.already_settled.inc();
            }
            End::HandedBack => {
                meters.handed_back.inc();
            }
        }
        if let Some(since) = settled.times.first_pass_at {
            meters.run_seconds.observe(since.elapsed().as_secs_f64());
        }
        if !settled.told {
            meters.acks_lost.inc();
        }
    }
}

/// Encodes a finished run. CPU work.
fn encode(results: Results, model: &Model, identity: &Identity) -> Result<Vec<Message>, Refusal> {
    catch_unwind(AssertUnwindSafe(|| message::replies(results, model, identity))).unwrap_or_else(|_| {
        Err(Refusal::new(Reason::EngineFailed, "encoding the reply panicked; see the worker's log"))
    })
}

/// Encodes the replies of a complete job. CPU work.
fn answer(job: Executed, model: Arc<Model>, identity: &Identity) -> Settlement {
    let Executed { received, headers, results } = job;
    let verdict = match encode(results, &model, identity) {
        Ok(replies) => Verdict::Answer(Box::new(Answer { replies, headers })),
        Err(refusal) => Verdict::Bury(Box::new(Burial { headers: Some(headers), ..Burial::of(refusal) })),
    };
    Settlement { received, model, verdict }
}

/// Builds what carries out a disposition. CPU work.
fn send_onward(
    job: Box<Decoded>,
    results: Results,
    disposition: Disposition,
    model: Arc<Model>,
    identity: &Identity,
) -> Settlement {
    let (answered, items_done) = (results.offset, job.items_done());
    let parts = match encode(results, &model, identity) {
        Ok(parts) => parts,
        Err(refusal) => {
            let headers = Some(JobHeaders { items_done: answered, ..job.headers });
            let verdict = Verdict::Bury(Box::new(Burial { headers, ..Burial::of(refusal) }));
            return Settlement { received: job.received, model, verdict };
        }
    };
    let back = if job.received.suspect { Onward::Suspects } else { Onward::Queue };
    let (next, onward, cause, otherwise) = match disposition {
        Disposition::Requeue(next) if next.exclusive => (next, back, Cause::Exclusive, None),
        Disposition::Requeue(next) => (next, back, Cause::Smaller, None),
        Disposition::HandOver(next) => (next, back, Cause::HandedOver, None),
        Disposition::Delay(next) => {
            let wait_ms = Waits::for_memory(next.delays);
            (next, Onward::Delay(wait_ms), Cause::Delayed, None)
        }
        Disposition::Enlarge(next, refusal) => {
            let key = model.larger.clone().unwrap_or_default();
            (next, Onward::Larger(key), Cause::Larger, Some(refusal))
        }
        Disposition::DeadLetter(next, refusal) => {
            let headers = Some(JobHeaders { items_done, ..next });
            let burial = Burial { parts, answered, headers, ..Burial::of(refusal) };
            let verdict = Verdict::Bury(Box::new(burial));
            return Settlement { received: job.received, model, verdict };
        }
    };
    let headers = JobHeaders { items_done, ..next };
    let message = message::requeue(&job.received, &model, &headers, &onward);
    let requeue = Requeue { parts, answered, job: message, cause, headers, otherwise };
    let verdict = Verdict::Requeue(Box::new(requeue));
    Settlement { received: job.received, model, verdict }
}
