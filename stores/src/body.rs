//! An object's bytes as a server sends them, for a thread that may block, and why they do not come.

use std::error::Error;
use std::io::{self, Read};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt as _};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

/// The longest text of a store's error that goes into a dead letter, in bytes: servers put whole documents there.
const CAUSE_BYTES_MAX: usize = 300;

/// The bytes as they come.
pub(crate) struct Body {
    runtime: Handle,
    /// An error has its text.
    pieces: BoxStream<'static, Result<Bytes, String>>,
    piece: Bytes,
    until: Instant,
    /// The error text for a timeout.
    late: String,
}

impl Body {
    /// The bytes of `pieces`, which have to come until then.
    pub(crate) fn new(
        runtime: Handle,
        pieces: BoxStream<'static, Result<Bytes, String>>,
        until: Instant,
        timeout: Duration,
    ) -> Self {
        Self { runtime, pieces, piece: Bytes::new(), until, late: late(timeout) }
    }
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.runtime.block_on(timeout_at(self.until, self.pieces.next())) {
                Ok(None) => return Ok(0),
                Ok(Some(Ok(piece))) => self.piece = piece,
                Ok(Some(Err(error))) => return Err(io::Error::other(error)),
                Err(_) => return Err(io::Error::new(io::ErrorKind::TimedOut, self.late.clone())),
            }
        }
        let count = into.len().min(self.piece.len());
        into[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

/// What is said of an object that did not come in time.
pub(crate) fn late(timeout: Duration) -> String {
    format!("it took longer than {timeout:?} (timeout_s)")
}

/// The innermost cause of an error. Outer ones name the URL or the endpoint, and the number of attempts.
pub(crate) fn cause(error: &dyn Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    text[..text.floor_char_boundary(CAUSE_BYTES_MAX)].to_owned()
}
