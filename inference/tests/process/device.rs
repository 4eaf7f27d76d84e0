//! The shared CPU device's file, as a worker sees it: rows of process id, start time and bytes (see the worker's ledger).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use vramq_inference::process::{DeviceView, Reading};

const MAGIC: &[u8; 16] = b"vramq-memory-1\n\0";
const HEADER: usize = 32;
const ROW: usize = 32;
const ROWS: usize = 256;

/// A device that the tests' models take memory from.
#[derive(Debug)]
pub struct FileDevice {
    path: PathBuf,
    /// Whether it can tell processes apart.
    by_process: bool,
    /// Whether programs compute with the host's processors. Otherwise it stands for a GPU.
    on_host: bool,
}

impl FileDevice {
    pub fn new(folder: &Path, mib: u64, by_process: bool) -> Self {
        let path = folder.join("device");
        let mut bytes = vec![0; HEADER + ROW * ROWS];
        bytes[..16].copy_from_slice(MAGIC);
        bytes[16..24].copy_from_slice(&(mib << 20).to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        Self { path, by_process, on_host: false }
    }

    pub fn on_host(self) -> Self {
        Self { on_host: true, ..self }
    }

    /// Has a stranger hold so much.
    pub fn holds(&self, stranger: &Stranger, mib: u64) {
        let file = OpenOptions::new().read(true).write(true).open(&self.path).unwrap();
        file.lock().unwrap();
        let pid = u64::from(stranger.pid());
        let rows = (0..ROWS).map(|row| (HEADER + ROW * row) as u64);
        let process = |at: u64| {
            let mut number = [0; 8];
            file.read_exact_at(&mut number, at).unwrap();
            u64::from_le_bytes(number)
        };
        // Its own row, or the first that is of no living process.
        let own = rows.clone().find(|at| process(*at) == pid);
        let at = own.or_else(|| rows.clone().find(|at| started(process(*at)).is_none())).unwrap();
        let row = [pid, started(pid).unwrap(), mib << 20];
        let bytes: Vec<u8> = row.into_iter().flat_map(u64::to_le_bytes).collect();
        file.write_all_at(&bytes, at).unwrap();
    }

    /// The total, and who holds what.
    fn rows(&self) -> (u64, Vec<(i32, u64)>) {
        let file = File::open(&self.path).unwrap();
        file.lock_shared().unwrap();
        let bytes = std::fs::read(&self.path).unwrap();
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let rows = (0..ROWS).map(|row| HEADER + ROW * row);
        let alive = rows.filter(|at| number(*at) != 0 && started(number(*at)) == Some(number(*at + 8)));
        (number(16), alive.map(|at| (number(at) as i32, number(at + 16))).collect())
    }
}

impl DeviceView for FileDevice {
    fn name(&self) -> &str {
        "cpu"
    }

    fn computes_on_host(&self) -> bool {
        self.on_host
    }

    fn memory(&self, _: &[i32]) -> Option<Reading> {
        let (total, rows) = self.rows();
        let held: u64 = rows.iter().map(|(_, bytes)| bytes).sum();
        Some(Reading { free: total - held, total, own: 0 })
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        let held = |rows: &[(i32, u64)]| {
            rows.iter().filter(|(pid, _)| pids.contains(pid)).map(|(_, bytes)| bytes).sum()
        };
        self.by_process.then(|| held(&self.rows().1))
    }

    fn env(&self) -> Vec<(String, String)> {
        vec![("DEVICE".to_owned(), self.path.display().to_string())]
    }
}

fn started(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// A process that is none of ours, and may hold memory.
pub struct Stranger(Child);

impl Stranger {
    pub fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
