//! The worker's handle of a running program and its keeper.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf, pipe};
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::time::{Duration, timeout};

use super::aside::tidy;
use super::cgroup::Group;
use super::keeper::{self, Death, Order, Report, Spec};
use super::orphans;
use super::program;
use super::stderr::Stderr;

/// The variable that names the scratch folder. Each program has its own, so the variable also shows to which program a process
/// belongs.
pub const SCRATCH_VARIABLE: &str = "VRAMQ_SCRATCH";

/// How long a keeper may take to say that the program started: fork and exec, on a machine under load.
pub(super) const START_LIMIT: Duration = Duration::from_secs(30);

/// How long to wait for the last output of a dead program.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

/// How long a pass waits for a killed process and all that it started to be gone.
pub(super) const GONE_LIMIT: Duration = Duration::from_secs(10);

/// How often an error names a process that does not end.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// The executable that becomes a keeper.
#[derive(Clone, Debug)]
pub struct KeeperProgram {
    /// An executable that calls [`keeper_main`](keeper::keeper_main) when its only argument is [`ARGUMENT`](keeper::ARGUMENT).
    pub path: PathBuf,
}

impl Default for KeeperProgram {
    /// This executable, even if its file was replaced.
    fn default() -> Self {
        Self { path: PathBuf::from("/proc/self/exe") }
    }
}

/// Why a program did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("start a keeper")]
    Keeper(#[source] io::Error),
    #[error("the keeper did not answer within {} s", START_LIMIT.as_secs())]
    Silent,
    #[error("start {program}: {error}")]
    Program { program: String, error: String },
}

/// A running program. When this is dropped, its keeper kills it and all its descendants.
#[derive(Debug)]
pub struct Child {
    pid: i32,
    keeper_pid: i32,
    keeper: tokio::process::Child,
    orders: OwnedWriteHalf,
    reports: Lines<BufReader<OwnedReadHalf>>,
    stderr: Stderr,
    scratch: PathBuf,
    cgroup: Option<Group>,
    death: Option<Death>,
    is_gone: bool,
    /// Kills the processes that a keeper left when it died.
    orphans: Option<oneshot::Receiver<()>>,
}

/// A step in the end of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Died(Death),
    /// These processes were killed and do not end.
    Stuck(Vec<i32>),
    /// No process of a one-shot program is left; its files are.
    Ended,
    /// Neither processes nor files remain.
    Gone,
}

impl Child {
    /// Starts a program. The other end of the returned stream is what [`OutputUse`](keeper::OutputUse) says.
    ///
    /// # Errors
    /// See [`StartError`]. Nothing is left behind then.
    pub async fn start(
        program: &KeeperProgram,
        spec: &Spec,
        model: &str,
    ) -> Result<(Self, UnixStream), StartError> {
        let started = timeout(START_LIMIT, Self::start_unlimited(program, spec, model)).await;
        let started = started.map_err(|_| StartError::Silent).flatten();
        if started.is_err() {
            let (scratch, group) = (spec.scratch.clone(), spec.cgroup.clone().map(Group::at));
            tidy(move || {
                // Best effort: a keeper that was started may have removed it.
                let _ = std::fs::remove_dir_all(scratch);
                let _ = group.map(|group| group.remove());
            })
            .await;
        }
        started
    }

