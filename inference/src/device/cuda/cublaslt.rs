//! cuBLASLt, NVIDIA's library of matrix products, as far as an encoder needs it: `to = from · weightsᵀ + bias`, with all matrices
//! in row order.
//!
//! The library uses column order. A matrix in row order is its transpose in column order, so this module asks for `toᵀ = weights
//! · fromᵀ`: A is the transposed weights, B the activations, and the bias, one number for each row of D, is one for each column
//! here. Reference: "cuBLASLt API" of NVIDIA's cuBLAS manual.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t, cudaDataType_t, cudaStream_t,
};
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::Code;
use super::calls::functions;
use super::libraries::cublaslt;

pub use cudarc::cublaslt::sys::cudaDataType_t as DataType;

functions! { cublaslt, Code::Cublas;
    /// Makes a handle.
    fn cublasLtCreate(handle: *mut cublasLtHandle_t);
    /// Destroys the handle.
    fn cublasLtDestroy(handle: cublasLtHandle_t);
    /// Makes a description of an operation.
    fn cublasLtMatmulDescCreate(
        desc: *mut cublasLtMatmulDesc_t,
        compute: cublasComputeType_t,
        scale: cudaDataType_t,
    );
    /// Sets an attribute of it.
    fn cublasLtMatmulDescSetAttribute(
        desc: cublasLtMatmulDesc_t,
        attribute: DescAttribute,
        value: *const c_void,
        bytes: usize,
    );
    /// Destroys the description of an operation.
    fn cublasLtMatmulDescDestroy(desc: cublasLtMatmulDesc_t);
    /// Makes a description of a matrix.
    fn cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t,
        data: cudaDataType_t,
        rows: u64,
        columns: u64,
        leading: i64,
    );
    /// Sets an attribute of it.
    fn cublasLtMatrixLayoutSetAttribute(
        layout: cublasLtMatrixLayout_t,
        attribute: LayoutAttribute,
        value: *const c_void,
        bytes: usize,
    );
    /// Destroys the description of a matrix.
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
    /// Makes a description of what algorithms may be chosen.
    fn cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
    /// Sets an attribute of it.
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: cublasLtMatmulPreference_t,
        attribute: Preference,
        value: *const c_void,
        bytes: usize,
    );
    /// Destroys the description of what may be chosen.
    fn cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
    /// The algorithms that are likely to be the fastest, best first.
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t,
        desc: cublasLtMatmulDesc_t,
        a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t,
        c: cublasLtMatrixLayout_t,
        d: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t,
        wanted: i32,
        results: *mut cublasLtMatmulHeuristicResult_t,
        count: *mut i32,
    );
    /// Multiplies.
    fn cublasLtMatmul(
        handle: cublasLtHandle_t,
        desc: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: cudaStream_t,
    );
}

/// The library, ready for a context: the one that was bound when it was made. Its functions may be called from any thread that
/// has it bound.
#[derive(Debug)]
pub struct Handle(cublasLtHandle_t);

// SAFETY: a name for the library, which may be used from any thread, by its manual ("Thread safety").
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Creates the handle, which takes device memory. The library must be there, and a context bound.
    ///
    /// # Errors
    /// The error of the library.
    pub fn new() -> Result<Self, Code> {
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is valid for a write.
        unsafe { cublasLtCreate(&raw mut handle) }?;
        Ok(Self(handle))
    }

    /// The library's version: 130100 is 13.1.0. Zero, if it does not say.
    pub fn version(&self) -> usize {
        type Function = unsafe extern "C" fn() -> usize;
        // SAFETY: the type is as the library's header has it.
        let function =
            cublaslt().and_then(|library| unsafe { library.get::<Function>(b"cublasLtGetVersion") }.ok());
        // SAFETY: takes nothing.
        function.map_or(0, |function| unsafe { function() })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here. An error leaves memory behind, which ends with the process.
        let _ = unsafe { cublasLtDestroy(self.0) };
    }
}

