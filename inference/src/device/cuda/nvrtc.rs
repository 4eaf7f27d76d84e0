//! NVRTC, NVIDIA's compiler as a library: its functions, called through the handle that [`libraries`](super::libraries) opened.
//! Needs no device. Reference: "NVRTC User Guide", "User interface".

use std::ffi::{c_char, c_int};

pub use cudarc::nvrtc::sys::nvrtcProgram as Program;

use super::Code;
use super::calls::functions;
use super::libraries::nvrtc;

functions! { nvrtc, Code::Nvrtc;
    /// Its version.
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    /// Makes a program of a source.
    fn nvrtcCreateProgram(
        program: *mut Program,
        source: *const c_char,
        name: *const c_char,
        headers: c_int,
        header_sources: *const *const c_char,
        header_names: *const *const c_char,
    );
    /// Destroys the program.
    fn nvrtcDestroyProgram(program: *mut Program);
    /// Compiles the program.
    fn nvrtcCompileProgram(program: Program, options: c_int, each: *const *const c_char);
    /// Bytes of its machine code.
    fn nvrtcGetCUBINSize(program: Program, bytes: *mut usize);
    /// Its machine code.
    fn nvrtcGetCUBIN(program: Program, code: *mut c_char);
    /// Bytes of its text in PTX.
    fn nvrtcGetPTXSize(program: Program, bytes: *mut usize);
    /// Its text in PTX.
    fn nvrtcGetPTX(program: Program, text: *mut c_char);
    /// Bytes of the compiler's messages.
    fn nvrtcGetProgramLogSize(program: Program, bytes: *mut usize);
    /// The compiler's messages.
    fn nvrtcGetProgramLog(program: Program, log: *mut c_char);
    /// How many architectures it compiles for.
    fn nvrtcGetNumSupportedArchs(count: *mut c_int);
    /// These, as 90 for `sm_90`.
    fn nvrtcGetSupportedArchs(architectures: *mut c_int);
}
