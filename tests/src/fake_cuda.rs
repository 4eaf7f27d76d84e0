//! Compiles the fake NVIDIA driver once, and runs tests in separate processes that load it.

use std::ffi::OsString;
use std::fs::File;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::programs::{root, target};

/// Tells a test that it is already in its own process.
const INSIDE: &str = "VRAMQ_TEST_FAKE_CUDA";

const FLAGS: &[&str] =
    &["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"];

/// A folder with a `libcuda.so.1` that is the fake.
///
/// # Errors
/// There is no C compiler, or the sources are wrong.
pub fn driver() -> Result<PathBuf> {
    build("libcuda.so.1", &root().join("tests/fake_cuda"), &[])
}

/// Compiler flags of the emulation. It checks kernels by the code that the compiler generates from them: see access.cpp.
const CXX_FLAGS: &[&str] =
    &["-std=c++20", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden"];
const KERNEL_FLAGS: &[&str] = &[
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-fsanitize=thread",
    "-fsanitize=alignment",
    "--param=tsan-instrument-func-entry-exit=0",
];

/// Flags for the units of this CPU, with which a fused multiply-add is an instruction and no call. The compiler fuses nothing by itself.
fn units() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return &["-mavx2", "-mfma", "-ffp-contract=off"];
    }
    &["-ffp-contract=off"]
}

/// A driver that runs the encoder's kernels on the CPU, and fails operations that would fail on a GPU.
///
/// # Errors
/// There is no C++ compiler, or the sources are wrong.
pub fn gpu() -> Result<PathBuf> {
    let objects = emulation("kernels")?;
    let flags: Vec<&str> = objects.iter().map(String::as_str).chain(["-lstdc++", "-lm"]).collect();
    build("libcuda.so.1", &root().join("tests/fake_cuda"), &flags)
}

/// A program that runs kernels with mistakes in the same emulation.
///
/// # Errors
/// As for [`gpu`].
pub fn mistakes() -> Result<PathBuf> {
    let objects = emulation("mistakes")?;
    let flags: Vec<&str> = objects.iter().map(String::as_str).collect();
    Ok(compiled("c++", "mistakes", &[], &[], &flags)?.join("mistakes"))
}

/// The emulation's objects and those of some kernels.
fn emulation(kernels: &str) -> Result<Vec<String>> {
    let folder = root().join("tests/fake_cuda/emulation");
    let sources = root().join("inference/src/engine/encoder/kernels");
    let beside = [files(&folder, &["h"])?, files(&sources, &["cu", "cuh"])?].concat();
    let include = format!("-I{}", sources.display());
    let object = |name: &str, own: &[&str]| -> Result<String> {
        let flags = [CXX_FLAGS, units(), own, &[include.as_str(), "-c"]].concat();
        let object = format!("{name}.o");
        let folder = compiled("c++", &object, &[folder.join(format!("{name}.cpp"))], &beside, &flags)?;
        Ok(folder.join(object).display().to_string())
    };
    let mut objects = vec![object(kernels, KERNEL_FLAGS)?];
    for name in ["emulation", "instructions", "access", "fiber", "numbers"] {
        objects.push(object(name, &["-O3"])?);
    }
    Ok(objects)
}

/// The same of an old driver, without some function.
///
/// # Errors
/// As for [`driver`].
pub fn driver_without(symbol: &str) -> Result<PathBuf> {
    build("libcuda.so.1", &root().join("tests/fake_cuda"), &[&format!("-D{symbol}={symbol}_is_not_here")])
}

/// A folder with a `libnvidia-ml.so.1` that is the fake.
///
/// # Errors
/// As for [`driver`].
pub fn nvml() -> Result<PathBuf> {
    build("libnvidia-ml.so.1", &root().join("tests/fake_cuda/nvml"), &["-ldl"])
}

/// A folder with a `libcublasLt.so.13` that is the fake.
///
/// # Errors
/// As for [`driver`].
pub fn cublaslt() -> Result<PathBuf> {
    build("libcublasLt.so.13", &root().join("tests/fake_cuda/cublaslt"), &["-O2", "-ldl"])
}

/// A folder with a copy of a library under another name, as toolkits have them besides those with a version.
///
/// # Errors
/// The library is not there.
pub fn copied(library: &Path, name: &str) -> Result<PathBuf> {
    let folder = target()?.join("fake_cuda/copies");
    std::fs::create_dir_all(&folder)?;
    // Tests in other processes may copy it, too: the last one replaces equal bytes.
    let fresh = tempfile::NamedTempFile::new_in(&folder)?.into_temp_path();
    std::fs::copy(library, &fresh)?;
    let own = folder.join(name);
    std::fs::create_dir_all(&own)?;
    fresh.persist(own.join(name))?;
    Ok(own)
}

