//! A web server as a store: plain GETs to public addresses, without redirects.

use std::error::Error;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures_util::stream::{self, StreamExt as _};
use reqwest::Client;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{ACCEPT_ENCODING, CONTENT_ENCODING, HeaderMap};
use tokio::net::lookup_host;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::rustls::RootCertStore;
use url::{Host, Url};

use crate::Fault;
use crate::address::is_public;
use crate::body::{Body, cause, late};
use crate::http_client;
use crate::reference::Reference;

/// How long a connection is kept for the next object. Servers keep theirs for 5 s or more, and a request that meets the end of its
/// connection fails.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// The longest `Content-Encoding` in an error, in characters.
const ENCODING_CHARS_MAX: usize = 40;

/// A client of one store.
#[derive(Debug)]
pub struct HttpStore {
    /// Or why there is none.
    client: Result<Client, String>,
    is_private: bool,
    timeout: Duration,
}

impl HttpStore {
    /// A client that takes at most so long for an object, and connects to private addresses only if it may.
    pub fn new(is_private: bool, timeout: Duration) -> Self {
        Self { client: client(is_private, timeout), is_private, timeout }
    }

    /// Fetches an object. Returns a stream of its bytes, and its length in bytes if the server names one. Blocks: call it from a thread
    /// of a tokio runtime that may block.
    ///
    /// # Errors
    /// The server cannot be reached, or rejects the request.
    pub fn get(&self, reference: &Reference) -> Result<(Box<dyn Read + Send>, Option<u64>), Fault> {
        let shown = reference.shown();
        if !self.is_private && literal_address(&reference.url).is_some_and(|address| !is_public(address)) {
            return Err(at_private_address(&shown));
        }
        let unavailable = |why: &str| Fault::Unavailable(format!("get {shown}: {why}"));
        let client = self.client.as_ref().map_err(|error| unavailable(error))?;
        let (runtime, until) = (Handle::current(), Instant::now() + self.timeout);
        let request = client.get(reference.url.clone()).header(ACCEPT_ENCODING, "identity");
        let response = match runtime.block_on(timeout_at(until, request.send())) {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                // The URL may have a signature.
                let error = error.without_url();
                return Err(match is_at_private_address(&error) {
                    true => at_private_address(&shown),
                    false => unavailable(&cause(&error)),
                });
            }
            Err(_) => return Err(unavailable(&late(self.timeout))),
        };
        if response.status().as_u16() != 200 {
            return Err(of_status(response.status().as_u16(), &shown));
        }
        if let Some(encoding) = encoding(response.headers()) {
            return Err(Fault::Denied(format!(
                "the server sends {shown} encoded as {encoding}, although it was asked for the bytes as they are"
            )));
        }
        let length = response.content_length();
        let pieces = stream::try_unfold(response, |mut response| async move {
            let piece = response.chunk().await;
            match piece {
                Ok(piece) => Ok(piece.map(|piece| (piece, response))),
                Err(error) => Err(cause(&error.without_url())),
            }
        });
        Ok((Box::new(Body::new(runtime, pieces.boxed(), until, self.timeout)), length))
    }
}

/// A client that trusts Mozilla's authorities, and connects to private addresses only if it may.
///
/// # Errors
/// The TLS library fails.
fn client(is_private: bool, timeout: Duration) -> Result<Client, String> {
    let mut roots = RootCertStore::empty();
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let client = http_client::builder(http_client::tls(roots)?, timeout)
        .http1_only()
        .dns_resolver(Resolver { is_private })
        .pool_idle_timeout(IDLE_MAX);
    client.build().map_err(|error| format!("set up the HTTP client: {}", cause(&error)))
}

/// All addresses of a name are private, and the client may not connect to them.
#[derive(Debug, thiserror::Error)]
#[error("all addresses are private")]
struct OnlyPrivateAddresses;

/// Looks names up. The client connects to no other address than those found here, even if the name changes a moment later.
#[derive(Debug)]
struct Resolver {
    is_private: bool,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(look_up(name, self.is_private))
    }
}

/// The addresses of a name that the client may connect to.
async fn look_up(name: Name, is_private: bool) -> Result<Addrs, Box<dyn Error + Send + Sync>> {
    // The client takes the port from the URL.
    let mut addresses: Vec<SocketAddr> = lookup_host((name.as_str(), 0)).await?.collect();
    let found = addresses.len();
    addresses.retain(|address| is_private || is_public(address.ip()));
    if addresses.is_empty() && found > 0 {
        return Err(OnlyPrivateAddresses.into());
    }
    Ok(Box::new(addresses.into_iter()))
}

