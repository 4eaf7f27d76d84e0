//! Serves `/livez`, `/readyz` and `/metrics` for orchestrators and Prometheus. A separate thread answers even while the event loop hangs.

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

use super::metrics::Metrics;
use super::status_board::{Status, StatusBoard};
use crate::config::Listen;

/// Connections at a time. A scraper and two probes need three; more wait in the system's queue.
const CONNECTIONS_MAX: usize = 16;

/// How long a connection may take from its first byte to its last. Prometheus gives up after 10 s, probes sooner.
const CONNECTION_MAX: Duration = Duration::from_secs(10);

/// How long a request's head may take: less than probes wait, so that clients that connect and send nothing do not block the probes.
const HEAD_MAX: Duration = Duration::from_secs(2);

/// The most bytes of a request's head. hyper asks for at least 8 KiB.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// A pause when the system has no free socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// Why HTTP cannot be served.
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

/// What the pages are made from.
#[derive(Clone, Debug)]
pub struct HttpState {
    pub board: Arc<StatusBoard>,
    pub metrics: Arc<Metrics>,
}

/// Serves on the first free port, for as long as the process runs.
///
/// # Errors
/// No port is free, the address does not belong to this machine, or no thread can be started.
pub fn start(listen: &Listen, state: HttpState) -> Result<SocketAddr, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (listener, address) = runtime.block_on(bind(listen))?;
    std::thread::Builder::new()
        .name("http".to_owned())
        .spawn(move || runtime.block_on(serve(listener, state)))?;
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
async fn serve(listener: TcpListener, state: HttpState) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // Never closed.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let state = state.clone();
                tokio::spawn(async move {
                    // A client that fails or is too slow needs no handling.
                    let _ = timeout(CONNECTION_MAX, converse(stream, state)).await;
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept a connection over HTTP");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn converse(stream: TcpStream, state: HttpState) -> Result<(), hyper::Error> {
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(state.answer(&request).await) }
    });
    http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(HEAD_BYTES_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

impl HttpState {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut rejection = page(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n");
            rejection.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return rejection;
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

    /// On another thread, because it reads files.
    async fn metrics(&self) -> Response<Full<Bytes>> {
        let metrics = Arc::clone(&self.metrics);
        match tokio::task::spawn_blocking(move || metrics.encode()).await {
            Ok(text) => page(StatusCode::OK, OPEN_METRICS, text),
            Err(error) => {
                tracing::error!(%error, "cannot write the metrics: /metrics answers 500");
                page(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "the metrics cannot be written\n")
            }
        }
    }
}

fn readiness(now: &Status) -> Response<Full<Bytes>> {
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