/// A folder with a library that is none.
///
/// # Errors
/// The system has no room for a small file.
pub fn broken_driver() -> Result<PathBuf> {
    let folder = target()?.join("fake_cuda/broken");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("libcuda.so.1"), "no library")?;
    Ok(folder)
}

/// Where the loader looks first, if these folders are to be found.
///
/// # Errors
/// A folder's name has a colon.
pub fn library_path(folders: &[PathBuf]) -> Result<OsString> {
    Ok(std::env::join_paths(folders)?)
}

fn build(name: &str, sources: &Path, flags: &[&str]) -> Result<PathBuf> {
    let soname = format!("-Wl,-soname,{name}");
    let flags = [FLAGS, flags, &[soname.as_str(), "-lpthread"]].concat();
    compiled("cc", name, &files(sources, &["c"])?, &files(sources, &["h"])?, &flags)
}

/// The files of a folder with one of these extensions, in order.
fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut files: Vec<_> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|own| extensions.iter().any(|known| own == *known)));
    files.sort();
    Ok(files)
}

/// A folder with the file `name`, made of `sources`, which include `beside`; as it is if it has been made of the same
/// before.
fn compiled(
    compiler: &str,
    name: &str,
    sources: &[PathBuf],
    beside: &[PathBuf],
    flags: &[&str],
) -> Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    (compiler, flags).hash(&mut hash);
    for file in sources.iter().chain(beside) {
        std::fs::read(file)?.hash(&mut hash);
    }
    let folder = target()?.join(format!("fake_cuda/{:016x}", hash.finish()));
    if folder.join(name).exists() {
        return Ok(folder);
    }
    std::fs::create_dir_all(&folder)?;
    // Tests in other processes need it, too: one of them compiles, which takes ten seconds, and the others wait. The system unlocks the
    // file if the test is killed.
    let lock = File::create(folder.join("lock"))?;
    lock.lock().context("lock a file")?;
    if folder.join(name).exists() {
        return Ok(folder);
    }
    let fresh = tempfile::NamedTempFile::new_in(&folder)?.into_temp_path();
    // Libraries come after what needs them.
    let (libraries, options): (Vec<&str>, Vec<&str>) = flags.iter().partition(|flag| flag.starts_with("-l"));
    let output = Command::new(compiler)
        .args(options)
        .args(sources)
        .args(libraries)
        .arg("-o")
        .arg(&fresh)
        .output()
        .with_context(|| format!("run {compiler}, which scripts/setup installs"))?;
    ensure!(output.status.success(), "compile {name}: {}", String::from_utf8_lossy(&output.stderr));
    fresh.persist(folder.join(name))?;
    Ok(folder)
}

/// Runs a test's body in a process of its own, with a library path and settings of the fake driver: libraries are opened once
/// for a process, and the loader reads its path once. `test` is its full name, from `module_path!` on.
///
/// # Errors
/// The body's.
pub fn alone(
    test: &str,
    path: &[PathBuf],
    settings: &[(&str, &str)],
    body: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    // `module_path!` begins with the crate's name; the test harness's names do not.
    let test = test.split_once("::").map_or(test, |(_crate, name)| name);
    let output = Command::new(std::env::current_exe()?)
        .args([test, "--exact", "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .env("LD_LIBRARY_PATH", library_path(path)?)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(settings.iter().copied())
        .output()?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{text}");
    ensure!(text.contains("1 passed"), "the test {test} did not run: {text}");
    Ok(())
}

/// Bytes that this process has allocated of the fake driver, and not freed.
///
/// # Errors
/// The driver is not loaded.
pub fn outstanding() -> Result<usize> {
    exported("fake_cuda_outstanding")
}

/// Bytes of all allocations of this process so far, freed or not.
///
/// # Errors
/// The driver is not loaded.
pub fn allocated() -> Result<usize> {
    exported("fake_cuda_allocated")
}

/// A number that the fake driver exports as a function.
fn exported(name: &str) -> Result<usize> {
    // SAFETY: opening the library again runs nothing, and both functions are as in tests/fake_cuda/memory.c.
    unsafe {
        let library = libloading::Library::new("libcuda.so.1")?;
        let number: libloading::Symbol<'_, unsafe extern "C" fn() -> usize> = library.get(name)?;
        Ok(number())
    }
}
