//! Starts the worker: HTTP, models, device, core; then serves, and ends the process.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::runtime::Handle;
use vramq_amqp::missing_patches;
use vramq_core::Core;
use vramq_core::admission::Budget;
use vramq_core::ids::ExecutorIndex;
use vramq_core::settings::{Settings, UNKNOWN_BYTES};
use vramq_core::units::{FreeMib, Mib};
use vramq_program::Logs;

use super::exit::Exit;
use super::open::{OpenError, Opened};
use super::{end, learned_limits, sessions};
use crate::broker::consumer_timeouts::ConsumerTimeouts;
use crate::broker::silent_queues::SilentQueues;
use crate::config::{self, Config, DeviceKind};
use crate::context::WorkerContext;
use crate::device::cuda;
use crate::event_loop::EventLoop;
use crate::executor::Executor;
use crate::executor::device_thread::DeviceThread;
use crate::executor::process::ProcessExecutor;
use crate::identity::Identity;
use crate::limits_writer::LimitsWriter;
use crate::model::Model;
use crate::observability::http::{self, HttpState};
use crate::observability::metrics::Metrics;
use crate::observability::spans::JobSpans;
use crate::observability::status_board::StatusBoard;
use crate::observability::status_reporter::StatusReporter;
use crate::signals::Signals;
use crate::state_file::StateFile;
use crate::stores::Stores;

/// RabbitMQ's default. AMQP cannot query the actual value.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(1800);

/// How long the last save may take at the end of the worker. A disk takes milliseconds, a busy one up to some seconds.
const LAST_SAVE_MAX: Duration = Duration::from_secs(5);

/// What the worker shows of itself: heartbeats, health and metrics.
struct Observability {
    identity: Arc<Identity>,
    board: Arc<StatusBoard>,
    metrics: Arc<Metrics>,
    logs: Logs,
    spans: Option<JobSpans>,
}

/// Runs a worker. `Err` is the exit code of a start that failed. `has_parent`: the worker is one of several, each with a GPU.
pub(super) fn run(config: Config, logs: Logs, has_parent: bool) -> Result<Exit, Exit> {
    if let Some(failpoint) = config.failpoint.clone() {
        failpoint.start();
    }
    // The event loop and lapin's tasks share one thread, so that messages between them cost no thread switch. Everything that may block or
    // compute for long has other threads.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| unusable(e.into()))?;
    let identity = Arc::new(Identity { worker: config.name.clone(), version: env!("CARGO_PKG_VERSION") });
    let board = Arc::new(StatusBoard::default());
    let metrics = Arc::new(Metrics::new(&identity, &board));
    let spans = JobSpans::from_environment(&identity).map_err(|error| {
        tracing::error!("cannot start: {error}");
        Exit::Usage
    })?;
    let signals = async { if has_parent { Signals::listen_to_parent() } else { Signals::listen() } };
    let mut signals = runtime.block_on(signals).context("listen for signals").map_err(unusable)?;
    listen(&config, HttpState { board: Arc::clone(&board), metrics: Arc::clone(&metrics) })?;
    let opened = runtime.block_on(load(&config, &mut signals))?;
    let models = opened.slots().map_err(not_opened)?;
    warn_of_settings(&config);
    for ((model, slots), (_, fit)) in models.iter().zip(&opened.models) {
        let weights = Mib(fit.inputs.weights);
        let per_job = match fit.inputs.per_job {
            UNKNOWN_BYTES => "unknown".to_owned(),
            bytes => Mib(bytes).to_string(),
        };
        let free = FreeMib(fit.inputs.free);
        tracing::info!(model = model.name, slots, %weights, %per_job, %free, "model loaded");
    }
    let observability = Observability { identity, board, metrics, logs, spans };
    let entered = runtime.enter();
    let mut event_loop = event_loop(&config, &opened, &models, observability).map_err(unusable)?;
    drop(entered);
    // In a task, so that a panic becomes an exit code.
    let served = runtime.spawn(async move {
        let served = sessions::serve(&config, &mut event_loop, &mut signals).await;
        save_last(event_loop.context()).await;
        event_loop.context().programs.close().await;
        let exit = served?;
        let exit = if event_loop.core().wants_restart() { Exit::Restart } else { exit };
        let (meters, spans) = (&event_loop.context().meters, event_loop.context().spans.clone());
        meters.log_totals();
        finish(spans, exit).await
    });
    let exit = runtime.block_on(served).unwrap_or_else(|_| {
        tracing::error!(
            "the event loop panicked (see above): the worker ends, to be restarted; the broker delivers the unacknowledged jobs again"
        );
        Ok(Exit::Restart)
    });
    // Nobody waits for stores any more: the jobs of these fetches and outputs are still at the broker.
    runtime.shutdown_background();
    exit
}

