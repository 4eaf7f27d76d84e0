//! The limits of an upload: its size, how long it may take, and the length of its names.

use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};

use crate::problem::{Problem, Retry};
use crate::used::Full;

/// The longest name of a file that is kept, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// The time that every upload may take: 512 MiB, the largest file by default in a configured place, at 1.2 Mbit/s.
const UPLOAD_MAX_LEAST: Duration = Duration::from_secs(3600);

/// The rate of a slow client. An upload may take longer than an hour if the largest file takes that long at this rate.
const SLOW_BYTES_PER_S: u64 = 150_000;

/// How long an upload may send nothing.
const PIECE_MAX: Duration = Duration::from_secs(30);

/// How long an upload may take, where the largest file has so many bytes.
pub fn upload_max(file_bytes: u64) -> Duration {
    UPLOAD_MAX_LEAST.max(Duration::from_secs(file_bytes / SLOW_BYTES_PER_S))
}

/// The beginning of a name, as much as is kept.
pub fn cut(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME_BYTES_MAX)]
}

/// The next piece of an upload; `None` after the last one.
///
/// # Errors
/// It did not come in time, or cannot be read.
pub async fn next_piece(
    pieces: &mut (impl Stream<Item = Result<Bytes, Problem>> + Unpin),
) -> Result<Option<Bytes>, Problem> {
    let next = tokio::time::timeout(PIECE_MAX, pieces.next()).await;
    let next = next.map_err(|_| {
        Problem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", "the file did not come in time")
    })?;
    next.transpose()
}

/// # Errors
/// The file has more bytes than a file may have.
pub fn check_size(bytes: u64, file_bytes: u64) -> Result<(), Problem> {
    if bytes <= file_bytes {
        return Ok(());
    }
    let message = format!("the file has more than {file_bytes} bytes");
    Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message))
}

/// The store has no room for an upload.
pub fn full(of: Full) -> Problem {
    let message = match of {
        Full::All => "the store of uploads is full",
        Full::Owner => {
            "this key's uploads have all the bytes that they may have (files.mib_max_per_key): remove some"
        }
    };
    Problem::new(StatusCode::INSUFFICIENT_STORAGE, "store_full", message).with_retry(Retry::No)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upload_may_take_as_long_as_the_largest_file_does() {
        for (file_bytes, seconds) in [(10, 3_600), (512 << 20, 3_600), (15_000_000_000, 100_000)] {
            assert_eq!(upload_max(file_bytes).as_secs(), seconds, "{file_bytes}");
        }
    }
}
