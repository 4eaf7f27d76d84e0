//! Random scripts: queues with random arguments, and what several clients do with them.

use std::sync::Arc;

use vramq_testkit::simulation::Random;
use vramq_testkit::simulation::broker::{
    Command, ExchangeKind, Millis, Name, Overflow, Properties, QueueKind, QueueOptions,
};

/// Clients, and channels of each.
pub const CLIENTS: usize = 2;
pub const CHANNELS: usize = 4;
const OPERATIONS: usize = 24;
/// A time to live that ends while a script runs, and one that does not.
pub const TTL_SHORT: Millis = 30;
const TTL_LONG: Millis = 10 * 60 * 1_000;

/// The exchanges that the scripts of a run share. Their bindings go with the queues of each script.
const DIRECT: &str = "direct";
const FANOUT: &str = "fanout";
const DEAD: &str = "dead";
const DEAD_FANOUT: &str = "dead.fanout";

#[derive(Clone, Debug)]
pub struct Script {
    /// What the names of its queues start with.
    pub prefix: String,
    pub queues: Vec<(Name, QueueOptions)>,
    pub setup: Vec<Command>,
    pub operations: Vec<Operation>,
}

impl Script {
    /// Whether a channel may learn late that a queue is full, and the queue accepts messages until then.
    pub fn may_refuse_late(&self) -> bool {
        self.queues.iter().any(|(_, options)| {
            options.kind == QueueKind::Quorum
                && options.max_length.is_some()
                && options.overflow == Overflow::RejectPublish
        })
    }
}

/// A part of a script. After it the check waits until the broker is idle.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Sent one after the other, without waiting.
    Burst(Vec<Act>),
    /// One command that is answered.
    Ask {
        channel: usize,
        command: Command,
    },
    Consume {
        channel: usize,
        prefetch: u16,
        queue: Name,
        tag: Name,
        no_ack: bool,
        priority: i32,
    },
    Cancel {
        channel: usize,
        pick: usize,
    },
    Close {
        channel: usize,
    },
    /// The connection breaks.
    Lose {
        client: usize,
    },
    /// Waits until messages with a short time to live have expired.
    Wait,
}

#[derive(Clone, Debug)]
pub enum Act {
    Publish {
        channel: usize,
        command: Command,
    },
    /// Settles one of the channel's unsettled deliveries.
    Settle {
        channel: usize,
        pick: usize,
        multiple: bool,
        how: How,
    },
}

#[derive(Clone, Copy, Debug)]
pub enum How {
    Ack,
    Requeue,
    Reject,
    /// Acks a delivery tag that does not exist.
    AckUnknown,
}

struct Writer {
    random: Random,
    kind: QueueKind,
    run: String,
    prefix: String,
    names: Vec<Name>,
    published: u32,
    /// Avoids mistakes for which the broker closes a channel. While a quorum queue's channel is being closed, it is random whether the
    /// broker still acks deliveries to consumers with `no_ack`. So a script has either such mistakes or such consumers.
    is_careful: bool,
    /// Whether the first queue dead-letters to itself and clients reject a lot: messages then die several times for one reason.
    comes_back: bool,
    /// Messages expire while the script runs.
    expires: bool,
}

/// The script of a seed. All names start with `run`.
pub fn write(seed: u64, kind: QueueKind, run: &str) -> Script {
    let (random, run, prefix) = (Random::new(seed), run.to_owned(), format!("{run}.{seed}"));
    let mut writer = Writer {
        random,
        kind,
        run,
        prefix,
        names: Vec::new(),
        published: 0,
        is_careful: false,
        comes_back: false,
        expires: false,
    };
    writer.is_careful = kind == QueueKind::Quorum && writer.random.chance(40);
    writer.comes_back = writer.random.chance(15);
    writer.expires = kind == QueueKind::Classic || writer.random.chance(25);
    writer.names = ["a", "b", "d"].iter().map(|name| format!("{}.{name}", writer.prefix).into()).collect();
    let queues = writer.queues();
    let setup = writer.setup(&queues);
    let operations = (0..OPERATIONS).flat_map(|_| writer.operations()).collect();
    Script { prefix: writer.prefix, queues, setup, operations }
}

/// Whether a command makes messages expire while a script runs.
pub fn expires_soon(command: &Command) -> bool {
    match command {
        Command::Publish { properties, .. } => properties.expiration == Some(TTL_SHORT),
        Command::DeclareQueue { options, .. } => options.message_ttl == Some(TTL_SHORT),
        _ => false,
    }
}

