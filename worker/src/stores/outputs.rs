//! Large outputs: written to a folder, so that the reply carries a reference in their place.

use std::path::Path;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use url::Url;
use vramq_schemas::{Encoding, Output};

use super::folder::Folder;
use super::reference::hex;
use crate::broker::wire_size::wire_bytes;
use crate::engine::OutputMax;

/// The longest media type that goes into a reference, in bytes; RFC 6838 allows no longer ones.
const MEDIA_TYPE_BYTES_MAX: usize = 255;

/// The most that a reference adds to the URL of its folder: a name of 64 digits and an index, a digest, a media type of which each
/// byte is escaped.
const REFERENCE_BYTES: u64 = 64 + 11 + 80 + 6 + 3 * MEDIA_TYPE_BYTES_MAX as u64;

/// Where a model's large outputs go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputConfig {
    /// The folder.
    pub folder: std::path::PathBuf,
    /// What references to files of the folder begin with.
    pub url: Url,
    /// Outputs of more bytes are written to the folder.
    pub above: u64,
}

/// A folder for the outputs of a model.
#[derive(Debug)]
pub struct OutputStore {
    folder: Folder,
    url: Url,
    above: u64,
}

/// Whose outputs they are: a hash of the model, the caller and the job's id. A job that runs again writes over its own files, and no other
/// caller's job does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputOwner(String);

impl OutputOwner {
    pub fn new(model: &str, caller: Option<&str>, id: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update((model.len() as u64).to_le_bytes());
        hash.update(model);
        // No caller is told apart from one without a name, and the length tells where the id begins.
        match caller {
            None => hash.update([0]),
            Some(caller) => {
                hash.update([1]);
                hash.update((caller.len() as u64).to_le_bytes());
                hash.update(caller);
            }
        }
        hash.update(id);
        Self(hex(&hash.finalize()))
    }
}

impl OutputStore {
    pub fn new(config: &OutputConfig) -> Arc<Self> {
        let OutputConfig { folder, url, above } = config.clone();
        Arc::new(Self { folder: Folder::new(folder), url, above })
    }

    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    /// What an output takes in a reply at most, if it would take so much as it is.
    pub fn bound(&self, output: OutputMax) -> OutputMax {
        match output {
            OutputMax::Bytes(bytes) | OutputMax::Text(bytes) if bytes > self.above => {
                OutputMax::Uri(self.url.as_str().len() as u64 + REFERENCE_BYTES)
            }
            output => output,
        }
    }

    /// Whether an output may have to be written: if it is above the limit, or could be.
    pub fn takes(&self, output: &Output) -> bool {
        match output {
            Output::Bytes { bytes, .. } => bytes.len() as u64 > self.above,
            Output::Json(_) => wire_bytes(output, Encoding::Json) as u64 > self.above,
            Output::Embedding(_) | Output::Uri(_) => false,
        }
    }

    /// Writes an output that is large enough, and gives its reference. Blocks until it is on disk. One that cannot be written stays
    /// as it is: it may fit its reply.
    pub fn store(&self, owner: &OutputOwner, index: u32, output: Output) -> Output {
        let (bytes, media_type) = match &output {
            Output::Bytes { bytes, media_type } => (bytes.as_slice().into(), media_type.as_str()),
            Output::Json(value) => match serde_json::to_vec(value) {
                Ok(text) => (std::borrow::Cow::Owned(text), "application/json"),
                Err(_) => return output,
            },
            Output::Embedding(_) | Output::Uri(_) => return output,
        };
        if bytes.len() as u64 <= self.above {
            return output;
        }
        let name = format!("{}-{index}", owner.0);
        if let Err(error) = self.folder.write(&name, &bytes) {
            let folder = self.folder.root().display();
            tracing::warn!(%folder, name, %error, "an output was not written to its store: it goes with the reply");
            return output;
        }
        Output::Uri(self.reference(&name, &Sha256::digest(&bytes), media_type))
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

/// What a media type may not have as it is in a fragment.
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
    use super::super::reference::Reference;
    use super::*;

    fn store(folder: &Path, url: &str) -> Arc<OutputStore> {
        OutputStore::new(&OutputConfig { folder: folder.to_owned(), url: url.parse().unwrap(), above: 4 })
    }

    fn bytes(bytes: &[u8]) -> Output {
        Output::Bytes { media_type: "image/png; a=\"b&c\"".to_owned(), bytes: bytes.to_vec() }
    }

    fn stored(store: &OutputStore, owner: &OutputOwner, index: u32, output: Output) -> String {
        match store.store(owner, index, output) {
            Output::Uri(uri) => uri,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_large_is_written_and_what_is_small_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "https://files.example.com/out/");
        let owner = OutputOwner::new("m", Some("a"), "job");
        assert_eq!(store.store(&owner, 0, bytes(b"1234")), bytes(b"1234"));
        let uri = stored(&store, &owner, 7, bytes(b"12345"));
        let reference = Reference::parse(&uri).unwrap();
        assert!(uri.starts_with("https://files.example.com/out/") && uri.contains("-7#sha256="), "{uri}");
        assert!(uri.ends_with("&type=image/png;%20a=%22b%26c%22"), "{uri}");
        let written = std::fs::read(folder.path().join(format!("{}-7", owner.0))).unwrap();
        assert_eq!((reference.check(&written), &written[..]), (Ok(()), &b"12345"[..]));
        let json = serde_json::json!({"b": [1, 2]});
        let uri = stored(&store, &owner, 8, Output::Json(json));
        assert!(uri.ends_with("&type=application/json"), "{uri}");
        assert_eq!(std::fs::read(folder.path().join(format!("{}-8", owner.0))).unwrap(), br#"{"b":[1,2]}"#);
        assert!(uri.len() as u64 <= "https://files.example.com/out/".len() as u64 + REFERENCE_BYTES);
    }

    #[test]
    fn a_job_writes_over_its_own_files_and_over_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "file:///srv/out");
        let owner = |caller, id| OutputOwner::new("m", caller, id);
        let first = stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first"));
        assert_eq!(stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first")), first);
        for (caller, id) in
            [(None, "job"), (Some("b"), "job"), (Some("a"), "job2"), (Some("aj"), "ob"), (None, "ajob")]
        {
            let name = |uri: &str| uri.split('#').next().unwrap().to_owned();
            assert_ne!(name(&stored(&store, &owner(caller, id), 0, bytes(b"other"))), name(&first));
        }
        let path = Reference::parse(&first).unwrap().segments.pop().unwrap();
        let path = folder.path().join(String::from_utf8(path).unwrap());
        assert_eq!(std::fs::read(path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 6);
    }

    #[test]
    fn an_output_that_cannot_be_written_goes_with_its_reply() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder.path().join("missing"), "file:///srv/out");
        assert_eq!(store.store(&OutputOwner::new("m", None, "job"), 0, bytes(b"12345")), bytes(b"12345"));
    }

    #[test]
    fn a_reply_with_references_is_small() {
        let store = store(Path::new("/srv/out"), "file:///srv/out");
        assert_eq!(store.bound(OutputMax::Bytes(4)), OutputMax::Bytes(4));
        assert!(matches!(store.bound(OutputMax::Bytes(1 << 30)), OutputMax::Uri(bytes) if bytes < 1100));
    }
}
