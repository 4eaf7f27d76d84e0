//! Checks and measures the CUDA device of this machine: what `tests/gpu/run` calls.
//!
//!   vramq-gpu check               all checks of the device, as a table in Markdown; ends with 1 if one fails, with 4 if there
//!                                 is no device
//!   vramq-gpu encoder MODEL...    compares the encoder with transformers' vectors of committed token ids, and for these models with
//!                                 the CPU's
//!   vramq-gpu pressure MODEL      runs passes beside a process that holds almost all memory
//!   vramq-gpu measure MODEL...    measures the device's matrix products, and the share that the encoder reaches
//!   vramq-gpu texts MODEL FILE    measures texts, one a line, tokenising included
//!   vramq-gpu pass MODEL ELEMENT PRODUCTS TOKENS
//!                                 runs a pass for a profiler; PRODUCTS are `library`, `timed` or `own`
//!   vramq-gpu products            names the PRODUCTS that there are here, one a line
//!   vramq-gpu draw SHAPE FOLDER   writes a model with random weights
//!   vramq-gpu hold MIB  holds memory of the device until its standard input ends
//!   vramq-gpu crash     runs a kernel that writes nowhere, and tells what became of the device
//!
//! A MODEL is a folder, or `tiny`, `minilm`, `base` or `large` with random weights. `--short` as the first argument shortens a
//! run in the emulation to seconds; its measurements then mean nothing. The device is the first one that `CUDA_VISIBLE_DEVICES`
//! shows.

mod checks;
mod encoder;
mod figures;
mod kernel;
mod kind;
mod measure;
mod model;
mod pass;
mod pressure;
mod references;
mod texts;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use vramq_inference::device::cuda::{CudaDevice, Lock, OpenError, Options, Which};
use vramq_tests::random::Random;

use kind::Kind;

/// How much of everything.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    pub is_short: bool,
}

impl Scale {
    /// Where compiled kernels stay, for the runs that follow.
    pub fn cache(self) -> Option<PathBuf> {
        std::env::var_os("VRAMQ_GPU_KERNELS").map(PathBuf::from)
    }
}

fn main() -> ExitCode {
    let mut arguments: Vec<_> = std::env::args().skip(1).collect();
    let is_short = arguments.first().is_some_and(|first| first == "--short");
    arguments.drain(..usize::from(is_short));
    let scale = Scale { is_short };
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    if let ["draw", shape, folder] = arguments[..] {
        return ended(model::draw_into(shape, Path::new(folder), &mut Random::new(4)));
    }
    let device = match open(None) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("vramq-gpu: {error}");
            return ExitCode::from(4);
        }
    };
    ended(match arguments[..] {
        ["check"] => checks::run(&device),
        ["encoder", ref models @ ..] => references::run(&device, scale)
            .and_then(|refers| Ok(encoder::run(&device, models, scale)? && refers)),
        ["pressure", model] => pressure::run(&device, model, scale),
        ["measure", ref models @ ..] => measure::run(&device, models, scale),
        ["pass", model, element, products, tokens] => {
            pass::run(&device, model, [element, products, tokens], scale)
        }
        ["products"] => {
            Kind::all(&device).iter().for_each(|kind| println!("{}", kind.word()));
            Ok(true)
        }
        ["texts", model, file] => texts::run(&device, model, file, scale),
        ["hold", mib] => hold(&device, mib).map(|()| true),
        ["crash"] => kernel::crash(&device).map(|()| true),
        _ => Err(anyhow::anyhow!(
            "usage: vramq-gpu [--short] check | encoder MODEL... | pressure MODEL | measure MODEL... | texts MODEL FILE | \
             pass MODEL ELEMENT PRODUCTS TOKENS | products | draw SHAPE FOLDER | hold MIB | crash"
        )),
    })
}

fn ended(done: Result<bool>) -> ExitCode {
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
    CudaDevice::open(&Options { which: Which::Index(0), cap, lock: Lock::None, libraries: None })
}

fn hold(device: &Arc<CudaDevice>, mib: &str) -> Result<()> {
    let mib: usize = mib.parse().context("MIB is not a number")?;
    let _held = device.alloc(mib << 20)?;
    println!("holding");
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    if !rest.is_empty() {
        bail!("nothing was expected on standard input");
    }
    Ok(())
}