impl Writer {
    fn queues(&mut self) -> Vec<(Name, QueueOptions)> {
        let mut queues: Vec<(Name, QueueOptions)> =
            self.names.clone().into_iter().map(|name| (name, self.options())).collect();
        // Dead letters either stay in their queue or go round.
        if self.random.chance(70)
            && let Some((_, options)) = queues.last_mut()
        {
            *options = QueueOptions { kind: self.kind, ..QueueOptions::default() };
        }
        // Only the first queue: otherwise timers would fire in parallel (see `short_ttl`).
        if self.kind == QueueKind::Quorum {
            for (_, options) in queues.iter_mut().skip(1) {
                options.message_ttl = options.message_ttl.map(|_| TTL_LONG);
            }
        }
        // A full queue refuses dead letters, which are offered again only after minutes.
        let at_least_once = queues.iter().any(|(_, options)| options.dead_letter_at_least_once);
        if at_least_once && let Some((_, options)) = queues.last_mut() {
            options.max_length = None;
        }
        if self.comes_back
            && let Some((name, options)) = queues.first_mut()
        {
            options.dead_letter_exchange = Some("".into());
            options.dead_letter_routing_key = Some(name.clone());
            options.dead_letter_at_least_once = false;
        }
        queues
    }

    fn options(&mut self) -> QueueOptions {
        let quorum = self.kind == QueueKind::Quorum;
        let mut options = QueueOptions { kind: self.kind, ..QueueOptions::default() };
        if self.random.chance(40) {
            options.max_length = Some(1 + self.random.below(5) as u32);
            options.overflow =
                if self.random.chance(60) { Overflow::RejectPublish } else { Overflow::DropHead };
        }
        if !quorum && self.random.chance(40) {
            options.max_priority = Some([1, 3, 10][self.random.below(3)]);
        }
        if self.random.chance(20) {
            options.message_ttl = Some(if self.random.chance(50) { self.short_ttl() } else { TTL_LONG });
        }
        if quorum && self.random.chance(60) {
            options.delivery_limit = Some(self.random.below(4) as i64);
        }
        if self.random.chance(70) {
            let (exchange, key): (&str, Option<Name>) = match self.random.below(4) {
                0 => ("", Some(self.names[2].clone())),
                1 => (DEAD, Some(self.names[2].clone())),
                2 => (DEAD, None),
                _ => (DEAD_FANOUT, None),
            };
            options.dead_letter_exchange = Some(self.exchange(exchange));
            options.dead_letter_routing_key = key;
            let rejects = options.max_length.is_none() || options.overflow == Overflow::RejectPublish;
            if quorum && rejects && self.random.chance(30) {
                options.dead_letter_at_least_once = true;
                options.overflow = Overflow::RejectPublish;
            }
        }
        options
    }

    fn setup(&mut self, queues: &[(Name, QueueOptions)]) -> Vec<Command> {
        let mut setup: Vec<Command> = queues
            .iter()
            .map(|(name, options)| Command::DeclareQueue {
                name: name.clone(),
                options: Box::new(options.clone()),
            })
            .collect();
        for (name, kind) in [
            (DIRECT, ExchangeKind::Direct),
            (FANOUT, ExchangeKind::Fanout),
            (DEAD, ExchangeKind::Direct),
            (DEAD_FANOUT, ExchangeKind::Fanout),
        ] {
            setup.push(Command::DeclareExchange { name: self.exchange(name), kind });
        }
        let mut bind = |queue: usize, exchange: &str, key: &Name| {
            let (queue, routing_key) = (self.names[queue].clone(), key.clone());
            setup.push(Command::Bind { queue, exchange: self.exchange(exchange), routing_key });
        };
        let names = self.names.clone();
        bind(0, DIRECT, &names[0]);
        bind(1, DIRECT, &names[1]);
        bind(0, FANOUT, &names[0]);
        bind(1, FANOUT, &names[1]);
        // Dead letters that keep their routing key must find a queue, too.
        bind(2, DEAD, &names[0]);
        bind(2, DEAD, &names[2]);
        bind(2, DEAD_FANOUT, &names[2]);
        setup
    }

    /// An operation. In scripts with expirations on quorum queues, mostly followed by a wait until everything has expired.
    fn operations(&mut self) -> Vec<Operation> {
        let operation = self.operation();
        let waits = self.kind == QueueKind::Quorum && self.expires && self.random.chance(70);
        [Some(operation), waits.then_some(Operation::Wait)].into_iter().flatten().collect()
    }

