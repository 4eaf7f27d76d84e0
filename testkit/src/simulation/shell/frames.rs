//! Converts the broker's frames to events of the core.

use std::time::Duration;

use vramq_core::action::JobQueue;
use vramq_core::event::{self, Event, PublicationOutcome, Source};
use vramq_core::ids::{self, DeliveryTag, Fingerprint, JobKey};

use super::Shell;
use super::as_known::caller_as_known;
use super::channels::JobChannel;
use super::session::Lease;
use super::stored_job::{Delivered, StoredJob};
use crate::simulation::agenda::MILLI;
use crate::simulation::broker::{ChannelId, Delivery, Emitted, Frame, code};
use crate::simulation::env::{Env, letter_of};
use crate::simulation::ledger::{JobSpec, Kind, ReplyTo};

impl Shell {
    /// A frame has come.
    pub fn frame(&mut self, env: &mut Env, emitted: Emitted) {
        let Some(session) = &self.session else { return };
        match (emitted.channel, emitted.frame) {
            (None, Frame::Blocked) => {
                self.is_blocked = true;
                self.handle(env, Event::BrokerBlocked { reason: "memory alarm".to_owned() });
            }
            (None, Frame::Unblocked) => {
                self.is_blocked = false;
                self.handle(env, Event::BrokerUnblocked);
            }
            (None, _) => self.session_failed(env, "the connection was closed"),
            (Some(channel), frame) if channel == session.publisher => self.publisher_frame(env, frame),
            (Some(channel), frame) => self.consumer_frame(env, channel, frame),
        }
    }

    fn consumer_frame(&mut self, env: &mut Env, channel: ChannelId, frame: Frame) {
        let Some(session) = &mut self.session else { return };
        let Some(&mut JobChannel { id: ids::ChannelId { model, .. }, queue, .. }) =
            session.channels.by_wire(channel)
        else {
            return;
        };
        match frame {
            Frame::Deliver { tag, delivery } => {
                // The model of a quorum queue may deliver after the consumer's end was confirmed.
                let Some(consumer) = super::perform::consumer_of(&tag) else { return };
                let is_of_bulk = |lease: &Lease| lease.consumer == consumer && lease.queue == JobQueue::Bulk;
                let source = match session.leases.iter().any(is_of_bulk) {
                    true => Source::Bulk(consumer),
                    false => Source::Jobs(queue, consumer),
                };
                self.delivered(env, channel, source, &delivery);
            }
            Frame::GetOk { delivery, .. } => {
                session.taking = None;
                self.delivered(env, channel, Source::Quarantine, &delivery);
            }
            Frame::GetEmpty => {
                session.taking = None;
                self.handle(env, Event::QuarantineEmpty);
            }
            Frame::CancelOk { tag } | Frame::Cancelled { tag } => {
                let at = session.leases.iter().position(|lease| lease.tag == tag);
                if let Some(at) = at {
                    let consumer = session.leases.remove(at).consumer;
                    self.handle(env, Event::ConsumerEnded { consumer });
                }
            }
            Frame::Closed { code } if code == code::NOT_FOUND && queue.is_further() => {
                self.queue_lost(env, model, queue, "NOT_FOUND - no queue");
            }
            Frame::Closed { code } => self.channel_closed(env, code),
            _ => {}
        }
    }

    fn channel_closed(&mut self, env: &mut Env, code: u16) {
        if code == code::PRECONDITION_FAILED {
            let held = self.jobs.len();
            if held == 0 {
                env.ledger.fail("the worker settles only what it holds", || {
                    "the broker closed a channel (406)".to_owned()
                });
            }
            let timeout = Duration::from_millis(env.plan.consumer_timeout_ms);
            self.learned_timeout = Some(env.plan.consumer_timeout_ms * MILLI);
            self.handle(env, Event::ConsumerTimeoutLearned { timeout });
        }
        self.session_failed(env, "the broker closed a channel");
    }

