//! Where a broker is: one or several hosts, with the credentials, virtual host and options that are the same for all.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties, Error, ErrorKind};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Seconds between heartbeats, unless the URL says otherwise: a dead peer is noticed within two of them.
const HEARTBEAT_S: u16 = 20;

/// Milliseconds for one host, from the TCP connection to the end of the handshake, unless the URL says otherwise.
const CONNECT_TIMEOUT_MS: u64 = 10_000;

/// The address of a broker or of the nodes of a cluster. Shows itself without credentials.
#[derive(Clone)]
pub struct Address {
    /// At least one; alike but for the host.
    hosts: Vec<Host>,
    tls: OwnedTLSConfig,
}

#[derive(Clone)]
struct Host {
    uri: AMQPUri,
    /// It did not answer the last time. An attempt of lapin's that is given up goes on in a thread of its own for as long as
    /// the peer says nothing, so such a host is first asked for a single byte.
    mute: Arc<AtomicBool>,
}

/// A text that is no address. Never repeats it: it may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is no AMQP URL ({what}); it looks like amqp://USER:PASSWORD@HOST:5672/VHOST, or amqps://…, with HOST:PORT,HOST:PORT for several hosts"
)]
pub struct InvalidAddress {
    what: String,
}

impl FromStr for Address {
    type Err = InvalidAddress;

    fn from_str(url: &str) -> Result<Self, InvalidAddress> {
        let invalid = |what: &str| InvalidAddress { what: what.to_owned() };
        let (scheme, rest) = url.split_once("://").ok_or_else(|| invalid("no scheme"))?;
        let (authority, tail) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
        let at = if user.is_empty() { "" } else { "@" };
        let of_host = |host: &str| {
            if host.is_empty() {
                return Err(invalid("an empty host"));
            }
            let parsed = format!("{scheme}://{user}{at}{host}{tail}").parse::<AMQPUri>();
            // Some of its messages quote the whole URL.
            let unquoted = |what: String| {
                if what.contains('@') || what.contains(url) { "it cannot be read".to_owned() } else { what }
            };
            let mut uri = parsed.map_err(|what| invalid(&unquoted(what)))?;
            // The parser takes an IPv6 address for no host at all, and that for localhost.
            if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                uri.authority.host = address.to_owned();
            }
            Ok(Host { uri: with_defaults(uri), mute: Arc::default() })
        };
        let hosts = hosts.split(',').map(of_host).collect::<Result<_, _>>()?;
        Ok(Self { hosts, tls: OwnedTLSConfig::default() })
    }
}

fn with_defaults(mut uri: AMQPUri) -> AMQPUri {
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    uri.query.connection_timeout.get_or_insert(CONNECT_TIMEOUT_MS);
    uri
}

impl Address {
    /// Trusts the certificates in a PEM text besides those that the system trusts.
    #[must_use]
    pub fn trusting(mut self, ca_pem: String) -> Self {
        self.tls.cert_chain = Some(ca_pem);
        self
    }

    pub fn is_tls(&self) -> bool {
        self.hosts.iter().any(|host| matches!(host.uri.scheme, AMQPScheme::AMQPS))
    }

    /// The seconds between heartbeats that the broker is asked for.
    pub fn heartbeat_s(&self) -> u16 {
        self.hosts.first().and_then(|host| host.uri.query.heartbeat).unwrap_or(HEARTBEAT_S)
    }

    /// Connects to the first host that answers. Begins with any of them, so that many clients spread over all.
    ///
    /// lapin's own recovery stays off: it brings consumers back without their prefetch.
    ///
    /// # Errors
    /// Of the first host that answered and said no, else of the last that was tried; with the host that it is about.
    pub async fn connect(&self, name: &str) -> Result<Connection, ConnectError> {
        let first = uuid::Uuid::new_v4().as_u64_pair().0 as usize % self.hosts.len();
        let (later, sooner) = self.hosts.split_at(first);
        let mut last = None;
        for host in sooner.iter().chain(later) {
            let error = match self.connect_to(host, name).await {
                Ok(connection) => return Ok(connection),
                Err(error) => ConnectError { host: shown(&host.uri), error },
            };
            if error.is_refusal() {
                return Err(error);
            }
            last = Some(error);
        }
        Err(last.unwrap_or_else(|| ConnectError { host: String::new(), error: io_error(no_answer()) }))
    }

