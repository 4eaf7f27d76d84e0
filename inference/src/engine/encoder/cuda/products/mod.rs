//! Matrix products by cuBLASLt, if it is installed. It is faster than this program's own kernel.
//!
//! The best algorithm depends on the number of rows, which differs from pass to pass. So the library is asked once for each shape
//! and bucket of rows (`buckets`). While a model loads, `warm_up` makes all products that passes will need, and `candidates` times
//! the algorithms that the library names. Products that the library refuses are computed by this program's own kernel.

mod buckets;
mod candidates;
mod warm_up;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::sys::CUdeviceptr;
use vramq_core::units::Mib;

use super::element::ElementType;
use crate::device::cuda::cublaslt::{DataType, Handle, Places, Plan, Shape};
use crate::device::cuda::{Code, CudaDevice, CudaError, CudaMemory, Meaning, Missing};
use crate::engine::encoder::config::Dims;

use buckets::bucket;

/// The library and what it has chosen. For the one stream of its device.
#[derive(Debug)]
pub(super) struct Products {
    handle: Handle,
    /// For partial sums.
    workspace: CudaMemory,
    data: DataType,
    alignment: u32,
    /// By shape and bucket of rows; none where the library has nothing.
    plans: Mutex<HashMap<(Shape, usize), Option<Plan>>>,
}

/// A product: `columns` rows of weights, of `inner` elements each as those of the activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub weights: CUdeviceptr,
    /// `columns` elements.
    pub bias: Option<CUdeviceptr>,
    pub inner: usize,
    pub columns: usize,
    pub rows: usize,
}

/// What NVIDIA recommends as workspace: for compute capability 9.0 and newer, and for older ones.
const WORKSPACE_BYTES: usize = 32 << 20;
const WORKSPACE_BYTES_OLD: usize = 4 << 20;

/// Matrices begin at multiples of this many bytes at least, as tensor cores need. Alignment beyond the maximum makes no difference.
const ALIGNMENT_MIN: usize = 16;
const ALIGNMENT_MAX: usize = 256;

/// Why a model's products are this program's own.
#[derive(Debug, thiserror::Error)]
pub(super) enum OwnProducts {
    #[error("as it is configured")]
    Configured,
    #[error("libcublasLt {0}")]
    NoLibrary(Missing),
    #[error("a row of the model is not a multiple of {ALIGNMENT_MIN} bytes, which cuBLASLt needs")]
    OddRows,
    #[error("cuBLASLt does not start: {0}")]
    Refused(Code),
}

impl Products {
    /// Prepares the library. Returns the reason if it is not there, or does not take this device or this model.
    ///
    /// # Errors
    /// The device has no room for the workspace, or is lost.
    pub fn load(
        device: &Arc<CudaDevice>,
        element: ElementType,
        dims: &Dims,
    ) -> Result<Result<Self, OwnProducts>, CudaError> {
        let alignment = alignment(dims, element);
        let own = match &device.libraries().cublaslt {
            Err(missing) => Some(OwnProducts::NoLibrary(missing.clone())),
            Ok(_) if alignment < ALIGNMENT_MIN => Some(OwnProducts::OddRows),
            Ok(_) => None,
        };
        if let Some(why) = own {
            tracing::info!(%why, "not using cuBLASLt: this program's own kernels compute the matrix products, which is slower");
            return Ok(Err(why));
        }
        device.bind()?;
        let handle = match device.counting(Handle::new)? {
            Ok(handle) => handle,
            Err(code) if code.meaning() == Meaning::Refused => {
                tracing::warn!(%code, "cuBLASLt does not start: this program's own kernels compute the matrix products, which is slower");
                return Ok(Err(OwnProducts::Refused(code)));
            }
            Err(code) => return Err(device.failed("start cuBLASLt", 0, code)),
        };
        let bytes = if device.capability() >= (9, 0) { WORKSPACE_BYTES } else { WORKSPACE_BYTES_OLD };
        let workspace = device.alloc(bytes)?;
        tracing::info!(
            version = handle.version(),
            workspace = %Mib(bytes as u64),
            "cuBLASLt computes the matrix products"
        );
        let data = match element {
            ElementType::F32 => DataType::CUDA_R_32F,
            ElementType::F16 => DataType::CUDA_R_16F,
            ElementType::Bf16 => DataType::CUDA_R_16BF,
        };
        let plans = Mutex::default();
        Ok(Ok(Self { handle, workspace, data, alignment: alignment as u32, plans }))
    }

    /// The library's version.
    pub fn version(&self) -> usize {
        self.handle.version()
    }

    /// Bytes of the device that stay for as long as the model is loaded.
    pub fn bytes(&self) -> u64 {
        self.workspace.len() as u64
    }

    /// What a product's plan is found by.
    fn key(&self, product: &Product) -> (Shape, usize) {
        let Product { inner, columns, bias, rows, .. } = *product;
        let (data, alignment) = (self.data, self.alignment);
        (Shape { data, inner, columns, has_bias: bias.is_some(), alignment }, bucket(rows))
    }

