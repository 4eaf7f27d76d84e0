//! Decides what an error code of CUDA means for the device and for the pass. Reads codes only, never texts.

use std::fmt;

use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::sys::CUresult;
use cudarc::nvrtc::sys::nvrtcResult;

use crate::device::OutOfMemory;

/// How a call to CUDA can fail, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The device has no room. A smaller pass may fit.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The context or the device is unusable: at best a new process can use the device again.
    #[error("{during}: {code}")]
    Lost { during: &'static str, code: Code },
    /// The driver refused this call, and reports no fault of the device. The program is at fault, or was built for another device.
    #[error("{during}: {code}")]
    Refused { during: &'static str, code: Code },
}

/// A code of one of CUDA's libraries, as a number: newer libraries have codes that this program does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `CUresult`.
    Driver(u32),
    /// `cublasStatus_t`.
    Cublas(u32),
    /// `nvrtcResult`.
    Nvrtc(u32),
    /// The library lacks a function.
    Missing(&'static str),
}

/// Shows the code's name in the headers. Asking the driver for a text would be another call to a driver that has just failed.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, number, library) = match *self {
            Self::Driver(number) => (driver_name(number), number, "driver"),
            Self::Cublas(number) => (cublas_name(number), number, "cuBLAS"),
            Self::Nvrtc(number) => (nvrtc_name(number), number, "NVRTC"),
            Self::Missing(function) => return write!(f, "there is no {function}"),
        };
        match name {
            Some(name) => write!(f, "{name} ({number})"),
            None => write!(f, "code {number} of the {library}, which is newer than this program"),
        }
    }
}

impl std::error::Error for Code {}

/// What a code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    OutOfMemory,
    Lost,
    Refused,
}

impl Code {
    pub fn meaning(self) -> Meaning {
        match self {
            Self::Driver(code) => driver(code),
            Self::Cublas(code) if code == cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED as u32 => {
                Meaning::OutOfMemory
            }
            Self::Cublas(_) | Self::Nvrtc(_) | Self::Missing(_) => Meaning::Refused,
        }
    }
}

/// Classifies by the driver API's reference, section "Data types used by CUDA driver", `CUresult`. A code means "lost" if the
/// reference says that the process must be relaunched, if it tells of a missing or broken device or driver, or if it has no
/// explanation. A code that this program does not know counts as refused: the caller then asks the driver, and a health probe
/// follows.
fn driver(code: u32) -> Meaning {
    if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 {
        Meaning::OutOfMemory
    } else if LOST.iter().any(|lost| *lost as u32 == code) {
        Meaning::Lost
    } else {
        Meaning::Refused
    }
}

const LOST: &[CUresult] = {
    use CUresult::*;
    &[
        // A kernel did something that ends its context.
        CUDA_ERROR_CONTAINED,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_ASSERT,
        CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_TENSOR_MEMORY_LEAK,
        // The hardware failed, or was taken away.
        CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_NVLINK_UNCORRECTABLE,
        CUDA_ERROR_DEVICE_UNAVAILABLE,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_EXTERNAL_DEVICE,
        // The driver, or the daemon between it and this process, ended or was replaced under it.
        CUDA_ERROR_DEINITIALIZED,
        CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUDA_ERROR_SYSTEM_NOT_READY,
        CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
        CUDA_ERROR_OPERATING_SYSTEM,
        CUDA_ERROR_MPS_CONNECTION_FAILED,
        CUDA_ERROR_MPS_RPC_FAILURE,
        CUDA_ERROR_MPS_SERVER_NOT_READY,
        CUDA_ERROR_MPS_CLIENT_TERMINATED,
        CUDA_ERROR_KEY_ROTATION,
        CUDA_ERROR_UNKNOWN,
    ]
};

/// Makes a function that knows the names of an enum's members.
macro_rules! names {
    ($function:ident of $type:ident: $($name:ident)+) => {
        fn $function(number: u32) -> Option<&'static str> {
            const NAMES: &[(u32, &str)] = &[$(($type::$name as u32, stringify!($name))),+];
            NAMES.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
        }
    };
}

