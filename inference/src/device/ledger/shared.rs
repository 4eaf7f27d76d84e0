//! The account of a device that several processes share: each takes and gives back in its row of a file, while no other uses the file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{self, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use super::table::{Holder, LedgerError, Table, claim};
use crate::device::{Memory, OutOfMemory};

/// A file that could not be read for so long is worth a line in the log. Others lock it for microseconds.
const READING_LATE: Duration = Duration::from_secs(10);

/// How long a reading of the memory may wait for the file, and how often it tries. Another access takes some ten microseconds, unless its
/// process was stopped in the middle of it.
const READING_MAX: Duration = Duration::from_millis(5);
const READING_RETRY: Duration = Duration::from_micros(50);

/// A ledger in a file. Every process has a row in it; the row of one that died counts for nothing.
#[derive(Debug)]
pub struct Shared {
    /// Locked by `flock` for each access. The mutex keeps this process's own threads apart.
    file: Mutex<File>,
    path: PathBuf,
    row: usize,
    pub(super) total: u64,
    /// The memory as it was when the file was last read, and when that was.
    seen: Mutex<(Memory, Instant)>,
    /// Whether the log says that the file could not be read for long.
    is_late: Once,
}

impl Shared {
    pub(super) fn open(path: &Path, total: u64) -> Result<Self, LedgerError> {
        let failed = |source| LedgerError::File { path: path.to_owned(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(failed)?;
        file.lock().map_err(failed)?;
        let claimed = claim(&file, path, total);
        file.unlock().map_err(failed)?;
        let seen = Mutex::new((Memory { free: 0, total, foreign: total }, Instant::now()));
        let shared = Self {
            file: Mutex::new(file),
            path: path.to_owned(),
            row: claimed?,
            total,
            seen,
            is_late: Once::new(),
        };
        // What is seen first.
        shared.memory();
        Ok(shared)
    }

    pub(super) fn take(&self, bytes: u64) -> Result<(), OutOfMemory> {
        let refused = |free, foreign| OutOfMemory { asked: bytes, free, total: self.total, foreign };
        self.locked(|table| {
            let mut foreign = table.held_by_others(self.row);
            let own = table.holder(self.row).bytes;
            let fits =
                |foreign: u64| foreign.checked_add(own)?.checked_add(bytes).filter(|sum| *sum <= self.total);
            if fits(foreign).is_none() {
                foreign = table.held_by_living_others(self.row);
            }
            if fits(foreign).is_none() {
                return Ok(Err(refused(self.total.saturating_sub(foreign).saturating_sub(own), foreign)));
            }
            self.write_own(table.file, own + bytes)?;
            self.see(foreign, own + bytes);
            Ok(Ok(()))
        })
        // A file that cannot be read has no memory to give.
        .unwrap_or_else(|| Err(refused(0, 0)))
    }

    pub(super) fn give(&self, bytes: u64) {
        self.locked(|table| {
            let own = table.holder(self.row).bytes;
            let left = own.saturating_sub(bytes);
            self.write_own(table.file, left)?;
            self.see(table.held_by_living_others(self.row), left);
            Ok(())
        });
    }

    pub(super) fn memory(&self) -> Option<Memory> {
        self.locked(|table| Ok(self.memory_in(table)))
    }

    /// The memory now, or as it was last seen if the file stays in use for so long. `None` if it cannot be read.
    pub(super) fn memory_soon(&self) -> Option<Memory> {
        let until = Instant::now() + READING_MAX;
        loop {
            let file = match self.file.try_lock() {
                Ok(file) => Some(file),
                Err(sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(sync::TryLockError::WouldBlock) => None,
            };
            let locked = file.and_then(|file| match file.try_lock() {
                Err(TryLockError::WouldBlock) => None,
                locked => Some((locked.map_err(io::Error::from), file)),
            });
            if let Some((locked, file)) = locked {
                return self.act_on(&file, locked, |table| Ok(self.memory_in(table)));
            }
            if Instant::now() >= until {
                let (memory, at) = *self.seen();
                if at.elapsed() > READING_LATE {
                    let file = self.path.display();
                    self.is_late.call_once(|| {
                        tracing::warn!(%file, "another process keeps the file of the shared device locked: until it is free, the last reading of the device's memory counts");
                    });
                }
                return Some(memory);
            }
            std::thread::sleep(READING_RETRY);
        }
    }

    fn memory_in(&self, table: &Table<'_>) -> Memory {
        self.see(table.held_by_living_others(self.row), table.holder(self.row).bytes)
    }

    fn see(&self, foreign: u64, own: u64) -> Memory {
        let free = self.total.saturating_sub(foreign).saturating_sub(own);
        let memory = Memory { free, total: self.total, foreign };
        *self.seen() = (memory, Instant::now());
        memory
    }

    pub(super) fn held_by(&self, pids: &[i32]) -> Option<u64> {
        let ours = |holder: &Holder| i32::try_from(holder.process).is_ok_and(|pid| pids.contains(&pid));
        self.locked(|table| {
            let holders = table.others(self.row).filter(|holder| ours(holder) && holder.is_alive());
            Ok(holders.map(|holder| holder.bytes).fold(0, u64::saturating_add))
        })
    }

    fn write_own(&self, file: &File, bytes: u64) -> io::Result<()> {
        Holder { bytes, ..Holder::this_process()? }.write(file, self.row)
    }

    /// Runs `act` on the file while no other process uses it. `None`, with a line in the log, if that fails.
    fn locked<T>(&self, act: impl FnOnce(&Table<'_>) -> io::Result<T>) -> Option<T> {
        let file = self.file();
        self.act_on(&file, file.lock(), act)
    }

    /// Runs `act` on the file, which is `locked` if that succeeded, and unlocks it.
    fn act_on<T>(
        &self,
        file: &File,
        locked: io::Result<()>,
        act: impl FnOnce(&Table<'_>) -> io::Result<T>,
    ) -> Option<T> {
        let acted = locked.and_then(|()| {
            let result = Table::read(file).and_then(|table| act(&table));
            file.unlock()?;
            result
        });
        acted
            .inspect_err(
                |error| tracing::error!(file = %self.path.display(), %error, "the file of the shared device cannot be used: until it can, the device counts as full"),
            )
            .ok()
    }

    /// Nothing panics while it holds the lock.
    fn seen(&self) -> MutexGuard<'_, (Memory, Instant)> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A poisoned lock is usable: no panic leaves the file half changed.
    fn file(&self) -> MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.locked(|table| Holder::default().write(table.file, self.row));
    }
}
