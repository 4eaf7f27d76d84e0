//! `vramq-gateway`: configuration -> connect -> serve -> drain.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, interval, sleep, timeout};
use uuid::Uuid;
use vramq_amqp::WITHDRAWN_MAX;
use vramq_gateway::adoption::Adoption;
use vramq_gateway::app::{App, Stores};
use vramq_gateway::broker::link::Link;
use vramq_gateway::config::cli::{Cli, Command, Options};
use vramq_gateway::config::{Config, Files, Invalid};
use vramq_gateway::descriptors;
use vramq_gateway::drain::Drain;
use vramq_gateway::files::FileStore;
use vramq_gateway::job_task::JOB_MAX;
use vramq_gateway::jobs::ResultStore;
use vramq_gateway::keys;
use vramq_gateway::operator::Operator;
use vramq_gateway::outputs::OutputStore;
use vramq_gateway::routes::router;
use vramq_gateway::server::Server;
use vramq_producer::{Client, ConnectError};
use vramq_program::{close_log, start_log, write_output};
use vramq_spans::Spans;

/// In the static programs of a release, because musl's own allocator takes one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How often old results and uploads are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(30);

/// Between attempts to reach the broker at start.
const CONNECT_PAUSE: Duration = Duration::from_secs(1);

/// How long the last answers may take, after the gateway has ended the waiting requests.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// The exit codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    Drained = 0,
    CutOff = 1,
    Usage = 2,
    Unreachable = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Ends the log when it is dropped, also by a panic of the main thread: the log then has the panic's line.
struct EndOfLog;

impl Drop for EndOfLog {
    fn drop(&mut self) {
        close_log(None);
    }
}

fn main() -> ExitCode {
    let _end = EndOfLog;
    let exit = match Cli::parse().command {
        Command::NewKey { name } => new_key(&name),
        Command::Completions(completions) => completions.write::<Cli>().map(|()| Exit::Drained),
        Command::Man(manual) => manual.write::<Cli>().map(|()| Exit::Drained),
        Command::CheckConfig(options) => prepare(&options).and_then(|config| {
            write_output(&format!(
                "the configuration is right: listening on {}, broker {}\n",
                config.http.listen, config.broker.address
            ))?;
            Ok(Exit::Drained)
        }),
        Command::Run(options) => prepare(&options).and_then(|config| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .map_err(|e| e.to_string())?;
            let exit = runtime.block_on(run(config));
            // Do not wait for threads that still block.
            runtime.shutdown_background();
            exit
        }),
    };
    let (exit, failure) = match exit {
        Ok(exit) => (exit, None),
        Err(error) => (Exit::Usage, Some(format!("vramq-gateway: {error}"))),
    };
    close_log(failure);
    exit.into()
}

fn new_key(name: &str) -> Result<Exit, String> {
    if !keys::is_name(name) {
        return Err(format!(
            "`{name}` cannot name a caller: 1 to 64 characters of a-z, A-Z, 0-9, `-`, `_` and `.`"
        ));
    }
    let (key, entry) = keys::new_key(name);
    println!(
        "# For the caller, who alone should have it: {key}\n# For the file of keys (http.keys):\n{entry}"
    );
    Ok(Exit::Drained)
}

/// Reads the configuration and the files that it names.
fn prepare(options: &Options) -> Result<Config, String> {
    // Reading the configuration may log.
    start_log(&options.log, options.log_format, None).map_err(|e| format!("--log (VRAMQ_LOG): {e}"))?;
    options.read().map_err(|e: Invalid| e.to_string())
}

async fn run(config: Config) -> Result<Exit, String> {
    let instance = Uuid::new_v4().to_string();
    let spans = Spans::from_environment("vramq-gateway", env!("CARGO_PKG_VERSION"), instance)?.map(Arc::new);
    let listener = TcpListener::bind(config.http.listen)
        .await
        .map_err(|e| format!("http.listen: cannot listen on {}: {e}", config.http.listen))?;
    let files = match config.files.clone() {
        Some(settings) => open_files(settings).await?,
        None => None,
    };
    let results = match config.results.store.clone() {
        Some(settings) => Some(ResultStore::open(settings).await?),
        None => None,
    };
    let outputs = config.outputs.as_ref().map(OutputStore::new);
    let addresses =
        [&config.broker.address].into_iter().chain(config.operator.as_ref().map(|it| &it.address));
    for file in addresses.flat_map(|address| address.credentials().exposed()) {
        tracing::warn!(file = %file.display(), "every user of this machine can read this secret file: run chmod o-r");
    }
    for patch in vramq_amqp::missing_patches() {
        tracing::error!("{patch}");
    }
    let operator = config.operator.clone().map(Operator::open).transpose()?;
    let name = format!("vramq-gateway {}", std::process::id());
    let (link, task) = Link::new(config.broker.address.clone(), name);
    let (client, adoption) = match connect(&config, &link).await {
        Ok(connected) => connected,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            return Ok(Exit::Unreachable);
        }
    };
    tokio::spawn(task.run());
    tokio::spawn(Arc::clone(&config.http.keys).watch());
    let (drain, drained) = watch::channel(Drain::Serving);
    let server = Server {
        listener,
        tls: config.http.tls.clone(),
        connections_max: descriptors::connections(config.limits.connections),
        idle: config.http.idle,
        send_timeout: config.http.send_timeout,
        drain: drained.clone(),
    };
    let address = server.listener.local_addr().map_err(|e| e.to_string())?;
    let drain_max = config.http.drain;
    let stores = Stores { results: results.zip(adoption), files, outputs };
    let app = App::new(config, client, link, stores, operator, drained);
    tracing::info!(%address, "serving");
    tokio::spawn(sweep_jobs(app.clone()));
    tokio::spawn(sweep_results(app.clone()));
    tokio::spawn(sweep_files(app.clone()));
    tokio::spawn(drain_on_signal(drain, drain_max).await?);
    let all_answered = server.run(router(app.clone(), spans.clone()), &app.metrics).await;
    app.leave_unfinished_jobs().await;
    if let Some(operator) = &app.operator {
        // An action whose caller has hung up may still run. The end of the drain stops it.
        let _ = timeout(drain_max + LAST_ANSWERS, operator.idle()).await;
    }
    if let Some(adoption) = &app.adoption {
        adoption.client.close().await;
    }
    app.client.close().await;
    send_last(spans).await;
    let cut_off = app.cut_off_count();
    tracing::info!(all_answered, cut_off, "drained");
    Ok(if all_answered && cut_off == 0 { Exit::Drained } else { Exit::CutOff })
}

