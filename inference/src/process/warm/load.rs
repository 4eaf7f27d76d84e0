//! Loads a warm process: starts it, sends `hello`, and waits for `ready` or an error.

use std::io;
use std::sync::Arc;

use tokio::net::UnixStream;
use tokio::time::{Duration, Instant, timeout};

use super::{Ready, Warm};
use crate::process::aside::Aside;
use crate::process::child::{Child, START_LIMIT, StartError};
use crate::process::config::{Mode, ProcessConfig};
use crate::process::device_view::{DeviceView, Reading};
use crate::process::frames::{Frames, NoFrame, name};
use crate::process::keeper::{Death, OutputUse, Spec};
use crate::process::load_watch::LoadWatch;
use crate::process::pool::PoolOptions;
use crate::process::protocol::{FromModel, OomReport, ToModel, VERSION};

/// Why a process is not loaded. Nothing of it is left, unless the worker is starting, and the process was killed and does not end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{0}")]
    Start(String),
    #[error(
        "loading takes {} MiB of device memory (as declared or measured), and {} of {} MiB are free",
        .bytes.div_ceil(1 << 20), .reading.free >> 20, .reading.total >> 20
    )]
    NoMemory { bytes: u64, reading: Reading },
    #[error("the model was not loaded within {} s (load_s)", .limit.as_secs_f64())]
    TimedOut { limit: Duration, stderr: String },
    #[error("the program {death} before the model was loaded{}", hint(.death))]
    Crashed { death: Death, stderr: String },
    #[error("out of device memory while loading: {}", .report.detail)]
    OutOfMemory { report: OomReport, stderr: String },
    #[error("loading failed: {detail}")]
    Failed { detail: String, stderr: String },
    #[error("{fault}")]
    Protocol { fault: String, stderr: String },
    #[error(
        "the model has the revision {found} by now, and this worker serves {served}: it must be started again to serve the other one"
    )]
    OtherRevision { found: String, served: String },
}

/// What a program that ends like this usually lacks.
fn hint(death: &Death) -> &'static str {
    match death {
        Death::Exited(0) => {
            ": it did not serve one (in Python by vramq.serve, else by the protocol on VRAMQ_FD)"
        }
        _ => "",
    }
}

impl From<StartError> for LoadError {
    fn from(error: StartError) -> Self {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}"));
        Self::Start(format!("{error}{}", source.unwrap_or_default()))
    }
}

impl LoadError {
    /// The last that the program printed.
    pub fn stderr(&self) -> &str {
        match self {
            Self::Start(_) | Self::NoMemory { .. } | Self::OtherRevision { .. } => "",
            Self::TimedOut { stderr, .. }
            | Self::Crashed { stderr, .. }
            | Self::OutOfMemory { stderr, .. }
            | Self::Failed { stderr, .. }
            | Self::Protocol { stderr, .. } => stderr,
        }
    }
}

/// The longest revision, in bytes. Message headers are cut there, so no job could demand a longer one.
const REVISION_BYTES_MAX: usize = vramq_schemas::fields::TEXT_BYTES_MAX;

