//! Accepts connections. Limits their number, the time for a request's head, the time between requests, and the time for which a client may
//! read nothing of its response. Closes the listener and all idle connections when the gateway drains.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tower::Service as _;

use crate::drain::Drain;
use crate::held_body::{HeldBody, UntilSent};
use crate::idle_timeout::{HEAD_MAX, IdleTimeout, InProgress};
use crate::metrics::Metrics;
use crate::send_timeout::SendTimeout;

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
    /// How long a connection may wait for its next request.
    pub idle: Duration,
    /// How long a client may read nothing of its response.
    pub send_timeout: Duration,
    pub drain: watch::Receiver<Drain>,
}

/// The connections of a server that accepts no more of them.
#[derive(Debug)]
pub struct Connections(GracefulShutdown);

impl Connections {
    /// Closes idle connections, and waits until all requests are answered.
    pub async fn all_answered(self) {
        self.0.shutdown().await;
    }
}

/// The times that bound what a connection waits for.
#[derive(Clone, Copy, Debug)]
struct Times {
    head: Duration,
    idle: Duration,
    send: Duration,
}

impl Server {
    /// Accepts connections until the drain begins. Their requests go on being served.
    pub async fn serve(self, router: Router, metrics: &Metrics) -> Connections {
        let room = Arc::new(Semaphore::new(self.connections_max));
        let graceful = GracefulShutdown::new();
        let acceptor = self.tls.map(TlsAcceptor::from);
        let times = Times { head: HEAD_MAX, idle: self.idle, send: self.send_timeout };
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
            let stream = SendTimeout::new(stream, times.send);
            let (router, gauge, acceptor) = (router.clone(), metrics.connections.clone(), acceptor.clone());
            let watcher = graceful.watcher();
            gauge.inc();
            tokio::spawn(async move {
                match acceptor {
                    None => converse(stream, router, watcher, times).await,
                    Some(acceptor) => {
                        if let Ok(Ok(stream)) = timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
                            converse(stream, router, watcher, times).await;
                        }
                    }
                }
                gauge.dec();
                drop(place);
            });
        }
        Connections(graceful)
    }
}

async fn converse<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    watcher: hyper_util::server::graceful::Watcher,
    times: Times,
) {
    let requests = InProgress::default();
    let stream = IdleTimeout::new(stream, requests.clone(), times.head, times.idle);
    let service = service_fn(move |request: Request<Incoming>| {
        let (mut router, until_over) = (router.clone(), UntilSent::new(requests.begin()));
        async move {
            let of_request = until_over.clone();
            let request = request.map(|body| Body::new(HeldBody::new(Body::new(body), of_request)));
            let response = router.call(request).await?;
            Ok::<_, Infallible>(response.map(|body| HeldBody::new(body, until_over)))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        // Later than the stream's own times: hyper's time runs as soon as it has the rest of a response in its buffer, and the client may
        // take that until the send timeout.
        .header_read_timeout(times.send + times.idle + times.head)
        .max_buf_size(BUFFER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    // The error of a connection concerns only its client.
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection failed");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    const BODY_BYTES: usize = 8 * BUFFER_BYTES_MAX;

    /// A service with one large body, and whether the connection still has a part of that.
    fn service() -> (Router, Weak<()>) {
        let held = Arc::new(());
        let is_held = Arc::downgrade(&held);
        let body = std::sync::Mutex::new(Some(HeldBody::new(
            Body::from(vec![b'x'; BODY_BYTES]),
            UntilSent::new(held),
        )));
        let body = Arc::new(body);
        let answer = move || {
            let body = body.lock().unwrap().take().unwrap();
            async { Body::new(body) }
        };
        (Router::new().route("/", get(answer)), is_held)
    }

    #[tokio::test]
    async fn a_slow_reader_gets_the_last_bytes_and_is_idle_only_then() {
        let (stream, mut client) = duplex(1024);
        let (router, is_held) = service();
        let [head, idle] = [300, 20].map(Duration::from_millis);
        let times = Times { head, idle, send: Duration::from_secs(3_600) };
        let graceful = GracefulShutdown::new();
        let mut connection = tokio::spawn(converse(stream, router, graceful.watcher(), times));
        client.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut response = Vec::new();
        while is_held.strong_count() > 0 {
            client.read_buf(&mut response).await.unwrap();
        }
        assert!(response.len() < BODY_BYTES, "the connection has the last part");
        assert!(timeout(3 * (head + idle), &mut connection).await.is_err(), "cut");
        client.read_to_end(&mut response).await.unwrap();
        assert!(response.ends_with(&[b'x'; BODY_BYTES]), "{}", response.len());
        connection.await.unwrap();
    }
}
