//! Builds and publishes messages about jobs: replies, jobs to be tried again, dead letters.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramq_amqp::UnknownOutcome;
use vramq_core::action::{Publication, Run};
use vramq_core::event::{Event, PublicationOutcome};
use vramq_core::ids::JobKey;
use vramq_core::rejection::Rejection;
use vramq_schemas::output_name::OutputOwner;
use vramq_schemas::{ItemProgress, Reason, ReplyHeaders};

use super::INLINE_BYTES_MAX;
use crate::broker::message::{self, Encoded, Message, ReplyAddress};
use crate::broker::publisher::{MessageOutcome, Publisher};
use crate::event_loop::EventLoop;
use crate::event_loop::completion::{Completion, PublicationKind, Sent};
use crate::failpoint::{self, Site};
use crate::identity::Identity;
use crate::job_store::Unconfirmed;
use crate::model::Model;
use crate::stores::outputs::OutputReply;

impl EventLoop {
    pub(crate) fn publish(&mut self, job: JobKey, publication: Publication) {
        // The core publishes only about jobs of this session that it has not released.
        let Some(stored) = self.jobs.get_mut(job) else {
            return tracing::error!(
                %job,
                "internal error: a job was released before its message was published. It stays unacknowledged until the session \
                 ends; please report it"
            );
        };
        let model = Arc::clone(&self.context.models[stored.model.0]);
        let payload = &mut stored.payload;
        let (received, identity) = (Arc::clone(&payload.received), Arc::clone(&self.context.identity));
        // The body is copied into these messages, so its size decides where they are built.
        let bytes = received.delivery.data.len();
        let kind = PublicationKind::Other;
        match publication {
            Publication::Reply(run) => self.reply(job, run, model),
            Publication::ReplyAgain => {
                let unconfirmed = std::mem::take(&mut payload.unconfirmed);
                self.send(job, PublicationKind::Reply, unconfirmed);
            }
            Publication::DeadReplies(rejection) => {
                let mut messages = std::mem::take(&mut payload.unconfirmed).messages;
                messages.retain(|reply| reply.body.len() <= self.context.body_max);
                let once_confirmed = PublicationOutcome::Confirmed { messages: count(messages.len()) };
                let kind = PublicationKind::DeadReplies { received, rejection };
                self.send(job, kind, Unconfirmed { messages, once_confirmed });
            }
            Publication::Requeue { headers, route } => self.build(job, bytes, kind, move || {
                Encoded::all(vec![message::requeue(&received, &model, &headers, &route)])
            }),
            Publication::DeadLetter { headers, rejection } => self.build(job, bytes, kind, move || {
                let headers = headers.as_deref();
                Encoded::all(vec![message::dead_letter(&received, headers, &model, &identity, &rejection)])
            }),
            Publication::FailureNotice(rejection) => self.build(job, 0, kind, move || {
                let notice = message::failed(&received, &model, &identity, &rejection);
                Encoded::all(notice.into_iter().collect())
            }),
        }
    }

    /// Publishes how far an item of a job is. Nothing waits for this reply, and it may be lost.
    pub(crate) fn publish_progress(&mut self, job: JobKey, progress: &ItemProgress) {
        // A job of an earlier session is gone.
        let Some(stored) = self.jobs.get(job) else { return };
        let payload = &stored.payload;
        let Some(encoding) = payload.encoding else { return };
        let Some(live) = self.session.as_mut().filter(|_| !self.is_closing) else { return };
        let address = ReplyAddress::of(&payload.received, &self.context.models[stored.model.0], encoding);
        let attempt = payload.received.job_headers().map_or(0, |headers| headers.attempt);
        let Some(message) = message::progress(progress, attempt, address, &self.context.identity) else {
            return;
        };
        live.session.publisher.add_progress(job, message, payload.received.caller());
        live.start_progress();
    }

