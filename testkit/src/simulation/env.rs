//! The environment that workers, callers and operators share: the broker, the network, the devices, the clock and the ledger.

mod network;
mod queues;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramq_core::event::Now;

use super::agenda::{Agenda, Happening, Life, MILLI, Micros};
use super::broker::{Broker, ChannelId, Command, ConnectionId, Message, Millis, Name, Properties, Step};
use super::device::{Device, Started};
use super::disks::Disks;
use super::ledger::{Kind, Ledger, Letter};
use super::names::Names;
use super::odds::ODDS;
use super::plan::{OPERATORS, Plan, STORES, WITHDRAWALS};
use super::random::Random;
use super::shell::{LimitsFile, RanOut};
use super::trace::Trace;

/// Unix time when a history begins: any will do.
const UNIX_MS: u64 = 1_700_000_000_000;

/// Who a connection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Worker(Life),
    /// Those who publish jobs.
    Publishers,
    /// Those who read replies and dead letters.
    Readers,
}

/// The world around the workers.
#[derive(Debug)]
pub struct Env {
    pub plan: Arc<Plan>,
    pub names: Arc<Names>,
    pub now: Micros,
    base: Instant,
    pub random: Random,
    /// Chooses what is withdrawn. Separate random numbers keep the histories of seeds without withdrawals unchanged.
    pub withdrawing: Random,
    /// Chooses which jobs refer to stores, and how stores answer. Separate for the same reason.
    pub stores: Random,
    /// Chooses what operators try. Separate for the same reason.
    pub operating: Random,
    /// Chooses rare events. Separate for the same reason.
    pub rare: Random,
    /// Each worker's file of learned limits, which outlives the process.
    pub limit_files: BTreeMap<usize, LimitsFile>,
    /// For each worker: what ran out of memory alone, as far as its file records it.
    pub ran_out: BTreeMap<usize, RanOut>,
    pub agenda: Agenda,
    pub broker: Broker,
    pub ledger: Ledger,
    pub devices: Vec<Device>,
    pub disks: Disks,
    pub trace: Trace,
    owners: BTreeMap<ConnectionId, Owner>,
    /// When the last frame of a connection arrives. No frame overtakes another.
    wires: BTreeMap<ConnectionId, Micros>,
    /// The messages of each channel by their delivery tags, 1, 2, 3, …
    delivered: BTreeMap<ChannelId, Vec<Letter>>,
    channels: BTreeMap<ChannelId, ConnectionId>,
    /// When the broker performs its next steps.
    broker_at: Option<Micros>,
    pub broker_is_down: bool,
    /// Further queues that workers may not consume, by model and index.
    forbidden: BTreeSet<(usize, usize)>,
    pub confirms_are_slow: bool,
    /// Faults of the plan that last.
    pub faults_now: usize,
    /// When a fault last affected anything.
    pub disturbed_at: Micros,
}

impl Env {
    pub fn new(plan: Arc<Plan>, trace: Trace) -> Self {
        let broker = Broker::new(plan.generation).with_consumer_timeout(plan.consumer_timeout_ms);
        Self {
            names: Arc::new(Names::new(
                &(0..plan.models.len()).map(|at| plan.sharing.queues(at).len() - 1).collect::<Vec<_>>(),
                plan.callers.iter().map(|caller| caller.number + 1).max().unwrap_or(0),
            )),
            now: 0,
            base: Instant::now(),
            random: Random::new(plan.seed ^ 0x5eed),
            withdrawing: Random::new(plan.seed ^ WITHDRAWALS),
            stores: Random::new(plan.seed ^ STORES),
            operating: Random::new(plan.seed ^ OPERATORS),
            rare: Random::new(plan.seed ^ ODDS),
            limit_files: BTreeMap::new(),
            ran_out: BTreeMap::new(),
            agenda: Agenda::default(),
            broker,
            ledger: Ledger::default(),
            devices: plan.devices.iter().map(|device| Device::new(device.total)).collect(),
            disks: Disks::default(),
            trace,
            owners: BTreeMap::new(),
            wires: BTreeMap::new(),
            delivered: BTreeMap::new(),
            channels: BTreeMap::new(),
            broker_at: None,
            broker_is_down: false,
            forbidden: BTreeSet::new(),
            confirms_are_slow: false,
            faults_now: 0,
            disturbed_at: 0,
            plan,
        }
    }

    /// Records that a fault affects something now.
    pub fn disturbed(&mut self) {
        self.disturbed_at = self.now;
    }

    pub fn millis(&self) -> Millis {
        self.now / MILLI
    }

    pub fn unix_ms(&self) -> u64 {
        UNIX_MS + self.millis()
    }

    pub fn base(&self) -> Instant {
        self.base
    }

    pub fn clock(&self) -> Now {
        Now { at: self.base + Duration::from_micros(self.now), unix_ms: self.unix_ms() }
    }