    async fn start_unlimited(
        program: &KeeperProgram,
        spec: &Spec,
        model: &str,
    ) -> Result<(Self, UnixStream), StartError> {
        let failed = StartError::Keeper;
        let Pipes { control, output, errors, theirs } = Pipes::open().map_err(failed)?;
        let [stdin, stdout, stderr] = theirs.map(Stdio::from);
        let mut command = Command::new(&program.path);
        command.arg0("vramq-keeper").arg(keeper::ARGUMENT).env_clear().current_dir("/");
        let mut keeper = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().map_err(failed)?;
        // The command has our copies of the keeper's ends.
        drop(command);
        let keeper_pid = keeper.id().and_then(|id| id.try_into().ok()).unwrap_or(0);
        let mut stderr = Stderr::read(errors, model.to_owned());
        let (reports, mut orders) = control.into_split();
        let mut reports = BufReader::new(reports).lines();
        let mut line = serde_json::to_vec(spec).map_err(|error| failed(error.into()))?;
        line.push(b'\n');
        let reported = async {
            orders.write_all(&line).await?;
            next_report(&mut reports).await
        };
        let not_started = |error| {
            let program = spec.command.first().cloned().unwrap_or_default();
            // For a script without its interpreter the system also reports "no such file", so the exact fault is looked up.
            let error = program::fault(Path::new(&program)).map_or(error, |fault| fault.what);
            StartError::Program { program, error }
        };
        let pid = match reported.await {
            Ok(Some(Report::Started { pid })) => pid,
            Ok(Some(Report::NotStarted { error })) => {
                let _ = keeper.wait().await;
                return Err(not_started(error));
            }
            other => {
                // The keeper has ended. Mostly what it printed says why.
                stderr.drained(DRAIN_LIMIT).await;
                return Err(failed(match (stderr.tail().trim_end(), other) {
                    ("", Err(error)) => error,
                    ("", Ok(_)) => io::Error::other("it ended before the program was started"),
                    (printed, _) => io::Error::other(printed.to_owned()),
                }));
            }
        };
        let (scratch, cgroup) = (spec.scratch.clone(), spec.cgroup.clone().map(Group::at));
        let child = Self {
            pid,
            keeper_pid,
            keeper,
            orders,
            reports,
            stderr,
            scratch,
            cgroup,
            death: None,
            is_gone: false,
            orphans: None,
        };
        Ok((child, output))
    }

    /// The program's process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The id of its keeper, the ancestor of all its processes.
    pub fn keeper_pid(&self) -> i32 {
        self.keeper_pid
    }

    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// How it died, if it has.
    pub fn death(&self) -> Option<Death> {
        self.death
    }

    /// The last that it printed.
    pub fn stderr_tail(&self) -> String {
        self.stderr.tail()
    }

    /// How much it printed until now, also what is not read yet: a mark for [`stderr_since`](Self::stderr_since).
    pub fn stderr_mark(&self) -> u64 {
        self.stderr.mark()
    }

    /// The last that it printed after a mark, until now.
    pub async fn stderr_since(&mut self, mark: u64) -> String {
        self.stderr.caught_up(DRAIN_LIMIT).await;
        self.stderr.tail_since(mark)
    }

    /// Waits for the next step of its end. Cancel-safe.
    pub async fn fate(&mut self) -> Fate {
        if self.is_gone {
            return Fate::Gone;
        }
        match next_report(&mut self.reports).await {
            Ok(Some(Report::Died(death))) => {
                self.death = Some(death);
                Fate::Died(death)
            }
            Ok(Some(Report::Stuck { pids })) => Fate::Stuck(pids),
            Ok(Some(Report::Ended)) => Fate::Ended,
            Ok(Some(Report::Gone)) => self.gone().await,
            // The reports ended without `Gone`: the keeper was killed, and the program with it.
            Ok(Some(_) | None) | Err(_) if self.death.is_none() => {
                self.death = Some(Death::KeeperLost);
                Fate::Died(Death::KeeperLost)
            }
            _ => {
                self.end_orphans().await;
                self.gone().await
            }
        }
    }

    async fn gone(&mut self) -> Fate {
        let _ = self.keeper.wait().await;
        self.stderr.drained(DRAIN_LIMIT).await;
        self.is_gone = true;
        Fate::Gone
    }

    /// Waits until it is dead.
    pub async fn died(&mut self) -> Death {
        loop {
            if let Some(death) = self.death {
                return death;
            }
            self.fate().await;
        }
    }

