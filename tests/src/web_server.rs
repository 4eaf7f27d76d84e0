//! A web server for tests of stores: the path of a request decides the answer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What every object has, unless its path says otherwise.
pub const BODY: &[u8] = b"what the server has\0\xff";

/// `test`, as gzip compresses it: by `printf test | gzip -n`.
const GZIP: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\x02\x03\x2b\x49\x2d\x2e\x01\0\x0c\x7e\x7f\xd8\x04\0\0\0";

/// The SHA-256 of `test`, which tests put into stores: by `printf test | sha256sum`.
pub const SHA256_OF_TEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

/// How often each path was asked for.
type Asked = Arc<Mutex<HashMap<String, usize>>>;

/// A server on a port of its own, until it is dropped.
#[derive(Debug)]
pub struct WebServer {
    address: SocketAddr,
    asked: Asked,
    speaks: watch::Sender<bool>,
    accepting: tokio::task::JoinHandle<()>,
}

impl WebServer {
    /// # Errors
    /// The system has no port.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("a port for a web server")?;
        let (address, asked) = (listener.local_addr()?, Asked::default());
        let (speaks, hears) = watch::channel(false);
        let accepting = tokio::spawn(accept(listener, Arc::clone(&asked), hears));
        Ok(Self { address, asked, speaks, accepting })
    }

    /// The URL of a path, which begins with a slash.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// From now on requests for `silent` objects are answered, also those that wait.
    pub fn speak(&self) {
        self.speaks.send_replace(true);
    }

    /// How often a path was asked for.
    pub fn asked(&self, path: &str) -> usize {
        locked(&self.asked).get(path).copied().unwrap_or(0)
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn locked(asked: &Asked) -> MutexGuard<'_, HashMap<String, usize>> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, asked: Asked, speaks: watch::Receiver<bool>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (asked, speaks) = (Arc::clone(&asked), speaks.clone());
        // A client that hangs up is not the server's fault.
        tokio::spawn(async move { drop(answer(stream, &asked, speaks).await) });
    }
}

/// Answers one request, and closes the connection. The last segment of the path says how:
///
/// | | |
/// |---|---|
/// | `missing` | 404 |
/// | `refused` | 403 |
/// | `redirect` | 302, to `/a/behind` |
/// | `gzip` | compressed, whatever the client asked for |
/// | `hinted` | 103, and then the object |
/// | `large` | 2 MiB, as its length says |
/// | `endless` | bytes until the client has enough |
/// | `cut` | less than its length says, at first; then all of it |
/// | `busy` | 503 at first; then the object |
/// | `slow` | nothing at first; then the object |
/// | `silent` | nothing until [`WebServer::speak`]; then the object |
/// | anything else | the object |
async fn answer(stream: TcpStream, asked: &Asked, mut speaks: watch::Receiver<bool>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let (mut request, mut line) = (String::new(), String::new());
    stream.read_line(&mut request).await?;
    while stream.read_line(&mut line).await? > 2 {
        line.clear();
    }
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let is_first = {
        let mut asked = locked(asked);
        let times = asked.entry(path.clone()).or_default();
        *times += 1;
        *times == 1
    };
    let head = |status: &str, more: &str| format!("HTTP/1.1 {status}\r\nConnection: close\r\n{more}\r\n");
    let of_length = |length: usize| head("200 OK", &format!("Content-Length: {length}\r\n"));
    let name = path.rsplit('/').next().unwrap_or_default();
    if name == "silent" {
        // An `Err` means that the server is dropped.
        let _ = speaks.wait_for(|speaks| *speaks).await;
    }
    if name == "slow" && is_first {
        // Until the client hangs up.
        while stream.read_line(&mut line).await? > 0 {}
        return Ok(());
    }
    let (head, body) = match name {
        "missing" => (head("404 Not Found", "Content-Length: 0\r\n"), &b""[..]),
        "refused" => (head("403 Forbidden", "Content-Length: 0\r\n"), &b""[..]),
        "redirect" => (head("302 Found", "Location: /a/behind\r\nContent-Length: 0\r\n"), &b""[..]),
        "gzip" => {
            let more = format!("Content-Encoding: gzip\r\nContent-Length: {}\r\n", GZIP.len());
            (head("200 OK", &more), GZIP)
        }
        "hinted" => {
            let hint = "HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n";
            (hint.to_owned() + &of_length(BODY.len()), BODY)
        }
        "large" => (of_length(2 << 20), &b""[..]),
        "endless" => (head("200 OK", ""), &b""[..]),
        "cut" if is_first => (of_length(BODY.len()), &BODY[..5]),
        "busy" if is_first => (head("503 Service Unavailable", "Content-Length: 0\r\n"), &b""[..]),
        _ => (of_length(BODY.len()), BODY),
    };
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    while path.ends_with("endless") {
        stream.write_all(&[7; 4096]).await?;
    }
    stream.shutdown().await
}
