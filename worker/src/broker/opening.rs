//! Opens a session with the broker: declares the topology, then opens the channels for jobs, publishing, commands and counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::ConfirmSelectOptions;
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::{Channel, Connection};
use vramq_amqp::ConnectError;
use vramq_core::ids::{ModelIndex, QueueIndex};

use super::aux_channel::AuxChannelState;
use super::consumer_timeouts::ConsumerTimeouts;
use super::deadline::within;
use super::direct_replies::DirectReplies;
use super::model_channels::{ModelChannels, OwnChannel};
use super::session::{AuxParts, ControlParts};
use super::silent_queues::{self, SilentQueues};
use super::topology::{self, FurtherQueue, TopologyError};
use crate::config::BrokerConfig;
use crate::model::Model;

/// How long the broker may take for one step of opening a session, such as a channel or the queues of a model. A working broker answers
/// within fractions of a second. This limits the wait for one that lost a frame.
pub(super) const STEP_MAX: Duration = Duration::from_secs(10);

/// A further queue of a model that cannot be consumed, and why.
pub type MissingQueue = (ModelIndex, QueueIndex, String);

/// Inputs for opening a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionPlan<'a> {
    pub broker: &'a BrokerConfig,
    pub worker: &'a str,
    pub models: &'a [Arc<Model>],
    /// The largest body that may be published.
    pub body_max: usize,
    pub aux_state: &'a Arc<AuxChannelState>,
    pub direct_replies: &'a DirectReplies,
    pub consumer_timeouts: &'a ConsumerTimeouts,
    pub silent_queues: &'a SilentQueues,
    /// Whether the worker is starting. Then a further queue that differs from its configuration is an error; later only its own consumers
    /// stop.
    pub is_first: bool,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("connect to {0}")]
    Unreachable(ConnectError),
    /// The broker answered and refused: credentials, vhost or permissions.
    #[error("the broker refuses the connection: {0}")]
    Refused(ConnectError),
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error("{step}: {error}")]
    Lost { step: &'static str, error: lapin::Error },
    #[error("{step}: the broker does not answer within {} s", STEP_MAX.as_secs())]
    Silent { step: &'static str },
}

impl SessionError {
    /// Whether trying again without a change can help.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::Topology(TopologyError::Refused { .. }))
    }
}

/// The channels of a session that is being opened.
pub(super) struct OpenChannels {
    pub(super) publisher: Channel,
    pub(super) models: Vec<ModelChannels>,
    pub(super) missing: Vec<MissingQueue>,
    pub(super) aux: Option<AuxParts<Channel>>,
}

impl OpenChannels {
    /// Prepares the two connections before anything is consumed: the topology, the publisher's channel in confirm mode, the channels of
    /// each model, and those of the control plane.
    pub(super) async fn open(
        consuming: &Connection,
        publishing: &Connection,
        plan: SessionPlan<'_>,
    ) -> Result<Self, SessionError> {
        let SessionPlan { broker, worker, .. } = plan;
        for model in plan.models {
            let declared = within(STEP_MAX, topology::declare(consuming, broker, model)).await;
            declared.ok_or(SessionError::Silent { step: "declare the topology" })??;
        }
        let publisher = channel(publishing).await?;
        let confirms = publisher.confirm_select(ConfirmSelectOptions::default());
        step("ask for confirms", confirms).await?;
        let (mut models, mut missing) = (Vec::with_capacity(plan.models.len()), Vec::new());
        for model in plan.models {
            let further = FurtherQueue::of(broker, model);
            let connection = consuming.status().clone();
            let own = OwnChannel { channel: channel(consuming).await?, connection };
            let timeouts = plan.consumer_timeouts.clone();
            let mut channels =
                ModelChannels::new(model.index, own, worker, &model.key, further.clone(), timeouts);
            for (at, queue) in (1..).map(QueueIndex).zip(&further) {
                if plan.silent_queues.is_silent(&queue.name, Instant::now()) {
                    missing.push((model.index, at, silent_queues::WHY.to_owned()));
                    continue;
                }
                match open_further(consuming, queue).await {
                    Ok(channel) => channels.found(at, channel),
                    Err(error @ SessionError::Topology(TopologyError::Refused { .. })) if !plan.is_first => {
                        missing.push((model.index, at, why_missing(&error)));
                    }
                    Err(error) => return Err(error),
                }
            }
            models.push(channels);
        }
        let aux = open_aux(consuming, publishing, plan.aux_state, broker.control).await?;
        Ok(Self { publisher, models, missing, aux })
    }
}

/// A channel for consuming a further queue, which must exist.
pub(super) async fn open_further(
    connection: &Connection,
    queue: &FurtherQueue,
) -> Result<Channel, SessionError> {
    let channel = channel(connection).await?;
    let declared = within(STEP_MAX, queue.declare(&channel)).await;
    declared.ok_or(SessionError::Silent { step: "declare a further queue" })??;
    Ok(channel)
}

/// The broker's reason against a further queue, and what to do.
pub fn with_advice(broker: &str) -> String {
    format!(
        "{broker}. Declare the queue as workers do, give the worker's user its permissions back, or take the queue out of the model's \
         `queues`. The worker looks for the queue every ten seconds"
    )
}

/// Why a further queue cannot be consumed; the broker's text where there is one, and what to do.
pub(super) fn why_missing(error: &SessionError) -> String {
    match error {
        SessionError::Topology(TopologyError::Refused { broker, .. }) => with_advice(broker),
        error => error.to_string(),
    }
}

/// Runs one step of opening a session, with its deadline.
async fn step<T>(
    step: &'static str,
    request: impl Future<Output = lapin::Result<T>>,
) -> Result<T, SessionError> {
    match within(STEP_MAX, request).await {
        Some(answer) => answer.map_err(|error| SessionError::Lost { step, error }),
        None => Err(SessionError::Silent { step }),
    }
}

async fn channel(connection: &Connection) -> Result<Channel, SessionError> {
    step("open channel", connection.create_channel()).await
}

async fn open_aux(
    consuming: &Connection,
    publishing: &Connection,
    state: &AuxChannelState,
    has_control: bool,
) -> Result<Option<AuxParts<Channel>>, SessionError> {
    if state.is_refused() {
        return Ok(None);
    }
    let opened = async {
        Ok::<_, SessionError>(AuxParts {
            heartbeats: channel(publishing).await?,
            withdrawals: channel(consuming).await?,
            topology: channel(consuming).await?,
            control: match has_control {
                true => Some(ControlParts {
                    commands: channel(consuming).await?,
                    answers: channel(publishing).await?,
                }),
                false => None,
            },
        })
    };
    match opened.await {
        Ok(channels) => Ok(Some(channels)),
        // lapin refused: the broker allows this connection no more channels. The connection itself is not affected.
        Err(SessionError::Lost { error, .. })
            if matches!(error.kind(), lapin::ErrorKind::ChannelsLimitReached) =>
        {
            state.refuse(&error);
            Ok(None)
        }
        Err(SessionError::Lost { error, .. }) => {
            if is_channel_too_many(&error) {
                state.refuse(&error);
            }
            Err(SessionError::Lost { step: "open channels for the control plane", error })
        }
        Err(error) => Err(error),
    }
}

/// Whether the broker closed the connection because the user has too many channels (`max-channels`).
pub(super) fn is_channel_too_many(error: &lapin::Error) -> bool {
    let lapin::ErrorKind::ProtocolError(answer) = error.kind() else { return false };
    *answer.kind() == AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED)
}
