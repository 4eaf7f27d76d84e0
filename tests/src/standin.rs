//! The stand-in for the NVIDIA driver, compiled once, and tests that run in a process of their own that finds it.

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::programs::root;

/// Tells a test that it is already in its own process.
const INSIDE: &str = "VRAMQ_TEST_STANDIN";

const FLAGS: &[&str] =
    &["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared"];

/// A folder with a `libcuda.so.1` that is the stand-in.
///
/// # Errors
/// There is no C compiler, or the sources are wrong.
pub fn driver() -> Result<PathBuf> {
    build("libcuda.so.1", &root().join("tests/standin"), &[])
}

/// The same of an old driver, without some function.
///
/// # Errors
/// As for [`driver`].
pub fn driver_without(symbol: &str) -> Result<PathBuf> {
    build("libcuda.so.1", &root().join("tests/standin"), &[&format!("-D{symbol}={symbol}_is_not_here")])
}

/// A folder with a `libnvidia-ml.so.1` that is the stand-in.
///
/// # Errors
/// As for [`driver`].
pub fn nvml() -> Result<PathBuf> {
    build("libnvidia-ml.so.1", &root().join("tests/standin/nvml"), &["-ldl"])
}

/// A folder with a library that is none.
///
/// # Errors
/// The system has no room for a small file.
pub fn broken_driver() -> Result<PathBuf> {
    let folder = target()?.join("standin/broken");
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
    let mut files: Vec<_> =
        std::fs::read_dir(sources)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "c" || extension == "h"));
    files.sort();
    let mut hash = DefaultHasher::new();
    (FLAGS, flags).hash(&mut hash);
    for file in &files {
        std::fs::read(file)?.hash(&mut hash);
    }
    let folder = target()?.join(format!("standin/{:016x}", hash.finish()));
    if folder.join(name).exists() {
        return Ok(folder);
    }
    std::fs::create_dir_all(&folder)?;
    // Tests in other processes may be at it, too: whoever is last replaces the same by the same.
    let fresh = tempfile::NamedTempFile::new_in(&folder)?.into_temp_path();
    let output = Command::new("cc")
        .args(FLAGS)
        .args(files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "c")))
        .args(flags)
        .arg(format!("-Wl,-soname,{name}"))
        .args(["-lpthread", "-o"])
        .arg(&fresh)
        .output()
        .context("run cc, which scripts/setup installs")?;
    ensure!(output.status.success(), "compile {name}: {}", String::from_utf8_lossy(&output.stderr));
    fresh.persist(folder.join(name))?;
    Ok(folder)
}

/// The folder that the tests were built in.
fn target() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests run from a target folder")?.to_owned())
}

/// Runs a test's body in a process of its own, with a library path and settings of the stand-in: cudarc opens libraries once
/// for a process, and the loader reads its path once.
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
    let output = Command::new(std::env::current_exe()?)
        .args([test, "--exact", "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .env("LD_LIBRARY_PATH", library_path(path)?)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(settings.iter().copied())
        .output()?;
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{told}");
    ensure!(told.contains("1 passed"), "the test {test} did not run: {told}");
    Ok(())
}
