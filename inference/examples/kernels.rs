//! Compiles the encoder's CUDA kernels with NVRTC, without a GPU.
//!
//! `kernels FOLDER-OF-NVRTC embed TO` writes the PTX that is embedded in the worker (for scripts/kernels); `kernels
//! FOLDER-OF-NVRTC report` prints the registers and shared memory of each kernel on each architecture.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use flate2::{Compression, GzBuilder};
use vramq_inference::device::cuda::Libraries;
use vramq_inference::engine::encoder::cuda::ElementType;
use vramq_inference::engine::encoder::cuda::compile::{self, Target, compile};

/// What comes along: for each type its oldest device, and for f16 also the first with asynchronous copies.
const EMBEDDED: [(ElementType, (u32, u32)); 4] = [
    (ElementType::F32, (7, 5)),
    (ElementType::F16, (7, 5)),
    (ElementType::F16, (8, 0)),
    (ElementType::Bf16, (8, 0)),
];

/// The PTX version that the text declares: that of CUDA 11.4, the oldest whose drivers this program supports. NVRTC declares its
/// own version, which older drivers reject, although the kernels need nothing newer than 7.0.
const PTX_VERSION: &str = ".version 7.4";

/// The architectures of a report.
const ARCHITECTURES: [(u32, u32); 7] = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (folder, command) = match &args[..] {
        [folder, command @ ..] if !command.is_empty() => (folder, command),
        _ => anyhow::bail!("usage: kernels FOLDER-OF-NVRTC embed TO | report"),
    };
    // As for a driver of any version.
    let libraries = Libraries::open(i32::MAX, Some(Path::new(folder)));
    let nvrtc = libraries.nvrtc.context("open NVRTC")?;
    eprintln!("NVRTC {:?} at {}", compile::version(), nvrtc.path.display());
    match command {
        [word, to] if word == "embed" => embed(Path::new(to)),
        [word] if word == "report" => report(),
        _ => anyhow::bail!("{command:?} is neither `embed TO` nor `report`"),
    }
}

fn embed(to: &Path) -> Result<()> {
    let mut hashes = Vec::new();
    for (element, (major, minor)) in EMBEDDED {
        let code = compile(element, Target::Ptx((major, minor)), &[])?.code;
        let text = String::from_utf8(code).context("PTX is text")?;
        let text: Vec<&str> = text
            .trim_end_matches('\0')
            .lines()
            .map(|line| if line.starts_with(".version ") { PTX_VERSION } else { line })
            .filter(|line| !line.is_empty() && !line.starts_with("//"))
            .collect();
        ensure!(text.contains(&PTX_VERSION), "no .version in the PTX of {element}");
        let path = to.join(format!("{element}-{major}{minor}.ptx.gz"));
        // No name and no time in the file: the same text gives the same bytes.
        let mut packed = GzBuilder::new().write(Vec::new(), Compression::best());
        packed.write_all((text.join("\n") + "\n").as_bytes())?;
        std::fs::write(&path, packed.finish()?).with_context(|| format!("write {}", path.display()))?;
        let line = format!("{}  {element}\n", compile::source_hash(element));
        if !hashes.contains(&line) {
            hashes.push(line);
        }
    }
    let path = to.join("sources.sha256");
    std::fs::write(&path, hashes.concat()).with_context(|| format!("write {}", path.display()))
}

fn report() -> Result<()> {
    println!(
        "{:<6} {:<8} {:<24} {:>9} {:>12} {:>11}",
        "type", "target", "kernel", "registers", "shared", "spills"
    );
    for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
        for capability in ARCHITECTURES {
            let target = Target::Cubin(capability);
            let Ok(compiled) = compile(element, target, &["--ptxas-options=-v"]) else {
                println!("{element:<6} {target:<8} does not compile");
                continue;
            };
            for kernel in compile::usage(&compiled.log) {
                println!(
                    "{element:<6} {:<8} {:<24} {:>9} {:>12} {:>11}",
                    target.to_string(),
                    kernel.name,
                    kernel.registers,
                    kernel.shared_bytes,
                    kernel.spilled_bytes
                );
            }
        }
    }
    Ok(())
}
