//! Turns deliveries, results and signals into events of the core.

use std::sync::Arc;

use lapin::message::Delivery;
use vramq_amqp::UnknownOutcome;
use vramq_core::action::JobQueue;
use vramq_core::event::{Event, Source};
use vramq_core::ids::{ConsumerId, JobKey, ModelIndex};
use vramq_inference::process::pool::Overdue;

use super::EventLoop;
use super::completion::{Completion, Sent};
use super::live_session::Input;
use super::queue_failure::{QueueFailure, classify_failure};
use crate::broker::control_plane::ControlRequest;
use crate::broker::job_channel::{JobChannel, QueueError};
use crate::broker::model_channels::{ConsumeError, Counted, Delivered, StartedConsumer};
use crate::broker::opening::with_advice;
use crate::broker::received::ReceivedJob;
use crate::broker::session::{Side, consumer_timeout, message_size_max};
use crate::broker::silent_queues;
use crate::failpoint::{self, Site};

impl EventLoop {
    pub(crate) fn handle(&mut self, input: Input) {
        match input {
            Input::Completed(completion) => self.completed(completion),
            Input::Delivered(model, Delivered { source, channel, delivery: Some(Ok(delivery)) }) => {
                self.delivered(model, source, &channel, delivery);
            }
            Input::Delivered(model, Delivered { source, delivery: Some(Err(error)), .. }) => {
                self.queue_failed(model, source.queue(), "consumer", &error);
            }
            Input::Delivered(_, Delivered { source, delivery: None, .. }) => {
                // The quarantine has no consumer.
                if let Some(consumer) = source.consumer() {
                    if let Some(live) = &mut self.session {
                        live.consumer_ended(consumer);
                    }
                    self.apply(Event::ConsumerEnded { consumer });
                }
            }
            Input::Started(model, queue, consumer, started) => {
                self.consumer_started(model, queue, consumer, started);
            }
            Input::Stopped(_, _, Ok(())) => {}
            Input::Stopped(model, queue, Err(error)) => {
                self.queue_failed(model, Some(queue), "stop a consumer", &error);
            }
            Input::Counted(model, Ok(Counted { counts, lost })) => {
                for (queue, error) in lost {
                    self.queue_failed(model, Some(JobQueue::Jobs(queue)), "look at a further queue", &error);
                }
                self.apply(Event::QueuesCounted { model, counts });
            }
            Input::LookedFor(model, queue, found) => {
                let Some(live) = &mut self.session else { return };
                let result = found.map(|channel| live.session.channels_mut(model).found(queue, channel));
                self.apply(Event::QueueLookedFor { model, queue, result });
            }
            Input::QuarantineTaken(model, Ok(Some((channel, delivery)))) => {
                self.delivered(model, Source::Quarantine, &channel, delivery);
            }
            Input::QuarantineTaken(_, Ok(None)) => self.apply(Event::QuarantineEmpty),
            Input::Counted(_, Err(error)) | Input::QuarantineTaken(_, Err(error)) => {
                self.not_looked_at(&error);
            }
            Input::Published(job, Ok(sent)) => self.published(job, sent),
            Input::Published(_, Err(UnknownOutcome::Closed(error))) => self.failed("publish", &error),
            Input::Published(_, Err(error)) => self.apply(Event::SessionFailed(format!("publish: {error}"))),
            Input::Acked(channel, sent) => self.apply(Event::AcksSent { channel, sent }),
            Input::Nacked(job, sent) => self.apply(Event::NackSent { job, sent }),
            Input::Broker(side, event) => self.broker_event(side, event),
            Input::Request(ControlRequest::Withdrawal(withdrawn)) => self.apply(Event::Withdrawn(withdrawn)),
            Input::Request(ControlRequest::Command(request)) => {
                let Some(live) = &mut self.session else { return };
                let command = request.command;
                let request = live.add_request(request.responder);
                self.apply(Event::Command { request, command });
            }
            Input::Signal(signal) => self.apply(Event::StopRequested { signal }),
            Input::Tick => self.tick(),
            Input::Timer => self.apply(Event::Timer),
        }
    }

    /// Handles a result from outside the event loop. Jobs of an earlier session no longer exist; its passes still count.
    pub(crate) fn completed(&mut self, completion: Completion) {
        match completion {
            Completion::PassEnded(completed) => self.pass_ended(*completed),
            Completion::Decoded { job, result } => self.decoded(job, *result),
            Completion::Fetched { job, result } => self.fetched(job, result),
            Completion::Prepared { job, result, rest } => self.prepared(job, result, rest),
            Completion::Encoded { job, kind, encoded } => {
                if self.jobs.get(job).is_some() {
                    self.encoded(job, kind, encoded);
                }
            }
            Completion::Progress { job, progress } => self.publish_progress(job, &progress),
        }
        self.apply_ready();
    }

    fn delivered(
        &mut self,
        model: ModelIndex,
        source: Source,
        channel: &Arc<JobChannel>,
        delivery: Delivery,
    ) {
        let received = ReceivedJob::now(delivery, source, &self.context.publisher_rules);
        failpoint::reach(Site::Received, [received.id()]);
        if received.has_ignored_headers() {
            self.context.meters.models[model.0].untrusted_headers.inc();
        }
        let (job, received) = self.jobs.add(model, channel, received);
        self.apply(Event::Delivered(Box::new(received.facts(job, model, channel.id()))));
    }

