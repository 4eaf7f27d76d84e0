//! Kernels through NVRTC, NVIDIA's compiler as a library. Needs no device.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr;

use super::element::ElementType;
use super::sources;
use crate::device::cuda::{Code, nvrtc};

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
    #[error("NVRTC does not compile the kernels for {target}: {code}\n{log}")]
    Failed { target: String, code: Code, log: String },
    #[error("start a thread for NVRTC: {0}")]
    NoThread(String),
}

/// Compiled code, and what the compiler had to say of it.
#[derive(Debug)]
pub struct Compiled {
    pub code: Vec<u8>,
    pub log: String,
}

/// NVRTC's version; zeros, if it is not there.
pub fn version() -> (i32, i32) {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are valid for a write. An `Err` leaves zeros.
    let _ = unsafe { nvrtc::nvrtcVersion(&raw mut major, &raw mut minor) };
    (major, minor)
}

/// Stack of the compiler's thread. The compiler recurses over its input, so this is large; it is reserved, not used.
const STACK_BYTES: usize = 64 << 20;

/// Compiles all kernels of a type of elements. Seconds.
///
/// # Errors
/// See [`CompileError`]. NVRTC's library may not be there: `device::cuda`'s libraries tell whether it is.
pub fn compile(element: ElementType, target: Target, extra: &[&str]) -> Result<Compiled, CompileError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("nvrtc".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || compile_here(element, target, extra))
            .map_err(|error| CompileError::NoThread(error.to_string()))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn compile_here(element: ElementType, target: Target, extra: &[&str]) -> Result<Compiled, CompileError> {
    let failed = |code, log| CompileError::Failed { target: target.to_string(), code, log };
    if let Target::Cubin((major, minor)) = target
        && !knows((major * 10 + minor).cast_signed())
    {
        return Err(CompileError::UnknownTarget { target: target.to_string(), version: version() });
    }
    // No source has a NUL in it, but the type cannot know that.
    let text = CString::new(sources::text(element)).unwrap_or_default();
    let program = Program::new(&text).map_err(|code| failed(code, String::new()))?;
    let mut options = vec![format!("--gpu-architecture={target}")];
    options.extend(sources::OPTIONS.iter().chain(extra).map(|option| (*option).to_owned()));
    let compiled = program.compile(options);
    let log = program.log();
    compiled.map_err(|code| failed(code, log.clone()))?;
    let code = match target {
        Target::Cubin(_) => program.get(nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN),
        Target::Ptx(_) => program.get(nvrtc::nvrtcGetPTXSize, nvrtc::nvrtcGetPTX),
    };
    let code = code.map_err(|code| failed(code, log.clone()))?;
    Ok(Compiled { code, log })
}

/// SHA-256 of what is compiled.
pub fn source_hash(element: ElementType) -> String {
    sources::hash(element)
}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub name: String,
    /// Of each thread.
    pub registers: u32,
    pub shared_bytes: u32,
    /// Of registers, to memory: stores and loads.
    pub spilled_bytes: u32,
}

/// Reads the log of a compilation with `--ptxas-options=-v`.
pub fn usage(log: &str) -> Vec<Usage> {
    // "Used 32 registers, used 1 barriers, 8224 bytes smem": the number before a word.
    let before = |line: &str, word: &str| {
        let number = line.split_once(word).and_then(|(before, _)| before.split_whitespace().last());
        number.and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    let mut kernels: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(Usage { name, ..Usage::default() });
        } else if let Some(kernel) = kernels.last_mut() {
            if line.contains("spill stores") {
                kernel.spilled_bytes =
                    before(line, " bytes spill stores") + before(line, " bytes spill loads");
            } else if line.contains(" registers") {
                kernel.registers = before(line, " registers");
                kernel.shared_bytes = before(line, " bytes smem");
            }
        }
    }
    kernels
}

/// Whether NVRTC compiles for an architecture, given as 90 for `sm_90`.
fn knows(architecture: i32) -> bool {
    let mut count = 0;
    // SAFETY: the pointer is valid for a write.
    if unsafe { nvrtc::nvrtcGetNumSupportedArchs(&raw mut count) }.is_err() {
        return false;
    }
    let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as the library has just said that it knows.
    let got = unsafe { nvrtc::nvrtcGetSupportedArchs(all.as_mut_ptr()) };
    got.is_ok() && all.contains(&architecture)
}

/// A program that is destroyed with its owner.
struct Program(nvrtc::Program);

type GetSize = unsafe fn(nvrtc::Program, *mut usize) -> Result<(), Code>;
type Get = unsafe fn(nvrtc::Program, *mut c_char) -> Result<(), Code>;

impl Program {
    fn new(text: &CStr) -> Result<Self, Code> {
        let mut program = ptr::null_mut();
        let (name, none) = (c"kernels.cu".as_ptr(), ptr::null());
        // SAFETY: the pointer is valid for a write; source and name are texts, which the library copies; there are no headers.
        unsafe { nvrtc::nvrtcCreateProgram(&raw mut program, text.as_ptr(), name, 0, none, none) }?;
        Ok(Self(program))
    }

    fn compile(&self, options: Vec<String>) -> Result<(), Code> {
        // No option has a NUL in it, but the type cannot know that.
        let options: Vec<_> =
            options.into_iter().map(|option| CString::new(option).unwrap_or_default()).collect();
        let each: Vec<_> = options.iter().map(|option| option.as_ptr()).collect();
        let count = i32::try_from(each.len()).unwrap_or(i32::MAX);
        // SAFETY: the program is valid while `self` lives; as many texts as are said, which outlive the call.
        unsafe { nvrtc::nvrtcCompileProgram(self.0, count, each.as_ptr()) }
    }

    fn get(&self, size: GetSize, get: Get) -> Result<Vec<u8>, Code> {
        let mut bytes = 0;
        // SAFETY: the program is valid while `self` lives; the pointer is valid for a write.
        unsafe { size(self.0, &raw mut bytes) }?;
        let mut code = vec![0_u8; bytes];
        // SAFETY: as above; there is room for as many bytes as the library has just said.
        unsafe { get(self.0, code.as_mut_ptr().cast()) }?;
        Ok(code)
    }

    fn log(&self) -> String {
        let log = self.get(nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog).unwrap_or_default();
        CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here. An `Err` leaves host memory behind, no more.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_a_kernel_are_read_from_the_assemblers_output() {
        let log = "ptxas info    : 56 bytes gmem\n\
            ptxas info    : Compiling entry function 'pool_f16' for 'sm_90'\n\
            ptxas info    : Function properties for pool_f16\n\
            ptxas         .     0 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 1 barriers, 8224 bytes smem\n\
            ptxas info    : Compile time = 61.777 ms\n\
            ptxas info    : Compiling entry function 'embed_f16' for 'sm_90'\n\
            ptxas info    : Used 40 registers, used 0 barriers\n";
        let expected = [("pool_f16", 32, 8224, 12), ("embed_f16", 40, 0, 0)].map(
            |(name, registers, shared_bytes, spilled_bytes)| Usage {
                name: name.to_owned(),
                registers,
                shared_bytes,
                spilled_bytes,
            },
        );
        assert_eq!(usage(log), expected);
    }
}
