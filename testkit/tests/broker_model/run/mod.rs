//! Runs a script on a broker and on the model, with the same commands for both. `compare.rs` checks whether the model explains the broker's
//! answers.

mod compare;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_testkit::simulation::broker::{Broker, ChannelId, Command, ConnectionId, Millis, Name};

pub use compare::PATIENCE;

use crate::accept::{self, State};
use crate::pool::{Pool, Ran};
use crate::script::{self, Act, CHANNELS, CLIENTS, How, Operation, Script, TTL_SHORT};
use crate::words;

#[derive(Clone, Copy, Debug)]
struct Open {
    client: usize,
    number: u16,
    id: ChannelId,
    confirms: bool,
}

/// The run of one script.
pub struct Run<'a> {
    pool: &'a mut Pool,
    states: Vec<State>,
    seen: accept::Seen,
    connections: Vec<Option<ConnectionId>>,
    channels: Vec<Option<Open>>,
    /// The channel of a frame, by the numbers of client and channel.
    ids: BTreeMap<(usize, u16), ChannelId>,
    queues: Vec<Name>,
    started: Instant,
    sent: Millis,
    must: Millis,
    /// A message may expire while the script runs.
    expires: bool,
    all_confirm: bool,
    pub log: Vec<String>,
    pub ran: Ran,
}

impl<'a> Run<'a> {
    pub fn new(pool: &'a mut Pool, broker: Broker, all_confirm: bool) -> Self {
        Self {
            pool,
            states: vec![State { broker, explained: BTreeMap::new() }],
            seen: BTreeMap::new(),
            connections: vec![None; CLIENTS],
            channels: vec![None; CHANNELS],
            ids: BTreeMap::new(),
            queues: Vec::new(),
            started: Instant::now(),
            sent: 0,
            must: 0,
            expires: false,
            all_confirm,
            log: Vec::new(),
            ran: Ran::default(),
        }
    }

    /// Runs all of it; the error has both views.
    pub fn all(&mut self, script: &Script) -> Result<()> {
        let setup = self.open(0)?;
        for command in &script.setup {
            self.send(setup, command)?;
        }
        self.settle()?;
        self.queues = script.queues.iter().map(|(name, _)| name.clone()).collect();
        // The setup succeeded, and is nearly the same for all scripts.
        self.log.clear();
        for (at, operation) in script.operations.iter().enumerate() {
            self.log.push(format!("operation {at}"));
            self.operate(operation)?;
        }
        self.finish()
    }

    fn operate(&mut self, operation: &Operation) -> Result<()> {
        let mut used = Vec::new();
        match operation {
            Operation::Burst(acts) => {
                for act in acts {
                    used.extend(self.act(act)?);
                }
            }
            Operation::Ask { channel, command } => {
                let open = self.open(*channel)?;
                self.send(open, command)?;
                used.push(open);
            }
            Operation::Consume { channel, prefetch, queue, tag, no_ack, priority } => {
                let open = self.open(*channel)?;
                if self.broker().consumer_tags(open.id).contains(tag) {
                    return Ok(());
                }
                self.send(open, &Command::Qos { prefetch: *prefetch })?;
                let (queue, tag) = (queue.clone(), tag.clone());
                self.send(open, &Command::Consume { queue, tag, no_ack: *no_ack, priority: *priority })?;
                used.push(open);
            }
            Operation::Cancel { channel, pick } => {
                let open = self.open(*channel)?;
                let tags = self.broker().consumer_tags(open.id);
                let Some(tag) = tags.get(pick % tags.len().max(1)).cloned() else { return Ok(()) };
                self.send(open, &Command::Cancel { tag })?;
                used.push(open);
            }
            Operation::Close { channel } => {
                let open = self.open(*channel)?;
                self.send(open, &Command::Close)?;
            }
            Operation::Lose { client } => self.lose(*client),
            Operation::Wait => {
                self.log.push(format!("  {:>5} ms  wait", self.now()));
                std::thread::sleep(Duration::from_millis(TTL_SHORT + 1));
                // Every expiry that was due when the wait began has happened.
                self.must = self.now();
            }
        }
        self.settle()?;
        self.forget_closed();
        used.dedup_by_key(|open| open.id);
        let still: Vec<Open> = used.into_iter().filter(|open| self.broker().is_open(open.id)).collect();
        for open in &still {
            self.compare_counts(*open)?;
        }
        if still.is_empty() {
            let any = self.open(0)?;
            self.compare_counts(any)?;
        }
        self.must = 0;
        Ok(())
    }