    async fn connect_to(&self, host: &Host, name: &str) -> lapin::Result<Connection> {
        let Host { uri, mute } = host;
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let patience = Duration::from_millis(uri.query.connection_timeout.unwrap_or(CONNECT_TIMEOUT_MS));
        if mute.load(Ordering::Relaxed) {
            let said = tokio::time::timeout(patience, says_something(uri)).await;
            said.unwrap_or_else(|_| Err(no_answer())).map_err(io_error)?;
        }
        let runtime = lapin::runtime::default_runtime()?;
        let connecting =
            Connection::connect_uri_with_config(uri.clone(), properties, self.tls.clone(), runtime);
        // lapin bounds neither the TCP connection nor the handshake.
        let connected = tokio::time::timeout(patience, connecting).await;
        mute.store(connected.is_err(), Ordering::Relaxed);
        connected.unwrap_or_else(|_| Err(io_error(no_answer())))
    }
}

/// Whether a broker answers the protocol's header. Of TLS, only whether somebody listens.
async fn says_something(uri: &AMQPUri) -> io::Result<()> {
    let mut stream = TcpStream::connect((uri.authority.host.as_str(), uri.authority.port)).await?;
    if matches!(uri.scheme, AMQPScheme::AMQP) {
        stream.write_all(b"AMQP\0\0\x09\x01").await?;
        stream.read_u8().await?;
    }
    Ok(())
}

fn no_answer() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

fn io_error(error: io::Error) -> Error {
    ErrorKind::IOError(Arc::new(error)).into()
}

/// Why there is no connection, and with which host.
#[derive(Debug, thiserror::Error)]
#[error("{host}: {error}")]
pub struct ConnectError {
    pub host: String,
    #[source]
    pub error: Error,
}

impl ConnectError {
    /// Whether the broker answered, and said no: 403 is a bad password, 530 an unknown virtual host. Others (320, a broker
    /// that shuts down) pass.
    pub fn is_refusal(&self) -> bool {
        matches!(self.error.kind(), ErrorKind::ProtocolError(told) if matches!(told.get_id(), 403 | 530))
    }
}

fn shown(uri: &AMQPUri) -> String {
    let (host, port) = (&uri.authority.host, uri.authority.port);
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(AMQPUri { scheme, vhost, .. }) = self.hosts.first().map(|host| &host.uri) else {
            return Ok(());
        };
        let hosts: Vec<_> = self.hosts.iter().map(|host| shown(&host.uri)).collect();
        write!(f, "{scheme}://{}/{}", hosts.join(","), vhost.trim_start_matches('/'))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(url: &str) -> String {
        url.parse::<Address>().unwrap().to_string()
    }

    #[test]
    fn one_host_or_several_with_the_same_of_all_else() {
        assert_eq!(shown("amqp://localhost"), "amqp://localhost:5672/");
        assert_eq!(shown("amqp://u:p@a:1,b,c:3/v?heartbeat=7"), "amqp://a:1,b:5672,c:3/v");
        assert_eq!(shown("amqps://u:p@a,b/%2f"), "amqps://a:5671,b:5671/");
        assert_eq!(shown("amqp://u:p@[::1]:5,a/v"), "amqp://[::1]:5,a:5672/v");
        let address: Address = "amqp://me:p%40ss@a,b/v?heartbeat=7".parse().unwrap();
        assert!(!address.is_tls() && address.heartbeat_s() == 7);
        for Host { uri, .. } in &address.hosts {
            assert_eq!((uri.vhost.as_str(), uri.query.heartbeat), ("v", Some(7)));
            let user = &uri.authority.userinfo;
            assert_eq!((user.username.as_str(), user.password.as_str()), ("me", "p@ss"));
        }
    }

    #[test]
    fn credentials_are_never_shown() {
        for url in [
            "amqp://user:hunter2@host:5672/%2f",
            "amqp://user:hunter2@host:99999/%2f",
            "amqp://user:hunter2@a,b:x/%2f",
            "amqp:user:hunter2@host",
            "hunter2",
            "http://user:hunter2@host/",
            "amqp://user:hunter2@/v",
            "amqp://user:hunter2@a,,b/v",
            "amqp://user:hunter2@host/?heartbeat=hunter2",
        ] {
            let told = match url.parse::<Address>() {
                Ok(address) => format!("{address} {address:?}"),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!told.contains("hunter2"), "{told}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for url in
            ["", "localhost", "http://host/", "amqp://a:x/", "amqp://u:p@/v", "amqp://a,,b/v", "amqp://a,/v"]
        {
            assert!(url.parse::<Address>().is_err(), "{url}");
        }
    }
}