fn unusable(error: anyhow::Error) -> Exit {
    tracing::error!("cannot start: {error:#}");
    Exit::Unusable
}

/// A line for each model that cannot be served.
fn not_opened(error: OpenError) -> Exit {
    error.in_words().iter().for_each(|text| not_usable(text));
    Exit::Unusable
}

fn not_usable(text: &str) {
    tracing::error!("cannot start: {text}");
}

fn warn_of_settings(config: &Config) {
    for patch in missing_patches() {
        tracing::error!("{patch}");
    }
    for file in config.broker.url.credentials().exposed() {
        tracing::warn!(file = %file.display(), "every user of this machine can read this secret file: run chmod o-r");
    }
    if config.job_limit > CONSUMER_TIMEOUT.mul_f64(0.8) {
        tracing::warn!(
            job_s = config.job_limit.as_secs(),
            "worker.job_s is longer than RabbitMQ allows by default: raise its consumer_timeout (1800 s) or lower worker.job_s"
        );
    }
    if let Some(fault) = config.device.more_than_machine() {
        tracing::warn!("{fault}");
    }
    if let (DeviceKind::Cpu(_), Ok(driver)) = (&config.device.kind, cuda::find())
        && let [first, ..] = &driver.devices[..]
    {
        tracing::warn!(%first, "running on the CPU, though there is a CUDA device: set device.kind = \"cuda\" to use it");
    }
}

/// Starts to serve health and metrics, if configured. Jobs do not depend on it: without a free port in a range, the worker runs without. A
/// single port that the configuration names must be free.
fn listen(config: &Config, state: HttpState) -> Result<(), Exit> {
    let Some(listen) = &config.http else { return Ok(()) };
    match http::start(listen, state) {
        Ok(address) => tracing::info!(%address, "serving /livez, /readyz and /metrics"),
        Err(error @ http::StartError::Bind { .. }) if listen.is_range() => {
            tracing::warn!(%error, "not serving health and metrics over HTTP; jobs are not affected");
        }
        Err(error) => {
            tracing::error!("cannot start: {error}");
            return Err(Exit::Usage);
        }
    }
    Ok(())
}

/// Loads the models, which may take minutes, unless a signal ends the process first.
async fn load(config: &Config, signals: &mut Signals) -> Result<Opened, Exit> {
    let config = config.clone();
    let runtime = Handle::current();
    let loading = tokio::task::spawn_blocking(move || {
        Opened::open(&config, &runtime, not_usable).and_then(Opened::complete)
    });
    tokio::select! {
        opened = loading => opened.map_err(|panic| unusable(panic.into()))?.map_err(not_opened),
        signal = signals.next() => {
            tracing::info!(signal, "stopped while loading");
            end(Exit::Drained, None)
        }
    }
}

