//! A session with the broker: one connection that consumes, one that publishes, and their channels.
//!
//! The broker may block a publishing connection (memory or disk alarm) and reads nothing from it then. So acks, cancels and commands use a
//! connection on which nothing is published. If either connection breaks, the whole session is replaced by a new one. lapin's own recovery
//! stays off, because it restores consumers without their prefetch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use lapin::{Channel, Connection, Event};
use vramq_amqp::{Address, BrokerHost, ConfirmedPublisher, FRAME_MAX_DEFAULT, MatchBy, Transfer, frame_max};
use vramq_core::ids::{ModelIndex, QueueIndex};

use super::aux_channel::{AuxChannel, AuxChannelState};
use super::direct_replies::DirectReplies;
use super::first_replies::FirstReplies;
use super::model_channels::ModelChannels;
use super::opening::{MissingQueue, OpenChannels, SessionError, SessionPlan, open_further, why_missing};
use super::progress_replies::ProgressReplies;
use super::publisher::{Publisher, SizeMax};
use super::reply_connection::ReplyConnection;
use super::silent_queues::{self, SilentQueues};
use crate::config::BrokerConfig;
use crate::model::Model;

/// How long an orderly close may take. After that the connections are dropped, with the same effect for the jobs.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// The wait in [`Session::flush`], as a multiple of the slowest confirm, and its minimum.
const FLUSH_CONFIRMS: u32 = 4;
const FLUSH_MIN: Duration = Duration::from_millis(50);
/// The maximum of that wait: one slow disk write must not delay the end of a drain.
const FLUSH_MAX: Duration = Duration::from_secs(2);

/// Which of the two connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Consuming,
    Publishing,
}

impl Side {
    /// For error messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Consuming => "consuming connection",
            Self::Publishing => "publishing connection",
        }
    }
}

/// Events of the connections; `None` when a connection has ended.
pub type Events = BoxStream<'static, (Side, Option<Event>)>;

/// An open session.
pub struct Session {
    consuming: Arc<Connection>,
    /// The broker host of the consuming connection.
    host: BrokerHost,
    publishing: Arc<Connection>,
    broker: BrokerConfig,
    models: Vec<Arc<Model>>,
    /// In confirm mode. All messages about jobs are published with it.
    pub publisher: Publisher,
    direct_replies: DirectReplies,
    /// In the order of the models.
    channels: Vec<ModelChannels>,
    /// Further queues that could not be consumed when the session was opened, and why, until they are taken.
    missing: Vec<MissingQueue>,
    /// Channels of the control plane, until they are taken; `None` if the broker allows none.
    aux: Option<AuxParts<Channel>>,
    pub events: Events,
}

/// One value for each part of the control plane.
#[derive(Debug)]
pub struct AuxParts<T> {
    pub heartbeats: T,
    pub withdrawals: T,
    pub topology: T,
    /// None if operators' commands are switched off.
    pub control: Option<ControlParts<T>>,
}

#[derive(Debug)]
pub struct ControlParts<T> {
    pub commands: T,
    pub answers: T,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("channels", &self.channels.len()).finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a session with one of the broker's hosts. If a host does not answer a frame, tries the next one.
    ///
    /// # Errors
    /// [`SessionError`] of the last host that was tried; no connection stays open.
    pub async fn open(plan: SessionPlan<'_>) -> Result<Self, SessionError> {
        let mut hosts = plan.broker.url.in_turn();
        let mut last = hosts.next().unwrap_or_else(|| plan.broker.url.clone());
        loop {
            match (Self::open_at(&last, plan).await, hosts.next()) {
                (Err(SessionError::Silent { step }), Some(next)) => {
                    tracing::warn!(step, broker = %last, "the broker does not answer, trying the next host");
                    last = next;
                }
                (opened, _) => return opened,
            }
        }
    }