    fn act(&mut self, act: &Act) -> Result<Option<Open>> {
        let (open, command) = match act {
            Act::Publish { channel, command } => (self.open(*channel)?, command.clone()),
            Act::Settle { channel, pick, multiple, how } => {
                let open = self.open(*channel)?;
                let tags = self.broker().unacked_tags(open.id);
                let tag = tags.get(pick % tags.len().max(1)).copied();
                let tag = match how {
                    How::AckUnknown => 999_999,
                    _ => match tag {
                        // In a burst it may already be settled; settling it twice closes the channel.
                        Some(tag) => tag,
                        None => return Ok(None),
                    },
                };
                let multiple = *multiple;
                let command = match how {
                    How::Ack | How::AckUnknown => Command::Ack { tag, multiple },
                    How::Requeue => Command::Nack { tag, multiple, requeue: true },
                    How::Reject => Command::Nack { tag, multiple, requeue: false },
                };
                (open, command)
            }
        };
        self.send(open, &command)?;
        Ok(Some(open))
    }

    /// Ends all channels and empties all queues, to compare their remaining messages in order.
    fn finish(&mut self) -> Result<()> {
        for channel in 0..CHANNELS {
            if let Some(open) = self.channels[channel].filter(|open| self.broker().is_open(open.id)) {
                self.send(open, &Command::Close)?;
            }
        }
        self.settle()?;
        self.forget_closed();
        let open = self.open(0)?;
        self.compare_counts(open)?;
        for queue in self.queues.clone() {
            // Emptying one queue may dead-letter into another, so they are emptied in turn.
            while self.broker().queue(&queue).is_some_and(|counts| counts.ready > 0) {
                self.send(open, &Command::Get { queue: queue.clone(), no_ack: true })?;
                self.settle()?;
            }
            let delete = Command::DeleteQueue { name: queue, if_unused: false, if_empty: false };
            self.send(open, &delete)?;
            self.settle()?;
        }
        self.send(open, &Command::Close)?;
        self.settle()?;
        ensure!(!self.states.is_empty(), "no state is left");
        Ok(())
    }

    /// A state that explains all frames so far. If states differ in something that a script reads, any state will do: both sides get the
    /// same commands.
    fn broker(&self) -> &Broker {
        &self.states[0].broker
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    /// A channel, opened if it is not.
    fn open(&mut self, at: usize) -> Result<Open> {
        if let Some(open) = self.channels[at] {
            return Ok(open);
        }
        let client = at % CLIENTS;
        let pooled = self.pool.client(client)?;
        let number = pooled.next_channel;
        pooled.next_channel += 1;
        pooled.client.open_channel(number)?;
        let key = (pooled.number, number);
        let known = self.connections[client];
        let mut opened = None;
        for state in &mut self.states {
            let connection = known.unwrap_or_else(|| state.broker.connect());
            let id = state.broker.open_channel(connection).context("a channel of a lost connection")?;
            opened = Some((connection, id));
        }
        let (connection, id) = opened.context("no state is left")?;
        self.connections[client] = Some(connection);
        self.ids.insert(key, id);
        self.seen.insert(id, Vec::new());
        // Half of the channels confirm; all of them if a quorum queue may refuse publishes. The counts of such a queue lack publishes that
        // it has not applied, and only a confirm shows whether one was refused.
        let open = Open { client, number, id, confirms: self.all_confirm || at < CHANNELS / 2 };
        self.channels[at] = Some(open);
        if open.confirms {
            self.send(open, &Command::ConfirmSelect)?;
        }
        Ok(open)
    }

    fn send(&mut self, open: Open, command: &Command) -> Result<()> {
        self.sent = self.now();
        self.expires |= script::expires_soon(command);
        self.log.push(format!("  {:>5} ms  {} <- {}", self.sent, open.id.0, words::command(command)));
        for state in &mut self.states {
            // The model, like the broker, ignores commands on a closed channel.
            let _ = state.broker.send(open.id, command.clone());
        }
        self.pool.client(open.client)?.client.send(open.number, command)
    }

    fn lose(&mut self, client: usize) {
        self.sent = self.now();
        self.log.push(format!("  {:>5} ms  client {client} is gone", self.sent));
        self.pool.clients[client] = None;
        let Some(connection) = self.connections[client].take() else { return };
        for state in &mut self.states {
            state.broker.lose(connection);
        }
        for channel in &mut self.channels {
            *channel = channel.take_if(|open| open.client != client);
        }
    }

    fn forget_closed(&mut self) {
        for at in 0..CHANNELS {
            if self.channels[at].is_some_and(|open| !self.broker().is_open(open.id)) {
                self.channels[at] = None;
            }
        }
    }
}
