//! Allocates memory of a CUDA device. A [`CudaMemory`] returns its bytes when it is dropped.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::CUdeviceptr;

use super::{CudaDevice, CudaError, Device as _, Memory, Noticed, OutOfMemory, Reading};

/// Device memory, uninitialised until a kernel or a copy on the device's stream has written it. Its drop waits for the stream
/// and gives it back. An error of that belongs to no pass: see [`CudaDevice::check`].
pub struct CudaMemory {
    pub(super) device: Arc<CudaDevice>,
    /// Null if there are no bytes.
    pub(super) start: CUdeviceptr,
    pub(super) bytes: u64,
    /// Of those, what is never given back: a leak on purpose.
    pub(super) kept: u64,
    /// It is the arena of a pass.
    pub(super) is_arena: bool,
}

impl CudaDevice {
    /// Memory that stays for as long as a model is loaded, uninitialised. Its drop gives it back.
    ///
    /// # Errors
    /// See [`CudaError`]. The memory is as before then.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<CudaMemory, CudaError> {
        self.bind()?;
        let asked = bytes as u64;
        if !self.has_room(asked) || !self.count(asked) {
            return Err(self.out_of_memory(asked));
        }
        let allocated = if bytes == 0 { Ok(0) } else { self.pool.alloc(bytes) };
        match allocated {
            Ok(start) => {
                Ok(CudaMemory { device: Arc::clone(self), start, bytes: asked, kept: 0, is_arena: false })
            }
            Err(error) => {
                self.used.fetch_sub(asked, Ordering::AcqRel);
                Err(self.failed("allocate memory", asked, error))
            }
        }
    }

    /// Whether the driver's own figures have room for so many bytes. A real driver takes long to refuse more than it has: an H100 with 80 GB
    /// free took 0.1 s. The figures are read again only if the newest ones have no room. Bytes that another thread is asking for count as
    /// used, and so do those that an injected leak keeps.
    fn has_room(&self, asked: u64) -> bool {
        let fits = |reading: Reading| self.used.load(Ordering::Acquire).saturating_add(asked) <= reading.room;
        let newest = self.reading.lock().unwrap_or_else(PoisonError::into_inner).0;
        // If the figures cannot be read, the allocation returns the driver's error.
        asked == 0 || fits(newest) || self.read().map_or(true, fits)
    }

    /// [`alloc`](Self::alloc) for the arena of a pass: the allocation that faults are injected into.
    ///
    /// # Errors
    /// As for [`alloc`](Self::alloc).
    pub fn alloc_arena(self: &Arc<Self>, bytes: usize) -> Result<CudaMemory, CudaError> {
        let asked = bytes as u64;
        let mut kept = 0;
        if let Some(injection) = self.injection.get() {
            let Memory { free, total, foreign } = self.memory();
            if let Some((free, foreign)) = injection.refuses(asked, free, foreign) {
                return Err(OutOfMemory { asked, free, total, foreign }.into());
            }
            kept = injection.leaks().min(asked);
        }
        let mut arena = self.alloc(bytes)?;
        (arena.kept, arena.is_arena) = (kept, true);
        self.active_pass_bytes.fetch_add(asked, Ordering::AcqRel);
        Ok(arena)
    }

    /// Counts bytes as used if the cap has room for them.
    fn count(&self, bytes: u64) -> bool {
        let cap = self.cap.unwrap_or(u64::MAX);
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= cap);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    /// Frees memory, in its drop.
    fn take_back(&self, memory: &CudaMemory) {
        // On a lost device every call fails, and the memory is gone with the context.
        if memory.start != 0 && self.lost.get().is_none() {
            let bound = self.set_current();
            // SAFETY: the memory came from this pool and is freed here only, because it is being dropped; all of the device's
            // work is on its one stream.
            if let Err(code) = bound.and_then(|()| unsafe { self.pool.free(memory.start) }) {
                self.lose("give memory back", code, Noticed::Late);
            }
        }
        if memory.is_arena {
            self.active_pass_bytes.fetch_sub(memory.bytes, Ordering::AcqRel);
        }
        self.used.fetch_sub(memory.bytes - memory.kept, Ordering::AcqRel);
    }
}

impl CudaMemory {
    /// The first byte, for the device; valid for [`len`](Self::len) bytes while this lives. Aligned to 256 bytes.
    pub fn start(&self) -> CUdeviceptr {
        self.start
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        // It was asked for as a `usize`.
        self.bytes as usize
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.device.take_back(self);
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaMemory({} bytes at {:#x})", self.bytes, self.start)
    }
}
