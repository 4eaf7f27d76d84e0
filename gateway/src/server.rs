//! Accepts connections. Limits their number, the time for a request's head, and the time for which a client may read nothing of its
//! response. Closes all connections when the gateway drains.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use crate::drain::Drain;
use crate::metrics::Metrics;
use crate::send_timeout::SendTimeout;

/// How long a request's head may take, and how long a connection may be idle.
const HEAD_MAX: Duration = Duration::from_secs(30);

/// How long a TLS handshake may take.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// The most bytes of a request's head, and of a body's piece.
const BUFFER_BYTES_MAX: usize = 64 * 1024;

/// Headers of a request. Browsers send some 20, balancers add some.
const HEADERS_MAX: usize = 100;

/// The pause after the system has no socket to give; an immediate retry would only fail again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections that wait for the listener.
#[derive(Debug)]
pub struct Server {
    pub listener: TcpListener,
    pub tls: Option<Arc<ServerConfig>>,
    pub connections_max: usize,
    /// How long a client may read nothing of its response.
    pub send_timeout: Duration,
    pub drain: watch::Receiver<Drain>,
    pub drain_max: Duration,
}

impl Server {
    /// Serves until the drain begins, then until all requests are answered or the time is up. Says whether all were.
    pub async fn run(self, router: Router, metrics: &Metrics) -> bool {
        let room = Arc::new(Semaphore::new(self.connections_max));
        let graceful = GracefulShutdown::new();
        let acceptor = self.tls.map(TlsAcceptor::from);
        let mut drain = self.drain;
        let mut has_sockets = true;
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                _ = drain.wait_for(|drain| *drain != Drain::Serving) => break,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if std::mem::replace(&mut has_sockets, false) {
                        tracing::warn!(%error, "cannot accept a connection: trying again every {} ms", ACCEPT_PAUSE.as_millis());
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            has_sockets = true;
            let Ok(place) = Arc::clone(&room).try_acquire_owned() else {
                // Closed at once: otherwise it would only wait in the system's queue.
                metrics.refused_connections.inc();
                continue;
            };
            let _ = stream.set_nodelay(true);
            let stream = SendTimeout::new(stream, self.send_timeout);
            let (router, gauge, acceptor) = (router.clone(), metrics.connections.clone(), acceptor.clone());
            let watcher = graceful.watcher();
            gauge.inc();
            tokio::spawn(async move {
                match acceptor {
                    None => converse(stream, router, watcher).await,
                    Some(acceptor) => {
                        if let Ok(Ok(stream)) = timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
                            converse(stream, router, watcher).await;
                        }
                    }
                }
                gauge.dec();
                drop(place);
            });
        }
        drop(self.listener);
        timeout(self.drain_max, graceful.shutdown()).await.is_ok()
    }
}

async fn converse<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .max_buf_size(BUFFER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // The error of a connection concerns only its client.
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection failed");
    }
}
