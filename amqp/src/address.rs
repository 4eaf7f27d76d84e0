//! The address of a broker: one or several hosts that share credentials, virtual host and options.

mod connect;
mod options;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use connect::ConnectError;
use lapin::uri::{AMQPScheme, AMQPUri};

use self::options::check_options;
use crate::credentials::{Credentials, InvalidCredentials, OfUrl};

/// Seconds between heartbeats, unless the URL says otherwise: a dead peer is noticed within two of them.
const HEARTBEAT_S: u16 = 20;

/// Milliseconds for one host, from the TCP connection to the end of the handshake, unless the URL says otherwise.
const CONNECT_TIMEOUT_MS: u64 = 10_000;

/// The address of a broker, or of the nodes of a cluster. `Display` and `Debug` omit the credentials.
#[derive(Clone)]
pub struct Address {
    /// At least one; they differ only by host.
    hosts: Vec<Host>,
    /// The host to try first; none: a random one.
    first: Option<usize>,
    /// Whether the URL has a user, and a password.
    names_user: bool,
    has_password: bool,
    credentials: Credentials,
    /// Certificates in PEM that are trusted besides those of the system.
    ca_pem: Option<String>,
}

#[derive(Clone)]
struct Host {
    uri: AMQPUri,
    /// It did not answer the last time. An abandoned attempt of lapin's continues in a thread for as long as the peer is silent,
    /// so such a host is probed for a single byte first.
    was_silent: Arc<AtomicBool>,
}

/// One host of an address, as the URL names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerHost {
    pub name: String,
    pub port: u16,
}

/// Why a text is not an address. Does not contain the text, which may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is not an AMQP URL ({what}); it should look like amqp://USER:PASSWORD@HOST:5672/VHOST, or amqps://…, with HOST:PORT,HOST:PORT for several hosts"
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
        check_options(tail).map_err(|what| invalid(&what))?;
        let (user, hosts) = authority.rsplit_once('@').map_or(("", authority), |(user, hosts)| (user, hosts));
        let at = if user.is_empty() { "" } else { "@" };
        let of_host = |host: &str| {
            if host.is_empty() {
                return Err(invalid("an empty host"));
            }
            let parsed = format!("{scheme}://{user}{at}{host}{tail}").parse::<AMQPUri>();
            // Some messages of the parser quote the whole URL.
            let unquoted = |what: String| {
                if what.contains('@') || what.contains(url) { "it cannot be read".to_owned() } else { what }
            };
            let mut uri = parsed.map_err(|what| invalid(&unquoted(what)))?;
            // The parser does not read an IPv6 address and assumes localhost.
            if let Some((address, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                uri.authority.host = address.to_owned();
            }
            Ok(Host { uri: with_defaults(uri), was_silent: Arc::default() })
        };
        let hosts = hosts.split(',').map(of_host).collect::<Result<_, _>>()?;
        let (name, password) = user.split_once(':').unwrap_or((user, ""));
        Ok(Self {
            hosts,
            first: None,
            names_user: !name.is_empty(),
            has_password: !password.is_empty(),
            credentials: Credentials::default(),
            ca_pem: None,
        })
    }
}

fn with_defaults(mut uri: AMQPUri) -> AMQPUri {
    // RabbitMQ has no virtual host without a name, and other clients take `amqp://host/` in this way.
    if uri.vhost.is_empty() {
        uri.vhost = "/".to_owned();
    }
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    uri.query.connection_timeout.get_or_insert(CONNECT_TIMEOUT_MS);
    uri
}

impl Address {
    /// Trusts the certificates in a PEM text, besides those of the system.
    #[must_use]
    pub fn trusting(mut self, ca_pem: String) -> Self {
        self.ca_pem = Some(ca_pem);
        self
    }

