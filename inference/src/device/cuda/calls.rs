//! Functions of CUDA's libraries, called so that their return codes are plain numbers.
//!
//! cudarc has these functions, too, and returns codes as an enum. A library that is newer than cudarc may return a code that is not in
//! the enum, which is undefined behaviour. And cudarc opens libraries itself, by names of its own choice. So only its types are used.

use std::ffi::{c_char, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUmemPool_attribute,
    CUmemPoolProps, CUmemoryPool, CUmodule, CUstream, CUuuid,
};

use super::Code;
use super::libraries::driver;

/// Declares functions of a library that return a code, zero for success. `$library` is a function that returns the opened library.
/// Without it each declared function returns `Code::Missing`.
macro_rules! functions {
    ($library:path, $code:expr; $($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?);)+) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As NVIDIA's reference of the function says.
        ///
        /// # Errors
        /// The code that it returns.
        #[allow(non_snake_case, clippy::too_many_arguments, reason = "the library's own")]
        pub unsafe fn $name($($argument: $type),*) -> Result<(), Code> {
            type Function = unsafe extern "C" fn($($type),*) -> u32;
            static FUNCTION: std::sync::OnceLock<Option<Function>> = std::sync::OnceLock::new();
            let Some(library) = $library() else { return Err(Code::Missing(stringify!($name))) };
            let function = FUNCTION.get_or_init(|| {
                // SAFETY: the type is as the library's header has it, but that an enum is a number of the same size.
                unsafe { library.get::<Function>(stringify!($name).as_bytes()) }.ok().map(|found| *found)
            });
            let Some(function) = function else { return Err(Code::Missing(stringify!($name))) };
            // SAFETY: by this function's contract.
            match unsafe { function($($argument),*) } {
                0 => Ok(()),
                code => Err($code(code)),
            }
        }
    )+ };
}

pub(super) use functions;

functions! { driver, Code::Driver;
    /// Starts the driver for this process.
    fn cuInit(flags: u32);
    /// The newest version of CUDA that it knows.
    fn cuDriverGetVersion(version: *mut i32);
    /// How many devices it lists.
    fn cuDeviceGetCount(count: *mut i32);
    /// One of them, by its place.
    fn cuDeviceGet(device: *mut CUdevice, ordinal: i32);
    /// What its maker calls it.
    fn cuDeviceGetName(name: *mut c_char, length: i32, device: CUdevice);
    /// Its UUID.
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    /// Its memory in bytes.
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    /// Its properties.
    fn cuDeviceGetAttribute(value: *mut i32, which: CUdevice_attribute, device: CUdevice);
    /// Its primary context.
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    /// Releases the primary context.
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    /// Makes a context the thread's own.
    fn cuCtxSetCurrent(context: CUcontext);
    /// Makes a stream.
    fn cuStreamCreate(stream: *mut CUstream, flags: u32);
    /// Destroys the stream.
    fn cuStreamDestroy_v2(stream: CUstream);
    /// Waits for the stream.
    fn cuStreamSynchronize(stream: CUstream);
    /// Makes an event.
    fn cuEventCreate(event: *mut CUevent, flags: u32);
    /// Marks a place in a stream.
    fn cuEventRecord(event: CUevent, stream: CUstream);
    /// Waits for the event.
    fn cuEventSynchronize(event: CUevent);
    /// Milliseconds between two places.
    fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent);
    /// Destroys an event.
    fn cuEventDestroy_v2(event: CUevent);
    /// Free and total bytes.
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    /// Makes a pool of memory.
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, props: *const CUmemPoolProps);
    /// Destroys the pool.
    fn cuMemPoolDestroy(pool: CUmemoryPool);
    /// Sets an attribute of the pool.
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    /// Reads an attribute of the pool.
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    /// Returns memory that the pool caches to the driver.
    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize);
    /// Allocates memory from a pool.
    fn cuMemAllocFromPoolAsync(start: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);
    /// Frees memory of a pool.
    fn cuMemFreeAsync(start: CUdeviceptr, stream: CUstream);
    /// Allocates memory without a pool.
    fn cuMemAlloc_v2(start: *mut CUdeviceptr, bytes: usize);
    /// Frees memory that was allocated without a pool.
    fn cuMemFree_v2(start: CUdeviceptr);
    /// Allocates host memory that the device reads and writes by itself.
    fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: u32);
    /// Frees that host memory.
    fn cuMemFreeHost(start: *mut c_void);
    /// A copy to the device.
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    /// A copy from it.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    /// Loads code.
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    /// Unloads it.
    fn cuModuleUnload(module: CUmodule);
    /// A kernel of it.
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// Runs a kernel.
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared: u32,
        stream: CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
}
