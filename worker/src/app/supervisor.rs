//! Supervises several GPUs: runs a worker process for each, all with the same configuration, and restarts processes that end. If all have
//! failed soon after their start, this process ends with the exit code of the last one.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::exit::Exit;
use crate::config::{Gpu, Gpus};
use crate::device::cuda::{Absent, NotListed, Which, choose, find};
use crate::retry::Backoff;
use crate::signals::Signals;

/// Between the end of a process and the next one on the same GPU.
const RESTART_MIN: Duration = Duration::from_secs(1);
const RESTART_MAX: Duration = Duration::from_secs(60);

/// A process that ran this long has not failed at its start: the next wait is short again.
const STEADY: Duration = Duration::from_secs(120);

/// How long a draining process may exceed the configured time before it is killed. Its own deadline has passed then, so it hangs.
const DRAIN_GRACE: Duration = Duration::from_secs(10);

/// Why there are no processes to supervise.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error(transparent)]
    Absent(#[from] Absent),
    #[error(transparent)]
    NotListed(#[from] NotListed),
    #[error("the driver lists no CUDA device")]
    None,
    #[error("device {0} is named twice")]
    Twice(Gpu),
    #[error(
        "device.cuda.uuid names instances of MIG as well as whole GPUs, such as {0}: run one worker for the instances, and another one for the whole GPUs"
    )]
    Mixed(Which),
}

impl SupervisorError {
    /// Whether the configuration is at fault, rather than the machine.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Twice(_) | Self::Mixed(_))
    }
}

/// The configured GPUs that there are.
///
/// # Errors
/// One of them is not there, or is named twice, or they are of two kinds.
pub fn gpus(configured: &Gpus) -> Result<Vec<Gpu>, SupervisorError> {
    let gpus: Vec<Gpu> = match configured {
        // A process sees only one MIG instance, whatever it asks for. So the processes themselves must look up several instances.
        Gpus::These(these) if these.iter().any(Which::is_instance) => {
            if let Some(whole) = these.iter().find(|which| !which.is_instance()) {
                return Err(SupervisorError::Mixed(whole.clone()));
            }
            let gpu = |(ordinal, which): (usize, &Which)| Gpu { ordinal, uuid: which.to_string() };
            these.iter().enumerate().map(gpu).collect()
        }
        Gpus::These(these) => {
            let listed = find()?.devices;
            let one = |which| choose(&listed, which).map(|found| Gpu::from(&found));
            these.iter().map(one).collect::<Result<_, _>>()?
        }
        Gpus::All => find()?.devices.iter().map(Gpu::from).collect(),
    };
    // Compares UUIDs without dashes and case, because those of instances are spelled as in the configuration.
    let digits = |gpu: &Gpu| gpu.uuid.replace('-', "").to_ascii_lowercase();
    let is_known = |at: usize, gpu: &Gpu| gpus[..at].iter().any(|other| digits(other) == digits(gpu));
    match gpus.iter().enumerate().find(|(at, gpu)| is_known(*at, gpu)) {
        Some((_, gpu)) => Err(SupervisorError::Twice(gpu.clone())),
        None if gpus.is_empty() => Err(SupervisorError::None),
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
    if Which::Uuid(gpu.uuid.clone()).is_instance() {
        // The driver lists only the first MIG instance, unless this variable names another.
        command.env("CUDA_VISIBLE_DEVICES", &gpu.uuid);
    }
    command
}

/// Keeps a worker running on each GPU until all are asked to drain, for which they have `drain`.
///
/// # Errors
/// Processes cannot be started, or signals not received.
pub async fn serve(drain: Duration, gpus: Vec<Gpu>) -> io::Result<Exit> {
    let mut signals = Signals::listen()?;
    let mut supervisor = Supervisor {
        program: std::env::current_exe()?,
        stops: watch::channel(0).0,
        drain: drain + DRAIN_GRACE,
        children: gpus.into_iter().map(Child::new).collect(),
        events: JoinSet::new(),
        exit: Exit::Drained,
    };
    (0..supervisor.children.len()).for_each(|at| supervisor.start(at));
    loop {
        tokio::select! {
            signal = signals.next() => {
                tracing::info!(signal, workers = supervisor.running(), "draining");
                supervisor.stop();
                // Those that wait to be started have nothing to finish.
                if supervisor.running() == 0 {
                    return Ok(supervisor.exit);
                }
            }
            // `events` has an entry for each child that runs or waits. A panic of a child's task ends this process too.
            event = supervisor.events.join_next() => match event {
                None => return Ok(supervisor.exit),
                Some(event) => if let Some(exit) = supervisor.handle(event?) { return Ok(exit) },
            },
        }
    }
}

struct Supervisor {
    program: PathBuf,
    /// How many requests to stop there were.
    stops: watch::Sender<usize>,
    /// How long a drain may take.
    drain: Duration,
    children: Vec<Child>,
    events: JoinSet<Event>,
    /// The exit code so far.
    exit: Exit,
}

/// A GPU and its process.
struct Child {
    gpu: Gpu,
    backoff: Backoff,
    /// When the process started; `None` while it waits for its restart.
    since: Option<Instant>,
    /// The last one failed soon after its start.
    failed: bool,
    /// It drained because someone other than this process asked it to.
    drained: bool,
}

impl Child {
    fn new(gpu: Gpu) -> Self {
        Self {
            gpu,
            backoff: Backoff::between(RESTART_MIN, RESTART_MAX),
            since: None,
            failed: false,
            drained: false,
        }
    }

    /// Whether its process is past its start.
    fn is_steady(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > STEADY)
    }
}

