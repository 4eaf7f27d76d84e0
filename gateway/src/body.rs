//! Reads request bodies: bounded in bytes, in time and in how many are in memory at once.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::app::App;
use crate::problem::Problem;

/// How long a body may take to come: 16 MiB at 4 Mbit/s.
const BODY_MAX: Duration = Duration::from_secs(35);

/// What a body without a length is taken for until it is there.
const UNKNOWN_BYTES: usize = 1024 * 1024;

/// Parsed bodies from this size on are parsed off the runtime.
const BLOCKING_BYTES: usize = 64 * 1024;

/// A body that was read and parsed.
#[derive(Debug)]
pub struct Parsed<T> {
    pub value: T,
    /// Of the bytes as they came.
    pub digest: [u8; 32],
    /// Its share of the memory for bodies.
    pub room: OwnedSemaphorePermit,
}

/// Reads a JSON body.
///
/// # Errors
/// It is no JSON, is too large, too slow, or has another shape; or there is no room for it.
pub async fn json<T: DeserializeOwned + Send + 'static>(
    app: &App,
    headers: &HeaderMap,
    body: Body,
) -> Result<Parsed<T>, Problem> {
    require_json(headers)?;
    let most = app.config.limits.body_bytes;
    let length = length(headers);
    if length.is_some_and(|length| length > most) {
        return Err(too_large(most));
    }
    let mut room = app.body_room(length.unwrap_or(UNKNOWN_BYTES.min(most)))?;
    let bytes = read(body, most).await?;
    if length.is_none() && bytes.len() > UNKNOWN_BYTES {
        room.merge(app.body_room(bytes.len() - UNKNOWN_BYTES)?);
    }
    let (value, digest) =
        off_runtime(bytes.len(), move || (parse(&bytes), Sha256::digest(&bytes).into())).await;
    Ok(Parsed { value: value?, digest, room })
}

/// Runs work over so many bytes where it does not hold up other requests.
pub async fn off_runtime<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes < BLOCKING_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}

async fn read(body: Body, most: usize) -> Result<Bytes, Problem> {
    let collected = timeout(BODY_MAX, Limited::new(body, most).collect()).await;
    match collected {
        Err(_) => {
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", "the body did not come in time"))
        }
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(most)),
        Ok(Err(error)) => Err(Problem::invalid(format!("the body cannot be read: {error}"))),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|e| {
        let mut what = e.to_string();
        // The parser quotes what it found, which may be long.
        what.truncate(what.floor_char_boundary(512));
        Problem::invalid(format!("the body is malformed: {what}"))
    })
}

/// A page of another site can send a form to a gateway on this machine, but no JSON.
fn require_json(headers: &HeaderMap) -> Result<(), Problem> {
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
