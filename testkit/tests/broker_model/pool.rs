//! Connections to a real broker, and the runs of scripts on them.

use std::fmt::Write as _;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use vramq_testkit::simulation::broker::{Broker, Command, Frame, Generation, Mistake, QueueKind};

use crate::client::{Address, Client, Seen};
use crate::run::{PATIENCE, Run};
use crate::script::{self, CLIENTS, Script};
use crate::words;

/// After so many runs of a script without an explanation, the model counts as wrong.
const RUNS_MAX: u32 = 3;
/// More frames than a broker sends in a script.
const FRAMES_MAX: usize = 65_536;
/// Channels of a connection before it is replaced: below what a broker allows.
const CHANNELS_MAX: u16 = 1_500;

/// Connections to a broker that scripts share.
pub struct Pool {
    address: Address,
    pub clients: Vec<Option<Pooled>>,
    next_client: usize,
    sender: SyncSender<Seen>,
    pub frames: Receiver<Seen>,
    pub generation: Generation,
    /// Names of this run's queues start with it.
    prefix: String,
}

/// One of these connections.
pub struct Pooled {
    pub client: Client,
    pub number: usize,
    pub next_channel: u16,
}

/// A script is not checked to its end, because too many orders of simultaneous events are possible.
#[derive(Clone, Copy, Debug)]
pub struct TooOpen;

impl std::fmt::Display for TooOpen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the script leaves too much open")
    }
}

impl std::error::Error for TooOpen {}

/// What a script's run was.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ran {
    pub frames: usize,
    pub states: usize,
    /// The check gave up before the script's end.
    pub is_cut_off: bool,
    /// Runs that it took.
    pub runs: u32,
}

impl Pool {
    /// `None` for a broker whose generation the model does not know.
    pub fn new(address: Address) -> Result<Option<Self>> {
        let (sender, frames) = sync_channel(FRAMES_MAX);
        let mut pool = Self {
            address,
            clients: (0..CLIENTS).map(|_| None).collect(),
            next_client: 0,
            sender,
            frames,
            generation: Generation::V3_10,
            prefix: format!("model.{}", std::process::id()),
        };
        let version = pool.client(0)?.client.version.clone();
        let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
        let version = numbers
            .next()
            .zip(numbers.next())
            .with_context(|| format!("the broker's version is {version}"))?;
        pool.generation = match version {
            (0..=3, _) => Generation::V3_10,
            (4, 0..=2) => Generation::V4_0,
            _ => return Ok(None),
        };
        Ok(Some(pool))
    }

    pub fn client(&mut self, at: usize) -> Result<&mut Pooled> {
        let used_up = |pooled: &Pooled| pooled.next_channel > CHANNELS_MAX;
        if self.clients[at].as_ref().is_none_or(used_up) {
            let number = self.next_client;
            self.next_client += 1;
            let client = Client::connect(&self.address, number, self.sender.clone())?;
            self.clients[at] = Some(Pooled { client, number, next_channel: 1 });
        }
        self.clients[at].as_mut().context("a client that was just made")
    }

    fn forget_all(&mut self) {
        self.clients.iter_mut().for_each(|client| *client = None);
    }

    /// Runs the script of a seed until the model explains it, at most `RUNS_MAX` times. A fault of the model appears each time. A
    /// disagreement that appears once is a rare order of events in the broker that the check does not know.
    pub fn run_until_explained(&mut self, seed: u64, kind: QueueKind) -> Result<Ran> {
        let mut runs = 0;
        loop {
            runs += 1;
            match self.run(seed, kind, None) {
                Ok(ran) => return Ok(Ran { runs, ..ran }),
                Err(report) if runs >= RUNS_MAX => return Err(report),
                Err(_) => {}
            }
        }
    }

    /// Runs the script of a seed; the error has the script and both views.
    pub fn run(&mut self, seed: u64, kind: QueueKind, mistake: Option<Mistake>) -> Result<Ran> {
        let script = script::write(seed, kind, &self.prefix);
        let mut broker = Broker::new(self.generation);
        if let Some(mistake) = mistake {
            broker = broker.with_mistake(mistake);
        }
        let shared = format!("{}.", self.prefix);
        let mut run = Run::new(self, broker, script.may_refuse_late());
        let outcome = run.all(&script);
        let is_cut_off = outcome.as_ref().is_err_and(|error| error.is::<TooOpen>());
        run.ran.is_cut_off = is_cut_off;
        let result = outcome.map_err(|error| {
            let mut text = format!("{error:#}\nseed {seed} ({kind:?})\n");
            for (name, options) in &script.queues {
                let _ = writeln!(text, "queue {name}{}", words::arguments(options));
            }
            for line in &run.log {
                let _ = writeln!(text, "{line}");
            }
            // Names are unique among scripts; within one, their last letter tells them apart.
            text.replace(&format!("{}.", script.prefix), "").replace(&shared, "")
        });
        let ran = run.ran;
        if result.is_err() {
            self.forget_all();
            self.remove(&script)?;
        }
        match result {
            Err(text) if !is_cut_off => Err(anyhow::anyhow!(text)),
            _ => Ok(ran),
        }
    }

    /// Deletes what a script that ended early left behind.
    fn remove(&mut self, script: &Script) -> Result<()> {
        let pooled = self.client(0)?;
        let channel = pooled.next_channel;
        pooled.next_channel += 1;
        pooled.client.open_channel(channel)?;
        for (name, _) in &script.queues {
            let delete = Command::DeleteQueue { name: name.clone(), if_unused: false, if_empty: false };
            pooled.client.send(channel, &delete)?;
        }
        pooled.client.send(channel, &Command::Close)?;
        let number = pooled.number;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match self.frames.recv_timeout(PATIENCE) {
                Ok((from, on, Frame::CloseOk)) if (from, on) == (number, channel) => return Ok(()),
                _ => {}
            }
        }
        bail!("the queues of a script cannot be deleted")
    }
}
