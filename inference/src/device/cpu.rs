//! The CPU as a device: a budget of host memory that is really allocated from, and really runs out.

use std::alloc::{self, Layout};
use std::fmt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::fault::{Fault, Injection};
use super::ledger::{Ledger, LedgerError};
use super::lock::DeviceLock;
use super::telemetry::Telemetry;
use super::{Device, Loss, Memory, OutOfMemory};

/// Alignment of every buffer: a cache line, and the widest vector register.
pub const ALIGNMENT: usize = 64;

/// A CPU device: its memory, and the threads that passes run on.
pub struct CpuDevice {
    ledger: Arc<Ledger>,
    lock: DeviceLock,
    injection: OnceLock<Injection>,
    /// Bytes of all arenas.
    active_pass_bytes: Arc<AtomicU64>,
    pool: rayon::ThreadPool,
    /// Held by the pass that runs. Threads of a pass wait for each other, so two passes must not share them.
    pass: Mutex<()>,
}

/// Why a [`CpuDevice`] gave no buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// The budget has no room. A smaller pass may fit.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The budget had room but the machine did not: `memory_mib` promises more than there is.
    #[error(
        "host memory is exhausted: the system refused {bytes} bytes that the device's budget has room for"
    )]
    HostExhausted { bytes: u64 },
}

/// Why there is no [`CpuDevice`].
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("start {threads} threads for the cpu device")]
    Threads {
        threads: usize,
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl CpuDevice {
    /// A device of `memory_bytes` with `threads` threads (at least 1).
    ///
    /// # Errors
    /// When the system does not start the threads.
    pub fn new(memory_bytes: u64, threads: usize) -> Result<Arc<Self>, OpenError> {
        Self::with(Ledger::own(memory_bytes), DeviceLock::own(), threads)
    }

    /// The same, its memory shared with all processes that name the same file.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn shared(memory_bytes: u64, threads: usize, file: &Path) -> Result<Arc<Self>, OpenError> {
        let ledger = Ledger::shared(file, memory_bytes)?;
        let lock =
            DeviceLock::shared(file).map_err(|source| LedgerError::File { path: file.to_owned(), source })?;
        Self::with(ledger, lock, threads)
    }

    fn with(ledger: Ledger, lock: DeviceLock, threads: usize) -> Result<Arc<Self>, OpenError> {
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|at| format!("cpu-{at}"))
            .build()
            .map_err(|source| OpenError::Threads { threads, source })?;
        Ok(Arc::new(Self {
            ledger: Arc::new(ledger),
            lock,
            injection: OnceLock::new(),
            active_pass_bytes: Arc::default(),
            pool,
            pass: Mutex::new(()),
        }))
    }

    /// Makes allocations of passes fail as the fault says. May be called once.
    pub fn inject(&self, fault: Fault) {
        // An `Err` is a second call.
        let _ = self.injection.set(Injection::new(fault));
    }

    /// Takes `bytes` from the device's memory and really allocates them, uninitialised, aligned to [`ALIGNMENT`].
    /// The buffer's drop gives them back.
    ///
    /// # Errors
    /// See [`AllocError`]. The memory is as before then.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer, AllocError> {
        self.alloc_counted(bytes, None)
    }

    fn alloc_counted(&self, bytes: usize, count: Option<Arc<AtomicU64>>) -> Result<Buffer, AllocError> {
        let exhausted = AllocError::HostExhausted { bytes: bytes as u64 };
        let layout = Layout::from_size_align(bytes, ALIGNMENT).map_err(|_| exhausted)?;
        self.ledger.take(bytes as u64)?;
        let bytes = bytes as u64;
        if let Some(count) = &count {
            count.fetch_add(bytes, Ordering::AcqRel);
        }
        let share = Share { ledger: Arc::clone(&self.ledger), bytes, kept: 0, count };
        let start = if layout.size() == 0 {
            Some(NonNull::<AlignedByte>::dangling().cast())
        } else {
            // SAFETY: the layout's size is not zero.
            NonNull::new(unsafe { alloc::alloc(layout) })
        };
        Ok(Buffer { start: start.ok_or(exhausted)?, layout, share })
    }

    /// [`alloc`](Self::alloc) for the arena of a pass: the allocation that faults are injected into.
    ///
    /// # Errors
    /// As for [`alloc`](Self::alloc).
    pub fn alloc_arena(&self, bytes: usize) -> Result<Buffer, AllocError> {
        let count = Some(Arc::clone(&self.active_pass_bytes));
        let Some(injection) = self.injection.get() else {
            return self.alloc_counted(bytes, count);
        };
        let Memory { free, total, foreign } = self.memory();
        if let Some((free, foreign)) = injection.refuses(bytes as u64, free, foreign) {
            return Err(OutOfMemory { asked: bytes as u64, free, total, foreign }.into());
        }
        let mut arena = self.alloc_counted(bytes, count)?;
        arena.share.kept = injection.leaks().min(bytes as u64);
        Ok(arena)
    }

    /// How many threads a pass runs on.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work(rank)` once on every thread, all at the same time, so that the calls may wait for each other. Returns when all
    /// have ended. Concurrent callers run one after the other.
    pub fn on_all_threads<F: Fn(usize) + Sync>(&self, work: F) {
        let _alone = self.pass.lock().unwrap_or_else(PoisonError::into_inner);
        self.pool.broadcast(|thread| work(thread.index()));
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self) -> Memory {
        self.ledger.memory()
    }

    fn try_memory(&self) -> Option<Memory> {
        self.ledger.try_memory()
    }

    fn active_pass_bytes(&self) -> u64 {
        self.active_pass_bytes.load(Ordering::Acquire)
    }

    fn trim(&self) {
        // Every pass frees its arena, but the C library may keep that memory.
        #[cfg(target_env = "gnu")]
        // SAFETY: has no preconditions; it may be called from any thread at any time (malloc_trim(3)).
        unsafe {
            libc::malloc_trim(0);
        }
    }

    fn lost(&self) -> Option<Loss> {
        None
    }

    fn telemetry(&self) -> Option<Telemetry> {
        None
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        self.ledger.held_by(pids)
    }

    fn note_programs(&self, pids: &[i32]) {
        self.ledger.note_programs(pids);
    }

    /// Hides all GPUs from programs: the CPU is the device.
    fn program_env(&self) -> Vec<(String, String)> {
        vec![("CUDA_VISIBLE_DEVICES".to_owned(), String::new())]
    }

    fn lock(&self) -> &DeviceLock {
        &self.lock
    }
}

