//! A minimal HTTP client for tests: one request per connection, and JSON for the management API.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::wait::DEADLINE;

/// How often a GET that the server failed at is tried again.
const TRIES_MORE: usize = 5;
const BEFORE_ANOTHER_TRY: Duration = Duration::from_millis(200);

/// A server, and who we are to it.
#[derive(Clone, Debug)]
pub struct Server {
    address: String,
    authorization: String,
}

impl Server {
    /// # Errors
    /// A URL that is not `http://USER:PASSWORD@HOST:PORT`.
    pub fn new(url: &str) -> Result<Self> {
        let (credentials, address) = url
            .strip_prefix("http://")
            .and_then(|rest| rest.trim_end_matches('/').split_once('@'))
            .with_context(|| format!("{url} is not http://USER:PASSWORD@HOST:PORT"))?;
        Ok(Self {
            address: address.to_owned(),
            authorization: format!("Basic {}", BASE64.encode(credentials)),
        })
    }

    /// Sends a request; the answer's JSON, or null for an empty one.
    ///
    /// # Errors
    /// The connection, an answer that is not JSON, or any status outside 200 to 299.
    pub async fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let body = body.map(Value::to_string).unwrap_or_default();
        // HTTP/1.0: no chunks, and the end of the answer is the end of the connection.
        let request = format!(
            "{method} {path} HTTP/1.0\r\nHost: {}\r\nAuthorization: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.address,
            self.authorization,
            body.len()
        );
        let (mut status, mut body) = converse(&self.address, request.as_bytes()).await?;
        // The management API fails if a listed object ends while it makes the list.
        let mut again = 0;
        while status == 500 && method == "GET" && again < TRIES_MORE {
            again += 1;
            tokio::time::sleep(BEFORE_ANOTHER_TRY).await;
            (status, body) = converse(&self.address, request.as_bytes()).await?;
        }
        if !(200..300).contains(&status) {
            bail!("{method} {path}: {status} {body}");
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&body).with_context(|| format!("{method} {path}: {body}"))
    }
}

/// A GET without credentials: status and body.
///
/// # Errors
/// The connection, no HTTP, or no answer in time.
pub async fn get(address: &str, path: &str) -> Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    let answer = timeout(DEADLINE, converse(address, request.as_bytes())).await.context("no answer");
    answer.and_then(|answer| answer).with_context(|| format!("GET {address}{path}"))
}

/// A request without credentials, and bytes both ways: status and body.
///
/// # Errors
/// The connection, no HTTP, or no answer in time.
pub async fn send(address: &str, method: &str, path: &str, body: &[u8]) -> Result<(u16, Vec<u8>)> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    let request = [head.as_bytes(), body].concat();
    let answer = timeout(DEADLINE, exchange(address, &request)).await.context("no answer");
    answer.and_then(|answer| answer).with_context(|| format!("{method} {address}{path}"))
}

/// Sends some bytes, and reads the answer to its end: status and body.
///
/// # Errors
/// The connection, or no HTTP.
pub async fn converse(address: &str, request: &[u8]) -> Result<(u16, String)> {
    let (status, body) = exchange(address, request).await?;
    Ok((status, String::from_utf8(body)?))
}

async fn exchange(address: &str, request: &[u8]) -> Result<(u16, Vec<u8>)> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connect to {address}"))?;
    stream.write_all(request).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let end = answer.windows(4).position(|at| at == b"\r\n\r\n");
    let body = answer.split_off(end.context("an answer without an end of headers")? + 4);
    let head = String::from_utf8(answer)?;
    let status = head.split(' ').nth(1).context("an answer without a status")?;
    Ok((status.parse()?, body))
}

/// Writes a text so that it can be one segment of a path.
pub fn segment(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    text.bytes().map(|b| if plain(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}
