//! A web server as a store: plain GETs to public addresses, without redirects.

use std::io::{self, Read};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::time::Duration;

use ureq::{Agent, AgentBuilder, ErrorKind};

use crate::Fault;
use crate::address::is_public;
use crate::reference::Reference;

/// How long connecting may take. A working server answers within a round trip; a lost packet is sent again after one second, then
/// two.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A client of one store.
#[derive(Debug)]
pub struct HttpStore {
    agent: Agent,
}

impl HttpStore {
    /// A client that takes at most so long for an object, and connects to private addresses only if it may.
    pub fn new(is_private: bool, timeout: Duration) -> Self {
        let agent = AgentBuilder::new()
            .redirects(0)
            .try_proxy_from_env(false)
            .timeout_connect(CONNECT_MAX.min(timeout))
            .timeout(timeout)
            .user_agent(concat!("vramq/", env!("CARGO_PKG_VERSION")))
            .resolver(move |authority: &str| resolve(authority, is_private))
            .build();
        Self { agent }
    }

    /// Fetches an object. Returns a stream of its bytes, and its length in bytes if the server names one. Blocks.
    ///
    /// # Errors
    /// The server cannot be reached, or rejects the request.
    pub fn get(&self, reference: &Reference) -> Result<(Box<dyn Read + Send>, Option<u64>), Fault> {
        let shown = reference.shown();
        // A compressed body has another digest, and may unpack to a thousand times its size.
        let request = self.agent.request_url("GET", &reference.url).set("Accept-Encoding", "identity");
        let response = match request.call() {
            Ok(response) => response,
            Err(ureq::Error::Status(status, _)) => return Err(of_status(status, &shown)),
            Err(ureq::Error::Transport(error)) => return Err(of_transport(&error, &shown)),
        };
        match response.status() {
            200 => {
                let length = response.header("Content-Length").and_then(|length| length.trim().parse().ok());
                Ok((response.into_reader(), length))
            }
            status => Err(of_status(status, &shown)),
        }
    }
}

/// The addresses of a host that the client may connect to. It connects to no other, even if the name changes a moment later.
fn resolve(authority: &str, is_private: bool) -> io::Result<Vec<SocketAddr>> {
    let mut addresses: Vec<_> = authority.to_socket_addrs()?.collect();
    let found = addresses.len();
    addresses.retain(|address| is_private || is_public(address.ip()));
    if addresses.is_empty() && found > 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(addresses)
}

fn of_status(status: u16, shown: &str) -> Fault {
    match status {
        300..=399 => Fault::Denied(format!("{shown} is a redirect ({status}), which is not followed")),
        404 | 410 => Fault::Missing(format!("the server has no {shown} ({status})")),
        // The server asks for more time, or for fewer requests.
        408 | 425 | 429 | 500..=599 => {
            Fault::Unavailable(format!("the server answers {shown} with {status}"))
        }
        _ => Fault::Denied(format!("the server answers {shown} with {status}")),
    }
}

fn of_transport(error: &ureq::Transport, shown: &str) -> Fault {
    use std::error::Error as _;
    let source = error.source();
    let kind = source.and_then(|source| source.downcast_ref::<io::Error>()).map(io::Error::kind);
    if error.kind() == ErrorKind::Dns && kind == Some(io::ErrorKind::PermissionDenied) {
        return Fault::Denied(format!("{shown} is at a private address, which its store does not allow"));
    }
    // The error itself would show the URL with its query, so only its source is shown.
    let why = source.map(|source| format!(": {source}")).unwrap_or_default();
    Fault::Unavailable(format!("get {shown}: {}{why}", error.kind()))
}