    fn reply(&mut self, job: JobKey, run: Run, model: Arc<Model>) {
        let Some(payload) = self.jobs.payload_mut(job) else { return };
        let of_run = payload.encoding.zip(payload.take_outputs(&run));
        if run.is_last {
            failpoint::reach(Site::Ran, [payload.received.id()]);
        }
        let Some((encoding, of_run)) = of_run else {
            tracing::error!(%job, ?run, "internal error: an output is missing; please report it");
            let error = "internal error: an output is missing; please report it";
            let encoded = Encoded::nothing(Rejection::new(Reason::EngineFailed, error));
            return self.encoded(job, PublicationKind::Reply, encoded);
        };
        let identity = Arc::clone(&self.context.identity);
        let store =
            model.outputs.clone().filter(|store| of_run.outputs.iter().any(|output| store.takes(output)));
        let store = store.map(|store| {
            let (caller, id) = (payload.received.caller(), payload.received.id().unwrap_or_default());
            (store, OutputOwner::new(&model.name, caller.as_deref(), id))
        });
        let received = Arc::clone(&payload.received);
        let reply = OutputReply { encoding, until: self.core.write_until(received.summary.at) };
        let encode = move |of_run| {
            let address = ReplyAddress::of(&received, &model, encoding);
            let encode = || message::replies(run, of_run, address, &model, &identity);
            catch_unwind(AssertUnwindSafe(encode)).unwrap_or_else(|_| {
                let error = "encoding the reply panicked; see the worker's log";
                Encoded::nothing(Rejection::new(Reason::EngineFailed, error))
            })
        };
        match store {
            None => self.build(job, run.bytes, PublicationKind::Reply, move || encode(of_run)),
            Some((store, owner)) => {
                let completions = self.completions.clone();
                tokio::spawn(async move {
                    let encoded = match of_run.stored(run.offset, &store, &owner, reply).await {
                        Ok((of_run, unwritten)) => {
                            // An `Err`, here and below, means that the process ends.
                            let encoded = tokio::task::spawn_blocking(move || encode(of_run)).await;
                            let Ok(Encoded { messages, rejection }) = encoded else { return };
                            let rejection =
                                rejection.map(|rejection| because_unwritten(rejection, unwritten));
                            Encoded { messages, rejection }
                        }
                        Err(rejection) => Encoded::nothing(rejection),
                    };
                    let kind = PublicationKind::Reply;
                    let _ = completions.send(Completion::Encoded { job, kind, encoded }).await;
                });
            }
        }
    }

    /// Builds messages, large ones on the pool.
    fn build(
        &mut self,
        job: JobKey,
        bytes: usize,
        kind: PublicationKind,
        build: impl FnOnce() -> Encoded + Send + 'static,
    ) {
        if bytes <= INLINE_BYTES_MAX {
            return self.encoded(job, kind, build());
        }
        let completions = self.completions.clone();
        self.context.pool.spawn(move || {
            let encoded = build();
            // An `Err` means that the process ends.
            let _ = completions.blocking_send(Completion::Encoded { job, kind, encoded });
        });
    }

    /// Publishes messages after they were built. Events that the core needs at once are added to `ready`.
    pub(crate) fn encoded(&mut self, job: JobKey, kind: PublicationKind, encoded: Encoded) {
        let Encoded { messages, rejection } = encoded;
        let number = count(messages.len());
        let once_confirmed = match rejection {
            Some(rejection) => PublicationOutcome::Cut { confirmed: number, rejection },
            None => PublicationOutcome::Confirmed { messages: number },
        };
        self.send(job, kind, Unconfirmed { messages, once_confirmed });
    }

    /// Publishes messages one after the other, so that `done` never overtakes a `part`.
    fn send(&mut self, job: JobKey, kind: PublicationKind, unconfirmed: Unconfirmed) {
        let Some(stored) = self.jobs.get(job) else { return };
        let Unconfirmed { messages, once_confirmed } = unconfirmed;
        if messages.is_empty() {
            return self.ready.push_back(Event::Published { job, outcome: once_confirmed });
        }
        let received = Arc::clone(&stored.payload.received);
        let model = Arc::clone(&self.context.models[stored.model.0]);
        let identity = Arc::clone(&self.context.identity);
        let Some(live) = self.session.as_mut().filter(|_| !self.is_closing) else { return };
        let publisher = live.session.publisher.clone();
        live.publishing.push(Box::pin(async move {
            // Replies that are all confirmed need no end.
            let is_cut = matches!(once_confirmed, PublicationOutcome::Cut { .. });
            let end = messages.last().filter(|_| is_cut).and_then(items_of).map(|items| items.end);
            let mut left = VecDeque::from(messages);
            let caller = || received.caller();
            let sent = publish_all(&publisher, &kind, &mut left, caller, &model, &identity).await;
            let sent = sent.map(|refused| Sent {
                kind,
                outcome: refused.unwrap_or_else(|| once_confirmed.clone()),
                taken_up_to: left.front().map_or(end, |next| items_of(next).map(|items| items.start)),
                unconfirmed: Unconfirmed { messages: left.into(), once_confirmed },
            });
            (job, sent)
        }));
    }

