//! Jobs between [`Client::submit`](crate::Client::submit) and the outcome of publishing. They survive the loss of a session: unconfirmed
//! jobs are published again.
//!
//! Each routing key that has jobs has a channel of its own while there are enough. The reason: RabbitMQ registers a channel with a quorum
//! queue before it publishes the channel's first message there. If the queue has lost its majority, that takes up to 65 s, in which RabbitMQ
//! reads nothing else from the channel. With a channel for each key, a queue that does not answer holds up only the jobs for it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lapin::types::ShortString;
use lapin::{Connection, ErrorKind};
use tokio::time::{Instant, sleep_until};
use vramq_amqp::reply_code::{ACCESS_REFUSED, NOT_ALLOWED, NOT_FOUND};
use vramq_amqp::{PublishOutcome, PublishPipeline};
use vramq_schemas::BODY_BYTES_MAX;

use crate::error::PublishError;
use crate::isolation::{Isolation, Turn};
use crate::job_channel::JobChannel;
use crate::outgoing::Outgoing;
use crate::registry::Registry;

/// With more routing keys at a time, some share a channel.
const CHANNELS_MAX: usize = 64;

/// For so long no more channels are opened than the broker allowed its user, all connections together.
const LIMITED_FOR: Duration = Duration::from_secs(600);

/// AMQP's codes with which a broker closes the connection over a frame: malformed or too large, of values or a command that it does not know,
/// unexpected, and not implemented. Others are about the connection.
const OVER_A_FRAME: [u16; 5] = [501, 502, 503, 505, 540];

/// The jobs that the broker has not confirmed. Each has a number here.
#[derive(Debug)]
pub(crate) struct JobChannels {
    /// The session's.
    connection: Option<Arc<Connection>>,
    channels: Vec<JobChannel>,
    /// The routing keys that have jobs.
    keys: HashMap<ShortString, Key>,
    /// How many channels the connection may have.
    channels_max: usize,
    /// How many the broker allowed when it refused further ones, and until when that counts.
    limit: Option<(usize, Instant)>,
    next_number: u64,
    isolation: Isolation,
    /// Attempts to connect since the last confirm; sets the wait before the next. A session alone does not reset it: else a job over which
    /// the broker closes each connection would make the client reconnect without a wait.
    pub(crate) failures: u32,
}

#[derive(Debug)]
struct Key {
    /// The index of its channel.
    channel: usize,
    jobs: usize,
}

impl Default for JobChannels {
    fn default() -> Self {
        Self {
            connection: None,
            channels: Vec::new(),
            keys: HashMap::new(),
            channels_max: CHANNELS_MAX,
            limit: None,
            next_number: 0,
            isolation: Isolation::default(),
            failures: 0,
        }
    }
}

impl JobChannels {
    /// All jobs are published from here on, on channels of this connection. `first` is one of them.
    pub(crate) fn begin_session(&mut self, connection: Arc<Connection>, first: PublishPipeline<u64>) {
        // Withdrawals need one as well, and the connection itself counts as one.
        let for_jobs = usize::from(connection.configuration().channel_max()).saturating_sub(2).max(1);
        self.channels_max = self.limit(Instant::now()).unwrap_or(CHANNELS_MAX).min(for_jobs);
        self.connection = Some(connection);
        let earlier = std::mem::replace(&mut self.channels, vec![JobChannel::with_publisher(first)]);
        self.keys.clear();
        self.isolation.begin_session();
        let mut jobs = earlier.into_iter().flat_map(|mut channel| channel.take_jobs()).collect::<Vec<_>>();
        jobs.sort_unstable_by_key(|(number, _)| *number);
        for (number, outgoing) in jobs {
            self.add_as(number, outgoing);
        }
    }

    /// Lets go of the connection. The jobs stay.
    pub(crate) fn end_session(&mut self) {
        self.connection = None;
        for channel in &mut self.channels {
            channel.close();
        }
    }

    /// Takes a new job.
    pub(crate) fn add(&mut self, outgoing: Outgoing) {
        let number = self.next_number;
        self.next_number += 1;
        self.add_as(number, outgoing);
    }

    fn add_as(&mut self, number: u64, outgoing: Outgoing) {
        let name = outgoing.message.routing_key.clone();
        let channel = match self.keys.get(&name) {
            Some(key) => key.channel,
            None => self.free_channel(),
        };
        self.keys.entry(name).or_insert(Key { channel, jobs: 0 }).jobs += 1;
        self.channels[channel].add(number, outgoing);
    }