    fn operation(&mut self) -> Operation {
        let channel = self.random.below(CHANNELS);
        match self.random.below(100) {
            0..30 => self.burst(false),
            30..52 => self.burst(true),
            52..70 => Operation::Consume {
                channel,
                prefetch: [0, 1, 1, 2, 3][self.random.below(5)],
                queue: self.queue(),
                tag: format!("c{}", self.random.below(3)).into(),
                no_ack: self.random.chance(15) && (self.is_careful || self.kind == QueueKind::Classic),
                priority: [0, 0, 0, 5, -1][self.random.below(5)],
            },
            70..76 => Operation::Cancel { channel, pick: self.random.below(3) },
            76..86 => {
                let command = Command::Get { queue: self.queue(), no_ack: self.random.chance(30) };
                Operation::Ask { channel, command }
            }
            86..90 => Operation::Lose { client: self.random.below(CLIENTS) },
            90..92 => Operation::Close { channel },
            92..94 => Operation::Wait,
            94..96 => Operation::Ask { channel, command: Command::Purge { queue: self.queue() } },
            96 if !self.is_careful => Operation::Ask { channel, command: self.impossible() },
            97 => {
                // Quorum queues do not support conditional deletion: brokers close the connection.
                let is_classic = self.kind == QueueKind::Classic;
                let (if_unused, if_empty) =
                    (self.random.chance(30) && is_classic, self.random.chance(30) && is_classic);
                Operation::Ask {
                    channel,
                    command: Command::DeleteQueue { name: self.queue(), if_unused, if_empty },
                }
            }
            _ if self.is_careful => self.burst(false),
            _ => Operation::Burst(vec![Act::Settle {
                channel,
                pick: 0,
                multiple: false,
                how: How::AckUnknown,
            }]),
        }
    }

    /// A command for which the broker closes the channel.
    fn impossible(&mut self) -> Command {
        match self.random.below(3) {
            0 => Command::Get { queue: format!("{}.missing", self.prefix).into(), no_ack: true },
            1 => Command::Count { queue: format!("{}.missing", self.prefix).into() },
            _ => {
                let options =
                    QueueOptions { kind: self.kind, message_ttl: Some(77), ..QueueOptions::default() };
                Command::DeclareQueue { name: self.names[2].clone(), options: Box::new(options) }
            }
        }
    }

    fn burst(&mut self, settles: bool) -> Operation {
        let first = self.random.below(CHANNELS);
        // Commands on several channels at once may happen in any order.
        let second = if self.random.chance(20) { self.random.below(CHANNELS) } else { first };
        // Two of them may settle the same delivery.
        let acts_max = if settles && self.is_careful { 1 } else { 4 };
        let acts = (0..=self.random.below(acts_max))
            .map(|at| {
                let channel = if at % 2 == 0 { first } else { second };
                if settles { self.settle(channel) } else { self.publish(channel) }
            })
            .collect();
        Operation::Burst(acts)
    }

    fn settle(&mut self, channel: usize) -> Act {
        let (acks, requeues) = if self.comes_back { (2, 4) } else { (4, 8) };
        let how = match self.random.below(10) {
            at if at < acks => How::Ack,
            at if at < requeues => How::Requeue,
            _ => How::Reject,
        };
        Act::Settle { channel, pick: self.random.below(4), multiple: self.random.chance(30), how }
    }

    fn publish(&mut self, channel: usize) -> Act {
        let (exchange, routing_key) = match self.random.below(10) {
            0..6 => ("", self.queue()),
            6 => (DIRECT, self.names[self.random.below(2)].clone()),
            7 => (FANOUT, self.names[0].clone()),
            8 => (DIRECT, "nobody".into()),
            _ => ("", format!("{}.missing", self.prefix).into()),
        };
        let expiration = match self.random.below(10) {
            0 if self.kind == QueueKind::Classic || routing_key == self.names[0] => Some(self.short_ttl()),
            0 | 1 => Some(TTL_LONG),
            _ => None,
        };
        let properties = Properties {
            priority: self.random.chance(50).then(|| self.random.below(12) as u8),
            expiration,
            persistent: self.random.chance(70),
            ..Properties::default()
        };
        self.published += 1;
        let body: Arc<[u8]> = format!("{}", self.published).into_bytes().into();
        Act::Publish {
            channel,
            command: Command::Publish {
                exchange: self.exchange(exchange),
                routing_key,
                mandatory: self.random.chance(50),
                properties: Box::new(properties),
                body,
            },
        }
    }

    /// The short time to live, if the script has expirations. The timers of quorum queues cannot be observed, and their dead letters arrive
    /// late. So in most scripts nothing in them expires, and in the others only messages in the first queue.
    fn short_ttl(&self) -> Millis {
        if self.expires { TTL_SHORT } else { TTL_LONG }
    }

    /// The exchange with this name in this run. The exchange without a name is common to all runs.
    fn exchange(&self, name: &str) -> Name {
        if name.is_empty() { "".into() } else { format!("{}.{name}", self.run).into() }
    }

    /// Most of the time the first.
    fn queue(&mut self) -> Name {
        let at = [0, 0, 0, 1, 2][self.random.below(5)];
        self.names[at].clone()
    }
}
