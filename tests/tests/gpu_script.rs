//! `tests/gpu/run`: that it checks what it says, and fails where there is nothing to check.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use tokio::process::Command;
use vramq_tests::programs::{program, root};
use vramq_tests::setup::Failed;
use vramq_tests::standin::{broken_driver, driver, library_path, nvml};
use vramq_tests::worker::{Ended, run_to_end};

#[test]
fn on_a_device_all_checks_hold() -> Result<(), Failed> {
    Ok(run(&[("STANDIN_FAIL", "cuLaunchKernel:1:700")], |ended, reports| {
        ensure!(ended.code == Some(0), "{ended:?}");
        ensure!(reports.len() == 1 && reports[0].contains("All checks hold."), "{reports:?}");
        for told in ["Stand-in 0", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "10,000", "cuda:0", "The doctor"] {
            ensure!(reports[0].contains(told), "{told} is not in {}", reports[0]);
        }
        ensure!(!reports[0].contains("**no**"), "{}", reports[0]);
        Ok(())
    })?)
}

#[test]
fn a_check_that_does_not_hold_is_told() -> Result<(), Failed> {
    // Launches succeed and do nothing: no address is illegal.
    Ok(run(&[("STANDIN_FAIL", "cuLaunchKernel:1:1")], |ended, reports| {
        ensure!(ended.code == Some(1), "{ended:?}");
        ensure!(reports.len() == 1 && reports[0].contains("Not all checks hold"), "{reports:?}");
        ensure!(reports[0].contains("| **no** |"), "{}", reports[0]);
        Ok(())
    })?)
}

#[test]
fn without_a_device_nothing_is_said_to_hold() -> Result<(), Failed> {
    let path = library_path(&[broken_driver()?]).map_err(Failed::from)?;
    Ok(run_with(path, &[], |ended, reports| {
        ensure!(ended.code == Some(4) && reports.is_empty(), "{ended:?} {reports:?}");
        ensure!(
            ended.stderr.contains("no usable NVIDIA GPU") && ended.stderr.contains("libcuda"),
            "{ended:?}"
        );
        Ok(())
    })?)
}

fn run(variables: &[(&str, &str)], look: impl FnOnce(Ended, Vec<String>) -> Result<()>) -> Result<()> {
    run_with(library_path(&[driver()?, nvml()?])?, variables, look)
}

/// Runs the script on some machine, and looks at what it wrote.
fn run_with(
    path: OsString,
    variables: &[(&str, &str)],
    look: impl FnOnce(Ended, Vec<String>) -> Result<()>,
) -> Result<()> {
    let folder = TempDir::new()?;
    let programs = program("vramq-worker")?;
    program("vramq-gpu")?;
    let reports = folder.path().join("reports");
    let mut command = Command::new(root().join("tests/gpu/run"));
    command
        .arg("--programs")
        .arg(programs.parent().context("a program has a folder")?)
        .arg("--report")
        .arg(&reports)
        // The stand-in has no kernels.
        .args(["--models", ""])
        .env("LD_LIBRARY_PATH", path)
        .env("STANDIN_SHARED", folder.path().join("device"))
        .env("STANDIN_MEMORY_MIB", "4096")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    look(runtime.block_on(run_to_end(command))?, written(&reports)?)
}

fn written(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    std::fs::read_dir(folder)?.map(|entry| Ok(std::fs::read_to_string(entry?.path())?)).collect()
}
