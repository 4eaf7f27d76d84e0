//! Counts how much of a device's memory each process holds: in this process only, or in a file that several processes share.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Memory, OutOfMemory};
use crate::process_tree;

/// What a shared file begins with; another version of the format has another.
const MAGIC: &[u8; 16] = b"vramq-memory-1\n\0";

/// The magic, the device's total, and eight bytes to spare.
const HEADER_BYTES: usize = 32;

/// Process id, its start time, bytes held, and eight bytes to spare; all u64, little endian.
const HOLDER_BYTES: usize = 32;

/// Processes that may share a device: far more than have room for a model on one.
const HOLDERS_MAX: usize = 256;

const FILE_BYTES: usize = HEADER_BYTES + HOLDERS_MAX * HOLDER_BYTES;

/// The account of a device's memory. Bytes are taken before they are allocated and returned after they are freed.
#[derive(Debug)]
pub enum Ledger {
    /// The device belongs to this process. `programs` is what its programs, which use no ledger, held at the last look.
    Own { total: u64, used: AtomicU64, programs: AtomicU64 },
    /// Processes that name the same file share the device.
    Shared(Shared),
}

/// A ledger in a file. Every process has a row in it; the row of one that died counts for nothing.
#[derive(Debug)]
pub struct Shared {
    /// Locked by `flock` for each access. The mutex keeps this process's own threads apart.
    file: Mutex<File>,
    path: PathBuf,
    row: usize,
    total: u64,
}

/// Why a shared device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("open {}, the file of the shared device", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is not a file of a shared device: delete it, or name another file", path.display())]
    Foreign { path: PathBuf },
    #[error(
        "{} stands for a device of {stands} bytes that other processes use, the configuration says {configured}: give \
         all the same memory_mib",
        path.display()
    )]
    OtherSize { path: PathBuf, stands: u64, configured: u64 },
    #[error("{} has no row left: {HOLDERS_MAX} processes share the device", path.display())]
    Full { path: PathBuf },
}

impl Ledger {
    /// Memory that only this process uses.
    pub fn own(total: u64) -> Self {
        Self::Own { total, used: AtomicU64::new(0), programs: AtomicU64::new(0) }
    }

    /// Memory that all processes share which name the same file; it is made if it is not there.
    ///
    /// # Errors
    /// See [`LedgerError`].
    pub fn shared(path: &Path, total: u64) -> Result<Self, LedgerError> {
        Shared::open(path, total).map(Self::Shared)
    }

    /// # Errors
    /// There is not so much free. Nothing is taken then.
    pub fn take(&self, bytes: u64) -> Result<(), OutOfMemory> {
        match self {
            Self::Own { total, used, programs } => {
                let foreign = programs.load(Ordering::Acquire).min(*total);
                used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                    used.checked_add(bytes).filter(|sum| *sum <= total - foreign)
                })
                .map(drop)
                .map_err(|used| OutOfMemory {
                    asked: bytes,
                    free: (total - foreign).saturating_sub(used),
                    total: *total,
                    foreign,
                })
            }
            Self::Shared(shared) => shared.take(bytes),
        }
    }

    /// Gives back what was taken.
    pub fn give(&self, bytes: u64) {
        match self {
            Self::Own { used, .. } => drop(used.fetch_sub(bytes, Ordering::AcqRel)),
            Self::Shared(shared) => shared.give(bytes),
        }
    }

    /// If the file cannot be read, the device counts as full.
    pub fn memory(&self) -> Memory {
        let (Self::Own { total, .. } | Self::Shared(Shared { total, .. })) = self;
        self.try_memory().unwrap_or(Memory { free: 0, total: *total, foreign: 0 })
    }

    /// `None` if the file cannot be read.
    pub fn try_memory(&self) -> Option<Memory> {
        match self {
            Self::Own { total, used, programs } => {
                let used = used.load(Ordering::Acquire);
                let foreign = programs.load(Ordering::Acquire).min(total - used);
                Some(Memory { free: total - used - foreign, total: *total, foreign })
            }
            Self::Shared(shared) => shared.memory(),
        }
    }

    /// Bytes that these processes hold together: by their rows in the file, or else their resident memory. `None` if the file cannot be
    /// read.
    pub fn held_by(&self, pids: &[i32]) -> Option<u64> {
        match self {
            Self::Own { .. } => Some(pids.iter().map(|pid| process_tree::resident_bytes(*pid)).sum()),
            Self::Shared(shared) => shared.held_by(pids),
        }
    }

    /// Records what the worker's programs, which are these processes, hold. A shared file has that already.
    pub fn note_programs(&self, pids: &[i32]) {
        if let Self::Own { programs, .. } = self
            && let Some(bytes) = self.held_by(pids)
        {
            programs.store(bytes, Ordering::Release);
        }
    }
}

impl Shared {
    fn open(path: &Path, total: u64) -> Result<Self, LedgerError> {
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
        Ok(Self { file: Mutex::new(file), path: path.to_owned(), row: claimed?, total })
    }

