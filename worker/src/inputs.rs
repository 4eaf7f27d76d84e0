//! Turns deliveries, results and signals into events of the core.

use std::sync::Arc;

use vramq_core::event::{Event, Source};
use vramq_core::ids::{JobKey, ModelIndex};

use crate::broker::control_plane::ControlRequest;
use crate::broker::model_channel::ConsumeError;
use crate::broker::publisher::PublishError;
use crate::broker::received::ReceivedJob;
use crate::broker::session::{Side, consumer_timeout, message_size_max};
use crate::event_loop::{Completion, EventLoop};
use crate::failpoint::{self, Site};
use crate::live_session::Input;
use crate::perform::publications::Sent;

impl EventLoop {
    pub(crate) fn handle(&mut self, input: Input) {
        match input {
            Input::Completed(completion) => self.completed(completion),
            Input::Delivered(model, source, Some(Ok(delivery))) => {
                let received = ReceivedJob::now(delivery, &self.context.publisher_rules);
                self.delivered(model, source, received);
            }
            Input::Delivered(_, _, Some(Err(error))) => self.failed("consumer", &error),
            Input::Delivered(_, Source::Jobs(consumer) | Source::Bulk(consumer), None) => {
                self.apply(Event::ConsumerEnded { consumer });
            }
            // The quarantine has no consumer.
            Input::Delivered(_, Source::Quarantine, None) => {}
            Input::Started(model, Ok(deliveries)) => {
                if let Some(live) = &mut self.session {
                    live.add_consumer(model, deliveries);
                }
            }
            Input::Started(model, Err(error)) => {
                let what = format!("consumer of `{}`", self.context.models[model.0].name);
                match error {
                    ConsumeError::Broker(error) => self.failed(&what, &error),
                    ConsumeError::Silent => self.apply(Event::SessionFailed(format!("{what}: {error}"))),
                }
            }
            Input::Stopped(Ok(())) => {}
            Input::Stopped(Err(error)) => self.failed("stop a consumer", &error),
            Input::Counted(model, Ok(counts)) => self.apply(Event::QueuesCounted { model, counts }),
            Input::Fetched(model, Ok(Some(delivery))) => {
                let received = ReceivedJob::now(delivery, &self.context.publisher_rules);
                self.delivered(model, Source::Quarantine, received);
            }
            Input::Fetched(model, Ok(None)) => self.apply(Event::QuarantineEmpty { model }),
            Input::Counted(_, Err(error)) | Input::Fetched(_, Err(error)) => {
                self.failed("look at the queues", &error);
            }
            Input::Published(job, Ok(sent)) => self.published(job, sent),
            Input::Published(_, Err(PublishError::Closed(error))) => self.failed("publish", &error),
            Input::Published(_, Err(error)) => self.apply(Event::SessionFailed(format!("publish: {error}"))),
            Input::Acked(model, sent) => self.apply(Event::AcksSent { model, sent }),
            Input::GivenBack(job, sent) => self.apply(Event::GivenBack { job, sent }),
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

    /// Takes in what was done off the event loop. Jobs of an earlier session are gone; passes of one still count.
    pub(crate) fn completed(&mut self, completion: Completion) {
        match completion {
            Completion::PassEnded(completed) => self.pass_ended(*completed),
            Completion::Decoded { job, result } => self.decoded(job, *result),
            Completion::Fetched { job, result } => self.fetched(job, result),
            Completion::Prepared { job, result, rest } => self.prepared(job, result, rest),
            Completion::Encoded { job, kind, result } => {
                if self.jobs.get(job).is_some() {
                    self.encoded(job, kind, result);
                }
            }
            Completion::Progress { job, progress } => self.publish_progress(job, &progress),
        }
        self.apply_ready();
    }

    fn delivered(&mut self, model: ModelIndex, source: Source, received: ReceivedJob) {
        failpoint::reach(Site::Received, [received.id()]);
        if received.has_ignored_headers() {
            self.context.meters.models[model.0].untrusted_headers.inc();
        }
        let (job, received) = self.jobs.add(model, received);
        self.apply(Event::Delivered(Box::new(received.facts(job, model, source))));
    }

    pub(crate) fn published(&mut self, job: JobKey, sent: Sent) {
        self.take_in_sent(job, sent);
        self.apply_ready();
    }

    fn broker_event(&mut self, side: Side, event: Option<lapin::Event>) {
        let is_whole = self.session.as_ref().is_some_and(|live| live.session.is_whole());
        match event {
            // lapin reports the end of every channel here, also of auxiliary ones.
            Some(lapin::Event::Error(error)) if is_whole => {
                tracing::debug!(%error, "an auxiliary channel was closed");
            }
            Some(lapin::Event::Error(error)) => self.failed(side.as_str(), &error),
            // Nothing is published on the other one.
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
            if let Some((bytes, lasted)) = pool.overdue() {
                self.apply(Event::MemoryWithheld { model, bytes, lasted });
            }
            if pool.status().unavailable.is_none() {
                self.apply(Event::ModelAvailable { model });
            }
        }
        let reading = self.context.read_device();
        self.apply(Event::Tick(reading));
    }

    /// A part of the session that jobs need is unusable. What the error says of the broker's limits comes first.
    fn failed(&mut self, what: &str, error: &lapin::Error) {
        if let Some(timeout) = consumer_timeout(error) {
            self.apply(Event::ConsumerTimeoutLearned { timeout });
        }
        if let Some(bytes) = message_size_max(error) {
            tracing::warn!(
                bytes,
                "the broker takes no message larger than this: it dead-letters larger ones"
            );
            self.body_max = bytes;
        }
        self.apply(Event::SessionFailed(format!("{what}: {error}")));
    }
}