    /// The channel of a key that had no jobs: one without jobs, or a new one, or the one with the fewest.
    fn free_channel(&mut self) -> usize {
        if let Some(idle) = self.channels.iter().position(|channel| channel.jobs() == 0) {
            return idle;
        }
        if self.channels.len() < self.channels_max {
            self.channels.push(JobChannel::default());
            return self.channels.len() - 1;
        }
        (0..self.channels.len()).min_by_key(|at| self.channels[*at].jobs()).unwrap_or(0)
    }

    /// Publishes what may be published, and tells callers the outcomes as they come. Waits for the next of these; for ever if there is
    /// none.
    ///
    /// Cancel safety: nothing is lost.
    ///
    /// # Errors
    /// Why a channel was lost.
    pub(crate) async fn next(&mut self, registry: &Registry) -> lapin::Result<()> {
        let until = self.publish_waiting(registry);
        let time_is_over = async {
            match until {
                Some(until) => sleep_until(until).await,
                None => pending().await,
            }
        };
        tokio::select! {
            settled = poll_fn(|context| self.poll(registry, context)) => settled,
            () = time_is_over => Ok(()),
        }
    }

    /// Publishes the jobs that may be published now. Returns until when the others wait for the outcome of a job that is published alone.
    fn publish_waiting(&mut self, registry: &Registry) -> Option<Instant> {
        let connection = self.connection.clone()?;
        loop {
            let now = Instant::now();
            let number = match self.isolation.turn(now) {
                Turn::Nobody { until } => return Some(until),
                Turn::Others => break,
                Turn::Isolated(number) => number,
            };
            let Some(at) = self.channel_with(number) else {
                self.isolation.remove(number);
                continue;
            };
            if !self.channels[at].has_room(&connection) {
                return None;
            }
            let bytes = self.channels[at].get(number).map_or(0, |outgoing| outgoing.message.body.len());
            if self.publish(at, number, registry) {
                self.isolation.published(number, bytes, now);
            }
        }
        for at in 0..self.channels.len() {
            while let Some((number, outgoing)) = self.channels[at].first_waiting()
                && !self.isolation.has_key(&outgoing.message.routing_key)
                && self.channels[at].has_room(&connection)
            {
                self.publish(at, number, registry);
            }
        }
        None
    }

    /// Publishes a job, unless its caller has given up on it.
    fn publish(&mut self, at: usize, number: u64, registry: &Registry) -> bool {
        let Some(outgoing) = self.channels[at].get(number) else { return false };
        let is_in_flight = registry.mark_sent(&outgoing.id, outgoing.registration);
        if is_in_flight {
            self.channels[at].publish(number);
        } else {
            // The caller has given up, or replies have completed the job before its confirm came.
            self.finish(at, number, |_| Ok(()));
        }
        is_in_flight
    }

