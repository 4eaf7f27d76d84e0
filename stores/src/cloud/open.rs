//! Creates the clients of object stores from their options.

use std::path::Path;
use std::sync::Arc;

use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use super::client::Connector;
use super::{CloudOptions, InvalidOption};
use crate::body::cause;

/// How often a request is sent again after a temporary fault. Few, because a job whose store fails waits and is tried again later.
const RETRIES: usize = 2;

/// The most that a file with a secret has, in bytes: a service account has some 2,400.
const SECRET_BYTES_MAX: usize = 64 * 1024;

type Objects = Result<Arc<dyn ObjectStore>, InvalidOption>;

/// A client for the bucket that a URL names.
pub(crate) fn open(url: &Url, options: &CloudOptions) -> Objects {
    let bucket = url.host_str().unwrap_or_default();
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if bucket.is_empty() || !bucket.bytes().all(is_name) {
        return invalid("url", format!("names no bucket; it is like {}://BUCKET/PREFIX", url.scheme()));
    }
    if url.port().is_some() || url.query().is_some() || url.fragment().is_some() || !url.username().is_empty()
    {
        return invalid(
            "url",
            "has more than a scheme, a bucket and a path; `endpoint` names another server",
        );
    }
    if let Some(endpoint) = &options.endpoint
        && (!matches!(endpoint.scheme(), "http" | "https") || endpoint.query().is_some())
    {
        return invalid("endpoint", "must be an http:// or https:// URL without a query");
    }
    if options.is_anonymous && (options.secret_file.is_some() || options.access_key_id.is_some()) {
        return invalid("anonymous", "is true, and there is a key, too");
    }
    let scheme = url.scheme();
    for (key, is_given, of) in [
        ("region", options.region.is_some(), "s3"),
        ("access_key_id", options.access_key_id.is_some(), "s3"),
        ("account", options.account.is_some(), "az"),
    ] {
        if is_given && scheme != of {
            return invalid(key, format!("is for {of}://, not for {scheme}://"));
        }
    }
    let secret = options.secret_file.as_deref().map(secret).transpose()?;
    match scheme {
        "s3" => s3(bucket, options, secret),
        "gs" => gs(bucket, options, secret),
        "az" => az(bucket, options, secret),
        other => invalid("url", format!("is of {other}://, which is not an object store")),
    }
}

fn s3(bucket: &str, options: &CloudOptions, secret: Option<String>) -> Objects {
    let builder = match (&options.access_key_id, secret) {
        (Some(id), Some(secret)) => {
            AmazonS3Builder::new().with_access_key_id(id).with_secret_access_key(secret)
        }
        (None, None) if options.is_anonymous => AmazonS3Builder::new().with_skip_signature(true),
        (None, None) => AmazonS3Builder::from_env(),
        (Some(_), None) => return invalid("access_key_id", "needs its secret in the file `secret_file`"),
        (None, Some(_)) => {
            return invalid("secret_file", "has the secret of a key whose `access_key_id` is missing");
        }
    };
    let mut builder = builder.with_bucket_name(bucket).with_retry(retry(options));
    if let Some(region) = &options.region {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(base(endpoint)).with_allow_http(endpoint.scheme() == "http");
    }
    built(builder.with_http_connector(connector(options)?).build())
}

fn gs(bucket: &str, options: &CloudOptions, secret: Option<String>) -> Objects {
    let mut builder = match (&secret, options.is_anonymous) {
        (None, false) => GoogleCloudStorageBuilder::from_env(),
        _ => GoogleCloudStorageBuilder::new(),
    };
    builder = builder.with_skip_signature(options.is_anonymous);
    if let Some(account) = secret {
        builder = builder.with_service_account_key(account);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder
            .with_base_url(&base(endpoint))
            .with_client_options(ClientOptions::new().with_allow_http(endpoint.scheme() == "http"));
    }
    built(
        builder
            .with_bucket_name(bucket)
            .with_retry(retry(options))
            .with_http_connector(connector(options)?)
            .build(),
    )
}

fn az(container: &str, options: &CloudOptions, secret: Option<String>) -> Objects {
    let builder = match (secret, options.is_anonymous) {
        (Some(key), _) => MicrosoftAzureBuilder::new().with_access_key(key),
        (None, true) => MicrosoftAzureBuilder::new().with_skip_signature(true),
        (None, false) => MicrosoftAzureBuilder::from_env(),
    };
    let mut builder = builder.with_container_name(container).with_retry(retry(options));
    if let Some(account) = &options.account {
        builder = builder.with_account(account);
    }
    if let Some(endpoint) = &options.endpoint {
        builder = builder.with_endpoint(base(endpoint)).with_allow_http(endpoint.scheme() == "http");
    }
    built(builder.with_http_connector(connector(options)?).build())
}

fn connector(options: &CloudOptions) -> Result<Connector, InvalidOption> {
    let by_tls = options.endpoint.as_ref().is_none_or(|endpoint| endpoint.scheme() == "https");
    Connector::new(options.timeout, by_tls).or_else(|error| invalid("url", error))
}

fn retry(options: &CloudOptions) -> RetryConfig {
    RetryConfig { max_retries: RETRIES, retry_timeout: options.timeout, ..RetryConfig::default() }
}

fn base(endpoint: &Url) -> String {
    endpoint.as_str().trim_end_matches('/').to_owned()
}

fn built<S: ObjectStore>(built: object_store::Result<S>) -> Objects {
    match built {
        Ok(store) => Ok(Arc::new(store)),
        Err(error) => invalid("url", format!("cannot be opened: {}", cause(&error))),
    }
}

/// A secret, without the line end that editors leave behind it.
fn secret(file: &Path) -> Result<String, InvalidOption> {
    let shown = file.display();
    match std::fs::read_to_string(file) {
        Ok(text) if text.trim().is_empty() => invalid("secret_file", format!("is {shown}, which is empty")),
        Ok(text) if text.len() > SECRET_BYTES_MAX => {
            invalid("secret_file", format!("is {shown}, which has more than {SECRET_BYTES_MAX} bytes"))
        }
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) => invalid("secret_file", format!("is {shown}, which cannot be read: {error}")),
    }
}

fn invalid<T>(key: &'static str, what: impl Into<String>) -> Result<T, InvalidOption> {
    Err(InvalidOption { key, what: what.into() })
}
