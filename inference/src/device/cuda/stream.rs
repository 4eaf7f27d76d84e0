//! The device's stream: enqueues work, waits for it, and classifies calls that failed.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUfunction};

use super::{Code, CudaDevice, CudaError, Meaning, Module, Noticed, calls};

impl CudaDevice {
    /// Makes the context the thread's own, for calls to the driver or to libraries that want it so.
    ///
    /// # Errors
    /// [`CudaError::Lost`] if the device is lost, or if an earlier call failed that could not report its error.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.bind_by(|| Noticed::AtOnce)
    }

    /// As [`bind`](Self::bind); `noticed` classifies a loss that it finds.
    pub(super) fn bind_by(&self, noticed: impl Fn() -> Noticed) -> Result<(), CudaError> {
        self.check()?;
        self.set_current().map_err(|code| self.lose("bind the context", code, noticed()))
    }

    pub(super) fn set_current(&self) -> Result<(), Code> {
        self.context.bind()
    }

    /// Waits for all that the stream has been given to do.
    ///
    /// # Errors
    /// The error of the work on the stream.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        self.wait().map_err(|code| self.failed("wait for the device", 0, code))
    }

    /// The same, but the thread sleeps, where the driver's ordinary wait keeps a core busy. For long work: waking up takes about 50
    /// µs.
    ///
    /// # Errors
    /// The error of the work on the stream.
    pub fn synchronize_asleep(&self) -> Result<(), CudaError> {
        self.bind()?;
        let event = self.end.handle();
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
    /// `to` has room for as many bytes of device memory. The host's bytes are neither moved nor written before the stream has been
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
    /// As for [`copy_in`](Self::copy_in). The host's bytes are not read before the wait either.
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

    /// Loads kernels: compiled code, or PTX.
    ///
    /// # Errors
    /// See [`failed`](Self::failed).
    pub fn load_module(&self, code: Vec<u8>) -> Result<Arc<Module>, CudaError> {
        self.bind()?;
        Module::new(&self.context, code).map_err(|code| self.failed("load kernels", 0, code))
    }

    /// Enqueues a kernel of this many blocks across and down, with this many threads each. The context is bound.
    ///
    /// # Safety
    /// Each argument points to the value of one parameter. Memory that a value points to is as large as the kernel needs, and lives
    /// until the stream has been waited for.
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

    /// Classifies a failed call. `asked` is the device memory that it requested, in bytes, or 0.
    pub fn failed(&self, during: &'static str, asked: u64, error: impl Into<Code>) -> CudaError {
        let code = error.into();
        match code.meaning() {
            Meaning::OutOfMemory => self.out_of_memory(asked),
            Meaning::Lost => self.lose(during, code, Noticed::AtOnce),
            // The real cause may be an earlier kernel that destroyed the context. Libraries and driver do not say so when they
            // refuse, but the next wait for the stream returns it.
            Meaning::Refused => match self.wait() {
                Err(driver) if driver.meaning() == Meaning::Lost => {
                    self.lose(during, driver, Noticed::AtOnce)
                }
                _ => CudaError::Refused { during, code },
            },
        }
    }
}