impl Warm {
    /// Starts the program, and waits until the model is loaded or until `stop`. `aside` is that of its slot. `started` gets the keeper's
    /// process id, and `watch` sees what the process holds. `is_first`: the worker is starting, so a process that does not end is not waited
    /// for without limit.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub async fn load(
        config: &ProcessConfig,
        options: &PoolOptions,
        aside: &Aside,
        started: impl FnOnce(i32),
        watch: &mut LoadWatch<impl Fn(i32, u64)>,
        is_first: bool,
        stop: impl Future<Output = ()>,
    ) -> Result<Self, LoadError> {
        debug_assert_eq!(config.mode, Mode::Warm);
        let mut stop = std::pin::pin!(stop);
        let spec = tokio::select! {
            spec = timeout(START_LIMIT, spec(config, options, aside)) => spec.unwrap_or_else(|_| Err(slow_disk()))?,
            () = &mut stop => return Err(LoadError::Start("the pool was closed".to_owned())),
        };
        let began = Instant::now();
        let (child, socket) = Child::start(&options.launcher.keeper, &spec, &config.name).await?;
        let keeper = child.keeper_pid();
        started(keeper);
        let mut warm = Self::not_loaded(child, socket, aside);
        let (hello, limit) = (hello(config, options.account.view()), config.load);
        let loaded = tokio::select! {
            loaded = timeout(limit, warm.hello(hello)) => loaded.map_err(|_| Refused::TimedOut).flatten(),
            () = &mut stop => Err(Refused::Stopped),
            never = watch.go_on(keeper) => match never {},
        };
        let refused = match loaded {
            Ok(ready) => {
                warm.ready = ready;
                warm.load_took = began.elapsed();
                return Ok(warm);
            }
            Err(refused) => refused,
        };
        if !matches!(refused, Refused::NoFrame(NoFrame::Died(_))) {
            watch.ends(keeper).await;
        }
        if is_first {
            end_first(&mut warm.child, config).await;
        } else {
            warm.child.end(config.kill, &config.name).await;
        }
        Err(refused.into_error(limit, warm.child.stderr_tail()))
    }

    /// A process that was started; its model is not loaded yet.
    fn not_loaded(child: Child, socket: UnixStream, aside: &Aside) -> Self {
        let (read, socket) = socket.into_split();
        Self {
            child,
            socket,
            frames: Frames::read(read),
            ready: Ready::default(),
            aside: aside.clone(),
            pings: 0,
            is_stuck: false,
            load_took: Duration::ZERO,
            passes: 0,
            printed_before: 0,
        }
    }

    async fn hello(&mut self, hello: ToModel) -> Result<Ready, Refused> {
        self.send(hello).await;
        match self.next().await.map_err(Refused::NoFrame)?.message {
            FromModel::Ready { version: VERSION, revision: Some(revision), .. }
                if revision.len() > REVISION_BYTES_MAX =>
            {
                let length = revision.len();
                let fault = format!("a revision of {length} bytes; the limit is {REVISION_BYTES_MAX}");
                Err(Refused::NoFrame(NoFrame::Fault(fault)))
            }
            FromModel::Ready { version: VERSION, weights, accepts, revision } => {
                Ok(Ready { weights, accepts, revision })
            }
            FromModel::Ready { version, .. } => {
                let fault =
                    format!("the program speaks version {version} of the protocol, the worker {VERSION}");
                Err(Refused::NoFrame(NoFrame::Fault(fault)))
            }
            FromModel::Oom { pass: None, memory, .. } => Err(Refused::OutOfMemory(memory)),
            FromModel::Failed { pass: None, detail, .. } => Err(Refused::Failed(detail)),
            other => Err(Refused::NoFrame(NoFrame::Fault(format!("{} before `ready`", name(&other))))),
        }
    }
}

/// What to start. Its scratch folder exists.
async fn spec(config: &ProcessConfig, options: &PoolOptions, aside: &Aside) -> Result<Spec, LoadError> {
    let (config, launcher, account) =
        (config.clone(), options.launcher.clone(), Arc::clone(&options.account));
    let make = move || launcher.spec(&config, account.view(), config.command.clone(), OutputUse::Protocol);
    let made = aside.run(make, discard).await;
    let made = made.unwrap_or_else(|| Err(io::Error::other("internal error; please report it")));
    made.map_err(|error| LoadError::Start(format!("make the scratch folder: {error}")))
}

fn discard(spec: io::Result<Spec>) {
    if let Ok(Spec { scratch, .. }) = spec {
        let _ = std::fs::remove_dir_all(scratch);
    }
}

fn hello(config: &ProcessConfig, device: &dyn DeviceView) -> ToModel {
    // Within the process the device is the only one of its kind.
    let device = if device.name().starts_with("cuda") { "cuda:0" } else { "cpu" };
    ToModel::Hello {
        version: VERSION,
        model: config.name.clone(),
        device: device.to_owned(),
        items_max: config.items_max,
    }
}

fn slow_disk() -> LoadError {
    LoadError::Start(format!("to make the scratch folder took longer than {} s", START_LIMIT.as_secs()))
}

/// Ends the first process of a model after a failed load. Limited in time, because the worker's start waits for it.
async fn end_first(child: &mut Child, config: &ProcessConfig) {
    if !child.end_within_limits(config.kill, &config.name).await {
        let (pid, keeper) = (child.pid(), child.keeper_pid());
        tracing::error!(model = config.name, pid, keeper, "the program does not end although it was killed");
    }
}

/// Why a hello was not answered with `ready`.
enum Refused {
    NoFrame(NoFrame),
    OutOfMemory(OomReport),
    Failed(String),
    TimedOut,
    Stopped,
}

impl Refused {
    fn into_error(self, limit: Duration, stderr: String) -> LoadError {
        match self {
            Self::TimedOut => LoadError::TimedOut { limit, stderr },
            Self::Stopped => LoadError::Start("the pool was closed".to_owned()),
            Self::NoFrame(NoFrame::Died(death)) => LoadError::Crashed { death, stderr },
            Self::NoFrame(NoFrame::Fault(fault)) => LoadError::Protocol { fault, stderr },
            Self::OutOfMemory(report) => LoadError::OutOfMemory { report, stderr },
            Self::Failed(detail) => LoadError::Failed { detail, stderr },
        }
    }
}
