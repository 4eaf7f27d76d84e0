//! A response body that holds a value, such as permits, until it is sent.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

/// The largest piece given to the connection. The connection takes the next piece only when the client has taken most of the earlier ones.
/// A body in one piece would count as sent at once, while it waits in the connection's buffer.
const PIECE_BYTES: usize = 64 * 1024;

/// What a response holds until it is sent, such as the permits of its request. Handlers put it into the response's extensions.
#[derive(Clone, Debug)]
pub struct UntilSent {
    _held: Arc<dyn Any + Send + Sync>,
}

impl UntilSent {
    pub fn new(held: impl Any + Send + Sync) -> Self {
        Self { _held: Arc::new(held) }
    }
}

/// A body that holds something until the connection has taken its last piece.
#[derive(Debug)]
pub struct HeldBody {
    body: Body,
    /// What is left of a piece of the body.
    rest: Bytes,
    _held: UntilSent,
}

impl HeldBody {
    pub fn new(body: Body, held: UntilSent) -> Self {
        Self { body, rest: Bytes::new(), _held: held }
    }
}

impl HttpBody for HeldBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(other))) => return Poll::Ready(Some(Ok(other))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let bytes = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (of_body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(of_body.lower().saturating_add(rest));
        if let Some(upper) = of_body.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn a_body_is_sent_in_pieces_and_holds_its_value_until_the_last() {
        let (whole, held) = (vec![7; 2 * PIECE_BYTES + 1], Arc::new(()));
        let mut sent = HeldBody::new(Body::from(whole.clone()), UntilSent::new(Arc::clone(&held)));
        let mut pieces = Vec::new();
        for left in [2 * PIECE_BYTES + 1, PIECE_BYTES + 1, 1] {
            assert_eq!((sent.size_hint().exact(), sent.is_end_stream()), (Some(left as u64), false));
            pieces.push(sent.frame().await.unwrap().unwrap().into_data().unwrap());
            assert_eq!(Arc::strong_count(&held), 2);
        }
        assert!(sent.is_end_stream() && pieces.concat() == whole);
        assert!(sent.frame().await.is_none());
        drop(sent);
        assert_eq!(Arc::strong_count(&held), 1);
    }

    #[tokio::test]
    async fn a_body_that_fails_still_fails_and_an_empty_one_stays_empty() {
        let broken =
            futures_util::stream::iter([Ok(Bytes::from_static(b"a")), Err(std::io::Error::other("b"))]);
        let mut sent = HeldBody::new(Body::from_stream(broken), UntilSent::new(()));
        assert_eq!(sent.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
        assert!(sent.frame().await.unwrap().is_err());
        assert!(HeldBody::new(Body::empty(), UntilSent::new(())).is_end_stream());
    }
}
