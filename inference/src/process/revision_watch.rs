//! Notices when the files that count for a one-shot program's revision are exchanged while a worker serves it.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use tokio::sync::Mutex;

use super::config::ProcessConfig;

/// The revision that a worker serves, and the files that it was computed from.
#[derive(Debug)]
pub(super) struct RevisionWatch {
    served: String,
    seen: Mutex<Seen>,
}

/// The files when they were last hashed.
#[derive(Debug)]
struct Seen {
    stamps: Vec<Option<Stamp>>,
    revision: String,
}

/// What changes with a file: a rename changes the inode, a write the times. The time of change of the inode shows a write whose time was set
/// back, as by `cp -p`.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl From<Metadata> for Stamp {
    fn from(file: Metadata) -> Self {
        Self {
            inode: (file.dev(), file.ino()),
            size: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }
}

impl RevisionWatch {
    /// Reads all files.
    ///
    /// # Errors
    /// One of `revision_files` cannot be read, with its name.
    pub(super) async fn start(config: &ProcessConfig) -> Result<Self, String> {
        let seen = Seen::now(stamps(config).await?, config).await?;
        Ok(Self { served: seen.revision.clone(), seen: Mutex::new(seen) })
    }

    /// The revision that the worker serves.
    pub(super) fn revision(&self) -> &str {
        &self.served
    }

    /// The revision that the files have by now, if it is another one. Reads them only if they changed; one caller does, and others wait.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(super) async fn other(&self, config: &ProcessConfig) -> Result<Option<String>, String> {
        let mut seen = self.seen.lock().await;
        let stamps = stamps(config).await?;
        if stamps != seen.stamps {
            *seen = Seen::now(stamps, config).await?;
        }
        Ok((seen.revision != self.served).then(|| seen.revision.clone()))
    }
}

impl Seen {
    /// `stamps` are from before the files are read, so a change meanwhile is seen the next time.
    async fn now(stamps: Vec<Option<Stamp>>, config: &ProcessConfig) -> Result<Self, String> {
        let revision = config.revision_of_files().await?.with(None);
        Ok(Self { stamps, revision })
    }
}

/// The stamps of all files that may count. Off the runtime, because they may be on a network.
async fn stamps(config: &ProcessConfig) -> Result<Vec<Option<Stamp>>, String> {
    let files: Vec<PathBuf> = config.files_of_revision().collect();
    let stamp = |file: PathBuf| file.metadata().ok().map(Stamp::from);
    let stamped = tokio::task::spawn_blocking(move || files.into_iter().map(stamp).collect());
    stamped.await.map_err(|error| error.to_string())
}
