//! The device's stream: enqueues work, waits for it, and classifies calls that failed.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::{CUdeviceptr, CUfunction};

use super::{Code, CudaDevice, CudaError, Meaning, Noticed, calls};

impl CudaDevice {
    /// Makes the context the thread's own, for calls to the driver or to libraries that want it so.
    ///
    /// # Errors
    /// [`CudaError::Lost`] if the device is, or an earlier call that could not say so had failed.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.bind_by(|| Noticed::AtOnce)
    }

    /// [`bind`](Self::bind), where what it may find was `noticed` so.
    pub(super) fn bind_by(&self, noticed: impl Fn() -> Noticed) -> Result<(), CudaError> {
        self.check()?;
        self.set_current().map_err(|code| self.lose("bind the context", code, noticed()))
    }

    pub(super) fn set_current(&self) -> Result<(), Code> {
        // SAFETY: the context lives as long as `self`.
        unsafe { calls::cuCtxSetCurrent(self.context.cu_ctx()) }
    }

    /// Waits for all that the stream has been given to do.
    ///
    /// # Errors
    /// The error of the work on the stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.wait().map_err(|code| self.failed("wait for the device", 0, code))
    }

    /// The same without keeping a core busy, which the driver's ordinary wait does: for long work, since waking up takes some
    /// 50 µs.
    ///
    /// # Errors
    /// The error of the work on the stream.
    pub fn synchronize_asleep(&self) -> Result<(), CudaError> {
        self.bind()?;
        let event = self.end.cu_event();
        // SAFETY: event and stream live as long as `self`, in the same context.
        let waited = unsafe {
            calls::cuEventRecord(event, self.stream()).and_then(|()| calls::cuEventSynchronize(event))
        };
        waited.map_err(|code| self.failed("wait for the device", 0, code))
    }

    fn wait(&self) -> Result<(), Code> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { calls::cuStreamSynchronize(self.stream()) }
    }

    /// Copies host memory to the device, on the stream.
    ///
    /// # Safety
    /// There are as many bytes of device memory at `to`. Those here are neither moved nor written before the stream has been
    /// waited for.
    ///
    /// # Errors
    /// See [`failed`](Self::failed).
    pub unsafe fn copy_in(
        &self,
        during: &'static str,
        to: CUdeviceptr,
        from: &[u8],
    ) -> Result<(), CudaError> {
        // SAFETY: by this function's contract.
        let copied =
            unsafe { calls::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream()) };
        copied.map_err(|code| self.failed(during, 0, code))
    }

    /// Copies device memory to the host, on the stream.
    ///
    /// # Safety
    /// As for [`copy_in`](Self::copy_in), and those here are not read before either.
    ///
    /// # Errors
    /// See [`failed`](Self::failed).
    pub unsafe fn copy_out(
        &self,
        during: &'static str,
        to: &mut [u8],
        from: CUdeviceptr,
    ) -> Result<(), CudaError> {
        let bytes = to.len();
        // SAFETY: by this function's contract.
        let copied =
            unsafe { calls::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, bytes, self.stream()) };
        copied.map_err(|code| self.failed(during, 0, code))
    }

    /// Adds a kernel to the stream, by blocks across and down and the threads of each. The context is bound.
    ///
    /// # Safety
    /// The arguments point to values of the kernel's parameters, one for each; what those point to lives until the stream has
    /// been waited for, and has room for what the kernel does there.
    ///
    /// # Errors
    /// See [`failed`](Self::failed).
    pub unsafe fn launch(
        &self,
        kernel: CUfunction,
        blocks: (u32, u32),
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (stream, arguments) = (self.stream(), arguments.as_mut_ptr());
        // SAFETY: by this function's contract.
        let launched = unsafe {
            calls::cuLaunchKernel(
                kernel,
                blocks.0,
                blocks.1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                arguments,
                null_mut(),
            )
        };
        launched.map_err(|code| self.failed("launch a kernel", 0, code))
    }

    /// What a failed call means. `asked` is how many bytes of device memory it was to get, if any.
    pub fn failed(&self, during: &'static str, asked: u64, error: impl Into<Code>) -> CudaError {
        let code = error.into();
        match code.meaning() {
            Meaning::OutOfMemory => self.out_of_memory(asked),
            Meaning::Lost => self.lose(during, code, Noticed::AtOnce),
            // Neither libraries nor the driver say whether an earlier kernel is why they refuse, one that took the context
            // with it. The next wait for the stream returns it.
            Meaning::Refused => match self.wait() {
                Err(driver) if driver.meaning() == Meaning::Lost => {
                    self.lose(during, driver, Noticed::AtOnce)
                }
                _ => CudaError::Refused { during, code },
            },
        }
    }
}