    fn poll(&mut self, registry: &Registry, context: &mut Context<'_>) -> Poll<lapin::Result<()>> {
        let (mut has_news, mut lost) = (false, None);
        for at in 0..self.channels.len() {
            let Poll::Ready(outcomes) = self.channels[at].poll(context) else { continue };
            has_news = true;
            let outcomes = match outcomes {
                Ok(outcomes) => outcomes,
                Err(error) => {
                    // The others may have confirms, which the broker sent before.
                    lost.get_or_insert((at, error));
                    continue;
                }
            };
            for (number, outcome) in outcomes {
                self.failures = 0;
                self.finish(at, number, |outgoing| {
                    if outcome == PublishOutcome::Confirmed {
                        registry.mark_confirmed(&outgoing.id, outgoing.registration);
                    }
                    publish_result(outgoing, outcome)
                });
            }
        }
        if let Some((at, error)) = lost {
            self.note_loss(&error, Some(at));
            return Poll::Ready(Err(error));
        }
        if has_news { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Notes why the connection is lost.
    pub(crate) fn connection_lost(&mut self, error: &lapin::Error, registry: &Registry) {
        // First take in the confirms that have come, so that no confirmed job is a possible cause. Its error says no more than `error`.
        let _ = self.poll(registry, &mut Context::from_waker(Waker::noop()));
        self.note_loss(error, None);
    }

    /// Fails every job. The channels stay open, so that what was sent arrives before the connection is closed.
    pub(crate) fn fail(&mut self, error: &PublishError) {
        self.keys.clear();
        for (_, outgoing) in self.channels.iter_mut().flat_map(JobChannel::take_jobs) {
            outgoing.finish(Err(error.clone()));
        }
    }

    /// A channel is lost, or the connection if it is `None`.
    fn note_loss(&mut self, error: &lapin::Error, channel: Option<usize>) {
        let (code, text) = match error.kind() {
            ErrorKind::ProtocolError(error) => (error.get_id(), error.get_message().to_string()),
            _ => return,
        };
        let now = Instant::now();
        // The user may have no more channels.
        if code == NOT_ALLOWED && self.channels.len() > 1 {
            // One fewer than are open: withdrawals need a channel as well.
            let open = self.channels.iter().filter(|channel| channel.is_open()).count();
            self.limit = Some((open.saturating_sub(1).max(1), now + LIMITED_FOR));
        }
        let in_flight = self.channels.iter().flat_map(JobChannel::unconfirmed);
        match channel {
            // These two concern the exchange, and so every job.
            Some(_) if matches!(code, NOT_FOUND | ACCESS_REFUSED) => self.refuse_all(code, &text),
            Some(at) if error.is_amqp_soft_error() => {
                let in_flight = self.channels[at].unconfirmed();
                self.find_faulty(code, &text, &in_flight);
            }
            _ if OVER_A_FRAME.contains(&code) => {
                let in_flight = self.isolation.possible_causes(in_flight, now);
                self.find_faulty(code, &text, &in_flight);
            }
            _ => {}
        }
    }

    fn limit(&self, now: Instant) -> Option<usize> {
        self.limit.filter(|(_, until)| now < *until).map(|(channels, _)| channels)
    }

    fn refuse_all(&mut self, code: u16, text: &str) {
        self.keys.clear();
        self.isolation = Isolation::default();
        for (_, outgoing) in self.channels.iter_mut().flat_map(JobChannel::take_jobs) {
            let refusal = refusal(&outgoing, code, text);
            outgoing.finish(Err(refusal));
        }
    }

    /// The broker has closed a channel or the connection over one of these jobs. A single one is refused; several are isolated.
    fn find_faulty(&mut self, code: u16, text: &str, in_flight: &[u64]) {
        for number in in_flight {
            let Some(at) = self.channel_with(*number) else { continue };
            if in_flight.len() == 1 {
                self.finish(at, *number, |outgoing| Err(refusal(outgoing, code, text)));
            } else if let Some(outgoing) = self.channels[at].get(*number) {
                self.isolation.add(*number, outgoing.message.routing_key.clone());
            }
        }
    }

    fn channel_with(&self, number: u64) -> Option<usize> {
        self.channels.iter().position(|channel| channel.get(number).is_some())
    }

    /// Tells the caller of a job how publishing it ended.
    fn finish(&mut self, at: usize, number: u64, end: impl FnOnce(&Outgoing) -> Result<(), PublishError>) {
        let Some(outgoing) = self.channels[at].remove(number) else { return };
        self.isolation.remove(number);
        if let Entry::Occupied(mut key) = self.keys.entry(outgoing.message.routing_key.clone()) {
            key.get_mut().jobs -= 1;
            if key.get().jobs == 0 {
                key.remove();
            }
        }
        let end = end(&outgoing);
        outgoing.finish(end);
    }
}

fn publish_result(outgoing: &Outgoing, outcome: PublishOutcome) -> Result<(), PublishError> {
    match outcome {
        PublishOutcome::Confirmed => Ok(()),
        PublishOutcome::Refused => {
            let (model, key) = model_and_key(outgoing);
            Err(PublishError::QueueFull { model, key })
        }
        PublishOutcome::Returned => Err(unroutable(outgoing, "312 NO_ROUTE")),
        PublishOutcome::TooLarge => match outgoing.message.body.len() {
            0..=BODY_BYTES_MAX => {
                let problem = "they do not fit a frame of the connection: the broker's frame_max is smaller than RabbitMQ's default of 128 KiB";
                Err(PublishError::Option { name: "headers", problem: problem.to_owned() })
            }
            bytes => Err(PublishError::TooLarge { bytes, cap: BODY_BYTES_MAX }),
        },
    }
}

fn refusal(outgoing: &Outgoing, code: u16, text: &str) -> PublishError {
    match code {
        NOT_FOUND => unroutable(outgoing, text),
        _ => PublishError::Refused { code, text: text.to_owned() },
    }
}

fn unroutable(outgoing: &Outgoing, broker_says: &str) -> PublishError {
    let (model, key) = model_and_key(outgoing);
    PublishError::Unroutable { model, key, broker_says: broker_says.to_owned() }
}

fn model_and_key(outgoing: &Outgoing) -> (String, String) {
    (outgoing.model.clone(), outgoing.message.routing_key.to_string())
}

#[cfg(test)]
#[path = "job_channels_tests.rs"]
mod tests;
