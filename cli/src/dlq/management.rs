//! Lists the queues of dead letters by RabbitMQ's management API: AMQP cannot list queues.

use std::fmt;
use std::io::Read as _;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use url::Url;
use vramq_amqp::Address;
use vramq_schemas::topology::dead_queue;

use super::error::Error;
use super::key_of;
use crate::output::text::safe;

/// How long one request may take: the API answers in milliseconds, or in seconds on a broker with ten thousands of queues.
const REQUEST_MAX: Duration = Duration::from_secs(30);

/// Queues in one answer: the most that the API gives.
const PAGE: usize = 500;

/// The most answers that are read, for 50,000 queues.
const PAGES_MAX: usize = 100;

/// Bytes of an answer. The API sends some 2 KB for a queue.
const ANSWER_MAX: u64 = 16 << 20;

/// The management API of a broker, with the user that asks it. `Debug` omits the password.
#[derive(Clone)]
pub(super) struct ManagementApi {
    /// Without user and password.
    base: Url,
    authorization: String,
    user: String,
    virtual_host: String,
    ca_pem: Option<String>,
}

impl fmt::Debug for ManagementApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.base)
    }
}

/// One answer of `GET /api/queues/VHOST`.
#[derive(Debug, Deserialize)]
struct Queues {
    page_count: usize,
    items: Vec<Queue>,
}

#[derive(Debug, Deserialize)]
struct Queue {
    name: String,
}

impl ManagementApi {
    /// The API at `http://HOST:15672`, or https. Its user is the URL's, else the broker's. Over TLS it trusts the system's authorities, and
    /// those of `ca_pem`.
    ///
    /// # Errors
    /// It is no such URL, or there is no user for it. The error does not contain the URL, which may hold a password.
    pub(super) async fn new(url: &str, broker: &Address, ca_pem: Option<String>) -> Result<Self, Error> {
        let invalid = |what: &str| {
            Error::Usage(format!(
                "--broker-management-url {what}; it should look like http://USER:PASSWORD@HOST:15672"
            ))
        };
        let mut base = Url::parse(url).map_err(|error| invalid(&format!("is no URL ({error})")))?;
        if !matches!(base.scheme(), "http" | "https") || !base.has_host() {
            return Err(invalid("is neither http:// nor https:// with a host"));
        }
        if base.query().is_some() || base.fragment().is_some() {
            return Err(invalid("has a query or a fragment, which it cannot have"));
        }
        let decoded = |text: &str| {
            let bytes = percent_encoding::percent_decode_str(text);
            bytes
                .decode_utf8()
                .map(String::from)
                .map_err(|_| invalid("has a user or password that is not UTF-8"))
        };
        let (user, password) = match base.username() {
            "" => user_of(broker, base.scheme() == "https").await?,
            user => (decoded(user)?, decoded(base.password().unwrap_or_default())?),
        };
        // Of an http URL with a host, both can be set.
        let _ = (base.set_username(""), base.set_password(None));
        let authorization = format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")));
        Ok(Self { base, authorization, user, virtual_host: broker.virtual_host().to_owned(), ca_pem })
    }

    /// The keys of the models that have a queue of dead letters, whether a worker serves them or not.
    ///
    /// # Errors
    /// The API cannot be reached, refuses the user, or answers something else than queues.
    pub(super) async fn models(self) -> Result<Vec<String>, Error> {
        let asked = tokio::task::spawn_blocking(move || self.ask());
        asked.await.unwrap_or_else(|error| Err(Error::Failed(format!("ask the management API: {error}"))))
    }

    fn ask(&self) -> Result<Vec<String>, Error> {
        let agent = self.agent()?;
        let mut keys = Vec::new();
        for page in 1..=PAGES_MAX {
            let Queues { page_count, items } = self.page(&agent, page)?;
            keys.extend(items.iter().filter_map(|queue| key_of(&queue.name)));
            if page >= page_count {
                return Ok(keys);
            }
        }
        Err(Error::Failed(format!(
            "{} has more than {} queues of dead letters: name models with --model",
            self.shown(),
            PAGE * PAGES_MAX
        )))
    }

