//! Memory of a CUDA device that is returned when it is dropped.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;

use super::CudaDevice;

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
