//! `vramq-worker`: configuration -> open -> serve -> drain.

use std::io::Write as _;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use vramq_schemas::status::WorkerState;
use vramq_worker::admission::Mib;
use vramq_worker::amqp::direct_replies::DirectReplies;
use vramq_worker::amqp::message::Identity;
use vramq_worker::amqp::publish::BrokerLimits;
use vramq_worker::amqp::session::{Session, SessionError};
use vramq_worker::amqp::topology::TopologyError;
use vramq_worker::board::{Board, Now};
use vramq_worker::capacity::Capacity;
use vramq_worker::ceiling::Ceilings;
use vramq_worker::config::cli::{Cli, Command, Options, has_span_collector, write_completions, write_manual};
use vramq_worker::config::{self, Config, DeviceKind, Gpu, Gpus};
use vramq_worker::crew;
use vramq_worker::device::thread::DeviceThread;
use vramq_worker::device::{Device, cuda};
use vramq_worker::doctor::Report;
use vramq_worker::doctor::cuda::CudaReport;
use vramq_worker::drain::Signals;
use vramq_worker::exit::Exit;
use vramq_worker::health::Health;
use vramq_worker::heartbeat::Teller;
use vramq_worker::http::{self, Site};
use vramq_worker::metrics::Metrics;
use vramq_worker::model::Model;
use vramq_worker::open::{OpenError, Opened};
use vramq_worker::pressure::{Leak, Pressure};
use vramq_worker::remembered::Remembered;
use vramq_worker::retry::Waits;
use vramq_worker::spans::Spans;
use vramq_worker::suspicion::Losses;
use vramq_worker::telemetry::{self, Logs};
use vramq_worker::worker::{Host, Outcome, serve};

/// A session that stood this long, or settled a job, was no failure: the next reconnect is quick again.
const SESSION_STEADY: Duration = Duration::from_secs(60);

/// RabbitMQ's own, which cannot be asked for over AMQP.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(1800);

fn main() {
    let result = match Cli::parse().command {
        Command::Run(options) => prepare(&options).map(|(config, logs)| match config.device.gpus.clone() {
            Some(gpus) => on_several(&gpus, |gpus| crew::serve(config.drain, gpus)),
            None => run(config, logs, options.gpu.is_some()).unwrap_or_else(|exit| exit),
        }),
        Command::Doctor { options, json } => prepare(&options).map(|(config, _)| match &config.device.gpus {
            Some(gpus) => on_several(gpus, crew::one_after_the_other),
            None => doctor(&config, json),
        }),
        Command::CheckConfig(options) => prepare(&options).map(|(config, _)| {
            let models = config.models.len();
            println!("the configuration is right: {models} model(s), broker {}", config.broker.url);
            Exit::Drained
        }),
        Command::Completions { shell } => {
            write_completions(shell);
            Ok(Exit::Drained)
        }
        Command::Man { folder } => write_manual(&folder)
            .map(|()| Exit::Drained)
            .map_err(|error| format!("write manual pages to {}: {error}", folder.display()).into()),
    };
    let exit = result.unwrap_or_else(|error| {
        eprintln!("vramq-worker: {error}");
        Exit::Usage
    });
    end(exit)
}

/// Ends the process at once: without what libraries have to do when a process ends. A driver waits for its device there, and a
/// device that is lost, or stuck in a pass, does not answer.
fn end(exit: Exit) -> ! {
    // Of what is printed the last piece may still be here; logs go to standard error, which keeps nothing.
    let _ = std::io::stdout().flush();
    // SAFETY: any thread may call it at any time. Nothing of this process goes on after it.
    unsafe { libc::_exit(exit as i32) }
}

fn prepare(options: &Options) -> Result<(Config, Logs), Box<dyn std::error::Error>> {
    let logs = telemetry::init(&options.log, options.log_format, options.gpu.as_ref())?;
    Ok((options.read()?, logs))
}

