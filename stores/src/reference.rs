//! A reference to stored bytes: a URL, with the digest and the media type of the bytes in its fragment.

use std::fmt::Write as _;

use percent_encoding::percent_decode_str;
use sha2::{Digest as _, Sha256};
use url::Url;

/// The scheme of folders.
pub const FILE: &str = "file";

/// The schemes of object stores.
const CLOUD_SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// The longest reference, in bytes: presigned URLs have some two thousand.
const REFERENCE_BYTES_MAX: usize = 8192;

/// Whether a URL is of an object store.
pub fn is_cloud(url: &Url) -> bool {
    CLOUD_SCHEMES.contains(&url.scheme())
}

/// A reference that was read: `URL`, or `URL#sha256=HEX&type=MEDIA_TYPE` with either part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Without the fragment.
    pub url: Url,
    /// The path's segments, decoded. None of them leads out of its folder.
    pub segments: Vec<Vec<u8>>,
    /// The digest that the bytes must have.
    pub sha256: Option<[u8; 32]>,
    /// For the program that reads the bytes.
    pub media_type: Option<String>,
}

/// Why a text is no reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidReference {
    /// It cannot be understood.
    Malformed(String),
    /// It would lead elsewhere than it says.
    Denied(String),
}

impl Reference {
    /// # Errors
    /// The text is no absolute URL, or one that tries to leave its folder; or its fragment has something unknown.
    pub fn parse(text: &str) -> Result<Self, InvalidReference> {
        let malformed = |what: &str| Err(InvalidReference::Malformed(what.to_owned()));
        if text.len() > REFERENCE_BYTES_MAX {
            return malformed("the reference is longer than 8192 bytes");
        }
        let mut url = match Url::parse(text) {
            Ok(url) => url,
            Err(error) => return malformed(&format!("the reference is not a URL: {error}")),
        };
        let (mut sha256, mut media_type) = (None, None);
        for part in url.fragment().unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
            match part.split_once('=') {
                Some(("sha256", hex)) => match digest(hex) {
                    Some(digest) => sha256 = Some(digest),
                    None => return malformed("the reference's sha256 is not 64 hexadecimal digits"),
                },
                Some(("type", escaped)) => {
                    media_type = Some(percent_decode_str(escaped).decode_utf8_lossy().into_owned());
                }
                _ => return malformed("the reference's fragment has something else than sha256= and type="),
            }
        }
        url.set_fragment(None);
        let denied = |what: &str| {
            let shown = shown(&url);
            Err(InvalidReference::Denied(format!("{shown} {what}")))
        };
        if !url.username().is_empty() || url.password().is_some() {
            return denied("has a user or a password, which no reference may have");
        }
        if url.scheme() == FILE
            && (url.host_str().is_some_and(|host| !host.is_empty()) || url.query().is_some())
        {
            return denied("names a host or has a query, which a file has not");
        }
        if is_cloud(&url) && url.query().is_some() {
            return denied("has a query, which an object of a bucket has not");
        }
        let segments = segments(&url);
        if segments.iter().any(|segment| is_odd(segment)) {
            return denied("has a segment that is not a name");
        }
        Ok(Self { url, segments, sha256, media_type })
    }

    /// For errors and logs: without the query, which may be a signature.
    pub fn shown(&self) -> String {
        shown(&self.url)
    }

    /// Whether bytes have the reference's digest. Any bytes do if it has none. The error names both digests.
    ///
    /// # Errors
    /// They have another digest.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        if self.sha256.is_none() {
            return Ok(());
        }
        self.check_digest(Sha256::digest(bytes).into())
    }

    /// [`check`](Self::check) of bytes whose digest is known.
    ///
    /// # Errors
    /// It is another one than the reference's.
    pub fn check_digest(&self, found: [u8; 32]) -> Result<(), String> {
        let Some(expected) = self.sha256.filter(|expected| *expected != found) else { return Ok(()) };
        let (expected, found) = (hex(&expected), hex(&found));
        Err(format!("{} has the sha256 {found}, not {expected}", self.shown()))
    }
}

/// The decoded segments of a URL's path, without an empty last one.
pub fn segments(url: &Url) -> Vec<Vec<u8>> {
    let Some(encoded) = url.path_segments() else { return Vec::new() };
    let mut segments: Vec<Vec<u8>> = encoded.map(|segment| percent_decode_str(segment).collect()).collect();
    if segments.last().is_some_and(Vec::is_empty) {
        segments.pop();
    }
    segments
}

/// Whether two starts of URLs are the same.
pub fn is_same_place(one: &Url, other: &Url) -> bool {
    origin(one) == origin(other) && segments(one) == segments(other)
}

/// Where a URL leads, without its path.
pub fn origin(url: &Url) -> (&str, Option<&str>, Option<u16>) {
    (url.scheme(), url.host_str(), url.port_or_known_default())
}

/// Whether a segment is not a plain name: a server or the system may read it as several segments, or as a way out of the folder.
/// Java servers take the text after a semicolon as a parameter, and `..;` as the folder above.
fn is_odd(segment: &[u8]) -> bool {
    let name = segment.split(|byte| *byte == b';').next().unwrap_or_default();
    segment.is_empty()
        || matches!(name, b"." | b"..")
        || segment.iter().any(|byte| matches!(byte, b'/' | b'\\' | 0))
}

fn shown(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    // `Err` means that the URL cannot have a password.
    let _ = url.set_password(None);
    let _ = url.set_username("");
    url.into()
}

fn digest(hex: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(digest)
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fragment_says_what_the_bytes_are() {
        let digest = "9F86D081884C7D659A2FEAA0C55AD015A3BF4F1B2B0B822CD15D6C15B0F00A08";
        for fragment in
            [format!("sha256={digest}"), format!("type=image/png;%20a=%22b%26c%22&sha256={digest}")]
        {
            let reference = Reference::parse(&format!("https://h/x%20y?a=1#{fragment}")).unwrap();
            assert_eq!(reference.url.as_str(), "https://h/x%20y?a=1");
            assert_eq!((reference.segments.len(), &reference.segments[0][..]), (1, &b"x y"[..]));
            assert_eq!(
                reference.media_type.as_deref(),
                fragment.contains("type").then_some("image/png; a=\"b&c\"")
            );
            assert_eq!(reference.check(b"test"), Ok(()));
            let error = reference.check(b"other").unwrap_err();
            assert!(
                error.starts_with("https://h/x%20y has the sha256 d9298a10")
                    && error.contains("not 9f86d081")
            );
        }
        assert_eq!(Reference::parse("https://h/x").unwrap().check(b"anything"), Ok(()));
    }
}