    /// Handles the result of a publication. Adds the core's event to `ready`.
    pub(crate) fn take_in_sent(&mut self, job: JobKey, sent: Sent) {
        let Sent { kind, outcome, taken_up_to, unconfirmed } = sent;
        if let PublicationKind::Reply = kind
            && !matches!(outcome, PublicationOutcome::Confirmed { .. })
            && let Some(up_to) = taken_up_to
        {
            self.ready.push_back(Event::RepliesTaken { job, up_to });
        }
        if let (PublicationKind::Reply | PublicationKind::DeadReplies { .. }, Some(payload)) =
            (kind, self.jobs.payload_mut(job))
        {
            payload.unconfirmed = unconfirmed;
        }
        self.ready.push_back(Event::Published { job, outcome });
    }
}

/// The items that a reply holds.
fn items_of(reply: &Message) -> Option<Range<u32>> {
    let headers = ReplyHeaders::read(&reply.headers).ok()?;
    Some(headers.offset..headers.offset.saturating_add(headers.items))
}

/// Publishes until a message is not confirmed. Removes the confirmed messages, and returns the outcome of the other one. `caller` names the
/// job's caller.
async fn publish_all(
    publisher: &Publisher,
    kind: &PublicationKind,
    left: &mut VecDeque<Message>,
    caller: impl Fn() -> Option<String>,
    model: &Model,
    identity: &Identity,
) -> Result<Option<PublicationOutcome>, UnknownOutcome> {
    while let Some(message) = left.front() {
        let destination = || message.destination();
        let answer = match kind {
            PublicationKind::DeadReplies { received, rejection } => {
                let dead = message::dead_reply(message.clone(), received, model, identity, rejection);
                publisher.publish(&dead, &caller).await?
            }
            _ => publisher.publish(message, &caller).await?,
        };
        let outcome = match answer {
            MessageOutcome::Confirmed => {
                left.pop_front();
                continue;
            }
            MessageOutcome::Unroutable => PublicationOutcome::Unroutable { destination: destination() },
            MessageOutcome::Refused => PublicationOutcome::Refused { destination: destination() },
            MessageOutcome::TooLarge => PublicationOutcome::TooLarge,
            MessageOutcome::ConnectionLost => {
                let why = "was not reached: the connection for direct replies was lost over the reply";
                PublicationOutcome::Unreachable { destination: destination(), why }
            }
            MessageOutcome::Barred => {
                let why = "gets no reply for a while: the broker closed the connection for direct replies over such addresses";
                PublicationOutcome::Unreachable { destination: destination(), why }
            }
            MessageOutcome::NoConnection => {
                let why = "was not reached: the worker has no connection for direct replies";
                PublicationOutcome::Unreachable { destination: destination(), why }
            }
            MessageOutcome::NoConfirm => {
                let why = "did not confirm a reply in time (`broker.confirm_s`, and more while large messages are on their way), and may have it nevertheless";
                PublicationOutcome::Unreachable { destination: destination(), why }
            }
        };
        return Ok(Some(outcome));
    }
    Ok(None)
}

/// Why a reply cannot be built. If it is too large because its store did not accept an output, the store is named as the cause.
fn because_unwritten(rejection: Rejection, unwritten: Option<String>) -> Rejection {
    match unwritten {
        Some(why) if rejection.reason == Reason::TooLarge => {
            let error = format!("{}; it was not written to its store: {why}", rejection.error);
            Rejection::new(Reason::StoreUnavailable, error)
        }
        _ => rejection,
    }
}

fn count(messages: usize) -> u32 {
    u32::try_from(messages).unwrap_or(u32::MAX)
}