    /// Where it is, and its bytes.
    fn workspace(&self) -> (CUdeviceptr, usize) {
        (self.workspace.start(), self.workspace.len())
    }

    /// Enqueues a product. Returns false, and does nothing, if the library does not take it.
    ///
    /// # Safety
    /// The product's weights and bias, and its rows at `from` and `to`, live until the stream has been waited for. All begin at
    /// multiples of the model's alignment.
    ///
    /// # Errors
    /// See [`CudaDevice::failed`].
    pub unsafe fn multiply(
        &self,
        device: &CudaDevice,
        product: &Product,
        from: CUdeviceptr,
        to: CUdeviceptr,
    ) -> Result<bool, CudaError> {
        let Product { weights, bias, inner, columns, rows } = *product;
        if rows == 0 {
            return Ok(true);
        }
        let ((shape, bucket), workspace) = (self.key(product), self.workspace());
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = plans.entry((shape, bucket));
        let is_new = matches!(entry, Entry::Vacant(_));
        let plan = match entry {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let planned = taken(Plan::new(&self.handle, &shape, bucket, workspace), &shape, bucket);
                entry.insert(planned.map_err(|code| device.failed("plan a matrix product", 0, code))?)
            }
        };
        let Some(ready) = plan else { return Ok(false) };
        let places = Places { from, weights, bias, to };
        let run = |ready: &mut Plan, is_new: bool| -> Result<_, CudaError> {
            // SAFETY: by this function's contract; the workspace lives as long as `self`, for this device's one stream.
            let mut run = || unsafe { ready.run(&self.handle, rows, &places, workspace, device.stream()) };
            // The first product loads the algorithm's code onto the device, where it stays.
            Ok(if is_new { device.counting(run)? } else { run() })
        };
        let failed = |code| device.failed("multiply matrices", 0, code);
        let first = run(ready, is_new)?;
        if !matches!(first, Err(code) if is_refusal(code)) {
            return first.map(|()| true).map_err(failed);
        }
        // The algorithm was chosen for the rows of the bucket, and may not work for fewer rows.
        tracing::debug!(
            inner,
            columns,
            rows,
            planned = bucket,
            "cuBLASLt refused an algorithm that it had chosen for a larger number of rows: asking it for exactly this number of rows"
        );
        let planned = Plan::new(&self.handle, &shape, rows, workspace);
        *plan =
            taken(planned, &shape, rows).map_err(|code| device.failed("plan a matrix product", 0, code))?;
        let Some(exact) = plan else { return Ok(false) };
        if taken(run(exact, true)?, &shape, rows).map_err(failed)?.is_none() {
            *plan = None;
        }
        Ok(plan.is_some())
    }
}

fn element_bytes(data: DataType) -> usize {
    if data == DataType::CUDA_R_32F { 4 } else { 2 }
}

/// `None` if the library refuses: then the program's own kernel computes the product.
fn taken<T>(result: Result<T, Code>, shape: &Shape, rows: usize) -> Result<Option<T>, Code> {
    match result {
        Ok(made) => Ok(Some(made)),
        Err(code) if is_refusal(code) => {
            let (inner, columns) = (shape.inner, shape.columns);
            tracing::warn!(inner, columns, rows, %code, "cuBLASLt refuses this product: using the program's own kernel, which is slower");
            Ok(None)
        }
        Err(code) => Err(code),
    }
}

/// Whether the library says that it has no such product, and nothing is wrong.
fn is_refusal(code: Code) -> bool {
    use cublasStatus_t::{
        CUBLAS_STATUS_ARCH_MISMATCH, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED,
    };
    let refusals = [CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_ARCH_MISMATCH];
    matches!(code, Code::Cublas(code) if refusals.iter().any(|status| *status as u32 == code))
}

/// All matrices of a pass begin at multiples of this many bytes. They lie one after the other, and each may have any number of
/// rows.
fn alignment(dims: &Dims, element: ElementType) -> usize {
    let rows = [dims.hidden, dims.attention_columns(), dims.qkv_columns(), dims.feed_forward]
        .map(|size| size * element.bytes());
    let common = rows.iter().map(|bytes| bytes.trailing_zeros()).min().unwrap_or(0);
    (1 << common).min(ALIGNMENT_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_begin_where_rows_do() {
        let dims = |hidden, feed_forward| Dims {
            layers: 1,
            hidden,
            heads: 1,
            kv_heads: 1,
            head: hidden,
            feed_forward,
            is_gated: false,
            vocabulary: 1,
            positions: 1,
            token_types: 1,
            is_sparse: false,
        };
        assert_eq!(alignment(&dims(384, 1536), ElementType::F16), 256);
        assert_eq!(alignment(&dims(64, 256), ElementType::F16), 128);
        assert_eq!(alignment(&dims(200, 96), ElementType::F16), 16);
        assert_eq!(alignment(&dims(200, 100), ElementType::F16), 8);
        assert_eq!(alignment(&dims(200, 100), ElementType::F32), 16);
    }
}
