//! Publishes messages about jobs: one message of a job at a time, after the confirm of the one before.

use std::collections::VecDeque;

use vramq_core::action::{Publication, Route, Run};
use vramq_core::event::{Event, PublicationOutcome};
use vramq_core::ids::JobKey;
use vramq_core::rejection::Rejection;
use vramq_schemas::headers::HISTORY_MAX;
use vramq_schemas::{JobHeaders, Reason};

use super::Shell;
use super::stored_job::SeenEnd;
use crate::simulation::broker::{Name, Properties};
use crate::simulation::env::Env;
use crate::simulation::ledger::{Kind, Letter, Nature, ReplyTo};

/// A message to publish.
#[derive(Clone, Debug)]
pub(super) struct Out {
    pub(super) kind: Kind,
    exchange: Name,
    routing_key: Name,
    priority: Option<u8>,
}

/// The kind of a publication, to recognise a repeated one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Reply,
    Requeue(Route),
    DeadReplies,
    DeadLetter,
    Notice,
}

impl What {
    fn of(publication: &Publication) -> Self {
        match publication {
            Publication::Reply(_) | Publication::ReplyAgain => Self::Reply,
            Publication::Requeue { route, .. } => Self::Requeue(route.clone()),
            Publication::DeadReplies(_) => Self::DeadReplies,
            Publication::DeadLetter { .. } => Self::DeadLetter,
            Publication::FailureNotice(_) => Self::Notice,
        }
    }

    /// Whether it goes to a caller, to workers with larger devices, or to an operator.
    fn is_for_others(&self) -> bool {
        matches!(self, Self::Reply | Self::Notice | Self::Requeue(Route::OtherWorkers(_))) || self.is_dead()
    }

    /// Whether it goes to the dead letters.
    fn is_dead(&self) -> bool {
        matches!(self, Self::DeadReplies | Self::DeadLetter)
    }
}

/// What is being published about a job.
#[derive(Debug)]
pub(super) struct Outbox {
    left: VecDeque<Out>,
    /// Whether it consists of replies, of which unconfirmed ones are kept.
    is_reply: bool,
    messages: u32,
}

impl Shell {
    pub(super) fn publish(&mut self, env: &mut Env, job: JobKey, publication: Publication) {
        self.check_withdrawn(env, job, &publication);
        self.check_publication(env, job, &publication);
        let Some(stored) = self.jobs.get_mut(&job) else {
            return env.ledger.fail("what is published was not released", || format!("{publication:?}"));
        };
        stored.is_publishing = true;
        let number = stored.job;
        let spec = &env.ledger.job(number).spec;
        let names = &env.names.models[stored.model.0];
        let reply_queue = match spec.reply_to {
            ReplyTo::Caller(caller) => env.names.replies[caller].clone(),
            ReplyTo::Nowhere => env.names.nowhere.clone(),
        };
        let to = |exchange: &Name, key: &Name, kind| Out {
            kind,
            exchange: exchange.clone(),
            routing_key: key.clone(),
            priority: None,
        };
        let (plain, dead, key) =
            (env.names.default_exchange.clone(), env.names.dead_exchange.clone(), names.key.clone());
        let messages: Vec<Out> = match publication {
            Publication::Reply(run) if spec.is_unencodable && run.is_last => {
                self.check_reply(env, job, &run);
                return self.cut(job, &run);
            }
            Publication::Reply(run) => return self.reply(env, job, run),
            Publication::ReplyAgain => std::mem::take(&mut stored.unconfirmed).into(),
            Publication::DeadReplies(_) => {
                let replies = std::mem::take(&mut stored.unconfirmed);
                let as_dead = |out: Out| match out.kind {
                    Kind::Reply { offset, items, .. } => to(&dead, &key, Kind::DeadReply { offset, items }),
                    kind => to(&dead, &key, kind),
                };
                replies.into_iter().map(as_dead).collect()
            }
            Publication::FailureNotice(_) => vec![to(&plain, &reply_queue, Kind::Failed)],
            Publication::DeadLetter { rejection, .. } if spec.nature == Nature::Huge => {
                let reason = rejection.reason;
                stored.end = Some(SeenEnd::Rejected(reason));
                if reason != Reason::TooLarge {
                    env.ledger.fail("nobody is blamed for others", || format!("job {}: {reason}", number.0));
                }
                return self.ready.push_back(Event::Published { job, outcome: PublicationOutcome::TooLarge });
            }
            Publication::DeadLetter { rejection, .. } => {
                vec![to(&dead, &key, Kind::DeadLetter { reason: rejection.reason })]
            }
            Publication::Requeue { headers, route } => {
                if !std::mem::replace(&mut stored.is_requeued, true) {
                    self.check_requeue(env, job, &headers, &route);
                }
                vec![self.requeued(env, job, *headers, &route)]
            }
        };
        let is_reply = messages
            .first()
            .is_some_and(|out| matches!(out.kind, Kind::Reply { .. } | Kind::DeadReply { .. }));
        self.send_all(env, job, messages, is_reply);
    }

