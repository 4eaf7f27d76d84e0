//! The environment that workers, callers and operators share: the broker, the network, the devices, the clock and the ledger.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramq_core::event::Now;

use super::agenda::{Agenda, Happening, Life, MILLI, Micros};
use super::broker::{
    Broker, ChannelId, Command, ConnectionId, Emitted, Frame, Message, Millis, Name, Properties, Step,
};
use super::device::{Device, Started};
use super::ledger::{Kind, Ledger, Letter};
use super::names::Names;
use super::plan::{OPERATORS, Plan, STORES, WITHDRAWALS};
use super::random::Random;
use super::shell::{LimitsFile, RanOut};
use super::trace::Trace;

/// Unix time when a history begins: any will do.
const UNIX_MS: u64 = 1_700_000_000_000;

/// Rounds of the broker's steps without time passing; then it goes on a moment later.
const ROUNDS_MAX: usize = 24;

/// Acknowledged deliveries of a channel that a restart of the broker may bring back: those whose acks it had read and not stored.
const RESTART_WINDOW: usize = 256;

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
    /// Chooses what is withdrawn: apart from the rest, so that a seed without withdrawals means what it meant before.
    pub withdrawing: Random,
    /// Chooses which jobs refer to stores, and how those answer: apart, for the same reason.
    pub stores: Random,
    /// Chooses what operators try: apart, for the same reason.
    pub operating: Random,
    /// What each worker wrote to its file of learned limits; it outlives the process.
    pub limit_files: BTreeMap<usize, LimitsFile>,
    /// What ran out of memory alone, by worker, as far as its file tells it.
    pub ran_out: BTreeMap<usize, RanOut>,
    pub agenda: Agenda,
    pub broker: Broker,
    pub ledger: Ledger,
    pub devices: Vec<Device>,
    pub trace: Trace,
    owners: BTreeMap<ConnectionId, Owner>,
    /// When the last frame of a connection arrives: none overtakes another.
    wires: BTreeMap<ConnectionId, Micros>,
    /// The messages of each channel by their delivery tags, 1, 2, 3, …
    delivered: BTreeMap<ChannelId, Vec<Letter>>,
    channels: BTreeMap<ChannelId, ConnectionId>,
    /// The broker goes on at this time.
    broker_at: Option<Micros>,
    pub broker_is_down: bool,
    pub confirms_are_slow: bool,
    /// Faults of the plan that last.
    pub faults_now: usize,
    /// When something was last wrong.
    pub disturbed_at: Micros,
}

impl Env {
    pub fn new(plan: Arc<Plan>, trace: Trace) -> Self {
        let broker = Broker::new(plan.generation).with_consumer_timeout(plan.consumer_timeout_ms);
        Self {
            names: Arc::new(Names::new(
                plan.models.len(),
                plan.callers.iter().map(|caller| caller.number + 1).max().unwrap_or(0),
            )),
            now: 0,
            base: Instant::now(),
            random: Random::new(plan.seed ^ 0x5eed),
            withdrawing: Random::new(plan.seed ^ WITHDRAWALS),
            stores: Random::new(plan.seed ^ STORES),
            operating: Random::new(plan.seed ^ OPERATORS),
            limit_files: BTreeMap::new(),
            ran_out: BTreeMap::new(),
            agenda: Agenda::default(),
            broker,
            ledger: Ledger::default(),
            devices: plan.devices.iter().map(|device| Device::new(device.total)).collect(),
            trace,
            owners: BTreeMap::new(),
            wires: BTreeMap::new(),
            delivered: BTreeMap::new(),
            channels: BTreeMap::new(),
            broker_at: None,
            broker_is_down: false,
            confirms_are_slow: false,
            faults_now: 0,
            disturbed_at: 0,
            plan,
        }
    }

    /// Something is wrong.
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

    /// The broker goes on: all that it can do now, in an order that chance decides.
    pub fn run_broker(&mut self) {
        if self.broker_at.is_none_or(|at| at > self.now) {
            return;
        }
        self.broker_at = None;
        if self.broker_is_down {
            return;
        }
        let mut only_offers = false;
        for _ in 0..ROUNDS_MAX {
            if let Some(only) = self.run_broker_once() {
                only_offers = only;
            } else {
                if let Some(at) = self.broker.next_time() {
                    let at = (at * MILLI).max(self.now + 100 * MILLI);
                    self.wake_broker(at);
                }
                return;
            }
        }
        self.wake_broker(self.now + if only_offers { 100 * MILLI } else { MILLI });
    }

    /// Nothing, if the broker could do nothing; else whether it did nothing but offer dead letters, which a full queue refuses again
    /// and again.
    fn run_broker_once(&mut self) -> Option<bool> {
        let millis = self.millis();
        let mut steps = self.broker.steps(millis);
        if self.confirms_are_slow {
            steps.retain(|step| !matches!(step, Step::Confirm { .. }));
        }
        let is_offer = |step: &Step| matches!(step, Step::DeadLetter(_) | Step::ApplyDead { .. });
        let only_offers = (!steps.is_empty()).then(|| steps.iter().all(is_offer));
        while !steps.is_empty() {
            let step = steps.swap_remove(self.random.below(steps.len()));
            if let Step::ConsumerTimeout(channel) = step {
                self.note_losses(&[channel], 0);
                self.check_timeout(channel);
            }
            for emitted in self.broker.perform(&step, millis) {
                self.emit(emitted);
            }
        }
        only_offers
    }

