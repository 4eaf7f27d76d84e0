//! One warm process: loaded once, then pass after pass.

use std::path::Path;

use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::OwnedWriteHalf;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use super::child::{Child, StartError};
use super::config::{Mode, ProcessConfig};
use super::frame::Frame;
use super::frames::{Frames, LAST_WORD, Unheard, name, next};
use super::item;
use super::keeper::{Death, OutputUse};
use super::launch::{self, Launcher};
use super::memory::DeviceBook;
use super::pass::{Cancellation, Events, PassEnd, PassRequest, Stop};
use super::protocol::{FailureKind, FromModel, ItemKind, OomReport, ToModel, VERSION};
use super::transcript::{End, Step, Transcript};

/// How long an idle process may take to answer a ping. A page that was swapped out, a machine under load.
const PONG_LIMIT: Duration = Duration::from_secs(20);

/// A loaded process.
#[derive(Debug)]
pub struct Warm {
    child: Child,
    socket: OwnedWriteHalf,
    frames: Frames,
    ready: Ready,
    pings: u64,
    /// Passes that it ran.
    pub passes: u64,
}

/// What a process says of itself when it is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub weights: u64,
    /// Empty: all.
    pub accepts: Vec<ItemKind>,
    pub revision: Option<String>,
}

/// Why a process is not loaded. Nothing is left of it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{0}")]
    Start(String),
    #[error("the model was not loaded within {} s (load_s)", .limit.as_secs_f64())]
    TimedOut { limit: Duration, stderr: String },
    #[error("the program {death} before the model was loaded")]
    Crashed { death: Death, stderr: String },
    #[error("out of device memory while loading: {}", .report.detail)]
    OutOfMemory { report: OomReport, stderr: String },
    #[error("loading failed: {detail}")]
    Failed { detail: String, stderr: String },
    #[error("{fault}")]
    Protocol { fault: String, stderr: String },
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
            Self::Start(_) => "",
            Self::TimedOut { stderr, .. }
            | Self::Crashed { stderr, .. }
            | Self::OutOfMemory { stderr, .. }
            | Self::Failed { stderr, .. }
            | Self::Protocol { stderr, .. } => stderr,
        }
    }
}