impl fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuDevice")
            .field("memory", &self.memory())
            .field("threads", &self.threads())
            .finish_non_exhaustive()
    }
}

/// Memory of a [`CpuDevice`], uninitialised until written.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
    share: Share,
}

// SAFETY: a buffer owns its memory exclusively, like a `Box<[u8]>`. Only the raw pointer suppresses the auto traits.
unsafe impl Send for Buffer {}
// SAFETY: as above. A shared buffer only hands out a raw pointer, and using that needs `unsafe`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// The first byte; valid for reads and writes of [`len`](Self::len) bytes while the buffer lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: `start` came from `alloc::alloc` with this same layout, and nothing has freed it: a buffer
            // is neither cloned nor taken apart. The budget's share goes back after this, in its own drop.
            unsafe { alloc::dealloc(self.start.as_ptr(), self.layout) };
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

/// For a dangling pointer of the right alignment.
#[repr(align(64))]
struct AlignedByte;

/// Bytes taken from the ledger. A drop returns them, also when a later step fails.
struct Share {
    ledger: Arc<Ledger>,
    bytes: u64,
    /// Of those, what is never given back: a leak on purpose.
    kept: u64,
    /// Where else the bytes are counted.
    count: Option<Arc<AtomicU64>>,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.ledger.give(self.bytes - self.kept);
        if let Some(count) = &self.count {
            count.fetch_sub(self.bytes, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(bytes: u64) -> Arc<CpuDevice> {
        CpuDevice::new(bytes, 2).unwrap()
    }

    #[test]
    fn memory_is_taken_and_given_back() {
        let device = device(1000);
        let first = device.alloc(600).unwrap();
        assert_eq!(device.memory(), Memory { free: 400, total: 1000, foreign: 0 });
        assert_eq!(first.as_ptr().addr() % ALIGNMENT, 0);
        let refused = device.alloc(401).unwrap_err();
        assert_eq!(
            refused,
            AllocError::OutOfMemory(OutOfMemory { asked: 401, free: 400, total: 1000, foreign: 0 })
        );
        let second = device.alloc(400).unwrap();
        let nothing = device.alloc(0).unwrap();
        assert_eq!(nothing.as_ptr().addr() % ALIGNMENT, 0);
        drop((first, second, nothing));
        assert_eq!(device.memory(), Memory { free: 1000, total: 1000, foreign: 0 });
    }

    #[test]
    fn a_host_without_memory_is_no_out_of_memory() {
        let device = device(u64::MAX);
        let bytes = isize::MAX as usize - ALIGNMENT + 1;
        let refused = device.alloc(bytes).unwrap_err();
        assert_eq!(refused, AllocError::HostExhausted { bytes: bytes as u64 });
        assert_eq!(device.memory().free, u64::MAX);
        assert!(matches!(device.alloc(usize::MAX), Err(AllocError::HostExhausted { .. })));
        assert_eq!(device.memory().free, u64::MAX);
    }

    #[test]
    fn threads_never_take_more_than_there_is() {
        let device = device(64 * 10);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let held: Vec<_> = (0..3).map_while(|_| device.alloc(64).ok()).collect();
                        assert!(device.memory().free <= 640 - 64 * held.len() as u64);
                    }
                });
            }
        });
        assert_eq!(device.memory().free, 640);
    }

    #[test]
    fn a_panic_gives_memory_and_threads_back() {
        let device = device(1000);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = device.alloc(700);
            device.on_all_threads(|rank| assert_ne!(rank, 1, "a thread ends badly"));
        }));
        assert!(ended.is_err());
        assert_eq!(device.memory().free, 1000);
        let seen = AtomicU64::new(0);
        device.on_all_threads(|rank| {
            seen.fetch_add(1 << (8 * rank), Ordering::Relaxed);
        });
        assert_eq!(seen.into_inner(), 0x101);
    }
}
