//! Object stores of clouds: Amazon S3 and servers with its protocol, Google Cloud Storage, Azure Blob Storage.
//!
//! The address and the credentials of a store come from the configuration and the environment. A message names only a key in the
//! store's bucket.

mod client;
mod open;

use std::error::Error as _;
use std::fmt;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{Attribute, Attributes, Extensions, GetOptions, ObjectStore, PutOptions, PutPayload};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout, timeout_at};
use url::Url;

use crate::Fault;
use crate::body::{Body, cause, late};
use crate::reference::{Reference, origin, segments};
use client::{OfObject, Refused};

/// How to reach an object store. Absent values are chosen as by the cloud's own tools: the cloud's endpoint, and credentials from
/// the environment or the machine's identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudOptions {
    /// Another server with the same protocol.
    pub endpoint: Option<Url>,
    /// S3: the region of the bucket.
    pub region: Option<String>,
    /// Azure: the storage account.
    pub account: Option<String>,
    /// S3: the public half of a key. The other half is in `secret_file`.
    pub access_key_id: Option<String>,
    /// A file with S3's secret access key, Azure's account key, or the JSON of a service account of Google.
    pub secret_file: Option<PathBuf>,
    /// Requests carry no credentials: the bucket is public.
    pub is_anonymous: bool,
    /// How long a read or a write of one object may take in all.
    pub timeout: Duration,
}

/// What is wrong with the options of a store, and with which.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {what}")]
pub struct InvalidOption {
    /// The option's name, as the configuration has it.
    pub key: &'static str,
    pub what: String,
}

/// The objects of a bucket whose keys begin with a prefix of whole segments.
pub struct CloudStore {
    objects: Arc<dyn ObjectStore>,
    url: Url,
    prefix: Path,
    /// Which server has the bucket, where that is not the cloud itself: its endpoint, and the account there.
    server: (Option<Url>, Option<String>),
    timeout: Duration,
}

/// Leaves out the inner client, whose `Debug` output may contain a credential.
impl fmt::Debug for CloudStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudStore").field("url", &self.url.as_str()).finish_non_exhaustive()
    }
}

impl CloudStore {
    /// A client of the store that a URL names: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Asks no server.
    ///
    /// # Errors
    /// The options do not belong to such a store, contradict each other, or name a file that cannot be read.
    pub fn open(url: &Url, options: &CloudOptions) -> Result<Self, InvalidOption> {
        let prefix = key(&segments(url)).ok_or_else(|| InvalidOption {
            key: "url",
            what: "has a path that is not a key of an object store".to_owned(),
        })?;
        let objects = open::open(url, options)?;
        let server = (options.endpoint.clone(), options.account.clone());
        Ok(Self { objects, url: url.clone(), prefix, server, timeout: options.timeout })
    }

    /// What the keys of all its objects begin with, as a URL.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Whether the two may contain the same object: they have the same bucket, and the prefix of one begins with that of the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        let is_in = |inner: &Self, outer: &Self| inner.prefix.prefix_matches(&outer.prefix);
        self.server == other.server
            && origin(&self.url) == origin(&other.url)
            && (is_in(self, other) || is_in(other, self))
    }

    /// The objects beneath the prefix, by the rest of their keys.
    pub fn objects(&self) -> Arc<dyn ObjectStore> {
        Arc::new(PrefixStore::new(Arc::clone(&self.objects), self.prefix.clone()))
    }

    /// Fetches an object of the bucket. Returns a stream of its bytes, and its length in bytes. Blocks: call it from a thread of a
    /// tokio runtime that may block.
    ///
    /// # Errors
    /// The store cannot be reached, rejects the request, or takes longer than the timeout.
    pub fn get(&self, reference: &Reference) -> Result<(impl Read + Send + use<>, u64), Fault> {
        let shown = reference.shown();
        let Some(key) = key(&reference.segments) else {
            return Err(Fault::Denied(format!("{shown} is not a key of an object store")));
        };
        let (runtime, until) = (Handle::current(), Instant::now() + self.timeout);
        let options = GetOptions { extensions: of_object(), ..GetOptions::default() };
        let found = runtime.block_on(timeout_at(until, self.objects.get_opts(&key, options)));
        let found = match found {
            Ok(found) => found.map_err(|error| fault(&error, &shown))?,
            Err(_) => return Err(Fault::Unavailable(format!("get {shown}: {}", late(self.timeout)))),
        };
        let length = found.meta.size;
        let pieces = found.into_stream().map_err(|error| cause(&error)).boxed();
        Ok((Body::new(runtime, pieces, until, self.timeout), length))
    }

    /// Writes an object beneath the prefix, and replaces one of the same name. Readers see only complete objects.
    ///
    /// # Errors
    /// The store cannot be reached, rejects the object, or takes longer than the timeout. The text says why.
    pub async fn put(&self, name: &str, bytes: Bytes, media_type: &str) -> Result<(), String> {
        let key = self.prefix.clone().join(name);
        let mut attributes = Attributes::new();
        if is_header_value(media_type) {
            attributes.insert(Attribute::ContentType, media_type.to_owned().into());
        }
        let options = PutOptions { attributes, extensions: of_object(), ..PutOptions::default() };
        match timeout(self.timeout, self.objects.put_opts(&key, PutPayload::from(bytes), options)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(cause(&error)),
            Err(_) => Err(late(self.timeout)),
        }
    }
}

/// Marks a request for an object, apart from those for credentials.
fn of_object() -> Extensions {
    let mut extensions = Extensions::new();
    extensions.insert(OfObject);
    extensions
}

/// The key that decoded segments make together.
fn key(segments: &[Vec<u8>]) -> Option<Path> {
    let segments: Option<Vec<_>> = segments.iter().map(|segment| std::str::from_utf8(segment).ok()).collect();
    Path::parse(segments?.join("/")).ok()
}

/// Whether a text may be sent as a header. A media type that comes from a model can be any text.
fn is_header_value(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// Why a store does not give an object. Its own words name its endpoint, which callers need not know.
fn fault(error: &object_store::Error, shown: &str) -> Fault {
    use object_store::Error;
    match error {
        Error::NotFound { .. } => Fault::Missing(format!("the store has no {shown}")),
        Error::PermissionDenied { .. } => Fault::Denied(format!("the store denies access to {shown}")),
        error => match refused(error) {
            Some(Refused(status @ 300..=399)) => Fault::Denied(format!(
                "the store answers {shown} with a redirect ({status}), which is not followed: check the region and the endpoint of the store"
            )),
            Some(Refused(status)) => Fault::Denied(format!("the store answers {shown} with {status}")),
            None => Fault::Unavailable(format!("get {shown}: {}", cause(error))),
        },
    }
}

/// The status of an answer that rejects a request for good, if the error has one.
fn refused(error: &object_store::Error) -> Option<Refused> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(refused) = error.downcast_ref::<Refused>() {
            return Some(*refused);
        }
        source = error.source();
    }
    None
}

#[cfg(test)]
mod tests;