    /// Connects, and declares or checks the topology of each model. The control plane's channels are opened last: if the broker allows
    /// none, later sessions work without them.
    async fn open_at(address: &Address, plan: SessionPlan<'_>) -> Result<Self, SessionError> {
        let SessionPlan { broker, worker, body_max, direct_replies, .. } = plan;
        let (consuming, host) = connect(address, &format!("vramq-worker {worker}")).await?;
        // The hosts before this one did not answer: waiting for them once is enough.
        let address = address.starting_with(&host);
        let publishing = match connect(&address, &format!("vramq-worker {worker} publishing")).await {
            Ok((publishing, _)) => publishing,
            Err(error) => {
                close(&consuming, Side::Consuming).await;
                return Err(error);
            }
        };
        let events =
            stream::select(events_of(&consuming, Side::Consuming), events_of(&publishing, Side::Publishing));
        let opened = OpenChannels::open(&consuming, &publishing, plan).await;
        let OpenChannels { publisher, models, missing, aux } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                // A dropped connection would stay open in lapin as long as the host sends heartbeats.
                join(close(&consuming, Side::Consuming), close(&publishing, Side::Publishing)).await;
                return Err(error);
            }
        };
        let size_max = SizeMax { body: body_max, frame: frame_max(&publishing) };
        warn_of_small_frames(size_max.frame);
        let (publishing, transfer) = (Arc::new(publishing), Transfer::default());
        let confirm_s = broker.confirm_s;
        // Without channels for the control plane, the broker allows none for these either.
        let for_replies = plan.aux_state.has_first_replies().then(|| ReplyConnection {
            connection: Arc::clone(&publishing),
            aux_state: Arc::clone(plan.aux_state),
            confirm_s,
            transfer: transfer.clone(),
        });
        let first_replies = for_replies.clone().map(FirstReplies::new);
        let progress = for_replies.map(ProgressReplies::new);
        let publisher =
            ConfirmedPublisher::beside_others(publisher, MatchBy::PublishSeq, Some(confirm_s), transfer);
        Ok(Self {
            consuming: Arc::new(consuming),
            host,
            publishing,
            broker: broker.clone(),
            models: plan.models.to_vec(),
            publisher: Publisher::new(publisher, first_replies, progress, direct_replies.clone(), size_max),
            direct_replies: direct_replies.clone(),
            channels: models,
            missing,
            aux,
            events: events.boxed(),
        })
    }

    /// The host that jobs are delivered from.
    pub fn host(&self) -> &BrokerHost {
        &self.host
    }

    /// The channels of a model's jobs.
    pub fn channels(&self, model: ModelIndex) -> &ModelChannels {
        &self.channels[model.0]
    }

    pub fn channels_mut(&mut self, model: ModelIndex) -> &mut ModelChannels {
        &mut self.channels[model.0]
    }

    /// Further queues that could not be consumed when the session was opened; given once.
    pub fn take_missing(&mut self) -> Vec<MissingQueue> {
        std::mem::take(&mut self.missing)
    }

    /// Checks a further queue. Returns a channel for consuming it, or why it cannot be consumed.
    pub fn look_for(
        &self,
        model: ModelIndex,
        queue: QueueIndex,
        silent: &SilentQueues,
    ) -> impl Future<Output = Result<Channel, String>> + Send + use<> {
        let consuming = Arc::clone(&self.consuming);
        let queue = self.channels(model).further(queue).cloned();
        let is_silent = queue.as_ref().is_some_and(|queue| silent.is_silent(&queue.name, Instant::now()));
        async move {
            let queue = queue.ok_or("the model has no such queue")?;
            if is_silent {
                return Err(silent_queues::WHY.to_owned());
            }
            open_further(&consuming, &queue).await.map_err(|error| why_missing(&error))
        }
    }

    /// Whether both connections are open, and all channels without which a model receives no jobs.
    pub fn is_whole(&self) -> bool {
        self.consuming.status().connected()
            && self.publishing.status().connected()
            && self.publisher.is_open()
            && self.channels.iter().all(ModelChannels::is_open)
    }

    /// The configuration and the models that the session was opened with.
    pub fn plan(&self) -> (BrokerConfig, Vec<Arc<Model>>) {
        (self.broker.clone(), self.models.clone())
    }

    /// The channels of the control plane; given once.
    pub fn take_aux(&mut self, state: &Arc<AuxChannelState>) -> Option<AuxParts<AuxChannel>> {
        let AuxParts { heartbeats, withdrawals, topology, control } = self.aux.take()?;
        let aux = |connection: &Arc<Connection>, channel| AuxChannel {
            connection: Arc::clone(connection),
            declare: self.broker.declare,
            state: Arc::clone(state),
            direct_replies: self.direct_replies.clone(),
            channel: Some(channel),
        };
        Some(AuxParts {
            heartbeats: aux(&self.publishing, heartbeats),
            withdrawals: aux(&self.consuming, withdrawals),
            topology: aux(&self.consuming, topology),
            control: control.map(|control| ControlParts {
                commands: aux(&self.consuming, control.commands),
                answers: aux(&self.publishing, control.answers),
            }),
        })
    }

    /// Waits until the broker's queues have received all acks. RabbitMQ 3.10 passes 32 acks on to a quorum queue
    /// (`quorum_commands_soft_limit`), and the others together once the first ones are on disk. If the connection closes before, it loses
    /// the others. The broker does not report that moment. But it confirms publishes once they are on disk, so the time of these confirms
    /// is the time to wait.
    pub fn flush(&self) -> impl Future<Output = ()> + Send + use<> {
        let synced = |_| self.channels.iter().map(ModelChannels::synced).collect::<Vec<_>>();
        let [before, after] = [(); 2].map(synced);
        let written = (self.publisher.slowest_confirm() * FLUSH_CONFIRMS).clamp(FLUSH_MIN, FLUSH_MAX);
        async move {
            let flushing = async {
                join_all(before).await;
                tokio::time::sleep(written).await;
                // By now the broker has passed on the acks that it held back.
                join_all(after).await;
            };
            // An error means that the session is lost, and there is nothing to flush.
            let _ = tokio::time::timeout(CLOSE_MAX + written, flushing).await;
        }
    }

    /// Closes both connections; deliveries that are not settled go back to the broker.
    pub async fn close(self) {
        join(close(&self.consuming, Side::Consuming), close(&self.publishing, Side::Publishing)).await;
    }
}

