//! Runs a script on a broker and on the model, and finds out whether the model explains what the broker did.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use vramq_testkit::simulation::broker::{Broker, ChannelId, Command, ConnectionId, Frame, Millis, Name};

use crate::accept::{self, Explored, State, Times};
use crate::client::Seen;
use crate::pool::{Pool, Pooled, Ran, TooOpen};
use crate::script::{self, Act, CHANNELS, CLIENTS, How, Operation, Script, TTL_SHORT};
use crate::words;

/// How long a broker may take for what the model says it will do.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// How long a count may be waited for until it is asked again: a state that waits in vain for something else may explain an answer that
/// came too early.
const COUNT_PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks at a queue's counts.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

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
    /// Where frames belong: number of the client, and of its channel.
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
        // It went well, and is the same for all scripts but for the arguments.
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
                // Each expiry that was due when the wait began is over.
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
                        // In a burst it may be settled already: a second time closes the channel.
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

    /// Ends all channels and empties all queues: what is left in them is compared, in order.
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
            // What one queue's end dead-letters into another stays there: they are emptied in turn.
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

    /// A state that explains all so far. Where states differ in what a script looks at, any will do: what is sent is
    /// the same on both sides.
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
        // Half of the channels confirm; all of them where a quorum queue may refuse: what such a queue has not applied is missing in
        // its counts, and whether it was refused could not be result without a confirm.
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
            // A channel that the broker has closed takes nothing, here as there.
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

    /// Waits until some state explains all that came, and expects no more.
    fn settle(&mut self) -> Result<()> {
        self.settle_within(PATIENCE)
    }

    fn settle_within(&mut self, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            while let Ok(seen) = self.pool.frames.try_recv() {
                self.see(seen)?;
            }
            let states = std::mem::take(&mut self.states);
            let before = states.first().cloned();
            let mut explored = self.explore(states);
            if explored.is_cut_off {
                bail!(TooOpen);
            }
            if !explored.rest.is_empty() {
                self.states = explored.rest;
                // A broker may be slower than its counts.
                self.states.append(&mut explored.waiting);
                return Ok(());
            }
            if explored.waiting.is_empty() {
                let expected: Vec<String> = explored
                    .refuted
                    .iter()
                    .map(|(model, real)| format!("{}\n  broker: {}", words::frame(model), words::frame(real)))
                    .collect();
                let left = before.map(|state| self.unexplained(&state)).unwrap_or_default();
                bail!(
                    "the model does not explain what the broker did.\n  model:  {}\n{left}",
                    expected.join("\n  model:  ")
                );
            }
            self.states = explored.waiting;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.pool.frames.recv_timeout(left) {
                Ok(seen) => self.see(seen)?,
                Err(_) => {
                    let state = &self.states[0];
                    bail!(
                        "the broker does not do what the model expects: {:?}",
                        state.broker.steps(self.must)
                    )
                }
            }
        }
    }

    fn unexplained(&self, state: &State) -> String {
        let mut text = String::new();
        for (id, frames) in &self.seen {
            let explained = state.explained.get(id).copied().unwrap_or(0);
            for frame in frames.iter().skip(explained) {
                let _ = writeln!(text, "  came on {}: {}", id.0, words::frame(frame));
            }
        }
        text
    }

    fn explore(&mut self, states: Vec<State>) -> Explored {
        // A clock's tick may separate what the broker and the model call now.
        let may = self.now() + 2;
        let times = Times { sent: self.sent, may, must: self.must, matter: self.expires };
        let explored = accept::explore(states, &self.seen, times);
        self.ran.states += explored.looked_at;
        explored
    }

    fn see(&mut self, (client, number, frame): Seen) -> Result<()> {
        let is_ours = |pooled: &Pooled| pooled.number == client;
        let is_closed = matches!(frame, Frame::ConnectionClosed { .. });
        ensure!(
            !is_closed || !self.pool.clients.iter().flatten().any(is_ours),
            "the broker closed a connection: {frame:?}"
        );
        // Frames of connections that are gone still come.
        let Some(id) = self.ids.get(&(client, number)) else { return Ok(()) };
        let frames = self.seen.entry(*id).or_default();
        // Brokers go on delivering until the client has heard that its channel is closed; no client looks at that.
        if matches!(frames.last(), Some(Frame::Closed { .. })) {
            return Ok(());
        }
        if let Some(open) = self.channels.iter().flatten().find(|open| open.id == *id) {
            if matches!(frame, Frame::Closed { .. }) {
                self.pool.client(open.client)?.client.agree_to_close(number)?;
            }
            self.ran.frames += 1;
            self.log.push(format!("  {:>5} ms  {} -> {}", self.now(), id.0, words::frame(&frame)));
            self.seen.entry(*id).or_default().push(frame);
        }
        Ok(())
    }

    /// Asks for the counts of all queues on a channel until some state has the same. What the channel did before has
    /// then reached the queues.
    fn compare_counts(&mut self, open: Open) -> Result<()> {
        for queue in self.queues.clone() {
            if self.broker().queue(&queue).is_none() {
                continue;
            }
            self.compare_count(open, &queue)?;
        }
        Ok(())
    }

    fn compare_count(&mut self, open: Open, queue: &Name) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let logged = self.log.len();
        loop {
            let before = self.states.clone();
            let seen = self.seen.get(&open.id).map_or(0, Vec::len);
            self.send(open, &Command::Count { queue: queue.clone() })?;
            let is_answer = |frame: &Frame| matches!(frame, Frame::DeclareOk { .. });
            let mut settled = self.settle_within(COUNT_PATIENCE);
            while settled.is_err()
                && Instant::now() < deadline
                && !self.states.is_empty()
                && !self.seen.get(&open.id).is_some_and(|frames| frames.iter().skip(seen).any(is_answer))
            {
                settled = self.settle_within(COUNT_PATIENCE);
            }
            let error = match settled {
                Ok(()) => {
                    self.log.truncate(logged);
                    return Ok(());
                }
                Err(error) if error.is::<TooOpen>() => return Err(error),
                Err(error) => error,
            };
            // The answer may have come before the broker was done. It is asked once more, as if it never was.
            let frames = self.seen.entry(open.id).or_default();
            let last = frames.iter().rposition(is_answer);
            match last {
                Some(at) if at >= seen && Instant::now() < deadline => frames.remove(at),
                _ => return Err(error).with_context(|| format!("the counts of {queue} differ")),
            };
            self.log.truncate(logged);
            self.states = before;
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}
