//! Connects to the first host of an address that answers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties, Error, ErrorKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Address, BrokerHost, CONNECT_TIMEOUT_MS, Host, shown};
use crate::credentials::Secrets;
use crate::reply_code::{ACCESS_REFUSED, NOT_ALLOWED, reply_code};

/// Why connecting failed, and to which host.
#[derive(Debug, thiserror::Error)]
#[error("{host}: {error}")]
pub struct ConnectError {
    pub host: String,
    #[source]
    pub error: Error,
}

impl ConnectError {
    /// Whether the broker refused: 403 is a wrong password, 530 an unknown virtual host. Other codes are temporary, for example
    /// 320 of a broker that shuts down.
    pub fn is_refusal(&self) -> bool {
        matches!(reply_code(&self.error), Some(ACCESS_REFUSED | NOT_ALLOWED))
    }
}

impl Address {
    /// Connects to the first host that answers, starting with a random one (if none was chosen by [`in_turn`](Self::in_turn)), so
    /// that clients spread over all.
    ///
    /// lapin's recovery stays off: it restores consumers without their prefetch.
    ///
    /// # Errors
    /// The error of the first host that refused, else of the last host that was tried; or a file of the credentials is unreadable.
    pub async fn connect(&self, name: &str) -> Result<Connection, ConnectError> {
        self.connect_with_host(name).await.map(|(connection, _)| connection)
    }

    /// As [`connect`](Self::connect), and which host it is.
    ///
    /// # Errors
    /// As those of [`connect`](Self::connect).
    pub async fn connect_with_host(&self, name: &str) -> Result<(Connection, BrokerHost), ConnectError> {
        let first = self.first.unwrap_or_else(|| self.random_host());
        let (later, sooner) = self.hosts.split_at(first);
        let secrets = self.credentials.read().await;
        let secrets = secrets
            .map_err(|error| ConnectError { host: "credentials".to_owned(), error: io_error(error) })?;
        let mut last = None;
        for host in sooner.iter().chain(later) {
            let error = match self.connect_to(host, name, &secrets).await {
                Ok(connection) => {
                    let authority = &host.uri.authority;
                    return Ok((
                        connection,
                        BrokerHost { name: authority.host.clone(), port: authority.port },
                    ));
                }
                Err(error) => ConnectError { host: shown(&host.uri), error },
            };
            if error.is_refusal() {
                return Err(error);
            }
            last = Some(error);
        }
        Err(last.unwrap_or_else(|| ConnectError { host: String::new(), error: io_error(no_answer()) }))
    }

    async fn connect_to(&self, host: &Host, name: &str, secrets: &Secrets) -> lapin::Result<Connection> {
        let Host { uri, was_silent } = host;
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let connect_timeout =
            Duration::from_millis(uri.query.connection_timeout.unwrap_or(CONNECT_TIMEOUT_MS));
        if was_silent.load(Ordering::Relaxed) {
            let answered = tokio::time::timeout(connect_timeout, probe(uri)).await;
            answered.unwrap_or_else(|_| Err(no_answer())).map_err(io_error)?;
        }
        let runtime = lapin::runtime::default_runtime()?;
        let mut uri = uri.clone();
        if let Some(password) = &secrets.password {
            uri.authority.userinfo.password.clone_from(password);
        }
        let tls = OwnedTLSConfig { identity: secrets.identity.clone(), cert_chain: self.ca_pem.clone() };
        let connecting = Connection::connect_uri_with_config(uri, properties, tls, runtime);
        // lapin bounds neither the TCP connection nor the handshake.
        let mut guard = AnswerGuard { was_silent, has_answered: false };
        let connected = tokio::time::timeout(connect_timeout, connecting).await;
        guard.has_answered = connected.is_ok();
        drop(guard);
        connected.unwrap_or_else(|_| Err(io_error(no_answer()))).map_err(|error| {
            if is_no_tls(&error) {
                io_error(io::Error::new(io::ErrorKind::InvalidData, NO_TLS))
            } else {
                error
            }
        })
    }
}

/// Notes on drop whether a host was silent. So it also notes a host at which the caller has given up before our own time limit.
struct AnswerGuard<'a> {
    was_silent: &'a AtomicBool,
    has_answered: bool,
}

impl Drop for AnswerGuard<'_> {
    fn drop(&mut self) {
        self.was_silent.store(!self.has_answered, Ordering::Relaxed);
    }
}

/// Waits until a broker answers the protocol header. With TLS, only until the port is open.
async fn probe(uri: &AMQPUri) -> io::Result<()> {
    let mut stream = TcpStream::connect((uri.authority.host.as_str(), uri.authority.port)).await?;
    if matches!(uri.scheme, AMQPScheme::AMQP) {
        stream.write_all(b"AMQP\0\0\x09\x01").await?;
        stream.read_u8().await?;
    }
    Ok(())
}

/// What to do where the port answers something else than TLS.
const NO_TLS: &str =
    "the port does not speak TLS: amqps:// is port 5671 of most brokers, and amqp:// port 5672";

/// Whether the peer answered the TLS handshake with something else. By text, because this crate does not depend on rustls, whose error it
/// is.
fn is_no_tls(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::IOError(why) if why.to_string().contains("InvalidContentType"))
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

fn io_error(error: io::Error) -> Error {
    ErrorKind::IOError(Arc::new(error)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The caller's time limit may be shorter than that of a host.
    #[tokio::test]
    async fn a_host_is_noted_as_silent_also_if_the_caller_gives_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: Address = format!("amqp://{}/", listener.local_addr().unwrap()).parse().unwrap();
        let was_silent = || address.hosts[0].was_silent.load(Ordering::Relaxed);
        assert!(!was_silent());
        let _accepted = tokio::select! {
            _ = address.connect("test") => panic!("a listener that says nothing has answered"),
            accepted = listener.accept() => accepted.unwrap(),
        };
        assert!(was_silent());
    }

    #[tokio::test]
    async fn a_chosen_host_is_tried_before_the_others() {
        // Ports of listeners that are closed again: each refuses at once.
        let port = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (a, b) = (port(), port());
        let address: Address = format!("amqp://127.0.0.1:{a},127.0.0.1:{b}/").parse().unwrap();
        for turn in address.in_turn() {
            let chosen = turn.first.unwrap();
            let error = turn.connect("test").await.unwrap_err();
            // The error is that of the host that was tried last.
            assert_eq!(error.host, format!("127.0.0.1:{}", [b, a][chosen]));
        }
    }
}
