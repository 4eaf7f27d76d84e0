//! Kernels through NVRTC, NVIDIA's compiler as a library. Needs no device.

use std::ffi::{CStr, CString, c_char};
use std::fmt;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use super::element::ElementType;
use super::sources;

/// What code is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Machine code of one compute capability, such as 9.0.
    Cubin((u32, u32)),
    /// Text that drivers compile for this compute capability and all newer ones.
    Ptx((u32, u32)),
}

/// `sm_90`, `compute_75`: as NVRTC names it.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cubin((major, minor)) => write!(f, "sm_{major}{minor}"),
            Self::Ptx((major, minor)) => write!(f, "compute_{major}{minor}"),
        }
    }
}

/// Why kernels could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    #[error("NVRTC {}.{} does not know {target}, which came after it", version.0, version.1)]
    UnknownTarget { target: String, version: (i32, i32) },
    #[error("NVRTC does not compile the kernels for {target}: {code:?}\n{log}")]
    Failed { target: String, code: sys::nvrtcResult, log: String },
}

/// Compiled code, and what the compiler had to say of it.
#[derive(Debug)]
pub struct Compiled {
    pub code: Vec<u8>,
    pub log: String,
}

/// NVRTC's version.
///
/// # Panics
/// If the library is not there: see [`compile`].
pub fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for a write. The call fails for null pointers only.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

/// Compiles all kernels of a type of elements. Seconds.
///
/// # Errors
/// See [`CompileError`].
///
/// # Panics
/// If NVRTC's library is not there: `device::cuda`'s libraries tell whether it is.
pub fn compile(element: ElementType, target: Target, extra: &[&str]) -> Result<Compiled, CompileError> {
    let failed = |code, log| CompileError::Failed { target: target.to_string(), code, log };
    if let Target::Cubin((major, minor)) = target
        && !knows((major * 10 + minor).cast_signed())
    {
        return Err(CompileError::UnknownTarget { target: target.to_string(), version: version() });
    }
    // No source has a NUL in it, but the type cannot know that.
    let text = CString::new(sources::text(element)).unwrap_or_default();
    let program = Program(
        result::create_program(&text, Some(c"kernels.cu"))
            .map_err(|NvrtcError(code)| failed(code, String::new()))?,
    );
    let mut options = vec![format!("--gpu-architecture={target}")];
    options.extend(sources::OPTIONS.iter().chain(extra).map(|option| (*option).to_owned()));
    // SAFETY: made above, destroyed in its drop.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    compiled.map_err(|NvrtcError(code)| failed(code, log.clone()))?;
    let code = match target {
        Target::Cubin(_) => program.get(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
        Target::Ptx(_) => program.get(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
    };
    let code = code.map_err(|NvrtcError(code)| failed(code, log.clone()))?;
    Ok(Compiled { code, log })
}

/// Whether NVRTC compiles for an architecture, given as 90 for `sm_90`.
fn knows(architecture: i32) -> bool {
    let mut count = 0;
    // SAFETY: the pointer is valid for a write.
    if unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result().is_err() {
        return false;
    }
    let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as the library has just said that it knows.
    let got = unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) }.result();
    got.is_ok() && all.contains(&architecture)
}

/// A program that is destroyed with its owner.
struct Program(sys::nvrtcProgram);

type GetSize = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type Get = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

impl Program {
    fn get(&self, size: GetSize, get: Get) -> Result<Vec<u8>, NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program is valid while `self` lives; the pointer is valid for a write.
        unsafe { size(self.0, &raw mut bytes) }.result()?;
        let mut code = vec![0_u8; bytes];
        // SAFETY: as above; there is room for as many bytes as the library has just said.
        unsafe { get(self.0, code.as_mut_ptr().cast()) }.result()?;
        Ok(code)
    }

    fn log(&self) -> String {
        let log = self.get(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog).unwrap_or_default();
        CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by `create_program`, destroyed only here. An `Err` leaves host memory behind, no more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
