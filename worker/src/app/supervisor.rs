//! Several GPUs: a worker process for each, all with the same configuration. A GPU that fails ends one of them, which is
//! started again; when all have failed soon after their start, all ends as the last one did.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::config::{Gpu, Gpus};
use crate::device::cuda::{Absent, NotListed, choose, find};
use crate::drain::Signals;
use crate::exit::Exit;
use crate::retry::Waits;

/// Between the end of a process and the next one on the same GPU.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(60);

/// A process that ran this long has not failed at its start: the next rest is short again.
const STEADY: Duration = Duration::from_secs(120);

/// What a process that is to drain may take for it beyond the configured time, before it is killed: its own deadline has passed
/// then, and it hangs.
const DRAIN_GRACE: Duration = Duration::from_secs(10);

/// Why there is no crew.
#[derive(Debug, thiserror::Error)]
pub enum CrewError {
    #[error(transparent)]
    Absent(#[from] Absent),
    #[error(transparent)]
    NotListed(#[from] NotListed),
    #[error("the driver lists no CUDA device")]
    None,
    #[error("device {0} is named twice, by different words")]
    Twice(Gpu),
}

impl CrewError {
    /// Whether the configuration is to blame, rather than the machine.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Twice(_))
    }
}

/// The configured GPUs that there are.
///
/// # Errors
/// One of them is not there, or is named twice.
pub fn gpus(configured: &Gpus) -> Result<Vec<Gpu>, CrewError> {
    let listed = find()?.devices;
    let found = match configured {
        Gpus::All => listed,
        Gpus::These(these) => these.iter().map(|which| choose(&listed, which)).collect::<Result<_, _>>()?,
    };
    let gpus: Vec<_> = found.iter().map(Gpu::from).collect();
    match gpus.iter().enumerate().find(|(at, gpu)| gpus[..*at].contains(gpu)) {
        Some((_, gpu)) => Err(CrewError::Twice(gpu.clone())),
        None if gpus.is_empty() => Err(CrewError::None),
        None => Ok(gpus),
    }
}

/// Runs this program's command for one GPU after the other, and returns the exit code that is furthest from 0.
///
/// # Errors
/// It cannot be started.
pub async fn one_after_the_other(gpus: Vec<Gpu>) -> io::Result<Exit> {
    let program = std::env::current_exe()?;
    let mut worst = Exit::Drained;
    for gpu in &gpus {
        let status = command(&program, gpu).stdin(Stdio::null()).status().await?;
        let exit = Exit::of(status.code()).unwrap_or(Exit::Unusable);
        if exit as u8 > worst as u8 {
            worst = exit;
        }
    }
    Ok(worst)
}

/// This program, with the arguments that it has itself, on one of the GPUs.
fn command(program: &Path, gpu: &Gpu) -> Command {
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--gpu").arg(gpu.to_string());
    command
}

/// Keeps a worker running on each GPU until all are told to drain, which takes them so long at most.
///
/// # Errors
/// There is no way to start processes or to listen for signals.
pub async fn serve(drain: Duration, gpus: Vec<Gpu>) -> io::Result<Exit> {
    let mut signals = Signals::listen()?;
    let mut crew = Crew {
        program: std::env::current_exe()?,
        orders: watch::channel(0).0,
        drain: drain + DRAIN_GRACE,
        members: gpus.into_iter().map(Member::new).collect(),
        events: JoinSet::new(),
        exit: Exit::Drained,
    };
    (0..crew.members.len()).for_each(|at| crew.start(at));
    loop {
        tokio::select! {
            signal = signals.next() => {
                tracing::info!(signal, workers = crew.running(), "draining");
                crew.order();
                // Those that rest have nothing to finish.
                if crew.running() == 0 {
                    return Ok(crew.exit);
                }
            }
            // All that were started, or rest, are there; what ends them by a panic ends this process as well.
            event = crew.events.join_next() => match event {
                None => return Ok(crew.exit),
                Some(event) => if let Some(exit) = crew.handle(event?) { return Ok(exit) },
            },
        }
    }
}

struct Crew {
    program: PathBuf,
    /// How many orders to end there were.
    orders: watch::Sender<usize>,
    /// How long a drain may take.
    drain: Duration,
    members: Vec<Member>,
    events: JoinSet<Event>,
    /// How it will end.
    exit: Exit,
}

/// A GPU and its process.
struct Member {
    gpu: Gpu,
    rests: Waits,
    /// Since when the process runs; none while it rests.
    since: Option<Instant>,
    /// The last one failed soon after its start.
    failed: bool,
    /// It was told to end, by others than this process.
    drained: bool,
}

impl Member {
    fn new(gpu: Gpu) -> Self {
        Self { gpu, rests: Waits::between(REST_MIN, REST_MAX), since: None, failed: false, drained: false }
    }