impl Warm {
    /// Starts the program and waits until the model is loaded, or until it should `stop`. `started` hears the keeper's process id.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub async fn load(
        launcher: &Launcher,
        config: &ProcessConfig,
        book: &DeviceBook,
        started: impl FnOnce(i32),
        stop: impl Future<Output = ()>,
    ) -> Result<Self, LoadError> {
        debug_assert_eq!(config.mode, Mode::Warm);
        let view = book.view();
        let spec = launch::spec(config, view, config.command.clone(), OutputUse::Protocol)
            .map_err(|error| LoadError::Start(format!("make the scratch folder: {error}")))?;
        let (child, socket) = Child::start(&launcher.keeper, &spec, &config.name).await?;
        started(child.keeper_pid());
        let (read, socket) = socket.into_split();
        let mut warm =
            Self { child, socket, frames: Frames::read(read), ready: Ready::default(), pings: 0, passes: 0 };
        // Within the process the device is the only one of its kind.
        let device = if view.name().starts_with("cuda") { "cuda:0" } else { "cpu" }.to_owned();
        let hello = ToModel::Hello {
            version: VERSION,
            model: config.name.clone(),
            device,
            items_max: config.items_max,
        };
        let limit = config.load;
        let loaded = tokio::select! {
            loaded = timeout(limit, warm.hello(hello)) => loaded.map_err(|_| Refused::TimedOut).flatten(),
            () = stop => Err(Refused::Stopped),
        };
        let error = match loaded {
            Ok(ready) => {
                warm.ready = ready;
                return Ok(warm);
            }
            Err(error) => error,
        };
        warm.child.end(config.kill, &config.name).await;
        let stderr = warm.child.stderr_tail();
        Err(match error {
            Refused::TimedOut => LoadError::TimedOut { limit, stderr },
            Refused::Stopped => LoadError::Start("the pool was closed".to_owned()),
            Refused::Unheard(Unheard::Died(death)) => LoadError::Crashed { death, stderr },
            Refused::Unheard(Unheard::Fault(fault)) => LoadError::Protocol { fault, stderr },
            Refused::OutOfMemory(report) => LoadError::OutOfMemory { report, stderr },
            Refused::Failed(detail) => LoadError::Failed { detail, stderr },
        })
    }

    async fn hello(&mut self, hello: ToModel) -> Result<Ready, Refused> {
        self.send(hello).await;
        match self.next().await.map_err(Refused::Unheard)?.message {
            FromModel::Ready { version: VERSION, weights, accepts, revision } => {
                Ok(Ready { weights, accepts, revision })
            }
            FromModel::Ready { version, .. } => {
                let fault =
                    format!("the program speaks version {version} of the protocol, the worker {VERSION}");
                Err(Refused::Unheard(Unheard::Fault(fault)))
            }
            FromModel::Oom { pass: None, memory, .. } => Err(Refused::OutOfMemory(memory)),
            FromModel::Failed { pass: None, detail, .. } => Err(Refused::Failed(detail)),
            other => Err(Refused::Unheard(Unheard::Fault(format!("{} before `ready`", name(&other))))),
        }
    }

    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    pub fn pid(&self) -> i32 {
        self.child.pid()
    }

    pub fn keeper_pid(&self) -> i32 {
        self.child.keeper_pid()
    }

    pub fn stderr_tail(&self) -> String {
        self.child.stderr_tail()
    }

    /// Runs one pass. Whether the process can go on is [`is_alive`](Self::is_alive).
    pub async fn run(
        &mut self,
        number: u64,
        request: &PassRequest,
        limits: &PassLimits,
        events: &Events,
        cancellation: &mut Cancellation,
    ) -> PassEnd {
        self.passes += 1;
        let scratch = self.child.scratch().to_owned();
        let (items, blobs) = match item::pack(number, &request.items, &scratch) {
            Ok(packed) => packed,
            Err(error) => {
                item::unpack(number, request.items.len(), &scratch);
                let detail = format!("write the items to the scratch folder: {error}");
                return PassEnd::Failed {
                    kind: FailureKind::HostMemory,
                    item: None,
                    detail,
                    stderr: String::new(),
                };
            }
        };
        let count = items.len();
        let run = ToModel::Run {
            pass: number,
            items,
            params: request.params.clone(),
            budget: request.budget,
            deadline_ms: limits.soft(count).as_millis().try_into().unwrap_or(u64::MAX),
            measure: request.measure,
        };
        let pass = Pass { number, items: count, scratch: &scratch, limits, events };
        let end = self.run_frame(Frame { message: run, blobs }, pass, cancellation).await;
        item::unpack(number, count, &scratch);
        end
    }

    async fn run_frame(
        &mut self,
        frame: Frame<ToModel>,
        pass: Pass<'_>,
        cancellation: &mut Cancellation,
    ) -> PassEnd {
        let bytes = match frame.encode() {
            Ok(bytes) => bytes,
            Err(error) => {
                let detail = format!("the items do not fit a frame: {error}");
                return PassEnd::Failed {
                    kind: FailureKind::Input,
                    item: None,
                    detail,
                    stderr: String::new(),
                };
            }
        };
        let mut transcript = Transcript::new(pass.number, pass.items);
        let mut soft = Instant::now() + pass.limits.soft(pass.items);
        let mut hard = None;
        let mut stop = None;
        let mut written = 0;
        let mut asked = false;
        loop {
            // A program that has not read all of the pass cannot hear it.
            if stop.is_some() && !asked && written == bytes.len() {
                asked = true;
                self.send(ToModel::Cancel { pass: pass.number }).await;
            }
            tokio::select! {
                // Limits before all else: a program that never stops talking has them too.
                biased;
                () = sleep_until(hard.unwrap_or(soft)), if hard.is_some() => {
                    self.child.end(pass.limits.kill, &pass.limits.model).await;
                    let stderr = self.child.stderr_tail();
                    return match stop {
                        Some(Stop::Cancelled) => PassEnd::Cancelled { killed: true },
                        _ => PassEnd::TimedOut { limit: pass.limits.soft(pass.items), killed: true, stderr },
                    };
                }
                why = cancellation.wait(), if stop.is_none() => {
                    stop = Some(why);
                    hard = Some(Instant::now() + pass.limits.kill);
                }
                () = sleep_until(soft), if stop.is_none() => {
                    stop = Some(Stop::TimedOut);
                    hard = Some(Instant::now() + pass.limits.kill);
                }
                next = next(&mut self.frames, &mut self.child) => {
                    let step = match next {
                        Ok(frame) => transcript.read(frame, pass.scratch).map_err(|fault| Unheard::Fault(fault.to_string())),
                        Err(unheard) => Err(unheard),
                    };
                    match step {
                        Ok(Step::Output { item, output }) => {
                            pass.events.output(item, output);
                            soft = soft.min(Instant::now() + pass.limits.item);
                        }
                        Ok(Step::Progress { item, fraction, note }) => {
                            pass.events.progress(item, fraction, note, pass.items - transcript.finished());
                        }
                        Ok(Step::End(end)) => return self.ended(end, stop, pass.limits).await,
                        Err(unheard) => return self.failed(unheard, pass.limits).await,
                    }
                }
                result = self.socket.write(&bytes[written..]), if written < bytes.len() => match result {
                    Ok(length) => written += length,
                    // It closed its end; what it says, or its death, tells why.
                    Err(_) => written = bytes.len(),
                },
            }
        }
    }

    /// The model ended the pass by itself.
    async fn ended(&mut self, end: End, stop: Option<Stop>, limits: &PassLimits) -> PassEnd {
        match (end, stop) {
            (End::Done { peak }, _) => PassEnd::Done { peak },
            (End::OutOfMemory { item, report }, _) => {
                PassEnd::OutOfMemory { item, report: Box::new(report), stderr: self.child.stderr_tail() }
            }
            (End::Failed { kind: FailureKind::Cancelled, .. }, Some(Stop::Cancelled)) => {
                PassEnd::Cancelled { killed: false }
            }
            (End::Failed { kind: FailureKind::Cancelled, .. }, Some(Stop::TimedOut)) => {
                let stderr = self.child.stderr_tail();
                PassEnd::TimedOut { limit: limits.item, killed: false, stderr }
            }
            (End::Failed { kind, item, detail }, _) => {
                // The process is of no more use, and knows it.
                if kind == FailureKind::Device {
                    self.child.end(limits.kill, &limits.model).await;
                }
                PassEnd::Failed { kind, item, detail, stderr: self.child.stderr_tail() }
            }
        }
    }

    /// The process died, or said what it must not.
    async fn failed(&mut self, unheard: Unheard, limits: &PassLimits) -> PassEnd {
        match unheard {
            Unheard::Died(death) => {
                self.child.all_gone(&limits.model).await;
                PassEnd::Crashed { death, stderr: self.child.stderr_tail() }
            }
            Unheard::Fault(fault) => {
                self.child.end(limits.kill, &limits.model).await;
                PassEnd::Protocol { fault, stderr: self.child.stderr_tail() }
            }
        }
    }

    /// Whether it can run another pass.
    pub fn is_alive(&self) -> bool {
        self.child.death().is_none()
    }

    /// Waits for an idle process to do what it should not: die, or speak unasked. Cancel-safe.
    pub async fn misbehaved(&mut self) -> String {
        match next(&mut self.frames, &mut self.child).await {
            Ok(frame) => format!("{} while no pass ran", name(&frame.message)),
            Err(Unheard::Died(death)) => format!("the program {death}"),
            Err(Unheard::Fault(fault)) => fault,
        }
    }

    /// Asks an idle process whether it is there.
    ///
    /// # Errors
    /// Says what it did instead of answering.
    pub async fn ping(&mut self) -> Result<Option<u64>, String> {
        self.pings += 1;
        let number = self.pings;
        let answer = async {
            self.send(ToModel::Ping { number }).await;
            next(&mut self.frames, &mut self.child).await
        };
        match timeout(PONG_LIMIT, answer).await {
            Err(_) => Err(format!("no answer to a ping within {} s", PONG_LIMIT.as_secs())),
            Ok(Ok(Frame { message: FromModel::Pong { number: answered, reserved }, .. }))
                if answered == number =>
            {
                Ok(reserved)
            }
            Ok(Ok(frame)) => Err(format!("{} instead of the answer to a ping", name(&frame.message))),
            Ok(Err(Unheard::Died(death))) => Err(format!("the program {death}")),
            Ok(Err(Unheard::Fault(fault))) => Err(fault),
        }
    }

    /// Asks it to give cached memory back.
    pub async fn trim(&mut self) {
        self.send(ToModel::Trim).await;
    }

    /// Ends it: asked by a message, by SIGTERM, by SIGKILL. Returns when nothing is left of it.
    pub async fn end(&mut self, kill: Duration, model: &str) {
        if self.is_alive() {
            self.send(ToModel::Shutdown).await;
            if timeout(kill, self.child.died()).await.is_ok() {
                self.child.all_gone(model).await;
                return;
            }
        }
        self.child.end(kill, model).await;
    }

    /// Ends it without asking.
    pub async fn end_now(&mut self, kill: Duration, model: &str) {
        self.child.end(kill, model).await;
    }

    /// Sends a message that is small, or that nothing else happens beside.
    async fn send(&mut self, message: ToModel) {
        if let Ok(bytes) = Frame::from(message).encode() {
            // It cannot block for long: the socket's buffer has room for hundreds of these. An error: the process is gone, which
            // its death reports.
            let _ = timeout(LAST_WORD, self.socket.write_all(&bytes)).await;
        }
    }

    async fn next(&mut self) -> Result<Frame<FromModel>, Unheard> {
        next(&mut self.frames, &mut self.child).await
    }
}

/// How long things may take.
#[derive(Clone, Debug)]
pub struct PassLimits {
    pub model: String,
    pub item: Duration,
    pub kill: Duration,
}

impl PassLimits {
    /// A pass of so many items, which may be worked on one after the other; as soon as outputs come one by one, each has its own.
    fn soft(&self, items: usize) -> Duration {
        self.item.saturating_mul(items.try_into().unwrap_or(u32::MAX))
    }
}

/// What the loop of a pass needs besides the process.
struct Pass<'a> {
    number: u64,
    items: usize,
    scratch: &'a Path,
    limits: &'a PassLimits,
    events: &'a Events,
}

/// Why a hello was not answered with `ready`.
enum Refused {
    Unheard(Unheard),
    OutOfMemory(OomReport),
    Failed(String),
    TimedOut,
    Stopped,
}
