//! The HTTP client of object stores: follows no redirect, uses no proxy, and distinguishes permanent errors from temporary ones.

use std::time::Duration;

use async_trait::async_trait;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::http_client;

/// Marks a request for an object. Requests for credentials have no mark: a rejected one may succeed later, with a renewed token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfObject;

/// The status of an answer that rejects a request for an object, and would reject it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("status {0}")]
pub(crate) struct Refused(pub(crate) u16);

/// The answer has the status of a final one, but its cause is not the object, and passes: an expired token, a replaced key, a wrong clock, a
/// slow connection. Every job fails until it has passed, and none afterwards.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store {what}: status {status} {code}")]
struct Temporary {
    what: &'static str,
    status: u16,
    code: &'static str,
}

const REJECTS: &str = "rejects the credentials";

/// The codes for that, with status 400 or 403, and what the store did. All are S3's, but for the first, which is Azure's.
const TEMPORARY: [(&str, &str); 7] = [
    ("AuthenticationFailed", REJECTS),
    ("ExpiredToken", REJECTS),
    ("InvalidToken", REJECTS),
    ("InvalidAccessKeyId", REJECTS),
    ("SignatureDoesNotMatch", REJECTS),
    ("RequestTimeTooSkewed", REJECTS),
    ("RequestTimeout", "waited too long for the request"),
];

/// Variables that name other authorities than the system's.
const AUTHORITIES: [&str; 2] = ["SSL_CERT_FILE", "SSL_CERT_DIR"];

/// Makes clients.
#[derive(Debug)]
pub(crate) struct Connector {
    /// How long a server may send nothing.
    silence: Duration,
    tls: ClientConfig,
}

impl Connector {
    /// Creates clients that trust the system's certificate authorities and give up on a server that is silent for `silence`.
    /// `by_tls`: there must be an authority, because the server is reached by TLS.
    ///
    /// # Errors
    /// There is no authority, or the TLS library fails.
    pub(crate) fn new(silence: Duration, by_tls: bool) -> Result<Self, String> {
        let loaded = rustls_native_certs::load_native_certs();
        let mut roots = RootCertStore::empty();
        // A certificate that cannot be parsed is left out.
        roots.add_parsable_certificates(loaded.certs);
        if by_tls && roots.is_empty() {
            return Err(no_authority(loaded.errors.first()));
        }
        Ok(Self { silence, tls: http_client::tls(roots)? })
    }
}

/// Why no server can be trusted: where the authorities' certificates should be.
fn no_authority(error: Option<&rustls_native_certs::Error>) -> String {
    let given = AUTHORITIES.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    let given: Vec<_> = given.map(|(name, value)| format!("{name} is {}", value.display())).collect();
    let place = if given.is_empty() { "the system has none".to_owned() } else { given.join(", ") };
    let why = error.map(|error| format!(": {error}")).unwrap_or_default();
    format!(
        "needs TLS, and the machine has no certificate of an authority: {place}{why}. Install ca-certificates, or name a PEM file in \
         SSL_CERT_FILE"
    )
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp);
        let client = http_client::builder(self.tls.clone(), self.silence)
            .https_only(allows_http.as_deref() != Some("true"))
            .read_timeout(self.silence)
            .build()
            .map_err(|error| object_store::Error::Generic { store: "HTTP", source: Box::new(error) })?;
        Ok(HttpClient::new(Client(client)))
    }
}

#[derive(Debug)]
struct Client(reqwest::Client);

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_of_object = request.extensions().get::<OfObject>().is_some();
        let response = self.0.call(request).await?;
        match response.status().as_u16() {
            status @ (400 | 401 | 403) if is_of_object => {
                let (parts, body) = response.into_parts();
                let body = body.bytes().await?;
                match temporary(status, &String::from_utf8_lossy(&body)) {
                    Some(temporary) => Err(HttpError::new(HttpErrorKind::Decode, temporary)),
                    None if is_final(status) => Err(HttpError::new(HttpErrorKind::Decode, Refused(status))),
                    None => Ok(HttpResponse::from_parts(parts, body.into())),
                }
            }
            status if is_of_object && is_final(status) => {
                // Nothing was decoded: `object_store` does not retry errors of this kind.
                Err(HttpError::new(HttpErrorKind::Decode, Refused(status)))
            }
            _ => Ok(response),
        }
    }
}

/// What an answer with status 400, 401 or 403 means, if its cause is not the object.
fn temporary(status: u16, body: &str) -> Option<Temporary> {
    let known = TEMPORARY.into_iter().find(|(code, _)| body.contains(&format!("<Code>{code}</Code>")));
    match (status, known) {
        (_, Some((code, what))) => Some(Temporary { what, status, code }),
        (401, None) => Some(Temporary { what: REJECTS, status, code: "Unauthorized" }),
        _ => None,
    }
}

/// Whether a status is permanent, and `object_store` has no error of its own for it.
fn is_final(status: u16) -> bool {
    match status {
        // Not modified, not authenticated, forbidden, not found, conflict with another writer: `object_store` has errors for these.
        304 | 401 | 403 | 404 | 409 | 412 => false,
        // The server asks for more time, or for fewer requests.
        408 | 425 | 429 => false,
        300..=499 => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_status_that_cannot_change_is_final() {
        for status in [200, 206, 304, 403, 404, 408, 425, 429, 500, 503] {
            assert!(!is_final(status), "{status}");
        }
        for status in [301, 302, 307, 400, 405, 410, 416, 451] {
            assert!(is_final(status), "{status}");
        }
    }

    #[test]
    fn what_passes_is_distinguished_from_denied_objects() {
        for (code, what) in TEMPORARY {
            let body = format!("<?xml?><Error><Code>{code}</Code><Message>m</Message></Error>");
            assert_eq!(temporary(400, &body), Some(Temporary { what, status: 400, code }));
            assert!(temporary(403, &body).is_some());
        }
        let rejected = temporary(401, "").unwrap().to_string();
        assert_eq!(rejected, "the store rejects the credentials: status 401 Unauthorized");
        // As Azure answers: after a mark of the byte order, and with the time of its answer.
        let body = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><Error><Code>AuthenticationFailed</Code><Message>Server failed to \
                    authenticate the request.\nTime:2026-11-29T12:00:00Z</Message></Error>";
        let rejected = temporary(403, body).unwrap().to_string();
        assert_eq!(rejected, "the store rejects the credentials: status 403 AuthenticationFailed");
        for body in ["", "<Error><Code>AccessDenied</Code><Message>ExpiredToken</Message></Error>"] {
            assert!(temporary(400, body).is_none() && temporary(403, body).is_none(), "{body}");
        }
    }
}