    /// Workers settle or give back what they hold before the broker's own limit, where it is the longer one.
    fn check_timeout(&mut self, channel: ChannelId) {
        let owner = self.channels.get(&channel).and_then(|connection| self.owners.get(connection));
        // A job may wait for its turn nearly as long as the broker lets it be held, and then be in a pass that hangs.
        let since = self.now.saturating_sub(2 * self.plan.consumer_timeout_ms * MILLI);
        let hung = self.devices.iter().any(|device| device.hung_at(self.now).is_some_and(|at| at >= since));
        if let Some(Owner::Worker(life)) = owner
            && !self.plan.has_short_timeout()
            && !hung
        {
            let worker = life.worker;
            self.ledger
                .fail("no job is held for too long", || format!("worker-{worker}: {channel:?} was closed"));
        }
    }

    /// A frame goes on its way to its client.
    fn emit(&mut self, emitted: Emitted) {
        if let (Some(channel), Frame::Deliver { delivery, .. } | Frame::GetOk { delivery, .. }) =
            (emitted.channel, &emitted.frame)
            && let Some(letter) = letter_of(&delivery.message)
        {
            let tags = self.delivered.entry(channel).or_default();
            tags.push(letter);
            if tags.len() as u64 != delivery.delivery_tag {
                let tag = delivery.delivery_tag;
                self.ledger
                    .fail("the model numbers deliveries without gaps", || format!("{channel:?}: {tag}"));
            }
        }
        if !self.owners.contains_key(&emitted.connection) {
            return;
        }
        let latency = if self.random.chance(2) { 200 * MILLI } else { 2 * MILLI };
        let at = self.soon(latency).max(self.wires.get(&emitted.connection).copied().unwrap_or(0));
        self.wires.insert(emitted.connection, at);
        self.agenda.at(at, Happening::Frame(Box::new(emitted)));
    }

    /// The message of a delivery.
    pub fn delivered_letter(&self, channel: ChannelId, tag: u64) -> Option<Letter> {
        let at = usize::try_from(tag.checked_sub(1)?).ok()?;
        self.delivered.get(&channel)?.get(at).copied()
    }

    /// What was delivered on channels and not settled comes again. So may the last acknowledged `window`.
    fn note_losses(&mut self, channels: &[ChannelId], window: usize) {
        let mut lost = Vec::new();
        for channel in channels {
            let unacked = self.broker.unacked_tags(*channel);
            lost.extend(unacked.iter().filter_map(|tag| self.delivered_letter(*channel, *tag)));
            let all = self.delivered.get(channel).map_or(&[][..], Vec::as_slice);
            lost.extend_from_slice(&all[all.len().saturating_sub(window)..]);
        }
        if let [only] = lost[..] {
            let job = self.ledger.letter(only).job;
            self.ledger.excuses_mut(job).died_alone += 1;
        }
        lost.iter().for_each(|letter| self.ledger.lost(*letter));
    }

    fn channels_of(&self, connection: ConnectionId) -> Vec<ChannelId> {
        self.channels.iter().filter(|(_, of)| **of == connection).map(|(channel, _)| *channel).collect()
    }

    /// A client has no connection any more; the broker may not know.
    pub fn forget(&mut self, connection: ConnectionId) {
        self.owners.remove(&connection);
    }

    /// The broker finds a connection gone.
    pub fn lose(&mut self, connection: ConnectionId) {
        self.owners.remove(&connection);
        self.wires.remove(&connection);
        let channels = self.channels_of(connection);
        self.note_losses(&channels, 0);
        self.broker.lose(connection);
        for channel in channels {
            self.channels.remove(&channel);
            self.delivered.remove(&channel);
        }
        let at = self.soon(MILLI);
        self.wake_broker(at);
    }

    /// The broker reads all that a connection has sent, before it is closed in good order.
    pub fn flush(&mut self, connection: ConnectionId) {
        let millis = self.millis();
        for channel in self.channels_of(connection) {
            for _ in 0..10_000 {
                let receive = Step::Receive(channel);
                if !self.broker.steps(millis).contains(&receive) {
                    break;
                }
                for emitted in self.broker.perform(&receive, millis) {
                    self.emit(emitted);
                }
            }
        }
    }

    /// The broker's node restarts. Gives the owners of all connections. What is on its way to readers still arrives: they take
    /// messages without acks, and what such a reader loses no worker can repeat.
    pub fn restart_broker(&mut self) -> Vec<Owner> {
        let channels: Vec<_> = self.channels.keys().copied().collect();
        self.note_losses(&channels, RESTART_WINDOW);
        let millis = self.millis();
        self.broker.restart(millis);
        self.channels.clear();
        self.delivered.clear();
        self.wires.clear();
        let owners = self.owners.values().copied().collect();
        self.owners.retain(|_, owner| *owner == Owner::Readers);
        owners
    }

    /// Declares what a session declares.
    pub fn declare_topology(&mut self) {
        let commands = self.names.topology(&self.plan);
        self.administer(commands);
    }

    /// Has commands carried out at once, on a connection of their own.
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

    /// Deletes a queue that holds nothing, and to which nothing is on its way.
    pub fn delete_if_empty(&mut self, queue: &Name) {
        self.wake_broker(self.now);
        self.run_broker();
        let is_empty = self.broker.queue(queue).is_some_and(|counts| counts.ready + counts.unacked == 0);
        if is_empty && !self.broker_is_down {
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

    /// A job's or a reply's end reaches its reader.
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

/// The message that the model of the broker carries.
pub fn letter_of(message: &Message) -> Option<Letter> {
    Some(Letter(u32::from_le_bytes(message.body.as_ref().try_into().ok()?)))
}
