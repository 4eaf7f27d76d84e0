//! Reads request bodies: bounded in bytes, in time and in how many are in memory at once.

use std::error::Error;
use std::io;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use crate::app::{App, draining};
use crate::body_memory::{BodyMemory, BodyRoom};
use crate::drain::Drain;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// How long a body may take to come: 16 MiB at 4 Mbit/s.
const BODY_MAX: Duration = Duration::from_secs(35);

/// A body without a `Content-Length` reserves memory in steps of this size, each before more is read.
const ROOM_STEP: usize = 256 * 1024;

/// What a parsed value takes in memory besides its text: 16 MiB of `"",` are 5 million values.
const VALUE_BYTES: usize = 40;

/// A body that was read and parsed.
#[derive(Debug)]
pub struct Parsed<T> {
    pub value: T,
    /// SHA-256 of the bytes as received.
    pub digest: [u8; 32],
    /// Its share of the memory for bodies.
    pub room: BodyRoom,
}

/// Reads a JSON body.
///
/// # Errors
/// It is not JSON, is too large, too slow, or has another shape; there is no room for it; or the drain ends before all of it has come.
pub async fn json<T: DeserializeOwned + Send + 'static>(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    body: Body,
) -> Result<Parsed<T>, Problem> {
    require_json(headers)?;
    let most = app.config.limits.body_bytes;
    let length = length(headers);
    if length.is_some_and(|length| length > most) {
        return Err(too_large(most));
    }
    let bytes = length.unwrap_or(0);
    let mut room = GrowingRoom {
        memory: &app.bodies,
        held: app.bodies.room(&caller.name, bytes, Instant::now())?,
        bytes,
    };
    let mut drain = app.drain.clone();
    let bytes = tokio::select! {
        came = timeout(BODY_MAX, read(Limited::new(body, most), most, &mut room)) => came.map_err(|_| {
            Problem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", "the body did not come in time")
        })??,
        Ok(_) = drain.wait_for(|drain| *drain == Drain::Over) => {
            app.cut_off();
            return Err(draining());
        }
    };
    let text = bytes.clone();
    let values = off_runtime(bytes.len(), move || values(&text)).await;
    room.grow_to(bytes.len().max(values.saturating_mul(VALUE_BYTES)))?;
    let (value, digest) =
        off_runtime(bytes.len(), move || (parse(&bytes), Sha256::digest(&bytes).into())).await;
    Ok(Parsed { value: value?, digest, room: room.held })
}

/// The room of a body that is being read, and how many bytes it was taken for.
struct GrowingRoom<'a> {
    memory: &'a BodyMemory,
    held: BodyRoom,
    bytes: usize,
}

impl GrowingRoom<'_> {
    /// # Errors
    /// Other bodies have the memory, or all of it is too little.
    fn grow_to(&mut self, bytes: usize) -> Result<(), Problem> {
        self.memory.grow(&mut self.held, bytes, Instant::now())?;
        self.bytes = self.bytes.max(bytes);
        Ok(())
    }
}

/// About how many values a JSON text has: its commas outside of strings.
fn values(text: &[u8]) -> usize {
    let (mut count, mut is_text, mut is_escaped) = (0, false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            b',' if !is_text => count += 1,
            _ => {}
        }
    }
    count
}

/// Collects a body. Memory is reserved before more is read.
async fn read(mut body: Limited<Body>, most: usize, room: &mut GrowingRoom<'_>) -> Result<Bytes, Problem> {
    let mut bytes = BytesMut::with_capacity(room.bytes);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            if error.is::<LengthLimitError>() {
                return too_large(most);
            }
            if is_cut_off(&*error) {
                return Problem::hung_up();
            }
            Problem::invalid(format!("the body cannot be read: {error}"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        let needed = bytes.len() + data.len();
        if needed > room.bytes {
            room.grow_to(needed.next_multiple_of(ROOM_STEP).min(most))?;
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}

/// Whether a body cannot be read because its connection ended or failed, and not because of what the client sent.
pub fn is_cut_off(error: &(dyn Error + 'static)) -> bool {
    let (mut cause, mut is_of_connection) = (Some(error), false);
    while let Some(error) = cause {
        is_of_connection |= error.is::<hyper::Error>();
        // Such as a chunk without its length.
        let is_malformed = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
        };
        if error.downcast_ref::<io::Error>().is_some_and(is_malformed) {
            return false;
        }
        cause = error.source();
    }
    is_of_connection
}

/// All bodies are objects. The deserializer would also take a list of an object's values.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(Problem::invalid("the body is malformed: it must be a JSON object"));
    }
    serde_json::from_slice(bytes).map_err(|e| {
        let mut what = e.to_string();
        // The parser quotes what it found, which may be long.
        what.truncate(what.floor_char_boundary(512));
        Problem::invalid(format!("the body is malformed: {what}"))
    })
}

/// A page of another site can send a form to a gateway on this machine, but no JSON.
fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
    let coding =
        headers.get(header::CONTENT_ENCODING).map_or("identity", |it| it.to_str().unwrap_or_default());
    if !coding.eq_ignore_ascii_case("identity") {
        let message = "a compressed body cannot be read: leave out Content-Encoding";
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_encoding", message));
    }
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = "the body must have the content type application/json";
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", message))
}

fn length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large(most: usize) -> Problem {
    let message =
        format!("the body has more than {most} bytes; send large inputs as files, or in several requests");
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_json_and_not_compressed() {
        let refused = |kind: &str, coding: Option<&str>| {
            let coding = coding.map(|coding| (header::CONTENT_ENCODING, coding));
            let pairs = [(header::CONTENT_TYPE, kind)].into_iter().chain(coding);
            let headers = pairs.map(|(name, value)| (name, value.parse().unwrap())).collect();
            require_json(&headers).err().map(|problem| problem.code)
        };
        for kind in ["application/json", "Application/JSON; charset=utf-8", "application/json ;x=y"] {
            assert_eq!(refused(kind, None), None, "{kind}");
        }
        for kind in ["", "text/plain", "application/jsonx", "multipart/form-data; boundary=b"] {
            assert_eq!(refused(kind, None), Some("content_type"), "{kind}");
        }
        assert_eq!(refused("application/json", Some("Identity")), None);
        assert_eq!(refused("application/json", Some("gzip")), Some("content_encoding"));
    }

    #[test]
    fn a_body_is_an_object() {
        #[derive(Debug, serde::Deserialize)]
        struct Value {
            a: u8,
        }
        assert_eq!(parse::<Value>(b" \r\n\t{\"a\": 1}").unwrap().a, 1);
        for other in ["", " ", "[1]", "1", "null", "\"a\"", "\u{feff}{\"a\": 1}", "{\"a\": 1} x"] {
            assert_eq!(parse::<Value>(other.as_bytes()).unwrap_err().status, 400, "{other}");
        }
    }

    #[test]
    fn commas_within_texts_are_no_values() {
        assert_eq!(values(br#"{"inputs": ["a, b", "c\", d", "\\"], "model": "m"}"#), 3);
        assert_eq!(values(br#"["","","",""]"#), 3);
        assert_eq!(values(b""), 0);
    }
}
