//! What outlives a session: models, device, and what was learned of them.

use std::sync::Arc;
use std::time::Duration;

use vramq_schemas::status::WorkerState;

use super::Outcome;
use crate::admission::Budget;
use crate::amqp::aside::Experience;
use crate::amqp::message::Identity;
use crate::amqp::publish::BrokerLimits;
use crate::board::{Board, Now};
use crate::capacity::Capacity;
use crate::ceiling::Ceilings;
use crate::device::Device;
use crate::device::thread::DeviceThread;
use crate::health::Health;
use crate::heartbeat::Teller;
use crate::metrics::Meters;
use crate::model::Model;
use crate::pressure::{Leak, Pressure};
use crate::remembered::Remembered;
use crate::spans::Spans;
use crate::suspicion::{Losses, Patience};
use crate::telemetry::Logs;

/// What outlives a session.
#[derive(Debug)]
pub struct Host {
    pub identity: Arc<Identity>,
    pub models: Vec<Arc<Model>>,
    /// The slots of each model.
    pub capacities: Vec<Capacity>,
    pub device: Arc<dyn Device>,
    pub thread: DeviceThread,
    /// Failed passes that the loop has heard of from the thread.
    pub failures_known: u64,
    pub budget: Budget,
    /// Bytes that this process held of the device when it started: the weights.
    pub resident: u64,
    /// Bytes of the device that stay free.
    pub reserve: u64,
    pub ceilings: Ceilings,
    pub pressure: Pressure,
    pub leak: Leak,
    /// Threads for decoding, tokenising and encoding.
    pub pool: Arc<rayon::ThreadPool>,
    /// Messages that were settled in sessions that were lost: their acks may never have arrived, even those that were sent.
    pub finished: Remembered,
    /// Messages that could be placed nowhere.
    pub given_back: Remembered,
    pub losses: Losses,
    pub limits: BrokerLimits,
    pub patience: Patience,
    pub health: Health,
    /// How long a job may be in hand, and a pass may take. The broker may ask for less of the first.
    pub job_limit: Duration,
    pub pass_limit: Duration,
    pub meters: Arc<Meters>,
    pub board: Arc<Board>,
    pub teller: Arc<Teller>,
    pub logs: Logs,
    /// Where spans of jobs go, if anywhere.
    pub spans: Option<Arc<Spans>>,
    /// With the channels of heartbeats and commands.
    pub aside: Arc<Experience>,
    /// How long a drain may take.
    pub drain: Duration,
    /// Told to take no jobs, until told otherwise.
    pub paused: bool,
    /// Asked to stop: no session is opened any more.
    pub draining: bool,
    /// Stops in order to be started again.
    pub restarting: bool,
    /// Jobs that were in hand when the last session ended.
    pub left: usize,
}

impl Host {
    /// What the budget is when nobody else holds anything.
    pub(super) fn budget_max(&self) -> u64 {
        self.device.memory().total.saturating_sub(self.resident).saturating_sub(self.reserve)
    }

    /// Counts the end of a session, and shows that there is none.
    pub(super) fn session_ended(&mut self, outcome: &Outcome, in_hand: &[usize]) {
        self.left = in_hand.iter().sum();
        self.meters.worker.connected.set(0);
        self.meters.worker.blocked.set(0);
        for (meters, jobs) in self.meters.models.iter().zip(in_hand) {
            meters.handed_back.inc_by(*jobs as u64);
            meters.in_hand.set(0);
            meters.waiting.set(0);
            meters.consuming.set(0);
        }
        match outcome {
            Outcome::Lost(error) => {
                self.meters.worker.sessions_lost.inc();
                self.board.set(Now::new(WorkerState::NoSession, format!("session lost: {error}")));
            }
            Outcome::Drained | Outcome::Killed => self.board.set(Now::new(WorkerState::Gone, "ended")),
        }
    }
}
