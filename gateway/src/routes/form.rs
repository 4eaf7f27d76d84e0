//! Bounds what a form has before its file: the parser keeps the head of a field in memory until it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use futures_util::StreamExt as _;

/// The most bytes of a form before its file. Fields that clients send with a file, such as `purpose`, have some hundred.
pub const BEFORE_FILE_BYTES_MAX: usize = 1024 * 1024;

/// Progress of reading a form.
#[derive(Debug, Default)]
pub struct BeforeFile {
    has_begun: AtomicBool,
    is_too_long: AtomicBool,
}

impl BeforeFile {
    /// Wraps a form's body. The body breaks off if too much comes before the file has [begun](Self::file_begins).
    pub fn bound(self: &Arc<Self>, body: Body) -> Body {
        let (this, mut bytes) = (Arc::clone(self), 0_usize);
        let pieces = body.into_data_stream().map(move |piece| {
            let piece = piece?;
            bytes = bytes.saturating_add(piece.len());
            if bytes > BEFORE_FILE_BYTES_MAX && !this.has_begun.load(Ordering::Acquire) {
                this.is_too_long.store(true, Ordering::Release);
                return Err(axum::Error::new("too much comes before the file"));
            }
            Ok(piece)
        });
        Body::from_stream(pieces)
    }

    /// The file begins; it has its own bound.
    pub fn file_begins(&self) {
        self.has_begun.store(true, Ordering::Release);
    }

    /// Whether the body broke off.
    pub fn is_too_long(&self) -> bool {
        self.is_too_long.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::BodyExt as _;

    use super::*;

    fn body(pieces: usize) -> Body {
        let piece = || Ok::<_, std::io::Error>(Bytes::from(vec![0; BEFORE_FILE_BYTES_MAX / 2]));
        Body::from_stream(futures_util::stream::iter((0..pieces).map(move |_| piece())))
    }

    #[tokio::test]
    async fn a_body_ends_before_a_file_that_does_not_come() {
        for (pieces, is_too_long) in [(2, false), (3, true)] {
            let before = Arc::new(BeforeFile::default());
            let read = before.bound(body(pieces)).collect().await;
            assert_eq!((read.is_err(), before.is_too_long()), (is_too_long, is_too_long), "{pieces}");
        }
    }

    #[tokio::test]
    async fn a_file_may_be_longer() {
        let before = Arc::new(BeforeFile::default());
        let mut bounded = before.bound(body(10));
        bounded.frame().await.unwrap().unwrap();
        before.file_begins();
        let rest = bounded.collect().await.unwrap().to_bytes();
        assert_eq!((rest.len(), before.is_too_long()), (9 * BEFORE_FILE_BYTES_MAX / 2, false));
    }
}