/// The shape of a product, without the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Of weights, activations and bias; sums are in f32.
    pub data: DataType,
    /// Length of a row of `from`, and of `weights`.
    pub inner: usize,
    /// Length of a row of `to`.
    pub columns: usize,
    pub has_bias: bool,
    /// All matrices begin at multiples of this many bytes.
    pub alignment: u32,
}

/// A product of a shape, with the algorithms that the library proposes for about this number of rows. One of them is used.
#[derive(Debug)]
pub struct Plan {
    desc: Desc,
    weights: Layout,
    from: Layout,
    to: Layout,
    has_bias: bool,
    /// At least one, in the library's order: that first which it expects to be the fastest.
    algorithms: Vec<cublasLtMatmulAlgo_t>,
    used: usize,
}

/// The device addresses of a product's matrices. `bias` is `None` exactly if the shape has no bias.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    pub from: CUdeviceptr,
    pub weights: CUdeviceptr,
    pub bias: Option<CUdeviceptr>,
    pub to: CUdeviceptr,
}

/// Partial sums may be added in f32, in the workspace. They must not be rounded to elements before, nor added in an order that
/// varies. Bits of `cublasLtReductionScheme_t`.
const REDUCTIONS: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// `CUBLAS_OP_T`. cudarc defines it only for the older library.
const TRANSPOSED: u32 = 1;

/// How many algorithms are requested, and how many usable ones are kept. Trying an algorithm loads its code onto the device.
const CANDIDATES: usize = 8;
const KEPT: usize = 4;

impl Plan {
    /// Requests the best algorithms for `rows`. `workspace` is its address and its bytes. The library's first algorithm is used.
    ///
    /// # Errors
    /// The library's error: `CUBLAS_STATUS_NOT_SUPPORTED` if it has no algorithm.
    pub fn new(
        handle: &Handle,
        shape: &Shape,
        rows: usize,
        workspace: (CUdeviceptr, usize),
    ) -> Result<Self, Code> {
        let Shape { data, inner, columns, has_bias, alignment } = *shape;
        let desc = Desc::new()?;
        if has_bias {
            let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            // Each product sets its own bias. The request needs a pointer that is not null, and reads nothing from it.
            desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &workspace.0)?;
        }
        let (inner, columns, rows) = (inner as u64, columns as u64, rows as u64);
        let weights = Layout::new(data, inner, columns)?;
        let from = Layout::new(data, inner, rows)?;
        let to = Layout::new(data, columns, rows)?;
        let choice = Choice::new()?;
        choice.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(workspace.1 as u64))?;
        choice.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &REDUCTIONS)?;
        for matrix in [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            choice.set(matrix, &alignment)?;
        }
        let mut results = [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; CANDIDATES];
        let mut count = 0;
        // SAFETY: all descriptions are valid, and there is room for as many results as are asked for.
        unsafe {
            cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                desc.0,
                weights.0,
                from.0,
                to.0,
                to.0,
                choice.0,
                CANDIDATES as i32,
                results.as_mut_ptr().cast(),
                &raw mut count,
            )
        }?;
        let count = usize::try_from(count).unwrap_or(0).min(CANDIDATES);
        let algorithms: Vec<_> = results[..count].iter().filter_map(usable).take(KEPT).collect();
        if algorithms.is_empty() {
            return Err(Code::Cublas(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32));
        }
        Ok(Self { desc, weights, from, to, has_bias, algorithms, used: 0 })
    }

    /// How many algorithms there are to choose from.
    pub fn algorithms(&self) -> usize {
        self.algorithms.len()
    }

    /// Uses the algorithm with this index from now on. The index must be valid.
    pub fn choose(&mut self, number: usize) {
        self.used = number;
    }

    /// Adds the product to a stream.
    ///
    /// # Safety
    /// The matrices have this shape and `rows` rows. They and the workspace live until the stream has been waited for. The
    /// workspace has the bytes that the plan was made with, and no other stream uses it. The stream's context is bound.
    ///
    /// # Errors
    /// The error of the library.
    pub unsafe fn run(
        &mut self,
        handle: &Handle,
        rows: usize,
        places: &Places,
        workspace: (CUdeviceptr, usize),
        stream: CUstream,
    ) -> Result<(), Code> {
        for layout in [&self.from, &self.to] {
            layout.set(LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_COLS, &(rows as u64))?;
        }
        if let Some(bias) = places.bias.filter(|_| self.has_bias) {
            self.desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        let (one, zero) = (1.0_f32, 0.0_f32);
        let at = |place: CUdeviceptr| place as usize as *mut c_void;
        let to = at(places.to);
        // SAFETY: by this function's contract; the descriptions are valid. C is D, and its factor of zero leaves it unread. The
        // library reads both factors before the call returns.
        unsafe {
            cublasLtMatmul(
                handle.0,
                self.desc.0,
                (&raw const one).cast(),
                at(places.weights),
                self.weights.0,
                at(places.from),
                self.from.0,
                (&raw const zero).cast(),
                to,
                self.to.0,
                to,
                self.to.0,
                &raw const self.algorithms[self.used],
                at(workspace.0),
                workspace.1,
                stream.cast(),
            )
        }
    }
}