    /// Says who the client is by files, which are read again for each connection.
    ///
    /// # Errors
    /// All that is wrong with them: files that cannot be read, and those that do not suit the URL.
    pub fn with_credentials(mut self, credentials: Credentials) -> Result<Self, Vec<InvalidCredentials>> {
        let url = OfUrl {
            is_tls: self.is_tls(),
            names_user: self.names_user,
            has_password: self.has_password,
            is_external: self.is_external(),
        };
        let faults = credentials.faults(url);
        self.credentials = credentials;
        if faults.is_empty() { Ok(self) } else { Err(faults) }
    }

    /// The files that say who the client is.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    pub fn is_tls(&self) -> bool {
        self.hosts.iter().any(|host| matches!(host.uri.scheme, AMQPScheme::AMQPS))
    }

    /// The user that connects by name and password; `guest` if the URL names none.
    pub fn user(&self) -> Option<&str> {
        let user = self.hosts.first().map(|host| host.uri.authority.userinfo.username.as_str());
        user.filter(|user| !user.is_empty())
    }

    /// The user that connects by name, with its password: for another door of the same broker, such as its management API. `None` if the
    /// certificate says who the client is.
    ///
    /// # Errors
    /// The file with the password cannot be read.
    pub async fn user_and_password(&self) -> io::Result<Option<(String, String)>> {
        if self.is_external() {
            return Ok(None);
        }
        let user = self.hosts.first().map(|host| host.uri.authority.userinfo.clone()).unwrap_or_default();
        let password = self.credentials.read().await?.password.unwrap_or(user.password);
        Ok(Some((user.username, password)))
    }

    pub fn virtual_host(&self) -> &str {
        self.hosts.first().map_or("/", |host| &host.uri.vhost)
    }

    /// The user that messages may name as their `user_id`: the URL's, unless the certificate names the user.
    pub fn user_id(&self) -> Option<&str> {
        self.user().filter(|_| self.names_user && !self.is_external())
    }

    /// Whether the certificate says who the client is.
    fn is_external(&self) -> bool {
        let mechanisms = self.hosts.iter().filter_map(|host| host.uri.query.auth_mechanism.as_ref());
        mechanisms.map(|mechanism| mechanism.name()).any(|name| name == "EXTERNAL")
    }

    /// The seconds between heartbeats that the broker is asked for.
    pub fn heartbeat_s(&self) -> u16 {
        self.hosts.first().and_then(|host| host.uri.query.heartbeat).unwrap_or(HEARTBEAT_S)
    }

    /// One address for each host, which tries that host first and then those that follow it: for a client that finds a host unusable
    /// after it has connected. Starts with a random one, so that clients spread over all.
    pub fn in_turn(&self) -> impl Iterator<Item = Self> + use<> {
        let (hosts, address, first) = (self.hosts.len(), self.clone(), self.random_host());
        (0..hosts).map(move |turn| Self { first: Some((first + turn) % hosts), ..address.clone() })
    }

    /// The same address, which tries this host first: for a further connection to a host that has answered.
    #[must_use]
    pub fn starting_with(&self, host: &BrokerHost) -> Self {
        let is_it = |known: &Host| {
            let authority = &known.uri.authority;
            authority.host == host.name && authority.port == host.port
        };
        Self { first: self.hosts.iter().position(is_it).or(self.first), ..self.clone() }
    }

    /// The same address, each host of which has at most this time to answer.
    #[must_use]
    pub fn answering_within(mut self, time: Duration) -> Self {
        let at_most_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        for host in &mut self.hosts {
            let ms = &mut host.uri.query.connection_timeout;
            *ms = Some(ms.map_or(at_most_ms, |ms| ms.min(at_most_ms)));
        }
        self
    }

    /// How many hosts it has, at least one.
    pub fn host_count(&self) -> usize {
        self.hosts.len()
    }

    fn random_host(&self) -> usize {
        uuid::Uuid::new_v4().as_u64_pair().0 as usize % self.hosts.len()
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
    fn several_hosts_share_everything_else() {
        assert_eq!(shown("amqp://localhost"), "amqp://localhost:5672/");
        assert_eq!(shown("amqp://u:p@a:1,b,c:3/v?heartbeat=7"), "amqp://a:1,b:5672,c:3/v");
        assert_eq!(shown("amqps://u:p@a,b/%2f"), "amqps://a:5671,b:5671/");
        assert_eq!(shown("amqp://u:p@[::1]:5,a/v"), "amqp://[::1]:5,a:5672/v");
        let address: Address = "amqp://me:p%40ss@a,b/v?heartbeat=7".parse().unwrap();
        assert!(!address.is_tls() && address.heartbeat_s() == 7 && address.user_id() == Some("me"));
        for Host { uri, .. } in &address.hosts {
            assert_eq!((uri.vhost.as_str(), uri.query.heartbeat), ("v", Some(7)));
            let user = &uri.authority.userinfo;
            assert_eq!((user.username.as_str(), user.password.as_str()), ("me", "p@ss"));
        }
    }

    #[test]
    fn the_virtual_host_is_a_slash_unless_it_has_a_name() {
        for url in ["amqp://a", "amqp://a/", "amqp://a//", "amqp://a/%2f", "amqp://a/%2F?heartbeat=7"] {
            let address: Address = url.parse().unwrap();
            assert_eq!(address.hosts[0].uri.vhost, "/", "{url}");
        }
    }

    #[test]
    fn messages_name_a_user_only_if_the_url_does() {
        let user_id = |url: &str| url.parse::<Address>().unwrap().user_id().map(str::to_owned);
        assert_eq!(user_id("amqp://m%40e:hunter2@a,b/").as_deref(), Some("m@e"));
        for url in ["amqp://a/", "amqp://:token@a/", "amqps://u:p@a/?auth_mechanism=external"] {
            assert_eq!(user_id(url), None, "{url}");
        }
    }

    #[test]
    fn each_host_is_the_first_of_one_turn() {
        let address: Address = "amqp://a,b,c/".parse().unwrap();
        let mut first: Vec<_> = address.in_turn().map(|turn| turn.first.unwrap()).collect();
        assert!(first.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 3), "{first:?}");
        first.sort_unstable();
        assert_eq!(first, [0, 1, 2]);
    }

    #[test]
    fn a_further_connection_starts_with_the_host_that_answered() {
        let address: Address = "amqp://a,b:7,b/".parse().unwrap();
        let first =
            |name: &str, port| address.starting_with(&BrokerHost { name: name.to_owned(), port }).first;
        assert_eq!([first("b", 7), first("b", 5672), first("c", 5672)], [Some(1), Some(2), None]);
    }

    #[test]
    fn a_host_has_the_shorter_of_two_times() {
        for (query, ms) in
            [("", 3_000), ("?connection_timeout=1000", 1_000), ("?connection_timeout=5000", 3_000)]
        {
            let address: Address = format!("amqp://a,b/%2f{query}").parse().unwrap();
            let address = address.answering_within(Duration::from_secs(3));
            assert!(
                address.hosts.iter().all(|host| host.uri.query.connection_timeout == Some(ms)),
                "{query}"
            );
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
            "amqp://user:hun?hunter2@host/",
            "amqp://user:hun?a=1&hunter2@host/",
        ] {
            let message = match url.parse::<Address>() {
                Ok(address) => format!("{address} {address:?}"),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for url in
            ["", "localhost", "http://host/", "amqp://a:x/", "amqp://u:p@/v", "amqp://a,,b/v", "amqp://a,/v"]
        {
            assert!(url.parse::<Address>().is_err(), "{url}");
        }
        // The parser ignores options that it does not know.
        let refused = "amqp://a,b/v?heartbeat=7&hartbeat=1".parse::<Address>().unwrap_err();
        assert!(refused.to_string().contains("the option hartbeat is unknown"), "{refused}");
    }
}
