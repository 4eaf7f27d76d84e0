//! The file of a shared device: a header, and a row for each process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// What a shared file begins with; another version of the format has another.
const MAGIC: &[u8; 16] = b"vramq-memory-1\n\0";

/// The magic, the device's total, and eight bytes to spare.
const HEADER_BYTES: usize = 32;

/// Process id, its start time, bytes held, and eight bytes to spare; all u64, little endian.
const HOLDER_BYTES: usize = 32;

/// Processes that may share a device: far more than have room for a model on one.
const HOLDERS_MAX: usize = 256;

const FILE_BYTES: usize = HEADER_BYTES + HOLDERS_MAX * HOLDER_BYTES;

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

/// Finds a row for this process. The file is locked.
pub(super) fn claim(file: &File, path: &Path, total: u64) -> Result<usize, LedgerError> {
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
pub(super) struct Table<'a> {
    pub(super) file: &'a File,
    bytes: Box<[u8; FILE_BYTES]>,
}

impl<'a> Table<'a> {
    pub(super) fn read(file: &'a File) -> io::Result<Self> {
        let mut bytes = Box::new([0; FILE_BYTES]);
        file.read_exact_at(&mut bytes[..], 0)?;
        Ok(Self { file, bytes })
    }

    pub(super) fn holder(&self, row: usize) -> Holder {
        let at = HEADER_BYTES + row * HOLDER_BYTES;
        Holder {
            process: number(&self.bytes[..], at),
            started: number(&self.bytes[..], at + 8),
            bytes: number(&self.bytes[..], at + 16),
        }
    }

    pub(super) fn held_by_others(&self, row: usize) -> u64 {
        self.others(row).map(|holder| holder.bytes).fold(0, u64::saturating_add)
    }

    /// The same without dead processes. Checks each process in `/proc`.
    pub(super) fn held_by_living_others(&self, row: usize) -> u64 {
        self.others(row).filter(Holder::is_alive).map(|holder| holder.bytes).fold(0, u64::saturating_add)
    }

    pub(super) fn others(&self, row: usize) -> impl Iterator<Item = Holder> {
        (0..HOLDERS_MAX)
            .filter(move |other| *other != row)
            .map(|row| self.holder(row))
            .filter(|holder| holder.bytes > 0)
    }
}

/// A process and what it holds. The start time tells it from a later process with the same id.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holder {
    pub(super) process: u64,
    pub(super) started: u64,
    pub(super) bytes: u64,
}

impl Holder {
    pub(super) fn this_process() -> io::Result<Self> {
        let process = u64::from(std::process::id());
        let started = started(process).ok_or(io::ErrorKind::NotFound)?;
        Ok(Self { process, started, bytes: 0 })
    }

    pub(super) fn is_alive(&self) -> bool {
        self.process != 0 && started(self.process) == Some(self.started)
    }

    pub(super) fn write(&self, file: &File, row: usize) -> io::Result<()> {
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
pub(super) fn started(process: u64) -> Option<u64> {
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
