//! `/livez`, `/readyz` and `/metrics`: for orchestrators and Prometheus, from the worker's own state, never from the loop, and
//! on a thread of their own: a loop that hangs has a thread of the runtime, which on one core is the only one.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::board::{Board, Now};
use crate::config::Listen;
use crate::metrics::Metrics;

/// Connections at a time. A scraper and two probes need three; whoever comes too many waits in the system's queue.
const CONNECTIONS_MAX: usize = 16;

/// How long a connection may take from its first byte to its last. Prometheus gives up after 10 s, probes sooner.
const CONNECTION_MAX: Duration = Duration::from_secs(10);

/// How long its head may take: less than probes wait, so that whoever connects and says nothing does not keep them out.
const HEAD_MAX: Duration = Duration::from_secs(2);

/// The most bytes of a request's head. hyper asks for at least 8 KiB.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// A pause when the system has no socket to give, rather than asking again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(
        "http.listen: cannot listen on {listen}: {source}. Is another worker there? Name another port, a range \
         (127.0.0.1:9464-9495), or `off`"
    )]
    Bind { listen: Listen, source: io::Error },
    #[error("serve HTTP: {0}")]
    Thread(#[from] io::Error),
}

/// What is served.
#[derive(Clone, Debug)]
pub struct Site {
    pub board: Arc<Board>,
    pub metrics: Arc<Metrics>,
}

/// Serves on the first of the ports that is free, for as long as the process runs.
///
/// # Errors
/// None is free, the address is none of this machine, or the system has no thread to give.
pub fn start(listen: &Listen, site: Site) -> Result<SocketAddr, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (listener, address) = runtime.block_on(bind(listen))?;
    std::thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || runtime.block_on(serve(listener, site)))?;
    Ok(address)
}

async fn bind(listen: &Listen) -> Result<(TcpListener, SocketAddr), StartError> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for port in listen.ports.clone() {
        match TcpListener::bind((listen.ip, port)).await.and_then(|it| Ok((it.local_addr()?, it))) {
            Ok((address, listener)) => return Ok((listener, address)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => {
                last = error;
                break;
            }
        }
    }
    Err(StartError::Bind { listen: listen.clone(), source: last })
}

/// Serves for ever.
async fn serve(listener: TcpListener, site: Site) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // Never closed.
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let site = site.clone();
                tokio::spawn(async move {
                    // Whatever becomes of it is the client's affair.
                    let _ = timeout(CONNECTION_MAX, converse(stream, site)).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "accept a connection over HTTP");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn converse(stream: TcpStream, site: Site) -> Result<(), hyper::Error> {
    let service = service_fn(move |request| {
        let site = site.clone();
        async move { Ok::<_, Infallible>(site.answer(&request).await) }
    });
    http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

impl Site {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refusal = page(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n");
            refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refusal;
        }
        match request.uri().path() {
            "/livez" => match self.board.stuck() {
                None => page(StatusCode::OK, TEXT, "alive\n"),
                Some(why) => page(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("stuck: {why}\n")),
            },
            "/readyz" => readiness(&self.board.now()),
            "/metrics" => self.metrics().await,
            _ => page(StatusCode::NOT_FOUND, TEXT, "there are /livez, /readyz and /metrics\n"),
        }
    }

    /// Off this thread: it reads files.
    async fn metrics(&self) -> Response<Full<Bytes>> {
        let metrics = Arc::clone(&self.metrics);
        match tokio::task::spawn_blocking(move || metrics.encode()).await {
            Ok(text) => page(StatusCode::OK, OPEN_METRICS, text),
            Err(error) => {
                tracing::error!(%error, "write the metrics");
                page(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n")
            }
        }
    }
}

fn readiness(now: &Now) -> Response<Full<Bytes>> {
    let state = now.state.as_str();
    if now.state.is_ready() {
        return page(StatusCode::OK, TEXT, format!("ready: {state}\n"));
    }
    let reason = now.reason.as_deref().unwrap_or("takes no jobs");
    page(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{state}: {reason}\n"))
}

fn page(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
