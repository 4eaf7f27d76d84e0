//! Page-locked host memory: the device copies from and to it directly, without the CPU.

use std::sync::Arc;

use crate::device::cuda::{Code, CudaDevice, CudaError, Meaning, calls};

/// Page-locked memory that grows as passes need it and stays: locking pages costs more than a small pass.
#[derive(Debug)]
pub(super) struct Staging {
    device: Arc<CudaDevice>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it owns its memory alone, like a `Vec<u8>`.
unsafe impl Send for Staging {}

/// What it grows to at least: the ids and vectors of a pass of the default size.
const BYTES_MIN: usize = 256 * 1024;

impl Staging {
    pub fn new(device: Arc<CudaDevice>) -> Self {
        Self { device, start: std::ptr::null_mut(), bytes: 0 }
    }

    /// The first `bytes` of it; what they hold is of earlier passes. No copy from or to it may be under way.
    ///
    /// # Errors
    /// The system has no memory to lock. That is the host's memory, not the device's.
    pub fn get(&mut self, bytes: usize) -> Result<&mut [u8], CudaError> {
        if bytes == 0 {
            // Nothing may be locked yet, and a slice must not begin at a null pointer.
            return Ok(&mut []);
        }
        if self.bytes < bytes {
            self.device.bind()?;
            self.free();
            let wanted = bytes.next_power_of_two().max(BYTES_MIN);
            let mut start = std::ptr::null_mut();
            // SAFETY: has no preconditions but a context, which is bound. No flags.
            let locked = unsafe { calls::cuMemHostAlloc(&raw mut start, wanted, 0) };
            locked.map_err(|code| self.refused(code))?;
            let start: *mut u8 = start.cast();
            // SAFETY: it is valid for writes of so many bytes. Locked memory is zeroed only by some systems.
            unsafe { std::ptr::write_bytes(start, 0, wanted) };
            (self.start, self.bytes) = (start, wanted);
        }
        // SAFETY: the memory is valid for that long, initialised, and borrowed through `self` alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.start, bytes) })
    }

    fn refused(&self, code: Code) -> CudaError {
        let during = "lock host memory for copies";
        match code.meaning() {
            // The host's memory ran out, so a smaller pass does not help.
            Meaning::OutOfMemory => CudaError::Refused { during, code },
            _ => self.device.failed(during, 0, code),
        }
    }

    fn free(&mut self) {
        if !self.start.is_null() {
            // SAFETY: it came from `cuMemHostAlloc`, and the pointer is forgotten here. The device's next call
            // returns an error if there is one.
            let _ = unsafe { calls::cuMemFreeHost(self.start.cast()) };
            (self.start, self.bytes) = (std::ptr::null_mut(), 0);
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            self.free();
        }
    }
}