    pub fn micros_of(&self, at: Instant) -> Micros {
        u64::try_from(at.saturating_duration_since(self.base).as_micros()).unwrap_or(Micros::MAX)
    }

    /// A time up to `most` from now, by chance.
    pub fn soon(&mut self, most: Micros) -> Micros {
        self.now + self.random.bits() % most.max(1)
    }

    pub fn connect(&mut self, owner: Owner) -> ConnectionId {
        let connection = self.broker.connect();
        self.owners.insert(connection, owner);
        connection
    }

    pub fn owner(&self, connection: ConnectionId) -> Option<Owner> {
        self.owners.get(&connection).copied()
    }

    pub fn open_channel(&mut self, connection: ConnectionId) -> Option<ChannelId> {
        let channel = self.broker.open_channel(connection)?;
        self.channels.insert(channel, connection);
        Some(channel)
    }

    /// Hands a command to the network. False if the client knows that its connection is gone.
    pub fn send(&mut self, channel: ChannelId, command: Command) -> bool {
        let sent = self.broker.send(channel, command).is_ok();
        if sent && self.broker_at.is_none_or(|at| at > self.now + 2 * MILLI) {
            let at = self.soon(2 * MILLI);
            self.wake_broker(at);
        }
        sent
    }

    pub fn publish(
        &mut self,
        channel: ChannelId,
        letter: Letter,
        exchange: Name,
        routing_key: Name,
        properties: Properties,
    ) -> bool {
        let body: Arc<[u8]> = letter.0.to_le_bytes().into();
        let properties = Box::new(properties);
        self.send(channel, Command::Publish { exchange, routing_key, mandatory: true, properties, body })
    }

    pub fn wake_broker(&mut self, at: Micros) {
        if self.broker_at.is_none_or(|due| at < due) {
            self.broker_at = Some(at);
            self.agenda.at(at, Happening::Broker);
        }
    }

    /// Declares what a session declares.
    pub fn declare_topology(&mut self) {
        let mut commands = self.names.topology(&self.plan);
        let further = self.plan.sharing.further().into_iter();
        let open = further.filter(|queue| !self.forbidden.contains(queue));
        commands.extend(open.map(|(model, queue)| self.names.further(&self.plan, model, queue)));
        self.administer(commands);
    }

    /// Performs commands at once, on a separate connection.
    pub fn administer(&mut self, commands: impl IntoIterator<Item = Command>) {
        let connection = self.broker.connect();
        let millis = self.millis();
        for command in commands {
            let Some(channel) = self.broker.open_channel(connection) else { break };
            if self.broker.send(channel, command).is_ok() {
                for emitted in self.broker.perform(&Step::Receive(channel), millis) {
                    self.emit(emitted);
                }
            }
        }
        self.broker.lose(connection);
        self.wake_broker(self.now);
    }

    /// Deletes a queue that is empty and that no message is on its way to.
    pub fn delete_if_empty(&mut self, queue: &Name) {
        self.wake_broker(self.now);
        self.run_broker();
        let is_empty = self.broker.queue(queue).is_some_and(|counts| counts.ready + counts.unacked == 0);
        // Requests to a queue without a leader are not visible.
        if is_empty && !self.broker_is_down && !self.broker.is_leaderless(queue) {
            // Quorum queues know no `if_empty`.
            self.administer([Command::DeleteQueue {
                name: queue.clone(),
                if_unused: false,
                if_empty: false,
            }]);
        }
    }

    /// Passes were let onto a device.
    pub fn started(&mut self, device: usize, started: Vec<Started>) {
        if self.devices[device].crowded() {
            self.ledger.fail("an exclusive pass is alone on its device", || format!("device {device}"));
        }
        for Started { ticket, ends_at } in started {
            if let Some(at) = ends_at {
                self.agenda.at(at, Happening::PassEnds { device, ticket });
            }
        }
    }

    /// A reply or dead letter reaches its reader.
    pub fn read(&mut self, letter: Letter, by_broker: bool) {
        let record = self.ledger.letter(letter);
        let job = record.job;
        match record.kind {
            Kind::Reply { offset, items, is_last } => {
                self.ledger.answered(job, offset, items);
                if is_last {
                    self.ledger.ended(job, super::ledger::End::Done);
                }
            }
            Kind::DeadReply { offset, items } => self.ledger.answered(job, offset, items),
            Kind::DeadLetter { reason, .. } => self.ledger.ended(job, super::ledger::End::DeadLetter(reason)),
            Kind::Job { .. } if by_broker => self.ledger.ended(job, super::ledger::End::ByBroker),
            Kind::Job { .. } | Kind::Failed => {}
        }
    }
}

/// The ledger's number of a message, from its body.
pub fn letter_of(message: &Message) -> Option<Letter> {
    Some(Letter(u32::from_le_bytes(message.body.as_ref().try_into().ok()?)))
}