    /// Waits until nothing is left of the program, and logs meanwhile which processes do not end.
    pub async fn all_gone(&mut self, model: &str) {
        loop {
            match timeout(TELL_EVERY, self.fate()).await {
                Ok(Fate::Gone) => return,
                Ok(Fate::Stuck(pids)) => {
                    tracing::error!(
                        model,
                        ?pids,
                        "processes of the model do not end although they were killed: device memory that they hold is not free until they end"
                    );
                }
                Ok(Fate::Died(_) | Fate::Ended) => {}
                Err(_) => {
                    let (pid, keeper) = (self.pid, self.keeper_pid);
                    tracing::error!(
                        model,
                        pid,
                        keeper,
                        "a process of the model, or the keeper of this process, does not end"
                    );
                }
            }
        }
    }

    /// Lets the keeper of a one-shot program remove its files.
    pub async fn finish(&mut self) {
        self.order(Order::Finish).await;
    }

    /// Ends the processes of a one-shot program: SIGTERM, after `grace` SIGKILL. Its files stay.
    pub async fn end_program(&mut self, grace: Duration) {
        self.terminate().await;
        if timeout(grace, self.died()).await.is_err() {
            self.kill().await;
            let _ = timeout(GONE_LIMIT, self.died()).await;
        }
    }

    /// SIGTERM to its process group.
    pub async fn terminate(&mut self) {
        self.order(Order::Terminate).await;
    }

    /// SIGKILL to it and all its descendants.
    pub async fn kill(&mut self) {
        self.order(Order::Kill).await;
    }

    /// Ends it as [`end`](Self::end) does, but waits only a limited time for processes that do not end although they were killed.
    /// Returns whether nothing is left; if not, the keeper goes on.
    pub async fn end_within_limits(&mut self, grace: Duration, model: &str) -> bool {
        timeout(grace + GONE_LIMIT, self.end(grace, model)).await.is_ok()
    }

    /// Ends the program by SIGTERM, after `grace` by SIGKILL. Returns when nothing is left of it.
    pub async fn end(&mut self, grace: Duration, model: &str) {
        if self.death.is_none() {
            self.terminate().await;
            if timeout(grace, self.died()).await.is_err() {
                tracing::warn!(model, pid = self.pid, "the model ignores SIGTERM, and is killed");
                self.kill().await;
            }
        }
        self.all_gone(model).await;
    }

    async fn order(&mut self, order: Order) {
        if let Ok(mut line) = serde_json::to_vec(&order) {
            line.push(b'\n');
            // `Err` means that the keeper is gone, which `fate` reports.
            let _ = self.orders.write_all(&line).await;
        }
    }

    /// Replaces a lost keeper: kills the processes that the program had started, and removes the scratch folder and the control
    /// group. Cancel-safe: a repeated call waits for the same thread.
    async fn end_orphans(&mut self) {
        let (scratch, cgroup) = (self.scratch.clone(), self.cgroup.clone());
        let ending = self.orphans.get_or_insert_with(|| {
            let (ended, ending) = oneshot::channel();
            // Not a thread of the runtime, whose shutdown would wait for it.
            std::thread::spawn(move || {
                orphans::end(&scratch, cgroup.as_ref());
                let _ = ended.send(());
            });
            ending
        });
        let _ = ending.await;
        self.orphans = None;
    }
}

async fn next_report(reports: &mut Lines<BufReader<OwnedReadHalf>>) -> io::Result<Option<Report>> {
    let line = reports.next_line().await?;
    line.map(|line| serde_json::from_str(&line).map_err(io::Error::from)).transpose()
}

/// Both ends of what connects a keeper.
struct Pipes {
    control: UnixStream,
    output: UnixStream,
    errors: pipe::Receiver,
    /// Standard input, output and error of the keeper.
    theirs: [OwnedFd; 3],
}

impl Pipes {
    fn open() -> io::Result<Self> {
        let pair = || {
            let (ours, theirs) = StdStream::pair()?;
            ours.set_nonblocking(true)?;
            io::Result::Ok((UnixStream::from_std(ours)?, theirs))
        };
        let (control, their_control) = pair()?;
        let (output, their_output) = pair()?;
        let (errors, their_errors) = io::pipe()?;
        let errors = pipe::Receiver::from_owned_fd(errors.into())?;
        Ok(Self {
            control,
            output,
            errors,
            theirs: [their_control.into(), their_output.into(), their_errors.into()],
        })
    }
}
