//! Every kernel of the encoder compiles for every architecture, with NVIDIA's compiler, as the worker does it. No GPU is needed.
//!
//! What the compiler has said of a source, and what passed the checks, is kept in the target folder, as Cargo keeps what it has compiled:
//! another compiler, other kernels, other options or another way to call the compiler are compiled anew. One target is compiled in every run,
//! and `make nightly` compiles all.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context as _, Result, ensure};
use vramq_inference::device::cuda::Libraries;
use vramq_inference::engine::encoder::cuda::ElementType;
use vramq_inference::engine::encoder::cuda::compile::{CompileError, Target, compile, source_hash, usage};
use vramq_tests::encoders::cache;
use vramq_tests::setup::{Failed, full};

const ALL: [(u32, u32); 7] = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];

/// What is compiled in every run: a call of the compiler that no longer works shows, whatever broke it.
const FRESH: (ElementType, (u32, u32)) = (ElementType::F32, (9, 0));

/// The code that calls the compiler.
const CALLER: &str = include_str!("../../../inference/src/engine/encoder/cuda/compile.rs");

/// The assembler says what each kernel takes.
const OPTIONS: &[&str] = &["--ptxas-options=-v"];

/// What a block may have without asking for more, and what a multiprocessor has: CUDA C++ programming guide, technical
/// specifications per compute capability.
const SHARED_MAX: u32 = 48 << 10;
const REGISTERS: u32 = 64 << 10;

#[test]
fn kernels_in_f32_compile() -> Result<(), Failed> {
    Ok(compiles(ElementType::F32, &ALL)?)
}

#[test]
fn kernels_in_f16_compile() -> Result<(), Failed> {
    Ok(compiles(ElementType::F16, &ALL)?)
}

#[test]
fn kernels_in_bf16_compile() -> Result<(), Failed> {
    Ok(compiles(ElementType::Bf16, &ALL[1..])?)
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_reported() -> Result<(), Failed> {
    Ok(unknown()?)
}

/// Opens NVRTC in the folder of scripts/setup. The file of the library.
fn open_nvrtc() -> Result<PathBuf> {
    let folder = std::env::var_os("VRAMQ_TEST_NVRTC")
        .context("VRAMQ_TEST_NVRTC is not set: `make test` sets it; by hand: scripts/setup nvrtc, then .cache/nvrtc/lib")?;
    let folder = PathBuf::from(folder);
    let found = Libraries::open(i32::MAX, Some(&folder)).nvrtc.context("open NVRTC")?;
    ensure!(found.path.starts_with(&folder), "the tests are for another one than {}", found.path.display());
    Ok(found.path.clone())
}

fn compiles(element: ElementType, architectures: &[(u32, u32)]) -> Result<()> {
    let nvrtc = open_nvrtc()?;
    for capability in architectures {
        let target = Target::Cubin(*capability);
        let kept = kept(&nvrtc, element, target)?;
        if !full() && (element, *capability) != FRESH && kept.exists() {
            check(element, target, &std::fs::read_to_string(kept)?)?;
            continue;
        }
        let compiled = compile(element, target, OPTIONS)?;
        ensure!(compiled.code.starts_with(b"\x7fELF"), "{element} for {target} is no machine code");
        check(element, target, &compiled.log)?;
        keep(&kept, &compiled.log)?;
    }
    Ok(())
}

/// The kernels are those of the sources, and each fits into a block and a multiprocessor.
fn check(element: ElementType, target: Target, log: &str) -> Result<()> {
    let kernels = usage(log);
    let mut found: Vec<_> = kernels.iter().map(|kernel| kernel.name.clone()).collect();
    found.sort();
    ensure!(found == names(element), "{element} for {target}: {found:?}");
    for kernel in kernels {
        // No block is larger than 1024 threads; those of so many registers are of 256.
        let threads = if kernel.registers > 64 { 256 } else { 1024 };
        ensure!(kernel.spilled_bytes == 0, "{target}: {kernel:?}");
        ensure!(kernel.shared_bytes <= SHARED_MAX, "{target}: {kernel:?}");
        ensure!(kernel.registers * threads <= REGISTERS, "{target}: {kernel:?}");
    }
    Ok(())
}

/// Where the assembler's log is kept, by all that it depends on.
fn kept(nvrtc: &Path, element: ElementType, target: Target) -> Result<PathBuf> {
    let library = std::fs::metadata(nvrtc)?;
    let mut hash = DefaultHasher::new();
    (source_hash(element), CALLER, OPTIONS).hash(&mut hash);
    (library.len(), library.modified()?.duration_since(UNIX_EPOCH)?).hash(&mut hash);
    Ok(cache()?.with_file_name("logs").join(format!("{element}-{target}-{:016x}", hash.finish())))
}

fn keep(path: &Path, log: &str) -> Result<()> {
    let folder = path.parent().context("a file without a folder")?;
    std::fs::create_dir_all(folder)?;
    // No reader sees half of it.
    let mut fresh = tempfile::NamedTempFile::new_in(folder)?;
    fresh.write_all(log.as_bytes())?;
    fresh.persist(path)?;
    Ok(())
}

/// The kernels that there are by their sources.
fn names(element: ElementType) -> Vec<String> {
    let linear: &[&str] = match element {
        ElementType::F32 => &["linear_small", "linear_small_gelu"],
        _ => &["linear_small", "linear_small_gelu", "linear_large", "linear_large_gelu"],
    };
    let others = ["embed", "add_norm", "rotate", "bias_gelu", "gate", "pool"];
    let attention = ["attention_16", "attention_32", "attention_64", "attention_128", "attention_256"];
    let mut names: Vec<_> =
        others.iter().chain(&attention).chain(linear).map(|name| format!("{name}_{element}")).collect();
    names.sort();
    names
}

fn unknown() -> Result<()> {
    open_nvrtc()?;
    let refused = compile(ElementType::F32, Target::Cubin((99, 9)), &[]).err().context("it compiles")?;
    ensure!(matches!(refused, CompileError::UnknownTarget { .. }), "{refused:?}");
    ensure!(refused.to_string().contains("does not know sm_999"), "{refused}");
    Ok(())
}