/// Creates the event loop with everything that outlives a session.
fn event_loop(
    config: &Config,
    opened: &Opened,
    slots: &[(Arc<Model>, NonZeroU16)],
    observability: Observability,
) -> anyhow::Result<EventLoop> {
    let Observability { identity, board, metrics, logs, spans } = observability;
    let device = opened.device.shared();
    let models: Vec<_> = slots.iter().map(|(model, _)| Arc::clone(model)).collect();
    let (executors, executor_of) = executors(opened, models.len())?;
    metrics.watch_programs(&opened.programs);
    let admission = Budget::new(opened.budget);
    let budget = admission.view();
    let meters = metrics.meters(&models, &device, &budget, config.callers_max);
    board.watch_passes(
        executors.iter().map(|executor| executor.active_pass().clone()).collect(),
        config.job_limit,
    );
    let reporter = StatusReporter {
        identity: Arc::clone(&identity),
        host: config::host_name(),
        started_at_ms: metrics.started_at_ms(),
        interval: config.heartbeat,
        board: Arc::clone(&board),
        meters: Arc::clone(&meters),
        models: models.clone(),
        device: Arc::clone(&device),
        budget,
    };
    let state_file = StateFile::in_folder(config.state.as_deref());
    state_file.check();
    let facts = slots.iter().zip(&executor_of).map(|((model, slots), at)| model.facts(*slots, *at));
    let core = Core::new(
        settings(config, opened, &executors),
        facts.collect(),
        learned_limits(&state_file, opened),
        admission,
    );
    let context = WorkerContext {
        identity,
        models,
        publisher_rules: Arc::new(config.publishers.clone()),
        device,
        executors,
        programs: Arc::clone(&opened.programs),
        executor_of,
        stores: Arc::new(Stores::new(&config.stores, config.fetch_memory)),
        pool: rayon::ThreadPoolBuilder::new().thread_name(|at| format!("prepare-{at}")).build()?,
        meters,
        board,
        reporter: Arc::new(reporter),
        logs,
        spans: spans.map(Arc::new),
        aux_state: Arc::default(),
        consumer_timeouts: ConsumerTimeouts::new(config.broker.queue_type),
        silent_queues: SilentQueues::default(),
        limits_writer: LimitsWriter::start(state_file),
        body_max: usize::MAX,
    };
    Ok(EventLoop::new(core, context))
}

type Executors = Vec<Box<dyn Executor>>;

/// The executors (the device's thread, and each program's processes), and for each model the index of its executor.
fn executors(opened: &Opened, models: usize) -> anyhow::Result<(Executors, Vec<ExecutorIndex>)> {
    let device = opened.device.shared();
    let mut executors: Executors = vec![Box::new(DeviceThread::spawn(Arc::clone(&device))?)];
    let mut executor_of = vec![ExecutorIndex(0); models];
    for (model, pool) in opened.programs.pools() {
        executor_of[model.0] = ExecutorIndex(executors.len());
        let (pool, programs) = (Arc::clone(pool), Arc::clone(&opened.programs));
        executors.push(Box::new(ProcessExecutor::new(pool, Arc::clone(&device), programs)));
    }
    opened.programs.watch();
    Ok((executors, executor_of))
}

fn settings(config: &Config, opened: &Opened, executors: &[Box<dyn Executor>]) -> Settings {
    let device = opened.device.shared();
    let memory = device.memory();
    Settings {
        worker: config.name.clone(),
        device: device.name().to_owned(),
        job_limit: config.job_limit,
        pass_limit: config.job_limit,
        drain: config.drain,
        poison: config.poison,
        reserve: config.device.reserve,
        resident: memory.own(),
        total: memory.total,
        pressure_percent: config.pressure.percent,
        pressure_tolerated: config.pressure.tolerated,
        bulk_jobs_max: config.broker.queue_length_max,
        large_turn: config.large_turn,
        confirm_max: Duration::from_secs(config.broker.confirm_s.into()),
        executors: executors.iter().map(|executor| executor.facts()).collect(),
        started_at: Instant::now(),
        seed: uuid::Uuid::new_v4().as_u64_pair().0,
    }
}

/// Writes down what was learned last, unless the disk does not answer.
async fn save_last(context: &WorkerContext) {
    let saved = async {
        // One after the other: both are in one file.
        context.limits_writer.finish().await;
        context.programs.save_off_the_runtime().await;
    };
    if tokio::time::timeout(LAST_SAVE_MAX, saved).await.is_err() {
        let seconds = LAST_SAVE_MAX.as_secs();
        tracing::warn!(
            seconds,
            "the folder of worker.state does not answer: what was learned last is not saved"
        );
    }
}

/// Sends the last spans and ends the process at once. Does not wait for passes that an executor still has.
async fn finish(spans: Option<Arc<JobSpans>>, exit: Exit) -> ! {
    if let Some(spans) = spans {
        // An `Err` is a panic of the SDK, which only loses spans.
        let _ = tokio::task::spawn_blocking(move || spans.finish()).await;
    }
    end(exit, None)
}