/// Sends the spans that still wait.
async fn send_last(spans: Option<Arc<Spans>>) {
    if let Some(spans) = spans {
        // An `Err` is a panic of the SDK, which only loses spans.
        let _ = tokio::task::spawn_blocking(move || spans.finish()).await;
    }
}

/// Opens the place of uploads. A gateway that nobody has given one serves without uploads if it cannot have its own folder.
async fn open_files(settings: Files) -> Result<Option<FileStore>, String> {
    let is_own = settings.is_own;
    match FileStore::open(settings).await {
        Ok(files) => Ok(Some(files)),
        Err(error) if is_own => {
            tracing::warn!(
                error,
                "this gateway takes no uploads: set files.folder or files.url, or files.folder = \"off\""
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Connects the client, and with a store of results what unfinished jobs need to be known to other gateways.
async fn connect(config: &Config, link: &Arc<Link>) -> Result<(Client, Option<Adoption>), ConnectError> {
    let deadline = Instant::now() + config.broker.connect;
    let options = client_options(config);
    let client = until_reached(deadline, || Client::connect(options.clone())).await?;
    let adoption = match &config.results.store {
        None => None,
        Some(store) => {
            let connect = || Adoption::connect(options.clone(), Arc::clone(link), store.keep);
            Some(until_reached(deadline, connect).await?)
        }
    };
    Ok((client, adoption))
}

fn client_options(config: &Config) -> vramq_producer::Options {
    let mut options = vramq_producer::Options::new(config.broker.url.clone());
    options.connection_name = format!("vramq-gateway {}", std::process::id());
    options.timeout = Some(JOB_MAX);
    // Withdrawn jobs are awaited as well, and must not take the places of others.
    options.jobs_in_flight = config.limits.in_flight + WITHDRAWN_MAX;
    options.anonymous = config.broker.anonymous;
    options = options.with_credentials(config.broker.address.credentials().clone());
    match &config.broker.ca_pem {
        Some(pem) => options.trusting(pem.clone()),
        None => options,
    }
}

/// Tries until the time for starting is over. A refusal is final.
async fn until_reached<T, F: Future<Output = Result<T, ConnectError>>>(
    deadline: Instant,
    connect: impl Fn() -> F,
) -> Result<T, ConnectError> {
    loop {
        match connect().await {
            Err(error) if error.is_retryable() && Instant::now() < deadline => {
                tracing::warn!(%error, "cannot connect to the broker: trying again");
                sleep(CONNECT_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

async fn sweep_jobs(app: App) {
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        app.jobs.sweep();
    }
}

/// One task for each place: one that hangs holds up its own sweeps.
async fn sweep_results(app: App) {
    let Some(results) = &app.results else { return };
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        results.storage().check_folder().await;
        if results.storage().is_to_be_swept()
            && let Err(error) = results.sweep().await
        {
            results.storage().sweep_again();
            tracing::warn!(%error, "cannot list the stored results: listing them again at the next sweep");
        }
    }
}

async fn sweep_files(app: App) {
    let Some(files) = &app.files else { return };
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        files.storage().check_folder().await;
        if files.storage().is_to_be_swept()
            && let Err(error) = files.sweep().await
        {
            files.storage().sweep_again();
            tracing::warn!(%error, "cannot list the uploads: listing them again at the next sweep");
        }
    }
}

/// The first signal begins the drain, its deadline or a second signal ends it.
async fn drain_on_signal(
    drain: watch::Sender<Drain>,
    most: Duration,
) -> Result<impl Future<Output = ()>, String> {
    let listen = |kind| signal(kind).map_err(|e| format!("listen for signals: {e}"));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!(seconds = most.as_secs(), "draining");
        drain.send_replace(Drain::Draining);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = sleep(most) => {}
        }
        drain.send_replace(Drain::Over);
        // Keep the sender until the process ends: the receivers stop on its value.
        std::future::pending::<()>().await;
    })
}