/// The address that a URL has in place of a name. The client does not look it up.
fn literal_address(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

fn is_at_private_address(error: &reqwest::Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        if error.is::<OnlyPrivateAddresses>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn at_private_address(shown: &str) -> Fault {
    Fault::Denied(format!("{shown} is at a private address, which its store does not allow"))
}

/// How a body is encoded, if it is not the object's bytes as they are.
fn encoding(headers: &HeaderMap) -> Option<String> {
    let values = headers.get_all(CONTENT_ENCODING).iter();
    let mut values = values.map(|value| String::from_utf8_lossy(value.as_bytes()).trim().to_owned());
    let encoding = values.find(|value| !value.is_empty() && !value.eq_ignore_ascii_case("identity"))?;
    Some(encoding.chars().take(ENCODING_CHARS_MAX).collect())
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    use super::*;

    type Got = Result<(Vec<u8>, Option<u64>), Fault>;

    fn got(url: String, is_private: bool) -> Got {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.unwrap().block_on(async {
            let get = move || {
                let store = HttpStore::new(is_private, Duration::from_secs(20));
                let (mut body, length) = store.get(&Reference::parse(&url).unwrap())?;
                let mut bytes = Vec::new();
                let read = body.read_to_end(&mut bytes);
                read.map_err(|error| Fault::Unavailable(format!("read: {error}")))?;
                Ok((bytes, length))
            };
            tokio::task::spawn_blocking(get).await.unwrap()
        })
    }

    /// What comes of a server's answer; and the request.
    fn answered(answer: &str) -> (Got, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/a?signature=1", listener.local_addr().unwrap());
        let answer = answer.to_owned();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let (mut stream, mut request) = (BufReader::new(stream), String::new());
            while stream.read_line(&mut request).unwrap() > 2 {}
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
            request.to_ascii_lowercase()
        });
        (got(url, true), server.join().unwrap())
    }

    const HEAD: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n";

    #[test]
    fn an_object_comes_as_it_is_or_not_at_all() {
        let (got, request) = answered(&format!("{HEAD}\r\ntest"));
        assert_eq!(got, Ok((b"test".to_vec(), Some(4))));
        assert!(request.contains("\r\naccept-encoding: identity\r\n"), "{request}");
        let (got, _) = answered(&format!("{HEAD}Content-Encoding: identity\r\n\r\ntest"));
        assert_eq!(got, Ok((b"test".to_vec(), Some(4))));
        for encoding in ["gzip", "x-gzip", "br", "identity\r\nContent-Encoding: zstd"] {
            let (got, _) = answered(&format!("{HEAD}Content-Encoding: {encoding}\r\n\r\ntest"));
            let fault = got.unwrap_err();
            assert!(matches!(&fault, Fault::Denied(what) if what.contains("/a encoded as ")), "{fault:?}");
        }
    }

    #[test]
    fn hints_come_before_the_answer() {
        let (got, _) = answered(&format!("HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n{HEAD}\r\ntest"));
        assert_eq!(got, Ok((b"test".to_vec(), Some(4))));
    }

    #[test]
    fn a_length_is_what_the_server_says_and_all_of_it_must_come() {
        let (got, _) = answered("HTTP/1.1 200 OK\r\n\r\ntest");
        assert_eq!(got, Ok((b"test".to_vec(), None)));
        let (got, _) = answered(&format!("{HEAD}\r\ntes"));
        let fault = got.unwrap_err();
        assert!(matches!(&fault, Fault::Unavailable(what) if what.starts_with("read: ")), "{fault:?}");
        let (got, _) = answered("no HTTP\r\n\r\n");
        let fault = got.unwrap_err();
        assert!(matches!(&fault, Fault::Unavailable(what) if !what.contains("signature")), "{fault:?}");
    }

    #[test]
    fn names_and_numbers_of_private_addresses_are_denied() {
        // Nobody listens there.
        for host in
            ["localhost", "127.0.0.1", "0x7f000001", "2130706433", "127.1", "[::1]", "[::ffff:127.0.0.1]"]
        {
            let url = format!("http://{host}:1/a");
            let fault = got(url.clone(), false).unwrap_err();
            assert!(
                matches!(&fault, Fault::Denied(what) if what.contains("private address")),
                "{host}: {fault:?}"
            );
            let fault = got(url, true).unwrap_err();
            assert!(matches!(&fault, Fault::Unavailable(_)), "{host}: {fault:?}");
        }
    }
}