/// Does the same on each of several GPUs, in processes of their own.
fn on_several<F>(gpus: &Gpus, run: impl FnOnce(Vec<Gpu>) -> F) -> Exit
where
    F: Future<Output = std::io::Result<Exit>>,
{
    let gpus = match crew::gpus(gpus) {
        Ok(gpus) => gpus,
        Err(error) => {
            tracing::error!("cannot start: {error}");
            return if error.is_usage() { Exit::Usage } else { Exit::Unusable };
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.and_then(|runtime| runtime.block_on(run(gpus))).unwrap_or_else(|error| {
        tracing::error!("cannot run a process for each GPU: {error}");
        Exit::Unusable
    })
}

fn doctor(config: &Config, json: bool) -> Exit {
    let opened = match Opened::open(config) {
        Ok(opened) => opened,
        Err(error) => {
            if matches!(error, OpenError::Cuda(_)) {
                // What there is explains what is not.
                print!("{}", CudaReport::new(None, config.device.libraries()));
            }
            eprintln!("vramq-worker: {:#}", anyhow::Error::from(error));
            return Exit::Unusable;
        }
    };
    let ceilings = ceilings(config, &*opened.device.shared());
    let report = Report::new(&opened, &ceilings, config.device.reserve, config.device.libraries());
    if json {
        // Plain numbers and texts: cannot fail.
        println!("{}", serde_json::to_string_pretty(&report).unwrap_or_default());
    } else {
        print!("{report}");
    }
    if report.is_well() { Exit::Drained } else { Exit::Unusable }
}

/// `Err` is the same exit, reached early. A worker with a parent is one of several, each with a GPU.
fn run(config: Config, logs: Logs, has_parent: bool) -> Result<Exit, Exit> {
    let unusable = |error: anyhow::Error| {
        tracing::error!("cannot start: {error:#}");
        Exit::Unusable
    };
    if let Some(drill) = config.drill.clone() {
        drill.start();
    }
    // One thread for the loop and for lapin's tasks: what they hand each other costs no switch between threads. Whatever may
    // block or compute for long has threads of its own.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| unusable(e.into()))?;
    let identity = Arc::new(Identity { worker: config.name.clone(), version: env!("CARGO_PKG_VERSION") });
    let board = Arc::new(Board::default());
    let metrics = Arc::new(Metrics::new(&identity, &board));
    let site = Site { board: Arc::clone(&board), metrics: Arc::clone(&metrics) };
    let spans = has_span_collector().then(|| Spans::start(&identity)).transpose().map_err(|error| {
        tracing::error!("cannot start: OTEL_EXPORTER_OTLP_ENDPOINT: {error}");
        Exit::Usage
    })?;
    let signals = async { if has_parent { Signals::listen_to_parent() } else { Signals::listen() } };
    let mut signals = runtime.block_on(signals).context("listen for signals").map_err(unusable)?;
    listen(&config, site)?;
    let opened = runtime.block_on(load(&config, &mut signals)).map_err(unusable)?;
    let models = opened.slots().map_err(|e| unusable(e.into()))?;
    if config.job_limit > CONSUMER_TIMEOUT.mul_f64(0.8) {
        tracing::warn!(
            job_s = config.job_limit.as_secs(),
            "jobs may be in hand for longer than RabbitMQ allows unless its consumer_timeout was raised from 1800 s"
        );
    }
    if let (DeviceKind::Cpu(_), Ok(driver)) = (&config.device.kind, cuda::find())
        && let [first, ..] = &driver.devices[..]
    {
        tracing::warn!(%first, "running on the CPU, though there is a CUDA device: device.kind = \"cuda\" uses it");
    }
    for (model, slots) in &models {
        let (weights, per_job) = (Mib(model.engine.resident_bytes()), Mib(model.job_bytes()));
        let free = Mib(opened.device.shared().memory().free);
        tracing::info!(model = model.name, slots, %weights, %per_job, %free, "model loaded");
    }
    let host =
        host(&config, opened, &models, Told { identity, board, metrics, logs, spans }).map_err(unusable)?;
    let models = host.models.clone();
    // As a task: a panic in it is an exit code and no panic of the whole.
    let served = runtime.spawn(serve_sessions(config, models, host, signals));
    runtime.block_on(served).map_err(|e| unusable(e.into()))?
}

/// Serves health and metrics from here on, if that is wanted. Jobs do not depend on it: where no port of a range is free the
/// worker goes without; a port that somebody has named is another matter.
fn listen(config: &Config, site: Site) -> Result<(), Exit> {
    let Some(listen) = &config.http else { return Ok(()) };
    match http::start(listen, site) {
        Ok(address) => tracing::info!(%address, "serving /livez, /readyz and /metrics"),
        Err(error @ http::StartError::Bind { .. }) if listen.is_range() => {
            tracing::warn!(%error, "no health and no metrics over HTTP");
        }
        Err(error) => {
            tracing::error!("cannot start: {error}");
            return Err(Exit::Usage);
        }
    }
    Ok(())
}

/// What others learn of the worker by.
struct Told {
    identity: Arc<Identity>,
    board: Arc<Board>,
    metrics: Arc<Metrics>,
    logs: Logs,
    spans: Option<Spans>,
}

/// Loads the models, which may take minutes, unless a signal ends the process first.
async fn load(config: &Config, signals: &mut Signals) -> anyhow::Result<Opened> {
    let config = config.clone();
    let loading = tokio::task::spawn_blocking(move || Opened::open(&config));
    tokio::select! {
        opened = loading => Ok(opened??),
        signal = signals.next() => {
            tracing::info!(signal, "stopped while loading");
            end(Exit::Drained)
        }
    }
}

/// All that outlives a session.
fn host(
    config: &Config,
    opened: Opened,
    slots: &[(Arc<Model>, NonZeroU16)],
    told: Told,
) -> anyhow::Result<Host> {
    let Told { identity, board, metrics, logs, spans } = told;
    let device = opened.device.shared();
    let memory = device.memory();
    let models: Vec<_> = slots.iter().map(|(model, _)| Arc::clone(model)).collect();
    let thread = DeviceThread::spawn(Arc::clone(&device))?;
    let meters = metrics.meters(&models, &device, &opened.budget);
    let teller = Teller {
        identity: Arc::clone(&identity),
        host: config::host_name(),
        started_at_ms: metrics.started_at_ms(),
        interval: config.heartbeat,
        board: Arc::clone(&board),
        meters: Arc::clone(&meters),
        models: models.clone(),
        device: Arc::clone(&device),
        budget: opened.budget.clone(),
    };
    board.watch_thread(thread.busy().clone(), config.job_limit);
    Ok(Host {
        identity,
        meters,
        board,
        teller: Arc::new(teller),
        logs,
        spans: spans.map(Arc::new),
        aside: Arc::default(),
        models,
        capacities: slots.iter().map(|(_, slots)| Capacity::new(slots.get())).collect(),
        thread,
        failures_known: 0,
        budget: opened.budget,
        resident: memory.own(),
        reserve: config.device.reserve,
        ceilings: ceilings(config, &*device),
        pressure: Pressure::new(config.pressure.percent, config.pressure.tolerated, memory.own()),
        leak: Leak::default(),
        pool: Arc::new(rayon::ThreadPoolBuilder::new().thread_name(|at| format!("prepare-{at}")).build()?),
        finished: Remembered::default(),
        given_back: Remembered::default(),
        losses: Losses::default(),
        limits: BrokerLimits { body_max: usize::MAX, declares: config.broker.declare },
        patience: config.patience,
        health: Health::default(),
        job_limit: config.job_limit,
        pass_limit: config.job_limit,
        drain: config.drain,
        paused: false,
        draining: false,
        restarting: false,
        left: 0,
        device,
    })
}

fn ceilings(config: &Config, device: &dyn Device) -> Ceilings {
    Ceilings::of_device(device.name(), device.memory().total, config.state.as_deref())
}

/// One session after the other, until a drain ends or the device is lost.
async fn serve_sessions(
    config: Config,
    models: Vec<Arc<Model>>,
    mut host: Host,
    mut signals: Signals,
) -> Result<Exit, Exit> {
    let mut first = true;
    let mut waits = Waits::reconnect();
    let direct_replies = DirectReplies::start(config.broker.url.clone(), &config.name);
    let exit = loop {
        let session = tokio::select! {
            session = open_session(&config, &models, &host, &direct_replies, first) => session?,
            signal = signals.next() => {
                tracing::info!(signal, "stopped while there was no session");
                break Exit::Drained;
            }
        };
        tracing::info!(broker = %config.broker.url, "session open");
        first = false;
        let (opened, settled) = (Instant::now(), host.meters.settled());
        match serve(&mut host, session, &mut signals).await {
            // The broker has the jobs again, which is all that is left to do.
            Outcome::Lost(error) if host.draining => {
                tracing::warn!(error, jobs = host.left, "session lost while draining");
                break if host.left == 0 { Exit::Drained } else { Exit::Killed };
            }
            Outcome::Lost(error) => tracing::warn!(error, "session lost, connecting again"),
            Outcome::Drained => break Exit::Drained,
            Outcome::Killed => break Exit::Killed,
        }
        if opened.elapsed() > SESSION_STEADY || host.meters.settled() > settled {
            waits = Waits::reconnect();
        }
        // Whatever ends sessions as soon as they stand must not become a storm of connections.
        tokio::select! {
            () = tokio::time::sleep(waits.next_wait()) => {}
            signal = signals.next() => {
                tracing::info!(signal, "stopped while there was no session");
                break Exit::Drained;
            }
        }
    };
    direct_replies.close().await;
    host.meters.log_totals();
    if let Some(spans) = host.spans.clone() {
        // An `Err` is a panic of the SDK, which costs spans and nothing else.
        let _ = tokio::task::spawn_blocking(move || spans.finish()).await;
    }
    let exit = if host.restarting { Exit::Restart } else { exit };
    // At once: not after the passes that the device's thread may still have, or wait with for other processes.
    end(exit)
}

/// Connects, again and again: at start for as long as the configuration says, later for ever.
async fn open_session(
    config: &Config,
    models: &[Arc<Model>],
    host: &Host,
    direct_replies: &DirectReplies,
    first: bool,
) -> Result<Session, Exit> {
    let Host { limits, aside, board, .. } = host;
    let started = Instant::now();
    let mut waits = Waits::reconnect();
    if first {
        board.set(Now::new(WorkerState::NoSession, "connecting to the broker"));
    }
    loop {
        let error =
            match Session::open(&config.broker, &config.name, models, *limits, aside, direct_replies).await {
                Ok(session) => return Ok(session),
                Err(error) => error,
            };
        if first && (!error.is_retryable() || started.elapsed() > config.broker.connect) {
            tracing::error!("cannot start: {error}");
            return Err(match error {
                SessionError::Topology(TopologyError::Refused { .. }) => Exit::Usage,
                _ => Exit::Unreachable,
            });
        }
        board.set(Now::new(WorkerState::NoSession, error.to_string()));
        let wait = waits.next_wait();
        tracing::warn!(%error, wait_ms = wait.as_millis(), "no session yet");
        tokio::time::sleep(wait).await;
    }
}
