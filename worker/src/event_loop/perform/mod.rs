//! Carries out the core's actions: starts futures and work on threads, whose results become events.

mod observations;
mod passes;
mod publications;

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use lapin::options::{BasicAckOptions, BasicNackOptions, BasicRejectOptions};
use vramq_core::acks::AckFrame;
use vramq_core::action::{Action, Answer};
use vramq_core::event::{DecodedJob, Event, FetchFault};
use vramq_core::ids::{ChannelId, JobKey, RequestId};
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;
use vramq_schemas::control::Outcome;

use crate::context::WorkerContext;
use crate::decode::{Decoded, References, decode};
use crate::engine::Item;
use crate::event_loop::EventLoop;
use crate::event_loop::completion::Completion;
use crate::event_loop::live_session::LiveSession;
use crate::failpoint::{self, Site};
use crate::job_store::Fetch;
use crate::preparation::Unprepared;
use crate::stores::fetch::Fetched;
use crate::stores::stores_of;

/// The most bytes that the event loop decodes or encodes itself, which takes some tens of microseconds. More goes to the pool.
const INLINE_BYTES_MAX: usize = 16 * 1024;

impl EventLoop {
    /// Starts an action. Events that it causes at once are added to `ready`.
    pub(crate) fn perform(&mut self, action: Action) {
        if action.needs_open_session() && !self.has_open_session() {
            tracing::debug!(
                ?action,
                "dropped an action: it needs a session, and there is none, or it is about to be closed"
            );
            return;
        }
        match action {
            Action::Consume { model, queue, consumer, prefetch, hold_max } => {
                self.on_session(|live, _| live.start_consumer(model, queue, consumer, prefetch, hold_max));
            }
            Action::StopConsumer { model, queue, consumer } => {
                self.on_session(|live, _| live.stop_consumer(model, queue, consumer));
            }
            Action::CountQueues { model } => self.on_session(|live, _| live.count_queues(model)),
            Action::LookForQueue { model, queue } => {
                self.on_session(|live, context| live.look_for_queue(model, queue, &context.silent_queues));
            }
            Action::TakeQuarantined { model } => self.on_session(|live, _| live.take_quarantined(model)),
            Action::Decode { job, cost } => self.decode(job, cost),
            Action::Fetch { job, until } => self.fetch(job, until),
            Action::Prepare { job, cost } => self.prepare(job, cost),
            Action::Run(order) => self.run(order),
            Action::CancelPass { pass, model } => {
                self.context.executors[self.context.executor_of[model.0].0].cancel(pass);
            }
            Action::Publish { job, publication } => self.publish(job, publication),
            Action::Ack { channel, frames } => self.ack(channel, &frames),
            Action::GiveBack { job } => self.nack(job, true),
            Action::Reject { job } => self.nack(job, false),
            Action::Release { job } => self.jobs.remove(job),
            Action::Answer { request, answer, text, last } => self.answer(request, answer, text, last),
            Action::SetLog { request, directives } => self.set_log(request, &directives),
            Action::SaveLimits => self.context.limits_writer.save(self.core.learned_limits()),
            Action::ReadMemory => {
                let (memory, passes) = self.context.read_memory();
                self.ready.push_back(Event::MemoryRead { memory, passes });
            }
            Action::TrimDevice => {
                self.context.device.trim();
                self.context.programs.trim();
            }
            Action::Observe(observation) => self.observe(observation),
            Action::EndSession(end) => {
                self.ending.get_or_insert(end);
            }
        }
    }

    /// Whether a session stands that is not about to be closed.
    fn has_open_session(&self) -> bool {
        self.session.is_some() && !self.is_closing
    }

    /// Does something on the session, if there is one.
    fn on_session(&mut self, act: impl FnOnce(&mut LiveSession, &WorkerContext)) {
        if let Some(live) = &mut self.session {
            act(live, &self.context);
        }
    }

    /// Sends acks in their order.
    fn ack(&mut self, channel: ChannelId, frames: &[AckFrame]) {
        let Some(live) = &mut self.session else { return };
        let acks: Vec<_> = frames
            .iter()
            .map(|frame| {
                (self.jobs.take_acked(channel, frame.tag(), frame.is_multiple()), frame.is_multiple())
            })
            .collect();
        live.acking.push(Box::pin(async move {
            // A frame is sent when its future is first polled, which happens in this order.
            let sent = join_all(acks.into_iter().map(async |(covered, multiple)| {
                let sent = match covered.last() {
                    Some(last) => is_sent(last.acker.ack(BasicAckOptions { multiple }).await),
                    None => false,
                };
                for unacked in &covered {
                    failpoint::reach(Site::Acked, [unacked.summary.id.as_deref()]);
                }
                sent
            }));
            (channel, sent.await)
        }));
    }

    /// Gives a delivery back to its queue, or rejects it to the dead letters.
    fn nack(&mut self, job: JobKey, requeue: bool) {
        let Some(live) = &mut self.session else { return };
        let Some(unacked) = self.jobs.take_nacked(job) else {
            self.ready.push_back(Event::NackSent { job, sent: false });
            return;
        };
        live.nacking.push(Box::pin(async move {
            let sent = match requeue {
                true => unacked.acker.nack(BasicNackOptions { requeue, multiple: false }).await,
                false => unacked.acker.reject(BasicRejectOptions { requeue }).await,
            };
            failpoint::reach(Site::Acked, [unacked.summary.id.as_deref()]);
            (job, is_sent(sent))
        }));
    }