    fn take(&self, bytes: u64) -> Result<(), OutOfMemory> {
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
            self.write_own(table.file, own + bytes).map(Ok)
        })
        // A file that cannot be read has no memory to give.
        .unwrap_or_else(|| Err(refused(0, 0)))
    }

    fn give(&self, bytes: u64) {
        self.locked(|table| {
            let own = table.holder(self.row).bytes;
            self.write_own(table.file, own.saturating_sub(bytes))
        });
    }

    fn memory(&self) -> Option<Memory> {
        self.locked(|table| {
            let foreign = table.held_by_living_others(self.row);
            let free = self.total.saturating_sub(foreign).saturating_sub(table.holder(self.row).bytes);
            Ok(Memory { free, total: self.total, foreign })
        })
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
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
        let acted = file.lock().and_then(|()| {
            let result = Table::read(&file).and_then(|table| act(&table));
            file.unlock()?;
            result
        });
        acted
            .inspect_err(
                |error| tracing::error!(file = %self.path.display(), %error, "the file of the shared device cannot be used: until it can, the device counts as full"),
            )
            .ok()
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

/// Finds a row for this process. The file is locked.
fn claim(file: &File, path: &Path, total: u64) -> Result<usize, LedgerError> {
    let failed = |source| LedgerError::File { path: path.to_owned(), source };
    let length = file.metadata().map_err(failed)?.len();
    if length != 0 && length != FILE_BYTES as u64 {
        return Err(LedgerError::Foreign { path: path.to_owned() });
    }
    file.set_len(FILE_BYTES as u64).map_err(failed)?;
    let table = Table::read(file).map_err(failed)?;
    if length != 0 && table.bytes[..MAGIC.len()] != *MAGIC {
        return Err(LedgerError::Foreign { path: path.to_owned() });
    }
    let stands = number(&table.bytes[..], MAGIC.len());
    let in_use = (0..HOLDERS_MAX).any(|row| table.holder(row).is_alive());
    if in_use && stands != total {
        return Err(LedgerError::OtherSize { path: path.to_owned(), stands, configured: total });
    }
    let row = (0..HOLDERS_MAX)
        .find(|row| !table.holder(*row).is_alive())
        .ok_or_else(|| LedgerError::Full { path: path.to_owned() })?;
    file.write_all_at(MAGIC, 0).map_err(failed)?;
    file.write_all_at(&total.to_le_bytes(), MAGIC.len() as u64).map_err(failed)?;
    Holder::this_process().and_then(|holder| holder.write(file, row)).map_err(failed)?;
    Ok(row)
}

/// The file's content at one moment.
struct Table<'a> {
    file: &'a File,
    bytes: Box<[u8; FILE_BYTES]>,
}

impl<'a> Table<'a> {
    fn read(file: &'a File) -> io::Result<Self> {
        let mut bytes = Box::new([0; FILE_BYTES]);
        file.read_exact_at(&mut bytes[..], 0)?;
        Ok(Self { file, bytes })
    }

    fn holder(&self, row: usize) -> Holder {
        let at = HEADER_BYTES + row * HOLDER_BYTES;
        Holder {
            process: number(&self.bytes[..], at),
            started: number(&self.bytes[..], at + 8),
            bytes: number(&self.bytes[..], at + 16),
        }
    }

    fn held_by_others(&self, row: usize) -> u64 {
        self.others(row).map(|holder| holder.bytes).fold(0, u64::saturating_add)
    }

    /// The same without dead processes. Checks each process in `/proc`.
    fn held_by_living_others(&self, row: usize) -> u64 {
        self.others(row).filter(Holder::is_alive).map(|holder| holder.bytes).fold(0, u64::saturating_add)
    }

    fn others(&self, row: usize) -> impl Iterator<Item = Holder> {
        (0..HOLDERS_MAX)
            .filter(move |other| *other != row)
            .map(|row| self.holder(row))
            .filter(|holder| holder.bytes > 0)
    }
}

/// A process and what it holds. The start time tells it from a later process with the same id.
#[derive(Clone, Copy, Debug, Default)]
struct Holder {
    process: u64,
    started: u64,
    bytes: u64,
}

impl Holder {
    fn this_process() -> io::Result<Self> {
        let process = u64::from(std::process::id());
        let started = started(process).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { process, started, bytes: 0 })
    }

    fn is_alive(&self) -> bool {
        self.process != 0 && started(self.process) == Some(self.started)
    }

    fn write(&self, file: &File, row: usize) -> io::Result<()> {
        let mut bytes = [0; HOLDER_BYTES];
        for (at, value) in [self.process, self.started, self.bytes].into_iter().enumerate() {
            bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        }
        file.write_all_at(&bytes, (HEADER_BYTES + row * HOLDER_BYTES) as u64)
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

/// When a process started, in the kernel's ticks since boot; nothing if it is not there any more (proc(5), field 22).
fn started(process: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command, field 2, may hold blanks and parentheses; state, field 3, comes after its last one.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    // A zombie holds nothing any more.
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