/// The algorithm of a result, if it has one. Its status is read as a number, because a newer library may have other ones.
fn usable(result: &MaybeUninit<cublasLtMatmulHeuristicResult_t>) -> Option<cublasLtMatmulAlgo_t> {
    let result = result.as_ptr();
    // SAFETY: the library has written this result, of which both parts are numbers.
    unsafe {
        let state = (&raw const (*result).state).cast::<u32>().read();
        (state == 0).then(|| (&raw const (*result).algo).read())
    }
}

/// Makes an owner of one of the library's descriptions, which sets its parts and destroys it.
macro_rules! description {
    ($name:ident($raw:ty), $attribute:ty, $set:ident, $destroy:ident) => {
        #[derive(Debug)]
        struct $name($raw);

        // SAFETY: it owns its memory alone.
        unsafe impl Send for $name {}

        impl $name {
            fn set<T>(&self, attribute: $attribute, value: &T) -> Result<(), Code> {
                // SAFETY: the description is valid, and the library copies as many bytes as there are.
                unsafe { $set(self.0, attribute, ptr::from_ref(value).cast(), size_of::<T>()) }
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made where this was, destroyed only here. An error leaves host memory behind, no more.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}

description!(
    Desc(cublasLtMatmulDesc_t),
    DescAttribute,
    cublasLtMatmulDescSetAttribute,
    cublasLtMatmulDescDestroy
);
description!(
    Layout(cublasLtMatrixLayout_t),
    LayoutAttribute,
    cublasLtMatrixLayoutSetAttribute,
    cublasLtMatrixLayoutDestroy
);
description!(
    Choice(cublasLtMatmulPreference_t),
    Preference,
    cublasLtMatmulPreferenceSetAttribute,
    cublasLtMatmulPreferenceDestroy
);

impl Desc {
    fn new() -> Result<Self, Code> {
        let mut desc = ptr::null_mut();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F);
        // SAFETY: the pointer is valid for a write.
        unsafe { cublasLtMatmulDescCreate(&raw mut desc, compute, scale) }?;
        let desc = Self(desc);
        desc.set(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        Ok(desc)
    }
}

impl Layout {
    /// A matrix in columns, without gaps.
    fn new(data: DataType, rows: u64, columns: u64) -> Result<Self, Code> {
        let mut layout = ptr::null_mut();
        let leading = i64::try_from(rows).unwrap_or(i64::MAX);
        // SAFETY: the pointer is valid for a write.
        unsafe { cublasLtMatrixLayoutCreate(&raw mut layout, data, rows, columns, leading) }?;
        Ok(Self(layout))
    }
}

impl Choice {
    fn new() -> Result<Self, Code> {
        let mut preference = ptr::null_mut();
        // SAFETY: the pointer is valid for a write.
        unsafe { cublasLtMatmulPreferenceCreate(&raw mut preference) }?;
        Ok(Self(preference))
    }
}