    fn decode(&mut self, job: JobKey, cost: usize) {
        let Some(stored) = self.jobs.get(job) else { return };
        let model = Arc::clone(&self.context.models[stored.model.0]);
        let takes_inputs_as_they_come = model.engine.takes_inputs_as_they_come();
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        let received = Arc::clone(&payload.received);
        let inputs = payload.fetched.as_mut().map(|fetched| std::mem::take(&mut fetched.inputs));
        let fetched = inputs.unwrap_or_default();
        let stores = Arc::clone(&self.context.stores);
        let is_small = received.delivery.data.len() <= INLINE_BYTES_MAX && fetched.is_empty();
        let read = move || decode(&received, &model, References { stores: &stores, fetched }, cost);
        if is_small && takes_inputs_as_they_come {
            return self.decoded(job, read());
        }
        let completions = self.completions.clone();
        self.context.pool.spawn(move || {
            let result = Box::new(read());
            // An `Err` means that the process ends.
            let _ = completions.blocking_send(Completion::Decoded { job, result });
        });
    }

    /// Fetches the inputs that a job refers to, until then.
    fn fetch(&mut self, job: JobKey, until: Instant) {
        let Some(stored) = self.jobs.get(job) else { return };
        let fetch_max = self.context.models[stored.model.0].fetch_max;
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        let wanted = std::mem::take(&mut payload.wanted);
        let (stores, completions) = (Arc::clone(&self.context.stores), self.completions.clone());
        let task = tokio::spawn(async move {
            let result = stores.fetch(wanted, fetch_max, until).await;
            // An `Err` means that the process ends.
            let _ = completions.send(Completion::Fetched { job, result }).await;
        });
        payload.fetch = Some(Fetch(task.abort_handle()));
    }

    /// Stores a job's fetched inputs. Adds the core's event to `ready`.
    pub(crate) fn fetched(&mut self, job: JobKey, result: Result<Fetched, FetchFault>) {
        // A job that ended meanwhile is gone.
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        payload.fetch = None;
        let result = result.map(|fetched| payload.fetched = Some(fetched));
        self.ready.push_back(Event::Fetched { job, result });
    }

    /// Prepares the next inputs of a job, on the pool.
    fn prepare(&mut self, job: JobKey, cost: usize) {
        let Some(stored) = self.jobs.get(job) else { return };
        let model = Arc::clone(&self.context.models[stored.model.0]);
        let Some(mut rest) = self.jobs.payload_mut(job).and_then(|payload| payload.unprepared.take()) else {
            let error =
                Rejection::new(Reason::EngineFailed, "internal error: inputs are missing; please report it");
            return self.ready.push_back(Event::Prepared { job, result: Err(error) });
        };
        let completions = self.completions.clone();
        self.context.pool.spawn(move || {
            let result = rest.prepare(&*model.engine, cost);
            // An `Err` means that the process ends.
            let _ = completions.blocking_send(Completion::Prepared { job, result, rest });
        });
    }

    /// Stores the next items of a job. Adds the core's event to `ready`.
    pub(crate) fn prepared(&mut self, job: JobKey, result: Result<Vec<Item>, Rejection>, rest: Unprepared) {
        // A job that ended meanwhile is gone.
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        payload.unprepared = Some(rest);
        let result = result.map(|items| {
            let costs = items.iter().map(Item::cost).collect();
            payload.prepared(items);
            costs
        });
        self.ready.push_back(Event::Prepared { job, result });
    }

    /// Stores the result of reading a job. Adds the core's event to `ready`.
    pub(crate) fn decoded(&mut self, job: JobKey, result: Result<Decoded, Rejection>) {
        // A job of an earlier session is gone.
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        if let Ok(Decoded { moves_to: Some(key), .. }) = &result {
            return self.ready.push_back(Event::Moved { job, key: key.clone() });
        }
        let result = match result {
            Ok(Decoded { wanted, .. }) if !wanted.is_empty() => {
                let stores = stores_of(&wanted);
                payload.wanted = wanted;
                return self.ready.push_back(Event::Referring { job, stores });
            }
            result => result,
        };
        let result = result.map(|decoded| {
            let costs = decoded.items.iter().map(Item::cost).collect();
            let items_total = decoded.items_total;
            payload.decoded(decoded);
            DecodedJob { items_total, costs }
        });
        self.ready.push_back(Event::Decoded { job, result });
    }

    fn answer(&mut self, request: RequestId, answer: Answer, text: String, last: bool) {
        // An answer contains the worker's state, which the command may have changed.
        self.publish_status();
        let outcome = match answer {
            Answer::Done => Outcome::Done,
            Answer::Refused => Outcome::Refused,
            Answer::Requested => Outcome::Requested,
            Answer::Stopped => Outcome::Stopped,
            Answer::MemoryBack => {
                let device = &self.context.device;
                Outcome::MemoryBack { device: device.name().to_owned(), free_bytes: device.memory().free }
            }
            Answer::TooLate => Outcome::TooLate,
            Answer::NotHere => Outcome::NotHere,
        };
        let Some(live) = &mut self.session else { return };
        if !last {
            if let Some(responder) = live.requests.get(&request) {
                responder.progress(outcome, text);
            }
        } else if let Some(responder) = live.requests.remove(&request) {
            responder.end(outcome, text);
        }
    }

    fn set_log(&mut self, request: RequestId, directives: &str) {
        match self.context.logs.set(directives) {
            Ok(()) => self.answer(request, Answer::Done, format!("logs `{directives}`"), true),
            Err(error) => {
                self.answer(request, Answer::Refused, format!("not a filter for logs: {error}"), true);
            }
        }
    }
}

/// Whether a frame was sent. Errors are ignored here: a lost session is noticed elsewhere.
fn is_sent(sent: lapin::Result<bool>) -> bool {
    sent.unwrap_or(false)
}
