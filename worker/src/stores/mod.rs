//! Inputs by reference: finds the store of a reference, and fetches the bytes within the host's memory.

mod abandoned;
pub mod fetch;
pub mod outputs;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use url::Url;
use vramq_core::event::FetchFault;
use vramq_core::ids::StoreIndex;
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;
use vramq_stores::cloud::CloudStore;
use vramq_stores::folder::Folder;
use vramq_stores::http::HttpStore;
use vramq_stores::reference::{self, InvalidReference, Reference};
use vramq_stores::{Fault, folder_of};

use self::abandoned::Abandoned;

/// The most objects of one store that are fetched at a time, each on a thread. Enough to hide the latency of a store, few enough to limit
/// threads and connections.
const FETCHES_PER_STORE: usize = 16;

/// The unit of permits for the host's memory: a semaphore counts no more than 2^29 on small machines.
const MEMORY_UNIT: u64 = 1024;

/// A store of the configuration.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    pub name: String,
    /// All references that begin with this prefix belong to the store, by whole path segments.
    pub prefix: Url,
    /// Whether addresses inside the machine or its networks may be connected to.
    pub is_private: bool,
    /// The client of an object store; `None` for a folder or a web server.
    pub cloud: Option<Arc<CloudStore>>,
    /// Bytes of the largest object.
    pub object_max: u64,
    /// How long the fetch of an object may take (except from a folder), and its writing.
    pub timeout: Duration,
}

/// Where the objects of a store are.
#[derive(Debug)]
enum Place {
    Folder(Folder),
    Http(HttpStore),
    Cloud(Arc<CloudStore>),
}

/// A store to read from.
#[derive(Debug)]
pub struct Store {
    index: StoreIndex,
    name: String,
    prefix: Url,
    segments: Vec<Vec<u8>>,
    object_max: u64,
    place: Place,
    fetches: Arc<Semaphore>,
    /// Reads that their jobs have given up.
    abandoned: Arc<Abandoned>,
    /// The part of the host's memory for jobs that refer to this store. A store that does not answer leaves the other parts free.
    memory: Arc<Semaphore>,
    /// Permits of `memory`.
    memory_max: u32,
}

/// All stores of a worker, and the host's memory for what is fetched from them.
#[derive(Debug)]
pub struct Stores {
    stores: Vec<Arc<Store>>,
    memory: Arc<Semaphore>,
}

/// An input by reference, with its store.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Index of the input within its job.
    pub item: usize,
    pub reference: Reference,
    store: Arc<Store>,
}

/// The stores of these inputs; each once.
pub fn stores_of(wanted: &[Wanted]) -> Vec<StoreIndex> {
    let stores: BTreeSet<_> = wanted.iter().map(|wanted| wanted.store.index).collect();
    stores.into_iter().collect()
}

/// The fault of an input in the form that the core uses.
fn of_item(fault: Fault, item: usize, store: StoreIndex, took: Duration) -> FetchFault {
    let is_transient = matches!(fault, Fault::Unavailable(_));
    let (reason, what) = match fault {
        Fault::Denied(what) => (Reason::ReferenceDenied, what),
        Fault::Missing(what) => (Reason::ReferenceMissing, what),
        Fault::Mismatch(what) => (Reason::ReferenceMismatch, what),
        Fault::TooLarge(what) => (Reason::TooLarge, what),
        Fault::Unavailable(what) => (Reason::StoreUnavailable, what),
    };
    let rejection = Rejection::new(reason, format!("inputs[{item}]: {what}"));
    let stores = if is_transient { vec![store] } else { Vec::new() };
    FetchFault { rejection, is_transient, stores, took }
}

impl Stores {
    /// Stores to read from. `memory`: bytes of host memory for fetched inputs of unanswered jobs.
    pub fn new(configs: &[StoreConfig], memory: u64) -> Self {
        let permits = u32::try_from(memory / MEMORY_UNIT).unwrap_or(u32::MAX) as usize;
        let permits = permits.min(Semaphore::MAX_PERMITS);
        Self {
            stores: configs
                .iter()
                .enumerate()
                .map(|(at, config)| {
                    Arc::new(Store::new(StoreIndex(at), config, part(permits, configs.len())))
                })
                .collect(),
            memory: Arc::new(Semaphore::new(permits)),
        }
    }

    /// Whether there is no store. References are then left to the models.
    pub fn is_empty(&self) -> bool {
        self.stores.is_empty()
    }

    /// Finds the store of an input's reference: the one with the longest prefix.
    ///
    /// # Errors
    /// The text is not a reference, or no store covers it.
    pub fn find(&self, item: usize, text: &str) -> Result<Wanted, Rejection> {
        let rejection = |reason, what: String| Rejection::new(reason, format!("inputs[{item}]: {what}"));
        let reference = Reference::parse(text).map_err(|error| match error {
            InvalidReference::Malformed(what) => rejection(Reason::InvalidInput, what),
            InvalidReference::Denied(what) => rejection(Reason::ReferenceDenied, what),
        })?;
        let covering = self.stores.iter().filter(|store| store.covers(&reference));
        match covering.max_by_key(|store| store.segments.len()) {
            Some(store) => Ok(Wanted { item, reference, store: Arc::clone(store) }),
            None => Err(rejection(
                Reason::ReferenceDenied,
                format!("no store of this worker covers {}", reference.shown()),
            )),
        }
    }
}