names! { driver_name of CUresult:
    CUDA_ERROR_INVALID_VALUE CUDA_ERROR_OUT_OF_MEMORY CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_DEINITIALIZED
    CUDA_ERROR_PROFILER_DISABLED CUDA_ERROR_PROFILER_NOT_INITIALIZED CUDA_ERROR_PROFILER_ALREADY_STARTED
    CUDA_ERROR_PROFILER_ALREADY_STOPPED CUDA_ERROR_STUB_LIBRARY CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
    CUDA_ERROR_DEVICE_UNAVAILABLE CUDA_ERROR_NO_DEVICE CUDA_ERROR_INVALID_DEVICE CUDA_ERROR_DEVICE_NOT_LICENSED
    CUDA_ERROR_INVALID_IMAGE CUDA_ERROR_INVALID_CONTEXT CUDA_ERROR_CONTEXT_ALREADY_CURRENT CUDA_ERROR_MAP_FAILED
    CUDA_ERROR_UNMAP_FAILED CUDA_ERROR_ARRAY_IS_MAPPED CUDA_ERROR_ALREADY_MAPPED CUDA_ERROR_NO_BINARY_FOR_GPU
    CUDA_ERROR_ALREADY_ACQUIRED CUDA_ERROR_NOT_MAPPED CUDA_ERROR_NOT_MAPPED_AS_ARRAY
    CUDA_ERROR_NOT_MAPPED_AS_POINTER CUDA_ERROR_ECC_UNCORRECTABLE CUDA_ERROR_UNSUPPORTED_LIMIT
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE CUDA_ERROR_PEER_ACCESS_UNSUPPORTED CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT CUDA_ERROR_NVLINK_UNCORRECTABLE CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION CUDA_ERROR_JIT_COMPILATION_DISABLED CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC CUDA_ERROR_CONTAINED CUDA_ERROR_INVALID_SOURCE CUDA_ERROR_FILE_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND CUDA_ERROR_SHARED_OBJECT_INIT_FAILED CUDA_ERROR_OPERATING_SYSTEM
    CUDA_ERROR_INVALID_HANDLE CUDA_ERROR_ILLEGAL_STATE CUDA_ERROR_LOSSY_QUERY CUDA_ERROR_NOT_FOUND
    CUDA_ERROR_NOT_READY CUDA_ERROR_ILLEGAL_ADDRESS CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_ASSERT CUDA_ERROR_TOO_MANY_PEERS CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED CUDA_ERROR_HARDWARE_STACK_ERROR CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_MISALIGNED_ADDRESS CUDA_ERROR_INVALID_ADDRESS_SPACE CUDA_ERROR_INVALID_PC
    CUDA_ERROR_LAUNCH_FAILED CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE CUDA_ERROR_TENSOR_MEMORY_LEAK
    CUDA_ERROR_NOT_PERMITTED CUDA_ERROR_NOT_SUPPORTED CUDA_ERROR_SYSTEM_NOT_READY
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE CUDA_ERROR_MPS_CONNECTION_FAILED
    CUDA_ERROR_MPS_RPC_FAILURE CUDA_ERROR_MPS_SERVER_NOT_READY CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED CUDA_ERROR_MPS_CLIENT_TERMINATED CUDA_ERROR_CDP_NOT_SUPPORTED
    CUDA_ERROR_CDP_VERSION_MISMATCH CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    CUDA_ERROR_STREAM_CAPTURE_MERGE CUDA_ERROR_STREAM_CAPTURE_UNMATCHED CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION CUDA_ERROR_STREAM_CAPTURE_IMPLICIT CUDA_ERROR_CAPTURED_EVENT
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD CUDA_ERROR_TIMEOUT CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
    CUDA_ERROR_EXTERNAL_DEVICE CUDA_ERROR_INVALID_CLUSTER_SIZE CUDA_ERROR_FUNCTION_NOT_LOADED
    CUDA_ERROR_INVALID_RESOURCE_TYPE CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION CUDA_ERROR_KEY_ROTATION
    CUDA_ERROR_UNKNOWN
}

names! { cublas_name of cublasStatus_t:
    CUBLAS_STATUS_NOT_INITIALIZED CUBLAS_STATUS_ALLOC_FAILED CUBLAS_STATUS_INVALID_VALUE
    CUBLAS_STATUS_ARCH_MISMATCH CUBLAS_STATUS_MAPPING_ERROR CUBLAS_STATUS_EXECUTION_FAILED
    CUBLAS_STATUS_INTERNAL_ERROR CUBLAS_STATUS_NOT_SUPPORTED CUBLAS_STATUS_LICENSE_ERROR
}

