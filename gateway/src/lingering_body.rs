//! The body of a request that may be answered before all of the body has come, because the request is refused or its form ends earlier. The
//! gateway then reads and drops the rest for a while. If it closed the connection instead, a client that is still sending would often see a
//! broken connection and no answer.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// The most bytes of a rest that are read: four of the largest job bodies. They are dropped at once.
const REST_BYTES_MAX: usize = 64 << 20;

/// How long a rest is read. Its request is answered and no longer in flight, but still has its connection.
const REST_MAX: Duration = Duration::from_secs(10);

/// The longest pause between two pieces of a rest. A client that pauses for longer waits for its answer, and does not send.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// A request's body. When it is dropped, the rest of the body is read in the background.
#[derive(Debug)]
pub struct LingeringBody {
    /// `None` after its end.
    rest: Option<Body>,
    /// Whether the client sends the body. With `Expect: 100-continue` it waits until the gateway reads.
    is_sent: bool,
}

impl LingeringBody {
    pub fn new(headers: &HeaderMap, body: Body) -> Self {
        let rest = (!body.is_end_stream()).then_some(body);
        Self { rest, is_sent: !headers.contains_key(header::EXPECT) }
    }
}

impl HttpBody for LingeringBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        let polled = Pin::new(rest).poll_frame(cx);
        // Polling makes the connection send `100 Continue`.
        self.is_sent = true;
        let frame = ready!(polled);
        if !matches!(frame, Some(Ok(_))) {
            self.rest = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.rest.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for LingeringBody {
    fn drop(&mut self) {
        let rest = self.rest.take().filter(|rest| self.is_sent && !rest.is_end_stream());
        if let (Some(rest), Ok(runtime)) = (rest, Handle::try_current()) {
            runtime.spawn(timeout(REST_MAX, read(rest)));
        }
    }
}

async fn read(mut rest: Body) {
    let mut bytes = 0_usize;
    while bytes <= REST_BYTES_MAX
        && let Ok(Some(Ok(frame))) = timeout(SILENCE_MAX, rest.frame()).await
    {
        bytes = bytes.saturating_add(frame.data_ref().map_or(0, Bytes::len));
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use tokio::sync::mpsc;

    use super::*;

    /// Bytes of a piece of [`body`].
    const PIECE_BYTES: usize = 1 << 20;

    /// An endless body, and a channel that reports each piece taken of it.
    fn body(headers: &[(header::HeaderName, &'static str)]) -> (LingeringBody, mpsc::UnboundedReceiver<()>) {
        let (taken, pieces) = mpsc::unbounded_channel();
        let piece = Bytes::from(vec![0; PIECE_BYTES]);
        let endless = stream::repeat_with(move || {
            // Nobody listens at the end of a test.
            let _ = taken.send(());
            Ok::<_, Infallible>(piece.clone())
        });
        let headers =
            headers.iter().map(|(name, value)| (name.clone(), value.parse().expect("a header"))).collect();
        (LingeringBody::new(&headers, Body::from_stream(endless)), pieces)
    }

    async fn count(mut pieces: mpsc::UnboundedReceiver<()>) -> usize {
        let mut count = 0;
        while pieces.recv().await.is_some() {
            count += 1;
        }
        count
    }

    #[tokio::test]
    async fn so_much_of_a_rest_is_read() {
        let most = REST_BYTES_MAX / PIECE_BYTES + 1;
        let (mut read, pieces) = body(&[]);
        read.frame().await.unwrap().unwrap();
        drop(read);
        assert_eq!(count(pieces).await, 1 + most);
        let (unread, pieces) = body(&[]);
        drop(unread);
        assert_eq!(count(pieces).await, most);
    }

    #[tokio::test]
    async fn a_client_that_waits_is_not_told_to_send() {
        let expects = [(header::EXPECT, "100-continue")];
        let (unread, pieces) = body(&expects);
        drop(unread);
        assert_eq!(count(pieces).await, 0);
        let (mut read, pieces) = body(&expects);
        read.frame().await.unwrap().unwrap();
        drop(read);
        assert!(count(pieces).await > 1);
    }

    #[tokio::test]
    async fn a_body_that_was_read_or_is_empty_is_over() {
        let empty = LingeringBody::new(&HeaderMap::new(), Body::empty());
        assert!(empty.is_end_stream() && empty.rest.is_none());
        let mut read = LingeringBody::new(&HeaderMap::new(), Body::from("text"));
        assert_eq!((read.size_hint().exact(), read.is_end_stream()), (Some(4), false));
        assert_eq!(read.frame().await.unwrap().unwrap().into_data().unwrap(), "text");
        assert!(read.frame().await.is_none());
        assert!(read.rest.is_none() && read.is_end_stream() && read.size_hint().exact() == Some(0));
    }
}
