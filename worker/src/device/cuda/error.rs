//! What an error code of CUDA means for the device and for the pass that met it. Codes only, never texts.

use std::fmt;

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUresult;
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys::nvrtcResult;

use crate::device::OutOfMemory;

/// How a call to CUDA can fail, as far as anyone decides by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The device has no room: a smaller pass cures it.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The context is of no use any more, or the device is: only a new process may be able to go on.
    #[error("{during}: {code}")]
    Lost { during: &'static str, code: Code },
    /// This call was refused, and the device is well, as far as the driver says: a fault of the program, or of what it was
    /// built for.
    #[error("{during}: {code}")]
    Refused { during: &'static str, code: Code },
}

/// A code of one of CUDA's libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    Driver(CUresult),
    Cublas(cublasStatus_t),
    Nvrtc(nvrtcResult),
}

/// By its name in the headers: asking the driver for a text would be one more call to a driver that has just failed.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver(code) => write!(f, "{code:?} ({})", *code as u32),
            Self::Cublas(code) => write!(f, "{code:?} ({})", *code as u32),
            Self::Nvrtc(code) => write!(f, "{code:?} ({})", *code as u32),
        }
    }
}

impl From<DriverError> for Code {
    fn from(DriverError(code): DriverError) -> Self {
        Self::Driver(code)
    }
}

impl From<CublasError> for Code {
    fn from(CublasError(code): CublasError) -> Self {
        Self::Cublas(code)
    }
}

impl From<NvrtcError> for Code {
    fn from(NvrtcError(code): NvrtcError) -> Self {
        Self::Nvrtc(code)
    }
}

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
            Self::Cublas(code) => cublas(code),
            // NVRTC compiles on the host: even its OUT_OF_MEMORY is the host's memory.
            Self::Nvrtc(_) => Meaning::Refused,
        }
    }
}

/// By the driver API's reference, section "Data types used by CUDA driver", `CUresult`. "Lost" are the codes of which it says
/// that the process has to be terminated and relaunched, those that tell of a device or a driver that is gone or
/// broken, and those that nobody can explain.
fn driver(code: CUresult) -> Meaning {
    use CUresult::*;
    match code {
        CUDA_ERROR_OUT_OF_MEMORY => Meaning::OutOfMemory,
        // A kernel did something that ends its context.
        CUDA_ERROR_CONTAINED
        | CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_TENSOR_MEMORY_LEAK
        // The hardware failed, or was taken away.
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_NO_DEVICE
        | CUDA_ERROR_EXTERNAL_DEVICE
        // The driver, or the daemon between it and this process, ended or was replaced under it.
        | CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_SYSTEM_NOT_READY
        | CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUDA_ERROR_OPERATING_SYSTEM
        | CUDA_ERROR_MPS_CONNECTION_FAILED
        | CUDA_ERROR_MPS_RPC_FAILURE
        | CUDA_ERROR_MPS_SERVER_NOT_READY
        | CUDA_ERROR_MPS_CLIENT_TERMINATED
        | CUDA_ERROR_KEY_ROTATION
        | CUDA_ERROR_UNKNOWN => Meaning::Lost,
        _ => Meaning::Refused,
    }
}

fn cublas(code: cublasStatus_t) -> Meaning {
    use cublasStatus_t::*;
    match code {
        CUBLAS_STATUS_ALLOC_FAILED => Meaning::OutOfMemory,
        // The library does not say whether a kernel of its own took the context with it.
        _ => Meaning::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::engine::PassError;

    use Meaning::{Lost, OutOfMemory as Oom, Refused};

    #[test]
    fn every_code_of_the_driver_that_anyone_decides_by() {
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
            assert_eq!(Code::from(DriverError(code)).meaning(), meaning, "{code:?}");
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
            assert_eq!(Code::from(CublasError(status)).meaning(), meaning, "{status:?}");
        }
    }

    #[test]
    fn the_compiler_never_speaks_of_the_device() {
        use nvrtcResult::*;
        for result in [NVRTC_ERROR_OUT_OF_MEMORY, NVRTC_ERROR_COMPILATION, NVRTC_ERROR_INTERNAL_ERROR] {
            assert_eq!(Code::from(NvrtcError(result)).meaning(), Refused, "{result:?}");
        }
    }

    #[test]
    fn passes_end_as_their_errors_say() {
        let oom = OutOfMemory { asked: 3, free: 2, total: 9, foreign: 0 };
        assert_eq!(PassError::from(CudaError::OutOfMemory(oom)), PassError::OutOfMemory(oom));
        let code = Code::Driver(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let during = "run a kernel";
        assert_eq!(
            PassError::from(CudaError::Lost { during, code }),
            PassError::DeviceLost("run a kernel: CUDA_ERROR_ILLEGAL_ADDRESS (700)".to_owned())
        );
        assert!(matches!(PassError::from(CudaError::Refused { during, code }), PassError::Failed(_)));
    }
}
