//! Ends connections whose client reads nothing of its response. Otherwise such a client would hold its connection, and the response in
//! memory, for ever.
//!
//! Linux reports a full send buffer as writable only when about a third of it is free. The buffer grows to 4 MiB (`net.ipv4.tcp_wmem`), so
//! a slow client seems to read nothing until it has read up to 2 MB.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A stream that fails if the peer makes no room for a write within a time.
#[derive(Debug)]
pub struct SendTimeout<S> {
    stream: S,
    within: Duration,
    /// Runs while the stream takes nothing.
    patience: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncWrite + Unpin> SendTimeout<S> {
    pub fn new(stream: S, within: Duration) -> Self {
        Self { stream, within, patience: None }
    }

    fn written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let written = write(Pin::new(&mut self.stream), cx);
        if written.is_ready() {
            self.patience = None;
            return written;
        }
        let within = self.within;
        let patience = self.patience.get_or_insert_with(|| Box::pin(sleep(within)));
        patience.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for SendTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for SendTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.written(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.written(cx, |stream, cx| stream.poll_write_vectored(cx, pieces))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_left() {
        let (stream, _client) = duplex(4);
        let failed = SendTimeout::new(stream, Duration::from_millis(10)).write_all(b"hello").await;
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn the_time_counts_from_what_was_taken_last() {
        let (stream, mut client) = duplex(4);
        let mut stream = SendTimeout::new(stream, Duration::from_secs(3_600));
        for _ in 0..2 {
            stream.write_all(b"full").await.unwrap();
            assert!(stream.patience.is_none());
            assert!(stream.write(b"more").now_or_never().is_none());
            assert!(stream.patience.is_some());
            client.read_exact(&mut [0; 4]).await.unwrap();
        }
        assert_eq!(stream.write(b"more").await.unwrap(), 4);
        assert!(stream.patience.is_none());
    }
}
