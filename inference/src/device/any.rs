//! A device of either kind (CPU or CUDA), for code that runs on both.

use std::sync::Arc;

use vramq_core::device::PassError;

use super::Device;
use super::cpu::{Buffer, CpuDevice};
use super::cuda::{CudaDevice, CudaError, CudaMemory};
use super::fault::Fault;

/// A device that is ready.
#[derive(Clone, Debug)]
pub enum AnyDevice {
    Cpu(Arc<CpuDevice>),
    Cuda(Arc<CudaDevice>),
}

/// The arena of a pass on it; dropping it gives the memory back.
#[derive(Debug)]
pub enum Arena {
    Cpu(Buffer),
    Cuda(CudaMemory),
}

impl AnyDevice {
    /// Makes allocations of passes fail as the fault says. May be called once.
    pub fn inject(&self, fault: Fault) {
        match self {
            Self::Cpu(device) => device.inject(fault),
            Self::Cuda(device) => device.inject(fault),
        }
    }

    /// Reads the memory figures now, for callers that compute with them. Waits for the device.
    ///
    /// # Errors
    /// The device is lost.
    pub fn read(&self) -> Result<(), CudaError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(device) => device.read().map(drop),
        }
    }

    /// The arena of a pass, uninitialised.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn alloc_arena(&self, bytes: usize) -> Result<Arena, PassError> {
        Ok(match self {
            Self::Cpu(device) => Arena::Cpu(device.alloc_arena(bytes)?),
            Self::Cuda(device) => Arena::Cuda(device.alloc_arena(bytes)?),
        })
    }

    /// The device as the event loop and admission see it.
    pub fn shared(&self) -> Arc<dyn Device> {
        match self {
            Self::Cpu(device) => Arc::<CpuDevice>::clone(device),
            Self::Cuda(device) => Arc::<CudaDevice>::clone(device),
        }
    }
}
