//! Large outputs: written to a folder or an object store. The reply then has a reference instead.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{timeout, timeout_at};
use url::Url;
use vramq_core::rejection::Rejection;
use vramq_schemas::output_name::OutputOwner;
use vramq_schemas::{Encoding, Output, Reason};
use vramq_stores::cloud::CloudStore;
use vramq_stores::folder::Folder;
use vramq_stores::reference::hex;

use super::Awaited;
use crate::engine::OutputMax;
use crate::wire_size::wire_bytes;

/// The most outputs of one model that are written at a time: enough to hide the latency of an object store. A folder that hangs blocks as
/// many threads and keeps their outputs in memory.
const WRITES_MAX: usize = 16;

/// How long an output waits until it can be written, as a multiple of the limit for a write. A busy store completes earlier writes in that
/// time, and a store that hangs does not block jobs for ever.
const WAIT_MAX: u32 = 10;

/// Why an output is not written although its store may work.
const NO_TIME_LEFT: &str =
    "the job was held for nearly as long as a job may be (worker.job_s), or the worker drains";

/// The longest media type in a reference, in bytes, according to RFC 6838.
const MEDIA_TYPE_BYTES_MAX: usize = 255;

/// The most bytes that a reference adds to the URL of its folder: a name of 64 digits and an index, a digest, and a media type with every
/// byte escaped.
const REFERENCE_BYTES: u64 = 64 + 11 + 80 + 6 + 3 * MEDIA_TYPE_BYTES_MAX as u64;

/// Where a model's large outputs are written.
#[derive(Clone, Debug)]
pub struct OutputConfig {
    pub destination: Destination,
    /// The prefix of references to them.
    pub url: Url,
    /// Outputs of more bytes are written there.
    pub above: u64,
    /// How long writing one may take.
    pub write_max: Duration,
}

/// The destination of outputs.
#[derive(Clone, Debug)]
pub enum Destination {
    Folder(PathBuf),
    Cloud(Arc<CloudStore>),
}

/// The store for the outputs of a model.
#[derive(Debug)]
pub struct OutputStore {
    writer: Writer,
    url: Url,
    above: u64,
    write_max: Duration,
    writes: Arc<Semaphore>,
    /// Writes for which their jobs wait.
    awaited: AtomicUsize,
}

#[derive(Debug)]
enum Writer {
    Folder(Arc<Folder>),
    Cloud(Arc<CloudStore>),
}

/// An output that was offered to a store.
#[derive(Debug)]
pub struct Offered {
    /// A reference, or the output as it was.
    pub output: Output,
    /// Why it was not written, if it should have been.
    pub unwritten: Option<String>,
}

impl OutputStore {
    pub fn new(config: &OutputConfig) -> Arc<Self> {
        let OutputConfig { destination, url, above, write_max } = config.clone();
        let writer = match destination {
            Destination::Folder(folder) => Writer::Folder(Arc::new(Folder::new(folder))),
            Destination::Cloud(cloud) => Writer::Cloud(cloud),
        };
        let (writes, awaited) = (Arc::new(Semaphore::new(WRITES_MAX)), AtomicUsize::new(0));
        Arc::new(Self { writer, url, above, write_max, writes, awaited })
    }

    /// The most bytes of an output in a reply, given its bound without a store.
    pub fn bound(&self, output: OutputMax) -> OutputMax {
        match output {
            OutputMax::Bytes(bytes) | OutputMax::Text(bytes) if bytes > self.above => {
                OutputMax::Uri(self.reference_max())
            }
            output => output,
        }
    }

    /// The most bytes of the reference to an output, if the output would be written.
    pub fn bytes_in_reply(&self, output: &Output) -> Option<u64> {
        self.takes(output).then(|| self.reference_max())
    }

    fn reference_max(&self) -> u64 {
        self.url.as_str().len() as u64 + REFERENCE_BYTES
    }

    /// How long writing one output may take.
    pub fn write_max(&self) -> Duration {
        self.write_max
    }