    fn agent(&self) -> Result<ureq::Agent, Error> {
        let agent = ureq::AgentBuilder::new()
            .redirects(0)
            .timeout(REQUEST_MAX)
            .user_agent(concat!("vramq/", env!("CARGO_PKG_VERSION")));
        if self.base.scheme() != "https" {
            return Ok(agent.build());
        }
        let mut roots = RootCertStore::empty();
        // A certificate that cannot be parsed is left out.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(pem) = &self.ca_pem {
            roots.add_parsable_certificates(CertificateDer::pem_slice_iter(pem.as_bytes()).flatten());
        }
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Failed(format!("set up TLS: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(agent.tls_config(Arc::new(tls)).build())
    }

    fn page(&self, agent: &ureq::Agent, page: usize) -> Result<Queues, Error> {
        let mut url = self.base.clone();
        // It is no error only for URLs without a host.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(["api", "queues", &self.virtual_host]);
        }
        url.query_pairs_mut()
            .append_pair("page", &page.to_string())
            .append_pair("page_size", &PAGE.to_string())
            .append_pair("use_regex", "true")
            .append_pair("name", &format!("^{}", dead_queue("").replace('.', r"\.")));
        let response = match agent.request_url("GET", &url).set("Authorization", &self.authorization).call() {
            Ok(response) if response.status() == 200 => response,
            Ok(response) | Err(ureq::Error::Status(_, response)) => {
                return Err(self.refused(response.status()));
            }
            Err(ureq::Error::Transport(error)) => {
                let why = safe(&error.to_string());
                return Err(Error::Unreachable(format!("ask the management API at {}: {why}", self.shown())));
            }
        };
        serde_json::from_reader(response.into_reader().take(ANSWER_MAX)).map_err(|error| {
            let why = safe(&error.to_string());
            Error::Failed(format!(
                "{} does not answer as RabbitMQ's management API does: {why}",
                self.shown()
            ))
        })
    }

    fn refused(&self, status: u16) -> Error {
        let (shown, user) = (self.shown(), safe(&self.user));
        match status {
            401 | 403 => Error::Refused(format!(
                "the management API at {shown} refuses the user {user} ({status}): it needs its password, the tag management, and \
                 permissions on the virtual host {}",
                safe(&self.virtual_host)
            )),
            404 => Error::Failed(format!(
                "{shown} has no queues of the virtual host {} (404): is it the management API of this broker?",
                safe(&self.virtual_host)
            )),
            _ => Error::Failed(format!("the management API at {shown} answers with {status}")),
        }
    }

    fn shown(&self) -> String {
        safe(self.base.as_str().trim_end_matches('/'))
    }
}

/// The broker's user and password, which the management API has, too.
///
/// # Errors
/// There is none, the file with the password cannot be read, or the password would travel unencrypted although the broker's URL demands
/// TLS.
async fn user_of(broker: &Address, by_tls: bool) -> Result<(String, String), Error> {
    const NAME_ONE: &str = "name a user in --broker-management-url";
    if broker.is_tls() && !by_tls {
        return Err(Error::Usage(format!(
            "the password of amqps:// is not sent over http://: {NAME_ONE}, or give an https:// URL"
        )));
    }
    let user = broker.user_and_password().await.map_err(|error| Error::Usage(safe(&error.to_string())))?;
    user.ok_or_else(|| Error::Usage(format!("the broker knows this user by its certificate: {NAME_ONE}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn api(url: &str, broker: &str) -> Result<ManagementApi, Error> {
        ManagementApi::new(url, &broker.parse().unwrap(), None).await
    }

    #[tokio::test]
    async fn the_user_is_the_urls_or_the_brokers() {
        for (url, broker, expected) in [
            ("http://me:hunter%40@host:15672", "amqp://broker:of-broker@host", "me:hunter@"),
            ("https://host/prefix/", "amqp://broker:of-broker@host", "broker:of-broker"),
            ("https://host", "amqps://broker:of-broker@host", "broker:of-broker"),
            ("http://me:hunter@host", "amqps://broker:of-broker@host", "me:hunter"),
            ("http://me:hunter@host", "amqps://host?auth_mechanism=external", "me:hunter"),
        ] {
            let api = api(url, broker).await.unwrap();
            let encoded = api.authorization.strip_prefix("Basic ").unwrap();
            assert_eq!(BASE64_STANDARD.decode(encoded).unwrap(), expected.as_bytes());
            assert!(!format!("{api:?} {}", api.shown()).contains("hunter"), "{api:?}");
        }
    }

    #[tokio::test]
    async fn a_password_that_needs_tls_or_does_not_exist_is_not_sent() {
        for (url, broker, says) in [
            ("http://host", "amqps://broker:of-broker@host", "is not sent over http://"),
            ("https://host", "amqps://host?auth_mechanism=external", "by its certificate"),
        ] {
            let error = api(url, broker).await.unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("of-broker"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_invalid_url_is_refused_and_its_password_not_shown() {
        for url in [
            "",
            "host:15672",
            "amqp://u:hunter2@host",
            "http://u:hunter2@host/?x",
            "http://u:hunter2@host/#x",
        ] {
            let error = api(url, "amqp://host").await.unwrap_err().to_string();
            assert!(
                error.starts_with("--broker-management-url ") && !error.contains("hunter2"),
                "{url}: {error}"
            );
        }
    }
}