    fn delivered(&mut self, env: &mut Env, channel: ChannelId, source: Source, delivery: &Delivery) {
        let Some(session) = &mut self.session else { return };
        let Some(of_jobs) = session.channels.by_wire(channel) else { return };
        let (id, model) = (of_jobs.id, of_jobs.id.model);
        let Some(letter) = letter_of(&delivery.message) else { return };
        self.last_job += 1;
        let job = JobKey(self.last_job);
        let record = env.ledger.letter(letter);
        let (number, twin) = (record.job, record.twin);
        let Kind::Job { headers, published_ms } = record.kind.clone() else { return };
        let spec = &env.ledger.job(number).spec;
        let next = headers.as_ref().map_or(0, |headers| headers.items_done);
        let own = headers.as_ref().and_then(|headers| headers.expires_at_ms);
        let expires_at_ms = own.or_else(|| Some(published_ms.unwrap_or(env.unix_ms()) + spec.ttl_ms?));
        let facts = event::Delivery {
            job,
            model,
            source,
            channel: id,
            tag: DeliveryTag(delivery.delivery_tag),
            fingerprint: Fingerprint(u64::from(twin.0)),
            redelivered: delivery.redelivered,
            delivery_count: delivery.delivery_count,
            id: Some(id_of(number.0)),
            caller: caller_as_known(env, spec).as_deref().map(str::to_owned),
            withdrawal: env.ledger.job(number).digest,
            reply_queue: match spec.reply_to {
                ReplyTo::Caller(caller) => Some(format!("replies.{caller}")),
                ReplyTo::Nowhere => Some("nowhere".to_owned()),
            },
            trace_id: None,
            bytes: bytes_of(spec),
            headers: headers.map(|headers| *headers),
            expires_at_ms,
            published_ms,
        };
        let delivered = Delivered {
            channel: id,
            source,
            tag: delivery.delivery_tag,
            withdrawn: self.known_withdrawal(env.now, number),
            returns: if delivery.redelivered { delivery.delivery_count.unwrap_or(1).max(1) } else { 0 },
            at: env.now,
            at_ms: env.unix_ms(),
            findings: self.health.findings,
        };
        let stored = StoredJob::new(letter, number, delivered, spec.costs.len(), next);
        self.jobs.insert(job, stored);
        self.bytes.consumed += facts.bytes;
        let Some(of_jobs) = self.session.as_mut().and_then(|session| session.channels.by_wire(channel))
        else {
            return;
        };
        of_jobs.tags.push(job);
        let known = env.broker.is_open(channel);
        let is_next = of_jobs.tags.len() as u64 == delivery.delivery_tag;
        if known && !is_next {
            env.ledger.fail("frames arrive in order", || format!("{channel:?}: {}", delivery.delivery_tag));
        }
        self.check_isolation(env, source);
        self.handle(env, Event::Delivered(Box::new(facts)));
    }

    fn publisher_frame(&mut self, env: &mut Env, frame: Frame) {
        match frame {
            Frame::Return { message } => {
                let letter = letter_of(&message);
                let Some(session) = &mut self.session else { return };
                let sent = session.confirms.values_mut().find(|sent| Some(sent.letter) == letter);
                if let Some(sent) = sent {
                    sent.is_returned = true;
                }
            }
            Frame::Ack { tag, multiple } => {
                let Some(session) = &self.session else { return };
                let first = if multiple { 0 } else { tag };
                let numbers: Vec<u64> =
                    session.confirms.range(first..=tag).map(|(number, _)| *number).collect();
                for number in numbers {
                    self.confirmed(env, number, true);
                }
            }
            Frame::Nack { tag, .. } => self.confirmed(env, tag, false),
            Frame::Closed { .. } => self.session_failed(env, "the broker closed the publishing channel"),
            _ => {}
        }
    }

    fn confirmed(&mut self, env: &mut Env, number: u64, accepted: bool) {
        let Some(session) = &mut self.session else { return };
        session.judge.confirmed(number);
        let Some(sent) = session.confirms.remove(&number).filter(|sent| !sent.is_late) else { return };
        let destination = "somewhere".to_owned();
        let outcome = match (accepted, sent.is_returned) {
            (true, false) => None,
            (_, true) => Some(PublicationOutcome::Unroutable { destination }),
            (false, false) => Some(PublicationOutcome::Refused { destination }),
        };
        if let Some(outcome) = self.publish_answered(env, sent.job, sent.letter, outcome) {
            self.handle(env, Event::Published { job: sent.job, outcome });
        }
    }
}

/// About the bytes of a job's body.
pub(super) fn bytes_of(spec: &JobSpec) -> usize {
    spec.costs.len() * 8
}

pub fn id_of(job: usize) -> String {
    format!("job-{job}")
}
