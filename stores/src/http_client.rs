//! What the HTTP clients for web servers and for object stores have in common.

use std::sync::Arc;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// How long connecting may take. A working server answers within a round trip; a lost packet is sent again after one second, then
/// two.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// TLS with servers that one of these authorities vouches for.
///
/// # Errors
/// The TLS library fails.
pub(crate) fn tls(roots: RootCertStore) -> Result<ClientConfig, String> {
    let versions = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("set up TLS: {error}"))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

/// A client that goes where it is sent, follows no redirect, uses no proxy, and leaves bodies as they come. Connecting takes `timeout` at
/// most.
pub(crate) fn builder(tls: ClientConfig, timeout: Duration) -> ClientBuilder {
    Client::builder()
        .user_agent(concat!("vramq/", env!("CARGO_PKG_VERSION")))
        // A redirect would lead where no configuration says.
        .redirect(Policy::none())
        .no_proxy()
        .tls_backend_preconfigured(tls)
        .connect_timeout(CONNECT_MAX.min(timeout))
        // Also where another crate turns these features on: an unpacked body has another digest and another length, and may have a
        // thousand times the size.
        .no_gzip()
        .no_brotli()
        .no_deflate()
        .no_zstd()
}
