//! Bounds the threads that one folder takes. A folder that hangs, such as one of a network, then costs its own requests these threads, and
//! not everybody the threads that tokio has for work that blocks.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream::{self, Stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

/// Operations of a folder at a time. tokio has 512 threads: the folders of results, uploads and outputs together leave more than half.
pub const OPERATIONS_MAX: usize = 64;

/// How long an operation waits for its turn while none of the others ends: a folder that works ends many in this time, a slow one some.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a folder may hang before the gateway stores nothing in it any more. A file server that is replaced is back in this time.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(30);

/// What is read of a file at a time.
const PIECE_BYTES: u64 = 256 * 1024;

/// As many operations of the folder as there may be do not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the folder does not answer: {OPERATIONS_MAX} operations wait for it")]
pub struct Busy;

impl From<Busy> for io::Error {
    fn from(busy: Busy) -> Self {
        Self::new(io::ErrorKind::ResourceBusy, busy)
    }
}

/// The operations of a folder.
#[derive(Debug)]
pub struct FolderThreads {
    folder: String,
    permits: Arc<Semaphore>,
    /// When an operation had waited in vain, if none has ended since.
    stuck_since: Mutex<Option<Instant>>,
    /// Operations that have ended.
    ended: AtomicU64,
}

/// Lets one operation of a folder run. Held until the operation ends, also if nobody waits for it any more.
#[derive(Debug)]
pub struct Turn {
    _permit: OwnedSemaphorePermit,
    of: Arc<FolderThreads>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.of.ended.fetch_add(1, Ordering::Relaxed);
        if self.of.stuck_since().take().is_some() {
            tracing::info!(folder = self.of.folder, "an operation of the folder has ended: it answers again");
        }
    }
}

impl FolderThreads {
    pub fn new(folder: &Path) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(OPERATIONS_MAX));
        Arc::new(Self {
            folder: folder.display().to_string(),
            permits,
            stuck_since: Mutex::default(),
            ended: AtomicU64::new(0),
        })
    }

    /// Operations that could begin now.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.permits.available_permits()
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// None of the operations ends.
    pub async fn turn(self: &Arc<Self>) -> Result<Turn, Busy> {
        let permits = || Arc::clone(&self.permits);
        let permit = match permits().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) if self.stuck_since().is_some() => return Err(Busy),
            Err(_) => self.permit_while_it_works().await.ok_or_else(|| self.note_stuck())?,
        };
        Ok(Turn { _permit: permit, of: Arc::clone(self) })
    }

    /// Waits for a permit for as long as the folder works: a long queue is no folder that hangs. `None`: none of the operations ends.
    async fn permit_while_it_works(&self) -> Option<OwnedSemaphorePermit> {
        let mut acquired = pin!(Arc::clone(&self.permits).acquire_owned());
        loop {
            let before = self.ended.load(Ordering::Relaxed);
            match timeout(WAIT_MAX, &mut acquired).await {
                Ok(permit) => return permit.ok(),
                Err(_) if self.ended.load(Ordering::Relaxed) == before => return None,
                Err(_) => {}
            }
        }
    }

    /// Waits for a turn to store what would be lost otherwise. It waits also while the folder hangs, but not after [`GIVEN_UP_AFTER`].
    ///
    /// # Errors
    /// None of the operations has ended for [`GIVEN_UP_AFTER`].
    pub async fn turn_to_store(self: &Arc<Self>) -> Result<Turn, Busy> {
        let is_given_up = || self.stuck_since().is_some_and(|since| since.elapsed() >= GIVEN_UP_AFTER);
        loop {
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                return Ok(Turn { _permit: permit, of: Arc::clone(self) });
            }
            if is_given_up() {
                return Err(Busy);
            }
            if let Some(permit) = self.permit_while_it_works().await {
                return Ok(Turn { _permit: permit, of: Arc::clone(self) });
            }
            self.note_stuck();
        }
    }

    /// Nothing panics while it holds the lock.
    fn stuck_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.stuck_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn, for as long as it takes.
    pub async fn turn_at_last(self: &Arc<Self>) -> Option<Turn> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.ok()?;
        Some(Turn { _permit: permit, of: Arc::clone(self) })
    }

    /// Runs work that blocks.
    ///
    /// # Errors
    /// None of the operations ends, or the work panics.
    pub async fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        let turn = self.turn().await?;
        let worked = spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        worked.await.map_err(io::Error::other)
    }

    /// Notes, and logs once, that none of the operations ends.
    fn note_stuck(&self) -> Busy {
        let mut since = self.stuck_since();
        if since.is_none() {
            *since = Some(Instant::now());
            tracing::warn!(
                folder = self.folder,
                operations = OPERATIONS_MAX,
                "the folder does not answer: until one of its operations ends, requests that need it get 503, and no job is recorded or stored in it. Check its mount"
            );
        }
        Busy
    }
}

/// The bytes of an open file. It fails if the file has fewer.
pub fn file_pieces(
    threads: Arc<FolderThreads>,
    file: std::fs::File,
    range: Range<u64>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + use<> {
    stream::try_unfold((file, range), move |(file, range)| {
        let threads = Arc::clone(&threads);
        async move {
            let length = range.end.saturating_sub(range.start).min(PIECE_BYTES);
            if length == 0 {
                return Ok(None);
            }
            let read = threads.run(move || {
                let mut piece = vec![0; usize::try_from(length).unwrap_or_default()];
                file.read_exact_at(&mut piece, range.start).map(|()| (Bytes::from(piece), file))
            });
            let (piece, file) = read.await??;
            Ok(Some((piece, (file, range.start + length..range.end))))
        }
    })
}
