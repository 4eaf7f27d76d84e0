//! Large outputs: written to a folder or an object store. The reply then has a reference instead.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

use super::abandoned::Abandoned;
use crate::engine::OutputMax;
use crate::wire_size::{fits_reply, wire_bytes};

/// The most outputs of one model that are written at a time: enough to hide the latency of an object store. A folder that hangs blocks as
/// many threads and keeps their outputs in memory.
const WRITES_MAX: usize = 16;

/// How long an output waits until it can be written, as a multiple of the limit for a write. A busy store completes earlier writes in that
/// time, and a store that hangs does not block jobs for ever.
const WAIT_MAX: u32 = 10;

/// Why an output is not written although its store may work.
const NO_TIME_LEFT: &str =
    "the job was held for nearly as long as the broker allows (its consumer_timeout, see worker.job_s)";

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
    /// Writes to a folder that their jobs have given up.
    abandoned: Arc<Abandoned>,
    /// The log has said that the folder hangs, and not yet that it works again.
    is_said_to_hang: AtomicBool,
}

#[derive(Debug)]
enum Writer {
    Folder(Arc<Folder>),
    Cloud(Arc<CloudStore>),
}

/// What the reply of an output says of it.
#[derive(Clone, Copy, Debug)]
pub struct OutputReply {
    pub encoding: Encoding,
    /// When the output has to be written, or else goes with the reply.
    pub until: Instant,
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
        Arc::new(Self {
            writer,
            url,
            above,
            write_max,
            writes: Arc::new(Semaphore::new(WRITES_MAX)),
            abandoned: Arc::default(),
            is_said_to_hang: AtomicBool::new(false),
        })
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
        self.abandoned.count() >= WRITES_MAX
    }

    /// Why an output is not written while the folder hangs. The log says once that it does.
    fn hung(&self) -> String {
        if !self.is_said_to_hang.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                store = self.url.as_str(),
                writes = WRITES_MAX,
                "all writes to the store hang: until one of them ends, outputs that fit a reply go with it at once, and the others wait"
            );
        }
        format!("{WRITES_MAX} earlier writes have not ended")
    }

    /// Writes an output that is large enough, and returns its reference once the bytes are on disk or in the object store. Returns an
    /// output that was not written in time, or not before the reply's `until`, unchanged, because it may fit its reply. If it does, it does not
    /// wait for a folder that hangs.
    ///
    /// # Errors
    /// The output is lost: a fault of the worker.
    pub async fn offer(
        &self,
        owner: &OutputOwner,
        index: u32,
        output: Output,
        reply: OutputReply,
    ) -> Result<Offered, Rejection> {
        if !self.takes(&output) {
            return Ok(Offered { output, unwritten: None });
        }
        let may_wait = !fits_reply(&output, reply.encoding);
        if !may_wait && self.hangs() {
            return Ok(Offered { output, unwritten: Some(self.hung()) });
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
        let write = timeout_at(reply.until.into(), self.write_unless_hung(&name, &prepared, may_wait)).await;
        let Some(written) = write.unwrap_or_else(|_| Some(Err(NO_TIME_LEFT.to_owned()))) else {
            return Ok(Offered { output: prepared.into_output(), unwritten: Some(self.hung()) });
        };
        Ok(match written {
            Ok(()) => {
                if self.is_said_to_hang.swap(false, Ordering::Relaxed) {
                    tracing::info!(store = self.url.as_str(), "outputs are written to the store again");
                }
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

    /// Writes an output; `None` if the folder hangs and the output does not wait for it. While the output has a place for its own write,
    /// the other places are too few to count as a hang.
    async fn write_unless_hung(
        &self,
        name: &str,
        prepared: &Prepared,
        may_wait: bool,
    ) -> Option<Result<(), String>> {
        tokio::select! {
            biased;
            written = self.write_in_time(name, prepared) => Some(written),
            () = self.abandoned.reaches(WRITES_MAX), if !may_wait => None,
        }
    }

    /// Only the write itself must end within `write_max`; waiting for earlier writes has its own limit.
    async fn write_in_time(&self, name: &str, prepared: &Prepared) -> Result<(), String> {
        let wait_max = self.write_max.saturating_mul(WAIT_MAX);
        let place = timeout(wait_max, Arc::clone(&self.writes).acquire_owned()).await;
        let place =
            place.map_err(|_| format!("others took longer than {wait_max:?} ({WAIT_MAX} × timeout_s)"))?;
        // Never closed.
        let permit = place.map_err(|error| error.to_string())?;
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
                let (_of_job, of_thread) = self.abandoned.begin();
                let write = tokio::task::spawn_blocking(move || {
                    // They stay with the thread, even if the thread hangs. The permit is returned last.
                    let (_permit, _of_thread) = (permit, of_thread);
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
#[path = "outputs_tests.rs"]
mod tests;