    fn consumer_started(
        &mut self,
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
        started: Result<StartedConsumer, ConsumeError>,
    ) {
        let Some(live) = &mut self.session else { return };
        match started {
            Ok(started) => {
                self.context.silent_queues.forget(&live.session.channels(model).name(queue));
                live.consumer_started(model, queue, consumer, Some(started));
            }
            Err(error) => {
                live.consumer_started(model, queue, consumer, None);
                self.not_started(model, queue, &error);
            }
        }
    }

    fn not_started(&mut self, model: ModelIndex, queue: JobQueue, error: &ConsumeError) {
        let Some(live) = &mut self.session else { return };
        let channels = live.session.channels_mut(model);
        let what = format!("consumer of `{}`", channels.name(queue));
        match (error, queue) {
            (ConsumeError::Silent(asked_on), JobQueue::Jobs(queue)) if queue.is_further() => {
                let Some(closing) = channels.give_up(queue, *asked_on, &self.context.silent_queues) else {
                    return;
                };
                tokio::spawn(closing);
                self.apply(Event::QueueLost { model, queue, error: silent_queues::WHY.to_owned() });
            }
            (ConsumeError::Broker(error), queue) => self.queue_failed(model, Some(queue), &what, error),
            (ConsumeError::NoChannel, JobQueue::Jobs(queue)) if queue.is_further() => {
                self.apply(Event::QueueLost { model, queue, error: error.to_string() });
            }
            (error, _) => self.apply(Event::SessionFailed(format!("{what}: {error}"))),
        }
    }

    /// A model's queues could not be counted, or its quarantine could not be read.
    fn not_looked_at(&mut self, error: &QueueError) {
        let what = "look at the queues";
        match error {
            QueueError::Broker(error) => self.failed(what, error),
            QueueError::Silent => self.apply(Event::SessionFailed(format!("{what}: {error}"))),
        }
    }

    /// An operation that a queue's consumers need has failed.
    fn queue_failed(&mut self, model: ModelIndex, queue: Option<JobQueue>, what: &str, error: &lapin::Error) {
        self.context.consumer_timeouts.learn(error);
        let Some(live) = &mut self.session else { return self.failed(what, error) };
        let is_whole = live.session.is_whole();
        let channels = live.session.channels_mut(model);
        match classify_failure(queue, error, is_whole, |queue| channels.has_open(queue)) {
            QueueFailure::OfReplacedChannel => {}
            QueueFailure::Queue(queue, error) => {
                channels.lost(queue);
                self.apply(Event::QueueLost { model, queue, error: with_advice(&error) });
            }
            QueueFailure::Session => self.failed(what, error),
        }
    }

    pub(crate) fn published(&mut self, job: JobKey, sent: Sent) {
        self.take_in_sent(job, sent);
        self.apply_ready();
    }

    fn broker_event(&mut self, side: Side, event: Option<lapin::Event>) {
        let is_whole = self.session.as_ref().is_some_and(|live| live.session.is_whole());
        match event {
            // lapin reports the end of every channel here, also of auxiliary ones and those of further queues.
            Some(lapin::Event::Error(error)) if is_whole && consumer_timeout(&error).is_none() => {
                tracing::debug!(
                    error = error.to_string(),
                    "the broker closed a channel that jobs do not need: the session goes on"
                );
            }
            Some(lapin::Event::Error(error)) => self.failed(side.as_str(), &error),
            // Nothing is published on the other connection.
            Some(lapin::Event::ConnectionBlocked(reason)) if side == Side::Publishing => {
                if let Some(live) = &self.session {
                    live.session.publisher.blocked();
                }
                self.apply(Event::BrokerBlocked { reason });
            }
            Some(lapin::Event::ConnectionUnblocked) if side == Side::Publishing => {
                if let Some(live) = &self.session {
                    live.session.publisher.unblocked();
                }
                self.apply(Event::BrokerUnblocked);
            }
            Some(_) => {}
            None => self.apply(Event::SessionFailed(format!("{} closed", side.as_str()))),
        }
    }

    fn tick(&mut self) {
        self.publish_slow_status();
        if let Some(live) = &self.session {
            live.session.publisher.tick();
        }
        let programs = Arc::clone(&self.context.programs);
        for (model, pool) in programs.pools() {
            if let Some(Overdue { bytes, lasted, has_ended }) = pool.overdue() {
                self.apply(Event::MemoryWithheld { model, bytes, lasted, has_ended });
            }
            if let Some(revision) = pool.other_revision() {
                self.apply(Event::OtherRevision { model, revision });
            }
            if pool.status().unavailable.is_none() {
                self.apply(Event::ModelAvailable { model });
            }
        }
        let reading = self.context.read_device();
        self.apply(Event::Tick(reading));
    }

    /// A part of the session that jobs need is unusable. First learns the broker's limits that the error reveals.
    fn failed(&mut self, what: &str, error: &lapin::Error) {
        self.context.consumer_timeouts.learn(error);
        if let Some(timeout) = consumer_timeout(error) {
            self.apply(Event::ConsumerTimeoutLearned { timeout });
        }
        if let Some(bytes) = message_size_max(error) {
            tracing::warn!(bytes, "learned the broker's max_message_size: larger jobs are dead-lettered");
            self.context.body_max = bytes;
        }
        self.apply(Event::SessionFailed(format!("{what}: {error}")));
    }
}
