//! Checks and measures the CUDA device of this machine: what `tests/gpu/run` calls.
//!
//!   vramq-gpu check     all checks, as a table in Markdown; ends with 1 if one fails, with 4 if there is no device
//!   vramq-gpu encoder [--measure] MODEL...
//!                       compares the encoder with the CPU's, and measures it: `tiny`, `minilm`, `base`, `large` with random
//!                       weights, or folders
//!   vramq-gpu hold MIB  holds memory of the device until its standard input ends
//!   vramq-gpu crash     runs a kernel that writes nowhere, and tells what became of the device
//!
//! The device is the first one that `CUDA_VISIBLE_DEVICES` shows.

mod checks;
mod encoder;
mod kernel;
mod model;

use std::io::Read as _;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use vramq_worker::device::cuda::{CudaDevice, OpenError, Options, Which};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let device = match open(None) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("vramq-gpu: {error}");
            return ExitCode::from(4);
        }
    };
    let done = match arguments[..] {
        ["check"] => checks::run(&device),
        ["encoder", "--measure", ref models @ ..] => encoder::run(&device, models, true),
        ["encoder", ref models @ ..] => encoder::run(&device, models, false),
        ["hold", mib] => hold(&device, mib).map(|()| true),
        ["crash"] => kernel::crash(&device).map(|()| true),
        _ => Err(anyhow::anyhow!("usage: vramq-gpu check | encoder [--measure] MODEL... | hold MIB | crash")),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vramq-gpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The device, or a part of it.
fn open(cap: Option<u64>) -> Result<Arc<CudaDevice>, OpenError> {
    CudaDevice::open(&Options { which: Which::Index(0), cap, lane: None, libraries: None })
}

fn hold(device: &Arc<CudaDevice>, mib: &str) -> Result<()> {
    let mib: usize = mib.parse().context("MIB is no number")?;
    let _held = device.alloc(mib << 20)?;
    println!("holding");
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    if !rest.is_empty() {
        bail!("nothing was expected on standard input");
    }
    Ok(())
}