/// The URL cannot ask for small frames, so they are the broker's.
fn warn_of_small_frames(frame_max: usize) {
    if frame_max < FRAME_MAX_DEFAULT {
        tracing::warn!(
            frame_max,
            "the broker's frame_max is smaller than RabbitMQ's default of 131072: a job whose headers, with those that workers add, do not fit a frame is not tried again, and its dead letter may lack the worker's explanation; set frame_max = 131072 in rabbitmq.conf"
        );
    }
}

async fn close(connection: &Connection, side: Side) {
    let connection_name = side.as_str();
    // A broker that blocks publishers reads nothing from this connection, and would never answer.
    match tokio::time::timeout(CLOSE_MAX, connection.close(200, "bye".into())).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(connection_name, %error, "close connection"),
        Err(_) => tracing::debug!(connection_name, "the broker does not answer the close"),
    }
}

async fn connect(address: &Address, name: &str) -> Result<(Connection, BrokerHost), SessionError> {
    address.connect_with_host(name).await.map_err(|error| match error.is_refusal() {
        true => SessionError::Refused(error),
        false => SessionError::Unreachable(error),
    })
}

fn events_of(connection: &Connection, side: Side) -> BoxStream<'static, (Side, Option<Event>)> {
    let ended = stream::once(async move { (side, None) });
    let listener = connection.events_listener();
    listener.map(move |event| (side, Some(event))).chain(ended).boxed()
}

/// Why a channel was closed, if the error concerns only that channel: the broker's text, or lapin's.
pub fn why_closed(error: &lapin::Error) -> Option<String> {
    match error.kind() {
        lapin::ErrorKind::ProtocolError(answer) if error.is_amqp_soft_error() => {
            Some(answer.get_message().to_string())
        }
        lapin::ErrorKind::InvalidChannelState(..) => Some(error.to_string()),
        _ => None,
    }
}

/// The largest body that the broker accepts, if the error says that one was larger. The broker reports this limit in no other way.
pub fn message_size_max(error: &lapin::Error) -> Option<usize> {
    let lapin::ErrorKind::ProtocolError(answer) = error.kind() else { return None };
    let (_, rest) = answer.get_message().as_str().split_once("is larger than configured max size ")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// How long the broker lets a consumer hold a delivery, if the error says that one was held for longer. The broker reports this limit in no
/// other way.
pub fn consumer_timeout(error: &lapin::Error) -> Option<Duration> {
    let lapin::ErrorKind::ProtocolError(answer) = error.kind() else { return None };
    let (_, rest) = answer.get_message().as_str().split_once("timed out. Timeout value used: ")?;
    let (ms, _) = rest.split_once(" ms")?;
    ms.parse().ok().map(Duration::from_millis)
}
