//! The start: opens what the configuration names, connects to the broker, and begins what runs beside the requests.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;
use vramq_amqp::WITHDRAWN_MAX;
use vramq_producer::{Client, ConnectError};
use vramq_spans::Spans;

use super::sweeps;
use crate::adoption::Adoption;
use crate::app::{App, Stores};
use crate::broker::link::Link;
use crate::config::{Config, Files};
use crate::descriptors;
use crate::drain::Drain;
use crate::files::FileStore;
use crate::job_task::JOB_MAX;
use crate::jobs::ResultStore;
use crate::operator::Operator;
use crate::outputs::OutputStore;
use crate::server::Server;
use crate::storage::Place;

/// Between attempts to reach the broker at start.
const CONNECT_PAUSE: Duration = Duration::from_secs(1);

/// How long the start looks for the folder of outputs.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// A gateway that may serve.
pub(super) struct Started {
    pub(super) app: App,
    pub(super) server: Server,
    /// `None`: no collector takes spans.
    pub(super) spans: Option<Arc<Spans>>,
}

/// Starts the gateway. `None`: the broker cannot be reached, or refuses the gateway. The log says why.
///
/// # Errors
/// In words: what the configuration names cannot be opened.
pub(super) async fn start(
    config: Config,
    drained: watch::Receiver<Drain>,
) -> Result<Option<Started>, String> {
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
    if let Some(Place::Folder(folder)) = &config.outputs {
        warn_if_missing(folder).await;
    }
    log_weaknesses(&config);
    let operator = config.operator.clone().map(Operator::open).transpose()?;
    let (link, link_task) = Link::new(config.broker.address.clone(), connection_name());
    let (client, adoption) = match connect(&config, &link).await {
        Ok(connected) => connected,
        Err(error) => {
            tracing::error!(%error, "cannot start");
            return Ok(None);
        }
    };
    tokio::spawn(link_task.run());
    tokio::spawn(Arc::clone(&config.http.keys).watch());
    let server = Server {
        listener,
        tls: config.http.tls.clone(),
        connections_max: descriptors::connections(config.limits.connections),
        idle: config.http.idle,
        send_timeout: config.http.send_timeout,
        drain: drained.clone(),
    };
    let address = server.listener.local_addr().map_err(|e| e.to_string())?;
    let stores = Stores { results: results.zip(adoption), files, outputs };
    let app = App::new(config, client, link, stores, operator, drained);
    tracing::info!(%address, "serving");
    sweeps::begin(&app);
    Ok(Some(Started { app, server, spans }))
}

/// The name that the broker shows for the gateway's connections.
fn connection_name() -> String {
    format!("vramq-gateway {}", std::process::id())
}

/// Logs what an operator should mend although the gateway starts: secrets that others can read, and libraries without their patches.
fn log_weaknesses(config: &Config) {
    let addresses =
        [&config.broker.address].into_iter().chain(config.operator.as_ref().map(|it| &it.address));
    for file in addresses.flat_map(|address| address.credentials().exposed()) {
        tracing::warn!(file = %file.display(), "every user of this machine can read this secret file: run chmod o-r");
    }
    for patch in vramq_amqp::missing_patches() {
        tracing::error!("{patch}");
    }
}

/// Logs that the folder of outputs is not there. It may be mounted later.
async fn warn_if_missing(folder: &Path) {
    // A file system that hangs holds up no start.
    let looked = timeout(LOOK_MAX, tokio::fs::try_exists(folder)).await;
    if matches!(looked, Ok(Ok(false))) {
        tracing::warn!(
            folder = %folder.display(),
            "outputs.folder is not there: callers cannot download large outputs until it is. Make or mount it, or correct its name"
        );
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
    options.connection_name = connection_name();
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