enum Event {
    Ended { at: usize, outcome: io::Result<ExitStatus> },
    Due { at: usize },
}

impl Supervisor {
    fn start(&mut self, at: usize) {
        let command = command(&self.program, &self.children[at].gpu);
        let (stops, drain) = (self.stops.subscribe(), self.drain);
        self.children[at].since = Some(Instant::now());
        self.events.spawn(async move { Event::Ended { at, outcome: run(command, stops, drain).await } });
    }

    fn running(&self) -> usize {
        self.children.iter().filter(|child| child.since.is_some()).count()
    }

    fn is_ending(&self) -> bool {
        *self.stops.borrow() > 0
    }

    fn stop(&mut self) {
        self.stops.send_modify(|stops| *stops += 1);
    }

    /// Handles an event. Returns the exit code if the supervisor must end now.
    fn handle(&mut self, event: Event) -> Option<Exit> {
        match event {
            Event::Due { .. } if self.is_ending() => None,
            Event::Due { at } => {
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
        let child = &mut self.children[at];
        let (gpu, was_steady) = (&child.gpu, child.is_steady());
        child.since = None;
        if is_ending {
            if exit != Some(Exit::Drained) {
                tracing::warn!(%gpu, how, "the worker did not drain: the broker delivers its unacknowledged jobs again");
                self.end_as(exit.unwrap_or(Exit::Killed));
            }
            return (self.running() == 0).then_some(self.exit);
        }
        // `Killed` is a drain that was cut short.
        if let Some(Exit::Drained | Exit::Killed) = exit {
            tracing::info!(%gpu, how, "worker drained: not starting it again");
            child.drained = true;
            exit.into_iter().filter(|exit| *exit != Exit::Drained).for_each(|exit| self.end_as(exit));
            return None;
        }
        child.failed = !was_steady;
        if was_steady {
            child.backoff = Backoff::between(RESTART_MIN, RESTART_MAX);
        }
        let wanted = || self.children.iter().filter(|child| !child.drained);
        if wanted().all(|child| child.failed && child.since.is_none()) {
            tracing::error!(
                how,
                "the workers of all GPUs failed at their start: stopping. Their own log lines say why"
            );
            return Some(exit.unwrap_or(Exit::Restart));
        }
        self.restart_later(at, &how);
        None
    }

    /// Keeps the first exit code that is not that of a drain.
    fn end_as(&mut self, exit: Exit) {
        if self.exit == Exit::Drained {
            self.exit = exit;
        }
    }

    /// Starts a process again after a while.
    fn restart_later(&mut self, at: usize, how: &str) {
        let running = self.running();
        let Child { gpu, backoff, .. } = &mut self.children[at];
        let wait = backoff.next_wait();
        tracing::warn!(%gpu, how, rest_ms = wait.as_millis(), running, "worker ended: starting it again");
        self.events.spawn(async move {
            sleep(wait).await;
            Event::Due { at }
        });
    }
}

/// Runs a process to its end, and forwards stop requests to it. If this process ends first, the child's standard input closes, and the
/// child notices.
async fn run(
    mut command: Command,
    mut stops: watch::Receiver<usize>,
    drain: Duration,
) -> io::Result<ExitStatus> {
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    // Taken out, because waiting for the child would close it.
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
            Ok(()) = stops.changed() => {
                let given = *stops.borrow_and_update();
                deadline.get_or_insert_with(|| Instant::now() + drain);
                if let Some(input) = &mut input {
                    // An `Err` means that the process has ended already.
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

#[cfg(test)]
mod tests {
    use super::*;

    const INSTANCE: &str = "MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae01";

    fn these(uuids: &[&str]) -> Result<Vec<Gpu>, SupervisorError> {
        gpus(&Gpus::These(uuids.iter().map(|uuid| Which::Uuid((*uuid).to_owned())).collect()))
    }

    #[test]
    fn an_instance_is_one_however_it_is_spelled() {
        let upper = "MIG-A0A1A2A3-A4A5-A6A7-A8A9-AAABACADAE01";
        let short = "MIG-a0a1a2a3a4a5a6a7a8a9aaabacadae01";
        for again in [INSTANCE, upper, short] {
            let error = these(&[INSTANCE, again]).unwrap_err();
            assert!(matches!(error, SupervisorError::Twice(_)) && error.is_usage(), "{again}: {error}");
        }
        let two = these(&[INSTANCE, "MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae02"]).unwrap();
        assert_eq!([two[0].ordinal, two[1].ordinal], [0, 1]);
    }

    #[test]
    fn instances_and_whole_gpus_are_not_in_one_list() {
        let error = these(&[INSTANCE, "GPU-1d5a00ff"]).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("GPU-1d5a00ff"), "{error}");
    }
}