    /// Whether an output may have to be written: its size is, or could be, above the limit.
    pub fn takes(&self, output: &Output) -> bool {
        match output {
            Output::Bytes { bytes, .. } => bytes.len() as u64 > self.above,
            Output::Json(_) => wire_bytes(output, Encoding::Json) as u64 > self.above,
            Output::Embedding(_) | Output::Sparse(_) | Output::Uri(_) => false,
        }
    }

    /// Whether the folder hangs: all places for writes are taken by writes that their jobs have given up.
    fn hangs(&self) -> bool {
        matches!(self.writer, Writer::Folder(_))
            && self.writes.available_permits() == 0
            && self.awaited.load(Ordering::Relaxed) == 0
    }

    /// Writes an output that is large enough, and returns its reference once the bytes are on disk or in the object store. Returns an
    /// output that was not written in time, or not before `until`, unchanged, because it may fit its reply.
    ///
    /// # Errors
    /// The output is lost: a fault of the worker.
    pub async fn offer(
        &self,
        owner: &OutputOwner,
        index: u32,
        output: Output,
        until: Instant,
    ) -> Result<Offered, Rejection> {
        if !self.takes(&output) {
            return Ok(Offered { output, unwritten: None });
        }
        if self.hangs() {
            // The log has a WARN about each of these writes.
            let why = format!("{WRITES_MAX} earlier writes have not ended");
            return Ok(Offered { output, unwritten: Some(why) });
        }
        let above = self.above;
        // Digests and JSON of large outputs take too long for the runtime's threads.
        let prepared = tokio::task::spawn_blocking(move || Prepared::of(output, above)).await;
        let prepared = match prepared {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(output)) => return Ok(Offered { output, unwritten: None }),
            Err(error) => {
                let error = format!("internal error: an output is missing; please report it: {error}");
                return Err(Rejection::new(Reason::EngineFailed, error));
            }
        };
        let name = owner.name(index);
        let written = timeout_at(until.into(), self.write_in_time(&name, &prepared)).await;
        Ok(match written.unwrap_or_else(|_| Err(NO_TIME_LEFT.to_owned())) {
            Ok(()) => {
                let output = Output::Uri(self.reference(&name, &prepared.digest, &prepared.media_type));
                Offered { output, unwritten: None }
            }
            Err(error) => {
                let store = self.url.as_str();
                tracing::warn!(
                    store,
                    name,
                    error,
                    "cannot write the output to its store: sending it in the reply"
                );
                Offered { output: prepared.into_output(), unwritten: Some(error) }
            }
        })
    }

    /// Only the write itself must end within `write_max`; waiting for earlier writes has its own limit.
    async fn write_in_time(&self, name: &str, prepared: &Prepared) -> Result<(), String> {
        let wait_max = self.write_max.saturating_mul(WAIT_MAX);
        let place = timeout(wait_max, Arc::clone(&self.writes).acquire_owned()).await;
        let place =
            place.map_err(|_| format!("others took longer than {wait_max:?} ({WAIT_MAX} × timeout_s)"))?;
        // Never closed.
        let permit = place.map_err(|error| error.to_string())?;
        let _awaited = Awaited::count(&self.awaited);
        let written = timeout(self.write_max, self.write(permit, name, prepared)).await;
        written.map_err(|_| format!("it took longer than {:?} (timeout_s)", self.write_max))?
    }

    async fn write(
        &self,
        permit: OwnedSemaphorePermit,
        name: &str,
        prepared: &Prepared,
    ) -> Result<(), String> {
        let bytes = prepared.bytes.clone();
        match &self.writer {
            Writer::Cloud(cloud) => {
                let _permit = permit;
                cloud.put(name, bytes, &prepared.media_type).await
            }
            Writer::Folder(folder) => {
                let (folder, name) = (Arc::clone(folder), name.to_owned());
                let write = tokio::task::spawn_blocking(move || {
                    // The permit stays with the thread, even if the thread hangs.
                    let _permit = permit;
                    folder.write(&name, &bytes)
                });
                write.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
            }
        }
    }

    fn reference(&self, name: &str, digest: &[u8], media_type: &str) -> String {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().push(name);
        }
        let media_type = &media_type[..media_type.floor_char_boundary(MEDIA_TYPE_BYTES_MAX)];
        let escaped = percent_encoding::utf8_percent_encode(media_type, ESCAPED);
        format!("{url}#sha256={}&type={escaped}", hex(digest))
    }
}

