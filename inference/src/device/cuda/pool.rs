//! The driver's memory pool: the only place that allocates device memory.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUmemAllocationHandleType, CUmemAllocationType, CUmemLocation,
    CUmemLocationType, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult,
};

use super::context::Stream;
use super::{Code, calls};

/// The first version of CUDA whose drivers can limit a pool's size. For older drivers the field must be zero.
const MAX_SIZE_SINCE: i32 = 12_020;

/// How far the driver lets a pool exceed its cap. A pool takes memory from the system in pieces, of 32 MiB on the drivers that were
/// examined, and keeps partly used pieces. The worker counts its bytes exactly.
const MAX_SIZE_SLACK: u64 = 64 << 20;

const OUT_OF_MEMORY: Code = Code::Driver(CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32);

/// Where device memory comes from. Its user binds the context to the thread first.
#[derive(Debug)]
pub struct Pool {
    /// None where the driver has no pools, as on some virtual GPUs: there every allocation is one of the system's.
    handle: Option<CUmemoryPool>,
    stream: Arc<Stream>,
}

// SAFETY: a pool's handle is only a name for the driver, whose functions on pools may be called from any thread.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Creates a pool on the stream's device. The caller allocates no more than `cap` bytes. The driver, if it can, limits the pool
    /// to `cap` and some slack.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn new(
        stream: Arc<Stream>,
        ordinal: i32,
        driver_version: i32,
        cap: Option<u64>,
    ) -> Result<Self, Code> {
        let pools = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        if stream.context().attribute(pools)? == 0 {
            return Ok(Self { handle: None, stream });
        }
        // SAFETY: a struct of integers, enums that have a member of value zero, and a pointer that may be null; the API
        // wants all that is not set to be zero.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.handleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
        props.location = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal };
        if driver_version >= MAX_SIZE_SINCE {
            let most = |cap: u64| usize::try_from(cap.saturating_add(MAX_SIZE_SLACK)).unwrap_or(usize::MAX);
            props.maxSize = cap.map_or(0, most);
        }
        let mut handle = null_mut();
        // SAFETY: `props` is filled in as the API wants it and lives through the call; the pointer is valid for a write.
        unsafe { calls::cuMemPoolCreate(&raw mut handle, &raw const props) }?;
        let pool = Self { handle: Some(handle), stream };
        // The pool keeps what a pass returns, so that the next pass needs no call to the system. `trim` is for pauses.
        let mut keep = u64::MAX;
        // SAFETY: the pool is valid, and this attribute is a u64.
        unsafe {
            calls::cuMemPoolSetAttribute(
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast(),
            )
        }?;
        Ok(pool)
    }

    /// Uninitialised memory, for use on the stream from here on. Not for zero bytes.
    ///
    /// # Errors
    /// What the driver says: `CUDA_ERROR_OUT_OF_MEMORY` where there is not so much.
    pub fn alloc(&self, bytes: usize) -> Result<CUdeviceptr, Code> {
        let mut start = 0;
        let Some(handle) = self.handle else {
            // SAFETY: the pointer is valid for a write.
            return unsafe { calls::cuMemAlloc_v2(&raw mut start, bytes) }.map(|()| start);
        };
        let mut allocate = || {
            // SAFETY: pool and stream live as long as `self`, in the same context; the pointer is valid for a write.
            let allocated = unsafe {
                calls::cuMemAllocFromPoolAsync(&raw mut start, bytes, handle, self.stream.handle())
            };
            allocated.map(|()| start)
        };
        match allocate() {
            Err(code) if code == OUT_OF_MEMORY => {
                // The pool may keep pieces of the wrong size. Once returned, they can be allocated in one piece.
                self.trim()?;
                allocate()
            }
            allocated => allocated,
        }
    }

    /// Frees memory of this pool. Waits for the stream first.
    ///
    /// # Safety
    /// `start` came from [`alloc`](Self::alloc) of this pool, is not freed yet, and no other stream uses it.
    ///
    /// # Errors
    /// The driver's error, or that of earlier work on the stream.
    pub unsafe fn free(&self, start: CUdeviceptr) -> Result<(), Code> {
        // SAFETY: the stream lives as long as `self`.
        let waited = unsafe { calls::cuStreamSynchronize(self.stream.handle()) };
        // SAFETY: by this function's contract; nothing uses the memory any more.
        let freed = unsafe {
            match self.handle {
                Some(_) => calls::cuMemFreeAsync(start, self.stream.handle()),
                None => calls::cuMemFree_v2(start),
            }
        };
        waited.and(freed)
    }

    /// Returns unused memory to the system.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn trim(&self) -> Result<(), Code> {
        let Some(handle) = self.handle else { return Ok(()) };
        // SAFETY: the stream lives as long as `self`. Memory that was freed on it is free when it is done.
        unsafe { calls::cuStreamSynchronize(self.stream.handle()) }?;
        // SAFETY: the pool is valid.
        unsafe { calls::cuMemPoolTrimTo(handle, 0) }
    }

    /// Bytes that the pool has reserved from the driver, whether in use or cached.
    ///
    /// # Errors
    /// The error of the driver.
    pub fn reserved(&self) -> Result<Option<u64>, Code> {
        let Some(handle) = self.handle else { return Ok(None) };
        let mut bytes = 0u64;
        let into: *mut c_void = (&raw mut bytes).cast();
        // SAFETY: the pool is valid, and this attribute is a u64.
        unsafe {
            calls::cuMemPoolGetAttribute(
                handle,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                into,
            )
        }?;
        Ok(Some(bytes))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            // SAFETY: made in `new`, destroyed only here. The driver keeps it until memory of it that is still used is freed.
            self.stream.context().destroy(|| unsafe { calls::cuMemPoolDestroy(handle) });
        }
    }
}
