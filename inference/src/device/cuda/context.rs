//! The context of a device, and what lives in it: streams, events, and the code of kernels.
//!
//! Calls go to the driver's library that [`libraries`](super::libraries) opened. cudarc has types like these, but opens the
//! library itself, first by the name without a version, which may be a stub of the CUDA toolkit.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUevent, CUfunction, CUmodule, CUstream};

use super::{Code, calls};

/// The primary context of a device: what this process does on the device, it does there.
#[derive(Debug)]
pub struct Context {
    device: CUdevice,
    handle: CUcontext,
    /// The first error of a `Drop`, which could not be returned.
    late: OnceLock<Code>,
}

/// What lives in a context. Its handles are only names for the driver, whose functions may be called from any thread.
macro_rules! shared {
    ($($type:ident)+) => { $(
        // SAFETY: as above.
        unsafe impl Send for $type {}
        // SAFETY: as above.
        unsafe impl Sync for $type {}
    )+ };
}

shared! { Context Stream Event Module Function }

impl Context {
    /// Takes the context of the device at this place of the driver's order, and binds it to the thread. The driver is initialised.
    pub(super) fn new(ordinal: i32) -> Result<Arc<Self>, Code> {
        let (mut device, mut handle) = (0, null_mut());
        // SAFETY: the pointers are valid for a write; the second call gets what the first has written.
        unsafe {
            calls::cuDeviceGet(&raw mut device, ordinal)?;
            calls::cuDevicePrimaryCtxRetain(&raw mut handle, device)?;
        }
        let context = Arc::new(Self { device, handle, late: OnceLock::new() });
        context.bind()?;
        Ok(context)
    }

    /// Makes it the thread's own.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn bind(&self) -> Result<(), Code> {
        // SAFETY: the context lives as long as `self`.
        unsafe { calls::cuCtxSetCurrent(self.handle) }
    }

    /// What the driver says of the device.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn attribute(&self, which: CUdevice_attribute) -> Result<i32, Code> {
        let mut value = 0;
        // SAFETY: the pointer is valid for a write.
        unsafe { calls::cuDeviceGetAttribute(&raw mut value, which, self.device) }.map(|()| value)
    }

    /// Free and total bytes of the device.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn free_and_total(&self) -> Result<(usize, usize), Code> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        unsafe { calls::cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    /// The error of an earlier `Drop`, if there was one.
    pub(super) fn late_error(&self) -> Option<Code> {
        self.late.get().copied()
    }

    /// In a `Drop`: binds the context, and destroys what lives in it.
    pub(super) fn destroy(&self, destroy: impl FnOnce() -> Result<(), Code>) {
        if let Err(code) = self.bind().and_then(|()| destroy()) {
            let _ = self.late.set(code);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: taken in `new`, given back only here. Nothing that could report an error is left.
        let _ = unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A queue of work for the device.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: CUstream,
}

/// The stream does not wait for the context's default stream (`CU_STREAM_NON_BLOCKING`).
const NON_BLOCKING: u32 = 1;

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, Code> {
        context.bind()?;
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for a write.
        unsafe { calls::cuStreamCreate(&raw mut handle, NON_BLOCKING) }?;
        Ok(Arc::new(Self { context: Arc::clone(context), handle }))
    }

    pub fn handle(&self) -> CUstream {
        self.handle
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here; the driver keeps it until its work has ended.
        self.context.destroy(|| unsafe { calls::cuStreamDestroy_v2(self.handle) });
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

/// What an event is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum EventKind {
    /// It has a time (`CU_EVENT_DEFAULT`).
    Timed = 0,
    /// A thread that waits for it sleeps (`CU_EVENT_BLOCKING_SYNC`).
    Slept = 1,
}

impl Event {
    pub(super) fn new(context: &Arc<Context>, kind: EventKind) -> Result<Self, Code> {
        context.bind()?;
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for a write.
        unsafe { calls::cuEventCreate(&raw mut handle, kind as u32) }?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    pub(super) fn handle(&self) -> CUevent {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here; the driver keeps it until work that names it has ended.
        self.context.destroy(|| unsafe { calls::cuEventDestroy_v2(self.handle) });
    }
}

/// Code of kernels, on the device.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

impl Module {
    /// Loads compiled code, or PTX, which the driver compiles.
    pub(super) fn new(context: &Arc<Context>, mut code: Vec<u8>) -> Result<Arc<Self>, Code> {
        context.bind()?;
        // PTX is a text that ends with a zero; code has its length in itself.
        code.push(0);
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for a write, and the code is complete.
        unsafe { calls::cuModuleLoadData(&raw mut handle, code.as_ptr().cast()) }?;
        Ok(Arc::new(Self { context: Arc::clone(context), handle }))
    }

    /// One of its kernels.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Function, Code> {
        // No kernel has a zero in its name; the driver does not know the empty one.
        let name = CString::new(name).unwrap_or_default();
        let mut handle = null_mut();
        // SAFETY: the pointer is valid for a write, and the name ends with a zero.
        unsafe { calls::cuModuleGetFunction(&raw mut handle, self.handle, name.as_ptr()) }?;
        Ok(Function { handle, _module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `new`, unloaded only here, and no `Function` of it is left.
        self.context.destroy(|| unsafe { calls::cuModuleUnload(self.handle) });
    }
}

/// A kernel.
#[derive(Debug)]
pub struct Function {
    handle: CUfunction,
    _module: Arc<Module>,
}

impl Function {
    pub fn handle(&self) -> CUfunction {
        self.handle
    }
}