/// An output in the form in which it is written.
struct Prepared {
    bytes: Bytes,
    digest: [u8; 32],
    media_type: String,
    /// The JSON value that the bytes encode, if the output was JSON.
    json: Option<Value>,
}

impl Prepared {
    /// The error is the output itself, if it is no larger than `above` or has no bytes to write.
    fn of(output: Output, above: u64) -> Result<Self, Output> {
        let (bytes, media_type, json) = match output {
            Output::Bytes { bytes, media_type } if bytes.len() as u64 > above => (bytes, media_type, None),
            Output::Json(value) => match serde_json::to_vec(&value) {
                Ok(text) if text.len() as u64 > above => (text, "application/json".to_owned(), Some(value)),
                _ => return Err(Output::Json(value)),
            },
            output => return Err(output),
        };
        let digest = Sha256::digest(&bytes).into();
        Ok(Self { bytes: bytes.into(), digest, media_type, json })
    }

    fn into_output(self) -> Output {
        let Self { bytes, media_type, json, .. } = self;
        // Copies the bytes only if a hanging write still holds them.
        json.map_or_else(|| Output::Bytes { media_type, bytes: bytes.into() }, Output::Json)
    }
}

/// Characters of a media type that must be escaped in a fragment.
const ESCAPED: &percent_encoding::AsciiSet = &percent_encoding::CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'&')
    .add(b'<')
    .add(b'>')
    .add(b'`');

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vramq_stores::reference::Reference;

    use super::*;

    fn store(folder: &Path, url: &str) -> Arc<OutputStore> {
        let destination = Destination::Folder(folder.to_owned());
        let write_max = Duration::from_secs(60);
        OutputStore::new(&OutputConfig { destination, url: url.parse().unwrap(), above: 4, write_max })
    }

    fn in_a_minute() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn bytes(bytes: &[u8]) -> Output {
        Output::Bytes { media_type: "image/png; a=\"b&c\"".to_owned(), bytes: bytes.to_vec() }
    }

    async fn stored(store: &OutputStore, owner: &OutputOwner, index: u32, output: Output) -> String {
        match store.offer(owner, index, output, in_a_minute()).await.unwrap() {
            Offered { output: Output::Uri(uri), unwritten: None } => uri,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn only_large_outputs_are_written_to_the_store() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "https://files.example.com/out/");
        let owner = OutputOwner::new("m", Some("a"), "job");
        assert_eq!(
            store.offer(&owner, 0, bytes(b"1234"), in_a_minute()).await.unwrap().output,
            bytes(b"1234")
        );
        let uri = stored(&store, &owner, 7, bytes(b"12345")).await;
        let reference = Reference::parse(&uri).unwrap();
        assert!(uri.starts_with("https://files.example.com/out/") && uri.contains("-7#sha256="), "{uri}");
        assert!(uri.ends_with("&type=image/png;%20a=%22b%26c%22"), "{uri}");
        let written = std::fs::read(folder.path().join(owner.name(7))).unwrap();
        assert_eq!((reference.check(&written), &written[..]), (Ok(()), &b"12345"[..]));
        let json = serde_json::json!({"b": [1, 2]});
        let uri = stored(&store, &owner, 8, Output::Json(json)).await;
        assert!(uri.ends_with("&type=application/json"), "{uri}");
        assert_eq!(std::fs::read(folder.path().join(owner.name(8))).unwrap(), br#"{"b":[1,2]}"#);
        assert!(uri.len() as u64 <= "https://files.example.com/out/".len() as u64 + REFERENCE_BYTES);
    }

    #[tokio::test]
    async fn a_job_writes_over_its_own_files_and_over_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "file:///srv/out");
        let owner = |caller, id| OutputOwner::new("m", caller, id);
        let first = stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first")).await;
        assert_eq!(stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first")).await, first);
        for (caller, id) in
            [(None, "job"), (Some("b"), "job"), (Some("a"), "job2"), (Some("aj"), "ob"), (None, "ajob")]
        {
            let name = |uri: &str| uri.split('#').next().unwrap().to_owned();
            let other = stored(&store, &owner(caller, id), 0, bytes(b"other")).await;
            assert_ne!(name(&other), name(&first));
        }
        let path = Reference::parse(&first).unwrap().segments.pop().unwrap();
        let path = folder.path().join(String::from_utf8(path).unwrap());
        assert_eq!(std::fs::read(path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 6);
    }

    #[tokio::test]
    async fn an_output_that_cannot_be_written_goes_with_its_reply() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder.path().join("missing"), "file:///srv/out");
        let owner = OutputOwner::new("m", None, "job");
        for output in [bytes(b"12345"), Output::Json(serde_json::json!([1, 2, 3, 4]))] {
            let offered = store.offer(&owner, 0, output.clone(), in_a_minute()).await.unwrap();
            assert_eq!(offered.output, output);
            assert!(offered.unwritten.is_some_and(|why| why.contains("No such file")));
        }
    }

    /// All threads for writes are taken.
    #[tokio::test]
    async fn an_output_that_is_not_written_in_time_goes_with_its_reply() {
        let folder = tempfile::tempdir().unwrap();
        let (destination, url) = (Destination::Folder(folder.path().to_owned()), "file:///srv/out");
        let write_max = Duration::from_millis(1);
        let config = OutputConfig { destination, url: url.parse().unwrap(), above: 4, write_max };
        let store = OutputStore::new(&config);
        let hung = Arc::clone(&store.writes).acquire_many_owned(WRITES_MAX as u32).await.unwrap();
        let owner = OutputOwner::new("m", None, "job");
        let awaited = Awaited::count(&store.awaited);
        let offered = store.offer(&owner, 0, bytes(b"12345"), in_a_minute()).await.unwrap();
        assert_eq!(offered.output, bytes(b"12345"));
        assert_eq!(offered.unwritten.as_deref(), Some("others took longer than 10ms (10 × timeout_s)"));
        // Their jobs have given them up: the folder hangs, and further outputs do not wait for it.
        drop(awaited);
        let offered = store.offer(&owner, 0, bytes(b"12345"), in_a_minute()).await.unwrap();
        assert_eq!(offered.output, bytes(b"12345"));
        assert_eq!(offered.unwritten.as_deref(), Some("16 earlier writes have not ended"));
        drop(hung);
        assert_eq!(store.offer(&owner, 0, bytes(b"1234"), in_a_minute()).await.unwrap().unwritten, None);
    }

    /// All threads for writes are taken, and for minutes nobody gives up.
    #[tokio::test]
    async fn an_output_whose_job_has_no_time_left_goes_with_its_reply() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "file:///srv/out");
        let hung = Arc::clone(&store.writes).acquire_many_owned(WRITES_MAX as u32).await.unwrap();
        let awaited = Awaited::count(&store.awaited);
        let owner = OutputOwner::new("m", None, "job");
        let offered = store.offer(&owner, 0, bytes(b"12345"), Instant::now()).await.unwrap();
        assert_eq!(offered.output, bytes(b"12345"));
        assert_eq!(offered.unwritten.as_deref(), Some(NO_TIME_LEFT));
        drop((hung, awaited));
    }

    #[test]
    fn a_reply_with_references_is_small() {
        let store = store(Path::new("/srv/out"), "file:///srv/out");
        assert_eq!(store.bound(OutputMax::Bytes(4)), OutputMax::Bytes(4));
        assert!(matches!(store.bound(OutputMax::Bytes(1 << 30)), OutputMax::Uri(bytes) if bytes < 1100));
    }
}
