//! `Range` (RFC 9110, section 14): the part of a file that a request wants, and the response with a file or a part of it.

use std::ops::Range;

use axum::BoxError;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::TryStream;

use crate::problem::Problem;

/// The headers of a request that say which part of a file it wants.
#[derive(Debug)]
pub struct DownloadRequest {
    pub method: Method,
    pub headers: HeaderMap,
}

/// What a request wants of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    Whole,
    /// Bytes that the file has, at least one.
    Part(Range<u64>),
    /// Bytes that it does not have.
    Nothing,
}

/// A file that is sent, whole or in part.
#[derive(Clone, Debug)]
pub struct FileFacts {
    pub media_type: String,
    /// Of the whole file.
    pub bytes: u64,
    /// Says that the bytes are the same as before, so that a client can go on with a download.
    pub etag: String,
}

impl DownloadRequest {
    /// Whether the request has a range, which may turn out to mean the whole file.
    pub fn has_range(&self) -> bool {
        self.method == Method::GET && self.headers.contains_key(header::RANGE)
    }

    /// The part of the file that the request wants. Per the RFC, a malformed range, one of another unit, and a list of ranges count as
    /// none. So does the range of a file that has changed.
    pub fn of(&self, file: &FileFacts) -> Wanted {
        let is_same = |validator: &HeaderValue| validator.as_bytes() == file.etag.as_bytes();
        if !self.has_range() || !self.headers.get(header::IF_RANGE).is_none_or(is_same) {
            return Wanted::Whole;
        }
        let asked = self.headers.get(header::RANGE).and_then(|range| range.to_str().ok());
        asked.and_then(|asked| wanted(asked, file.bytes)).unwrap_or(Wanted::Whole)
    }
}

fn wanted(asked: &str, bytes: u64) -> Option<Wanted> {
    let (unit, range) = asked.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = range.trim().split_once('-')?;
    let part = match (first.is_empty(), last.is_empty()) {
        (true, true) => return None,
        (true, false) => bytes.saturating_sub(number(last)?)..bytes,
        (false, true) => number(first)?..bytes,
        (false, false) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return None;
            }
            first..last.saturating_add(1).min(bytes)
        }
    };
    Some(if part.is_empty() { Wanted::Nothing } else { Wanted::Part(part) })
}

/// A number too large for `u64` is beyond the end of any file.
fn number(digits: &str) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| digits.parse().unwrap_or(u64::MAX))
}

/// The response with a file's bytes, or with those of a part: always as a download, so that no browser runs what somebody uploaded.
pub fn download<S>(pieces: S, file: &FileFacts, part: Option<Range<u64>>) -> Response
where
    S: TryStream<Ok = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let mut response = Body::from_stream(pieces).into_response();
    let mut length = file.bytes;
    if let Some(part) = part {
        length = part.end - part.start;
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let range = format!("bytes {}-{}/{}", part.start, part.end - 1, file.bytes);
        put(&mut response, header::CONTENT_RANGE, &range);
    }
    put(&mut response, header::ETAG, &file.etag);
    let headers = response.headers_mut();
    let media_type = file.media_type.parse().unwrap_or(HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_TYPE, media_type);
    headers.insert(header::CONTENT_LENGTH, length.into());
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    response
}

/// The response to a request for bytes that the file does not have.
pub fn unsatisfiable(file: &FileFacts) -> Response {
    let message =
        format!("the file has {} bytes: it has none of the bytes that the header Range asks for", file.bytes);
    let mut response = Problem::new(StatusCode::RANGE_NOT_SATISFIABLE, "range", message).into_response();
    put(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", file.bytes));
    response
}

/// Texts of visible ASCII: none is left out.
fn put(response: &mut Response, name: header::HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> FileFacts {
        FileFacts { media_type: "text/plain".to_owned(), bytes: 10, etag: "\"e\"".to_owned() }
    }

    fn asked(method: Method, headers: &[(header::HeaderName, &'static str)]) -> Wanted {
        let pairs = headers.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
        DownloadRequest { method, headers: pairs.collect() }.of(&file())
    }

    #[test]
    fn a_range_names_bytes_that_the_file_has() {
        let of = |range: &'static str| asked(Method::GET, &[(header::RANGE, range)]);
        for (range, part) in [
            ("bytes=0-0", 0..1),
            ("bytes=2-5", 2..6),
            ("Bytes = 2-5", 2..6),
            ("bytes=2-", 2..10),
            ("bytes=-3", 7..10),
            ("bytes=0-99", 0..10),
            ("bytes=-99", 0..10),
            ("bytes=9-99999999999999999999999", 9..10),
            ("bytes=-18446744073709551616", 0..10),
        ] {
            assert_eq!(of(range), Wanted::Part(part), "{range}");
        }
        for none in
            ["bytes=10-", "bytes=10-12", "bytes=-0", "bytes=18446744073709551615-18446744073709551615"]
        {
            assert_eq!(of(none), Wanted::Nothing, "{none}");
        }
        for odd in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=5-2",
            "bytes=a-b",
            "bytes=+1-2",
            "bytes=1-2,4-5",
            "lines=1-2",
        ] {
            assert_eq!(of(odd), Wanted::Whole, "{odd}");
        }
    }

    #[test]
    fn a_range_counts_for_the_same_file_and_for_get_alone() {
        let range = (header::RANGE, "bytes=2-5");
        assert_eq!(asked(Method::HEAD, std::slice::from_ref(&range)), Wanted::Whole);
        assert_eq!(asked(Method::GET, &[]), Wanted::Whole);
        for (validator, wanted) in
            [("\"e\"", Wanted::Part(2..6)), ("\"other\"", Wanted::Whole), ("W/\"e\"", Wanted::Whole)]
        {
            assert_eq!(asked(Method::GET, &[range.clone(), (header::IF_RANGE, validator)]), wanted);
        }
    }

    #[test]
    fn an_empty_file_has_no_part() {
        assert_eq!(
            (wanted("bytes=0-", 0), wanted("bytes=-1", 0)),
            (Some(Wanted::Nothing), Some(Wanted::Nothing))
        );
    }

    #[test]
    fn responses_say_which_bytes_they_have() {
        let none = || futures_util::stream::empty::<Result<Bytes, std::io::Error>>();
        let whole = download(none(), &file(), None);
        assert_eq!((whole.status(), whole.headers().get(header::CONTENT_RANGE)), (StatusCode::OK, None));
        assert_eq!(whole.headers()[header::CONTENT_LENGTH], "10");
        let part = download(none(), &file(), Some(2..6));
        assert_eq!(part.status(), StatusCode::PARTIAL_CONTENT);
        for (name, value) in [
            (header::CONTENT_RANGE, "bytes 2-5/10"),
            (header::CONTENT_LENGTH, "4"),
            (header::ETAG, "\"e\""),
            (header::ACCEPT_RANGES, "bytes"),
        ] {
            assert_eq!(part.headers()[&name], value, "{name}");
        }
        let refused = unsatisfiable(&file());
        assert_eq!(refused.headers()[header::CONTENT_RANGE], "bytes */10");
        assert_eq!(refused.status(), StatusCode::RANGE_NOT_SATISFIABLE);
    }
}