    /// Whether its process is past its start.
    fn is_steady(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > STEADY)
    }
}

enum Event {
    Ended { at: usize, outcome: io::Result<ExitStatus> },
    Rested { at: usize },
}

impl Crew {
    fn start(&mut self, at: usize) {
        let command = command(&self.program, &self.members[at].gpu);
        let (orders, drain) = (self.orders.subscribe(), self.drain);
        self.members[at].since = Some(Instant::now());
        self.events.spawn(async move { Event::Ended { at, outcome: run(command, orders, drain).await } });
    }

    fn running(&self) -> usize {
        self.members.iter().filter(|member| member.since.is_some()).count()
    }

    fn is_ending(&self) -> bool {
        *self.orders.borrow() > 0
    }

    fn order(&mut self) {
        self.orders.send_modify(|orders| *orders += 1);
    }

    /// How all ends, if it does now.
    fn handle(&mut self, event: Event) -> Option<Exit> {
        match event {
            Event::Rested { .. } if self.is_ending() => None,
            Event::Rested { at } => {
                self.start(at);
                None
            }
            Event::Ended { at, outcome } => self.ended(at, outcome),
        }
    }

    fn ended(&mut self, at: usize, outcome: io::Result<ExitStatus>) -> Option<Exit> {
        let exit = Exit::of(outcome.as_ref().ok().and_then(ExitStatus::code));
        let how = outcome.map_or_else(|error| error.to_string(), |status| status.to_string());
        let is_ending = self.is_ending();
        let member = &mut self.members[at];
        let (gpu, was_steady) = (&member.gpu, member.is_steady());
        member.since = None;
        if is_ending {
            if exit != Some(Exit::Drained) {
                tracing::warn!(%gpu, how, "the worker did not drain");
                self.end_as(exit.unwrap_or(Exit::Killed));
            }
            return (self.running() == 0).then_some(self.exit);
        }
        // The other is the end of a drain that did not come to its own.
        if let Some(Exit::Drained | Exit::Killed) = exit {
            tracing::info!(%gpu, how, "the worker was drained, and stays so");
            member.drained = true;
            exit.into_iter().filter(|exit| *exit != Exit::Drained).for_each(|exit| self.end_as(exit));
            return None;
        }
        member.failed = !was_steady;
        if was_steady {
            member.rests = Waits::between(REST_MIN, REST_MAX);
        }
        let wanted = || self.members.iter().filter(|member| !member.drained);
        if wanted().all(|member| member.failed && member.since.is_none()) {
            tracing::error!(how, "on every GPU the worker fails at its start");
            return Some(exit.unwrap_or(Exit::Restart));
        }
        self.rest(at, &how);
        None
    }

    /// The first reason that is none of draining is the one to tell.
    fn end_as(&mut self, exit: Exit) {
        if self.exit == Exit::Drained {
            self.exit = exit;
        }
    }

    /// Starts a process again after a while.
    fn rest(&mut self, at: usize, how: &str) {
        let running = self.running();
        let Member { gpu, rests, .. } = &mut self.members[at];
        let rest = rests.next_wait();
        tracing::warn!(%gpu, how, rest_ms = rest.as_millis(), running, "a worker has ended, and is started again");
        self.events.spawn(async move {
            sleep(rest).await;
            Event::Rested { at }
        });
    }
}

/// Runs a process to its end, and passes orders on to it. If this process ends first, the other one learns that by its standard
/// input.
async fn run(
    mut command: Command,
    mut orders: watch::Receiver<usize>,
    drain: Duration,
) -> io::Result<ExitStatus> {
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    // Waiting would close it.
    let mut input = child.stdin.take();
    let mut passed_on = 0;
    let mut deadline = None;
    loop {
        let overdue = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => return status,
            Ok(()) = orders.changed() => {
                let given = *orders.borrow_and_update();
                deadline.get_or_insert_with(|| Instant::now() + drain);
                if let Some(input) = &mut input {
                    // An `Err`: it has ended already.
                    let _ = input.write_all(&vec![b'\n'; given - passed_on]).await;
                }
                passed_on = given;
            }
            () = overdue => {
                deadline = None;
                child.start_kill()?;
            }
        }
    }
}