names! { nvrtc_name of nvrtcResult:
    NVRTC_ERROR_OUT_OF_MEMORY NVRTC_ERROR_PROGRAM_CREATION_FAILURE NVRTC_ERROR_INVALID_INPUT
    NVRTC_ERROR_INVALID_PROGRAM NVRTC_ERROR_INVALID_OPTION NVRTC_ERROR_COMPILATION
    NVRTC_ERROR_BUILTIN_OPERATION_FAILURE NVRTC_ERROR_INTERNAL_ERROR NVRTC_ERROR_TIME_FILE_WRITE_FAILED
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::engine::PassError;

    use Meaning::{Lost, OutOfMemory as Oom, Refused};

    #[test]
    fn every_code_of_the_driver_that_a_decision_depends_on() {
        use CUresult::*;
        let rows = [
            (CUDA_ERROR_OUT_OF_MEMORY, 2, Oom),
            (CUDA_ERROR_DEINITIALIZED, 4, Lost),
            (CUDA_ERROR_DEVICE_UNAVAILABLE, 46, Lost),
            (CUDA_ERROR_NO_DEVICE, 100, Lost),
            (CUDA_ERROR_ECC_UNCORRECTABLE, 214, Lost),
            (CUDA_ERROR_NVLINK_UNCORRECTABLE, 220, Lost),
            (CUDA_ERROR_CONTAINED, 226, Lost),
            (CUDA_ERROR_OPERATING_SYSTEM, 304, Lost),
            (CUDA_ERROR_ILLEGAL_ADDRESS, 700, Lost),
            (CUDA_ERROR_LAUNCH_TIMEOUT, 702, Lost),
            (CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, Lost),
            (CUDA_ERROR_ASSERT, 710, Lost),
            (CUDA_ERROR_HARDWARE_STACK_ERROR, 714, Lost),
            (CUDA_ERROR_ILLEGAL_INSTRUCTION, 715, Lost),
            (CUDA_ERROR_MISALIGNED_ADDRESS, 716, Lost),
            (CUDA_ERROR_INVALID_ADDRESS_SPACE, 717, Lost),
            (CUDA_ERROR_INVALID_PC, 718, Lost),
            (CUDA_ERROR_LAUNCH_FAILED, 719, Lost),
            (CUDA_ERROR_TENSOR_MEMORY_LEAK, 721, Lost),
            (CUDA_ERROR_SYSTEM_NOT_READY, 802, Lost),
            (CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803, Lost),
            (CUDA_ERROR_MPS_CONNECTION_FAILED, 805, Lost),
            (CUDA_ERROR_MPS_RPC_FAILURE, 806, Lost),
            (CUDA_ERROR_MPS_SERVER_NOT_READY, 807, Lost),
            (CUDA_ERROR_MPS_CLIENT_TERMINATED, 810, Lost),
            (CUDA_ERROR_EXTERNAL_DEVICE, 911, Lost),
            (CUDA_ERROR_KEY_ROTATION, 916, Lost),
            (CUDA_ERROR_UNKNOWN, 999, Lost),
            (CUDA_ERROR_INVALID_VALUE, 1, Refused),
            (CUDA_ERROR_NOT_INITIALIZED, 3, Refused),
            (CUDA_ERROR_INVALID_DEVICE, 101, Refused),
            (CUDA_ERROR_INVALID_IMAGE, 200, Refused),
            (CUDA_ERROR_INVALID_CONTEXT, 201, Refused),
            (CUDA_ERROR_NO_BINARY_FOR_GPU, 209, Refused),
            (CUDA_ERROR_INVALID_PTX, 218, Refused),
            (CUDA_ERROR_UNSUPPORTED_PTX_VERSION, 222, Refused),
            (CUDA_ERROR_INVALID_HANDLE, 400, Refused),
            (CUDA_ERROR_NOT_FOUND, 500, Refused),
            // Too many registers or threads for a block: this launch only.
            (CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 701, Refused),
            (CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720, Refused),
            (CUDA_ERROR_NOT_SUPPORTED, 801, Refused),
            (CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 901, Refused),
        ];
        for (code, number, meaning) in rows {
            assert_eq!(code as u32, number);
            assert_eq!(Code::Driver(code as u32).meaning(), meaning, "{code:?}");
        }
    }

    #[test]
    fn every_status_of_cublas() {
        use cublasStatus_t::*;
        let rows = [
            (CUBLAS_STATUS_NOT_INITIALIZED, Refused),
            (CUBLAS_STATUS_ALLOC_FAILED, Oom),
            (CUBLAS_STATUS_INVALID_VALUE, Refused),
            (CUBLAS_STATUS_ARCH_MISMATCH, Refused),
            (CUBLAS_STATUS_MAPPING_ERROR, Refused),
            (CUBLAS_STATUS_EXECUTION_FAILED, Refused),
            (CUBLAS_STATUS_INTERNAL_ERROR, Refused),
            (CUBLAS_STATUS_NOT_SUPPORTED, Refused),
            (CUBLAS_STATUS_LICENSE_ERROR, Refused),
        ];
        for (status, meaning) in rows {
            assert_eq!(Code::Cublas(status as u32).meaning(), meaning, "{status:?}");
        }
    }

    #[test]
    fn an_unknown_code_is_reported_as_its_number() {
        let code = Code::Driver(987);
        assert_eq!(code.meaning(), Refused);
        assert_eq!(code.to_string(), "code 987 of the driver, which is newer than this program");
        assert_eq!(Code::Driver(700).to_string(), "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
        assert_eq!(Code::Cublas(3).to_string(), "CUBLAS_STATUS_ALLOC_FAILED (3)");
        assert_eq!(Code::Nvrtc(6).to_string(), "NVRTC_ERROR_COMPILATION (6)");
    }

    #[test]
    fn passes_end_as_their_errors_say() {
        let oom = OutOfMemory { asked: 3, free: 2, total: 9, foreign: 0 };
        assert_eq!(PassError::from(CudaError::OutOfMemory(oom)), PassError::from(oom));
        let code = Code::Driver(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32);
        let during = "run a kernel";
        assert_eq!(
            PassError::from(CudaError::Lost { during, code }),
            PassError::DeviceLost("run a kernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)".to_owned())
        );
        assert!(matches!(PassError::from(CudaError::Refused { during, code }), PassError::Failed(_)));
    }
}