    /// Checks a publication about a job, and records it.
    fn check_publication(&mut self, env: &mut Env, job: JobKey, publication: &Publication) {
        let recomputed = std::mem::take(&mut self.observations.recomputed);
        if let Some(stored) = self.jobs.get_mut(&job) {
            stored.recomputed += recomputed;
        }
        let what = What::of(publication);
        let Some(stored) = self.jobs.get(&job) else { return };
        let is_again = stored.tries.is_refused() && stored.what.as_ref() == Some(&what);
        if is_again {
            self.check_again(env, stored);
        }
        self.check_probed(env, stored, publication);
        match publication {
            Publication::DeadLetter { headers, rejection } => {
                self.check_dead_letter(env, job, headers.as_deref(), rejection);
            }
            Publication::Requeue { headers, route } => self.check_account(env, job, headers, route),
            Publication::Reply(run) => self.check_run_figures(env, job, run),
            _ => {}
        }
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        if !is_again {
            stored.tries.begin();
            stored.what = Some(what);
        }
        stored.is_part_out &= matches!(publication, Publication::ReplyAgain);
        match publication {
            Publication::Requeue { headers, route } => {
                stored.requeue = Some((headers.clone(), route.clone()));
            }
            Publication::FailureNotice(rejection) if rejection.reason == Reason::Withdrawn => {
                stored.end = Some(SeenEnd::Withdrawn);
            }
            Publication::Reply(run) => stored.is_part_out = !run.is_last,
            _ => {}
        }
    }

    fn requeued(&self, env: &Env, job: JobKey, headers: JobHeaders, route: &Route) -> Out {
        let (names, mut headers) = (&env.names, headers);
        let stored = &self.jobs[&job];
        let spec = &env.ledger.job(stored.job).spec;
        let skip = headers.history.len().saturating_sub(HISTORY_MAX);
        headers.history.drain(..skip);
        let Kind::Job { headers: before, published_ms } = &env.ledger.letter(stored.letter).kind else {
            return Out {
                kind: Kind::Failed,
                exchange: names.nowhere.clone(),
                routing_key: names.nowhere.clone(),
                priority: None,
            };
        };
        let own = before.as_ref().and_then(|headers| headers.expires_at_ms);
        headers.expires_at_ms = own.or_else(|| Some((*published_ms)? + spec.ttl_ms?));
        let of_model = &names.models[stored.model.0];
        let routing_key = match route {
            Route::Now => of_model.key.clone(),
            Route::Bulk => of_model.bulk_key.clone(),
            Route::Quarantine => of_model.suspects_key.clone(),
            Route::Later(ms) => names.delay_key(stored.model.0, *ms),
            Route::OtherWorkers(key) => key.as_str().into(),
        };
        let exchange = names.retry_exchange.clone();
        let priority = matches!(route, Route::Now | Route::Later(_)).then_some(5);
        // Headers that cannot be read stay as they are.
        let headers = before.as_ref().map(|_| Box::new(headers));
        let kind = Kind::Job { headers, published_ms: *published_ms };
        Out { kind, exchange, routing_key, priority }
    }

    /// An output fits no reply, so nothing is sent.
    fn cut(&mut self, job: JobKey, run: &Run) {
        if let Some(stored) = self.jobs.get_mut(&job) {
            stored.refused_from.get_or_insert(run.offset);
        }
        let rejection = Rejection::new(Reason::TooLarge, "an output is larger than a reply");
        let outcome = PublicationOutcome::Cut { confirmed: 0, rejection };
        self.ready.push_back(Event::Published { job, outcome });
    }

    fn reply(&mut self, env: &mut Env, job: JobKey, run: Run) {
        self.check_reply(env, job, &run);
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        stored.next = run.offset + run.items;
        let routing_key = match env.ledger.job(stored.job).spec.reply_to {
            ReplyTo::Caller(caller) => env.names.replies[caller].clone(),
            ReplyTo::Nowhere => env.names.nowhere.clone(),
        };
        let out = |offset, items, is_last| Out {
            kind: Kind::Reply { offset, items, is_last },
            exchange: env.names.default_exchange.clone(),
            routing_key: routing_key.clone(),
            priority: None,
        };
        // Large outputs are sent as several messages.
        let messages = if run.items > 1 && env.random.chance(20) {
            let half = run.items / 2;
            vec![out(run.offset, half, false), out(run.offset + half, run.items - half, run.is_last)]
        } else {
            vec![out(run.offset, run.items, run.is_last)]
        };
        stored.reply_messages = u32::try_from(messages.len()).unwrap_or(u32::MAX);
        self.send_all(env, job, messages, true);
    }

