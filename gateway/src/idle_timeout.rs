//! Ends connections that wait for too long between two requests, and those whose request's head comes too slowly. hyper has one time for
//! both: a short one would end a connection on which a load balancer is about to send, a long one would help clients that send a byte now and
//! then.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// How long a request's head may take from its first byte, and the first request of a connection to come.
pub const HEAD_MAX: Duration = Duration::from_secs(30);

/// The requests of a connection that are in progress. Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct InProgress(Arc<Requests>);

#[derive(Debug, Default)]
struct Requests {
    count: AtomicUsize,
    /// Wakes the connection at the end of a request.
    ended: AtomicWaker,
}

/// A request in progress, until this is dropped: its response is sent, and its body is read.
#[derive(Debug)]
pub struct Request(InProgress);

impl InProgress {
    /// Counts a request until the returned value is dropped.
    pub fn begin(&self) -> Request {
        self.0.count.fetch_add(1, Ordering::AcqRel);
        Request(self.clone())
    }

    fn has_requests(&self) -> bool {
        self.0.count.load(Ordering::Acquire) > 0
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let Requests { count, ended } = &*self.0.0;
        count.fetch_sub(1, Ordering::AcqRel);
        // hyper may have polled the connection before: the rest of a body that nobody reads is dropped last, by another task.
        ended.wake();
    }
}

/// A stream that fails when the time for what it waits for is over.
#[derive(Debug)]
pub struct IdleTimeout<S> {
    stream: S,
    requests: InProgress,
    head_max: Duration,
    idle_max: Duration,
    waits_for: WaitsFor,
    /// The client has yet to take bytes of a response. hyper drops the body, and with it the [`Request`], before.
    has_unsent: bool,
}

/// What a connection waits for.
#[derive(Debug)]
enum WaitsFor {
    /// The head of a request, or the rest of it.
    Head(Pin<Box<Sleep>>),
    /// The first byte of a further request.
    Request(Pin<Box<Sleep>>),
    /// The end of a request. Bodies and responses have their own times.
    End,
}

impl<S> IdleTimeout<S> {
    /// `requests` are those of the service.
    pub fn new(stream: S, requests: InProgress, head_max: Duration, idle_max: Duration) -> Self {
        let waits_for = WaitsFor::Head(Box::pin(sleep(head_max)));
        Self { stream, requests, head_max, idle_max, waits_for, has_unsent: false }
    }

    fn look(&mut self) {
        match (&self.waits_for, self.requests.has_requests() || self.has_unsent) {
            (WaitsFor::Head(_) | WaitsFor::Request(_), true) => self.waits_for = WaitsFor::End,
            (WaitsFor::End, false) => self.waits_for = WaitsFor::Request(Box::pin(sleep(self.idle_max))),
            _ => {}
        }
    }

    /// Notes whether the client takes what is written.
    fn sends<T>(&mut self, cx: &Context<'_>, sent: Poll<T>) -> Poll<T> {
        let had_unsent = std::mem::replace(&mut self.has_unsent, sent.is_pending());
        if had_unsent && sent.is_ready() {
            // Reading is polled once more: only then does the time to the next request begin.
            cx.waker().wake_by_ref();
        }
        sent
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for IdleTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Before the look: a request that ends after it wakes the connection.
        self.requests.0.ended.register(cx.waker());
        self.look();
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, into);
        if read.is_ready() {
            if matches!(self.waits_for, WaitsFor::Request(_)) && into.filled().len() > before {
                self.waits_for = WaitsFor::Head(Box::pin(sleep(self.head_max)));
            }
            return read;
        }
        match &mut self.waits_for {
            WaitsFor::End => Poll::Pending,
            WaitsFor::Head(time) | WaitsFor::Request(time) => {
                time.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for IdleTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.sends(cx, sent)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.sends(cx, sent)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let sent = Pin::new(&mut self.stream).poll_flush(cx);
        self.sends(cx, sent)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::{Wake, Waker};

    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

    use super::*;

    /// Whether a connection was woken.
    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// A connection that may be idle for this long, the client's end, and what the service has.
    fn connection(idle_max: Duration) -> (IdleTimeout<DuplexStream>, DuplexStream, InProgress) {
        let (stream, client) = duplex(64);
        let service = InProgress::default();
        (IdleTimeout::new(stream, service.clone(), HEAD_MAX, idle_max), client, service)
    }

    #[tokio::test]
    async fn an_idle_connection_ends_and_one_with_a_request_does_not() {
        let (mut stream, mut client, service) = connection(Duration::from_millis(10));
        client.write_all(b"head").await.unwrap();
        assert_eq!(stream.read(&mut [0; 64]).await.unwrap(), 4);
        let request = service.begin();
        assert!(stream.read(&mut [0; 64]).now_or_never().is_none());
        assert!(matches!(stream.waits_for, WaitsFor::End));
        drop(request);
        let ended = stream.read(&mut [0; 64]).await.unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::TimedOut);
    }

    /// Nothing else wakes the connection when the rest of a body is dropped last.
    #[tokio::test]
    async fn the_end_of_a_request_wakes_the_connection() {
        let (mut stream, _client, service) = connection(HEAD_MAX);
        let request = service.begin();
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut read = || {
            let polled = Pin::new(&mut stream)
                .poll_read(&mut Context::from_waker(&waker), &mut ReadBuf::new(&mut [0]));
            assert!(polled.is_pending());
        };
        read();
        assert!(!woken.0.load(Ordering::Relaxed));
        drop(request);
        assert!(woken.0.load(Ordering::Relaxed));
        read();
        assert!(matches!(stream.waits_for, WaitsFor::Request(_)), "{stream:?}");
    }

    #[tokio::test]
    async fn a_client_that_is_slow_to_take_a_response_is_not_idle_before_the_last_byte() {
        let (mut stream, mut client, service) = connection(Duration::from_millis(10));
        let request = service.begin();
        assert!(stream.read(&mut [0]).now_or_never().is_none());
        stream.write_all(&[1; 64]).await.unwrap();
        assert!(stream.write(&[1]).now_or_never().is_none());
        drop(request);
        assert!(stream.read(&mut [0]).now_or_never().is_none());
        assert!(matches!(stream.waits_for, WaitsFor::End), "{stream:?}");
        client.read_exact(&mut [0; 64]).await.unwrap();
        stream.write_all(&[1]).await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_slow_head_has_its_own_time_from_its_first_byte_on() {
        let (mut stream, mut client, service) = connection(Duration::from_secs(3_600));
        let request = service.begin();
        assert!(stream.read(&mut [0; 64]).now_or_never().is_none());
        drop(request);
        assert!(stream.read(&mut [0; 64]).now_or_never().is_none());
        assert!(matches!(stream.waits_for, WaitsFor::Request(_)));
        let mut deadlines = Vec::new();
        for _ in 0..2 {
            client.write_all(b"G").await.unwrap();
            stream.read_exact(&mut [0]).await.unwrap();
            let WaitsFor::Head(time) = &stream.waits_for else { panic!("{stream:?}") };
            deadlines.push(time.deadline());
        }
        assert_eq!(deadlines[0], deadlines[1], "a further byte gives no more time");
    }
}