impl Store {
    fn new(index: StoreIndex, config: &StoreConfig, memory: usize) -> Self {
        let StoreConfig { name, prefix, is_private, cloud, object_max, timeout } = config;
        let segments = reference::segments(prefix);
        let place = match cloud {
            Some(cloud) => Place::Cloud(Arc::clone(cloud)),
            None if prefix.scheme() == reference::FILE => Place::Folder(Folder::new(folder_of(&segments))),
            None => Place::Http(HttpStore::new(*is_private, *timeout)),
        };
        Self {
            index,
            name: name.clone(),
            prefix: prefix.clone(),
            segments,
            object_max: *object_max,
            place,
            fetches: Arc::new(Semaphore::new(FETCHES_PER_STORE)),
            abandoned: Arc::default(),
            memory: Arc::new(Semaphore::new(memory)),
            memory_max: u32::try_from(memory).unwrap_or(u32::MAX),
        }
    }

    /// Whether a reference is below the store's prefix, by whole segments: `/in` does not cover `/inside`.
    fn covers(&self, reference: &Reference) -> bool {
        reference::origin(&self.prefix) == reference::origin(&reference.url)
            && reference.segments.len() > self.segments.len()
            && reference.segments.starts_with(&self.segments)
    }

    /// Whether reads run that their jobs have given up, as long as they do. In a folder that hangs they do not end.
    fn has_abandoned_reads(&self) -> bool {
        self.abandoned.count() > 0
    }
}

/// The part of the memory that one store may take. All of it for a single store, otherwise half: with one store that does not answer, the
/// other half stays free.
fn part(permits: usize, stores: usize) -> usize {
    if stores > 1 { permits.div_ceil(2) } else { permits }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stores(prefixes: &[&str]) -> Stores {
        let config = |(at, prefix): (usize, &&str)| StoreConfig {
            name: format!("s{at}"),
            prefix: prefix.parse().unwrap(),
            is_private: false,
            cloud: None,
            object_max: 1 << 20,
            timeout: Duration::from_secs(1),
        };
        Stores::new(&prefixes.iter().enumerate().map(config).collect::<Vec<_>>(), 1 << 20)
    }

    #[test]
    fn the_longest_prefix_decides() {
        let stores = stores(&[
            "file:///srv/in",
            "file:///srv/in/large/",
            "https://files.example.com/a",
            "https://files.example.com:8443/",
        ]);
        let found = |text: &str| stores.find(0, text).map(|wanted| wanted.store.name.clone());
        for (text, store) in [
            ("file:///srv/in/x.png", "s0"),
            ("file://localhost/srv/in/x.png", "s0"),
            ("file:///srv/in/large/x.png", "s1"),
            ("file:///srv/in/larger/x.png", "s0"),
            ("file:///srv/other/../in/x.png", "s0"),
            ("file:///srv/%69n/x.png", "s0"),
            ("https://files.example.com/a/x?signature=1", "s2"),
            ("https://FILES.example.com:443/a/x", "s2"),
            ("https://files.example.com:8443/anything", "s3"),
        ] {
            assert_eq!(found(text).as_deref(), Ok(store), "{text}");
        }
    }

    #[test]
    fn references_outside_all_stores_are_denied() {
        let stores = stores(&["file:///srv/in", "https://files.example.com/a"]);
        for text in [
            "file:///srv/in",
            "file:///srv/inside/x",
            "file:///etc/passwd",
            "file:///srv/in/../../etc/passwd",
            "file:///srv/in/%2e%2e/x",
            "file:///srv/in/..%2f..%2fetc/passwd",
            "file:///srv/in/a%00b",
            "file://server/srv/in/x",
            "http://files.example.com/a/x",
            "https://files.example.com/ab",
            "https://files.example.com/a/..%2fsecret",
            "https://files.example.com/a/%5c..%5csecret",
            "https://files.example.com/a/..;/secret",
            "https://files.example.com/a/%2e%2e;v=1/secret",
            "https://files.example.com/a/..%3b/secret",
            "https://files.example.com.evil.org/a/x",
            "https://files.example.com@evil.org/a/x",
            "https://evil.org/a/x",
            "s3://bucket/key",
            "data:text/plain,x",
        ] {
            let rejection = stores.find(3, text).unwrap_err();
            assert_eq!(rejection.reason, Reason::ReferenceDenied, "{text}: {rejection:?}");
            assert!(rejection.error.starts_with("inputs[3]: "), "{rejection:?}");
        }
        for text in
            ["", "x.png", "/srv/in/x", "https://", "file:///srv/in/x#page=2", "file:///srv/in/x#sha256=ab"]
        {
            let rejection = stores.find(0, text).unwrap_err();
            assert_eq!(rejection.reason, Reason::InvalidInput, "{text}: {rejection:?}");
        }
    }

    #[test]
    fn a_shown_reference_has_no_secrets() {
        let stores = stores(&["file:///srv/in"]);
        let rejection = stores.find(0, "https://evil.org/x?X-Amz-Signature=hunter2").unwrap_err();
        assert_eq!(rejection.error, "inputs[0]: no store of this worker covers https://evil.org/x");
    }
}