    fn send_all(&mut self, env: &mut Env, job: JobKey, messages: Vec<Out>, is_reply: bool) {
        let count = u32::try_from(messages.len()).unwrap_or(u32::MAX);
        if messages.is_empty() {
            let outcome = PublicationOutcome::Confirmed { messages: count };
            return self.ready.push_back(Event::Published { job, outcome });
        }
        let Some(session) = &mut self.session else { return };
        let before =
            session.outboxes.insert(job, Outbox { left: messages.into(), is_reply, messages: count });
        if before.is_some() {
            env.ledger.fail("one publication of a job at a time", || format!("{job:?}"));
        }
        self.send_next(env, job);
    }

    /// Publishes the next message of a job.
    fn send_next(&mut self, env: &mut Env, job: JobKey) {
        let (Some(session), Some(stored)) = (&mut self.session, self.jobs.get_mut(&job)) else { return };
        let Some(out) = session.outboxes.get(&job).and_then(|outbox| outbox.left.front()).cloned() else {
            return;
        };
        let is_next_attempt = matches!(out.kind, Kind::Job { .. });
        if is_next_attempt {
            env.ledger.continued(stored.letter);
        }
        let letter = env.ledger.write(stored.job, out.kind);
        if is_next_attempt {
            stored.next_attempt = Some(letter);
        }
        session.published += 1;
        session.confirms.insert(session.published, session.judge.sent(job, letter));
        let properties = Properties { priority: out.priority, persistent: true, ..Properties::default() };
        env.publish(session.publisher, letter, out.exchange, out.routing_key, properties);
    }

    /// The broker has answered a publish. `refused`: the fault, if any. Returns the publication's outcome once all its messages are
    /// answered.
    pub(super) fn publish_answered(
        &mut self,
        env: &mut Env,
        job: JobKey,
        letter: Letter,
        refused: Option<PublicationOutcome>,
    ) -> Option<PublicationOutcome> {
        let stored = self.jobs.get_mut(&job)?;
        let session = self.session.as_mut()?;
        let outbox = session.outboxes.get_mut(&job)?;
        let is_for_others = stored.what.as_ref().is_some_and(What::is_for_others);
        if let Some(outcome) = refused {
            env.ledger.refused(letter);
            let outbox = session.outboxes.remove(&job)?;
            stored.tries.answered(Some(&outcome), is_for_others, env.now);
            stored.was_refused = true;
            let is_full = matches!(outcome, PublicationOutcome::Refused { .. });
            stored.is_dead_refused |= is_full && stored.what.as_ref().is_some_and(What::is_dead);
            if outbox.is_reply {
                env.ledger.excuses_mut(stored.job).replies_refused = true;
                stored.unconfirmed = outbox.left;
                if let Kind::Reply { offset, .. } = env.ledger.letter(letter).kind {
                    stored.refused_from = Some(offset);
                    self.ready.push_back(Event::RepliesTaken { job, up_to: offset });
                }
            }
            return Some(outcome);
        }
        stored.tries.answered(None, is_for_others, env.now);
        let follows = match env.ledger.letter(letter).kind {
            Kind::Job { .. } | Kind::DeadLetter { .. } => true,
            Kind::Reply { is_last, .. } => is_last,
            Kind::DeadReply { .. } | Kind::Failed => false,
        };
        if follows {
            env.ledger.followed(stored.letter);
        }
        outbox.left.pop_front();
        if !outbox.left.is_empty() {
            self.send_next(env, job);
            return None;
        }
        let Outbox { is_reply, messages, .. } = session.outboxes.remove(&job)?;
        stored.tries.begin();
        match env.ledger.letter(letter).kind {
            Kind::Reply { is_last, .. } => {
                stored.refused_from = None;
                stored.end = is_last.then_some(SeenEnd::Replied);
            }
            Kind::Job { .. } => {
                stored.end = stored.requeue.take().map(|(headers, route)| SeenEnd::Requeued(headers, route));
            }
            Kind::DeadLetter { reason } => stored.end = Some(SeenEnd::DeadLettered(reason)),
            Kind::DeadReply { .. } | Kind::Failed => {}
        }
        // After a part the job goes on.
        stored.is_publishing = follows || !is_reply;
        let messages = if is_reply { stored.reply_messages } else { messages };
        Some(PublicationOutcome::Confirmed { messages })
    }
}
