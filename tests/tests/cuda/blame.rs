//! Which job a lost CUDA device is charged to: the one whose pass ran, or none; and errors after which the worker goes on. On a
//! fake driver.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use vramq_inference::device::cuda::{Code, CudaDevice, CudaError};
use vramq_inference::device::{Device as _, Loss};
use vramq_tests::encoders::{open, until};
use vramq_tests::fake_cuda::{driver, nvml};
use vramq_tests::with_libraries;

const MIB: u64 = 1 << 20;

/// Of the fake driver, with a context.
const FREE: u64 = (1024 - 300) * MIB;

with_libraries! { [driver()?, nvml()?];
    an_illegal_address_ends_the_device: ["FAKE_CUDA_FAIL" = "cuStreamSynchronize:2:700"];
    a_trim_between_passes_takes_no_error_from_a_pass: [
        "FAKE_CUDA_FAIL" = "cuStreamSynchronize:1:700",
        "FAKE_CUDA_FOREIGN" = foreign_file()?.to_str().context("a name")?
    ];
    an_error_that_appears_while_a_pass_runs_belongs_to_the_pass: ["FAKE_CUDA_FAIL" = "cuMemPoolGetAttribute:8:700:0"];
    an_error_that_appears_between_passes_belongs_to_no_pass: ["FAKE_CUDA_FAIL" = "cuMemPoolGetAttribute:8:700:0"];
    a_context_that_ends_between_passes_belongs_to_no_pass: ["FAKE_CUDA_FAIL" = "cuCtxSetCurrent:20:700:0"];
    a_refusal_after_an_illegal_address_is_its_echo: ["FAKE_CUDA_FAIL" = "cuStreamSynchronize:1:700"];
    an_error_in_a_drop_belongs_to_no_pass: ["FAKE_CUDA_FAIL" = "cuMemFreeAsync:1:1"];
    a_call_that_is_refused_ends_nothing: ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:1:1"];
    a_code_that_came_after_this_program_is_asked_about:
        ["FAKE_CUDA_FAIL" = "cuMemAllocFromPoolAsync:1:987,cuMemFreeAsync:1:650"];
}

/// A file that says how much others hold.
fn foreign_file() -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("fake-cuda-foreign-trim"))
}

mod bodies {
    use super::*;

    fn lost(device: &CudaDevice) -> Result<Loss> {
        device.lost().context("the device is not lost")
    }

    /// Whichever thread met it first: the watching thread also binds the context, between the failed call and its report.
    fn is_illegal_address(error: CudaError) -> Result<()> {
        let is_so = matches!(error, CudaError::Lost { code: Code::Driver(700), .. });
        ensure!(is_so, "{error}");
        Ok(())
    }

    pub fn an_illegal_address_ends_the_device() -> Result<()> {
        let device = open()?;
        let arena = device.alloc_arena(MIB as usize)?;
        device.synchronize()?;
        let error = device.synchronize().err().context("no error")?;
        is_illegal_address(error)?;
        let loss = lost(&device)?;
        ensure!(!loss.is_late && loss.error == error.to_string(), "{loss:?}");
        // After the loss every call returns the same error, and drops make no further calls.
        ensure!(device.alloc(1).err() == Some(error) && device.read().err() == Some(error));
        drop(arena);
        ensure!(device.active_pass_bytes() == 0 && lost(&device)? == loss);
        Ok(())
    }

    pub fn a_trim_between_passes_takes_no_error_from_a_pass() -> Result<()> {
        let neighbour = |bytes: u64| std::fs::write(foreign_file()?, bytes.to_string()).context("write");
        neighbour(0)?;
        let device = open()?;
        let arena = device.alloc_arena(MIB as usize)?;
        device.trim();
        // Once more than the round that it was asked for in: by then it would be done.
        for bytes in [100 * MIB, 200 * MIB] {
            neighbour(bytes)?;
            until(&device, |device| device.memory().foreign == bytes)?;
        }
        ensure!(device.lost().is_none(), "{:?}", device.lost());
        let error = device.synchronize().err().context("no error")?;
        ensure!(lost(&device)? == Loss { error: error.to_string(), is_late: false }, "{:?}", device.lost());
        drop(arena);
        Ok(())
    }

    /// The error comes out in the fourth reading: the watching thread's third.
    pub fn an_error_that_appears_while_a_pass_runs_belongs_to_the_pass() -> Result<()> {
        let device = open()?;
        let arena = device.alloc_arena(MIB as usize)?;
        until(&device, |device| device.lost().is_some())?;
        ensure!(!lost(&device)?.is_late, "{:?}", device.lost());
        drop(arena);
        Ok(())
    }

    pub fn an_error_that_appears_between_passes_belongs_to_no_pass() -> Result<()> {
        let device = open()?;
        until(&device, |device| device.lost().is_some())?;
        ensure!(lost(&device)?.is_late, "{:?}", device.lost());
        Ok(())
    }

    pub fn a_context_that_ends_between_passes_belongs_to_no_pass() -> Result<()> {
        let device = open()?;
        until(&device, |device| device.lost().is_some())?;
        let loss = lost(&device)?;
        ensure!(loss.is_late && loss.error.starts_with("bind the context"), "{loss:?}");
        Ok(())
    }

    pub fn a_refusal_after_an_illegal_address_is_its_echo() -> Result<()> {
        let device = open()?;
        let arena = device.alloc_arena(MIB as usize)?;
        // An error that some calls return in a context that an earlier kernel has ended.
        let error = device.failed("launch a kernel", 0, Code::Driver(400));
        is_illegal_address(error)?;
        // The arena's drop meets the same error, and does not acquit the pass.
        drop(arena);
        ensure!(lost(&device)? == Loss { error: error.to_string(), is_late: false }, "{:?}", device.lost());
        Ok(())
    }

    pub fn an_error_in_a_drop_belongs_to_no_pass() -> Result<()> {
        let device = open()?;
        drop(device.alloc_arena(MIB as usize)?);
        let loss = lost(&device)?;
        ensure!(loss.is_late && loss.error == "give memory back: CUDA_ERROR_INVALID_VALUE (1)", "{loss:?}");
        ensure!(matches!(device.alloc(1), Err(CudaError::Lost { .. })));
        Ok(())
    }

    pub fn a_call_that_is_refused_ends_nothing() -> Result<()> {
        let device = open()?;
        let error = device.alloc(MIB as usize).err().context("no error")?;
        ensure!(matches!(error, CudaError::Refused { .. }), "{error}");
        ensure!(device.lost().is_none() && device.memory().free == FREE);
        drop(device.alloc(MIB as usize)?);
        Ok(())
    }

    pub fn a_code_that_came_after_this_program_is_asked_about() -> Result<()> {
        let device = open()?;
        let error = device.alloc(MIB as usize).err().context("no error")?;
        ensure!(error.to_string().contains("code 987 of the driver"), "{error}");
        ensure!(matches!(error, CudaError::Refused { .. }) && device.lost().is_none(), "{error}");
        drop(device.alloc(MIB as usize)?);
        ensure!(lost(&device)?.error.contains("code 650 of the driver"), "{:?}", device.lost());
        Ok(())
    }
}
