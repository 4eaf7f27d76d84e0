//! `tests/gpu/run` checks what it reports, and fails if there is nothing to check.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use vramq_tests::fake_cuda::{broken_driver, cublaslt, driver, gpu, library_path, nvml};
use vramq_tests::programs::{program, python, root};
use vramq_tests::setup::Failed;
use vramq_tests::worker::{Ended, run_to_end_within};

/// All stages in emulation, on a machine that is busy with other builds.
const DEADLINE: Duration = Duration::from_secs(900);

#[test]
fn in_emulation_all_of_it_runs_to_its_end() -> Result<(), Failed> {
    let path = library_path(&[gpu()?, cublaslt()?, nvml()?]).map_err(Failed::from)?;
    // Passes that run out of memory have to be small, where kernels take their time. PyTorch is a stand-in on the same driver.
    let (python, stand_in) = (python().map_err(Failed::from)?, root().join("tests/fake_cuda/python"));
    let texts = [python, stand_in].map(|path| path.display().to_string());
    let variables =
        [("FAKE_CUDA_POOL_MIB", "2"), ("VRAMQ_BENCH_PYTHON", &texts[0]), ("PYTHONPATH", &texts[1])];
    // A private broker, where there is one to start: what it leaves behind is nobody's.
    Ok(run_with(path, &variables, &["--short", "--models", "tiny"], |ended, reports| {
        ensure!(ended.code == Some(0), "{ended:?}");
        let [json, markdown] = &reports[..] else { anyhow::bail!("{reports:?}") };
        let value: Value = serde_json::from_str(json).with_context(|| json.clone())?;
        for stage in ["check", "encoder", "pressure", "measure", "texts", "jobs", "program"] {
            let of = |row: &&Value| row["stage"] == stage;
            let row = value["stages"].as_array().into_iter().flatten().find(of);
            ensure!(row.is_some_and(|row| row["ended"] == "well"), "{stage}: {row:?}\n{markdown}");
        }
        for figure in ["check", "refers", "agrees", "pressure", "ceiling", "rate", "texts", "jobs", "program"]
        {
            let has =
                value["figures"].as_array().is_some_and(|all| all.iter().any(|one| one["figure"] == figure));
            ensure!(has, "no figure `{figure}` in {json}");
        }
        let jobs = value["figures"].as_array().into_iter().flatten().find(|one| one["figure"] == "jobs");
        ensure!(jobs.is_some_and(|jobs| jobs["pass_tokens"].as_u64() > Some(0)), "{jobs:?}");
        let rates = value["figures"].as_array().into_iter().flatten().filter(|one| one["figure"] == "rate");
        let fixed: Vec<_> = rates.filter_map(|rate| rate["fixed_share"].as_f64()).collect();
        ensure!(!fixed.is_empty() && fixed.iter().all(|share| *share > 0.0), "{json}");
        let kinds = [
            "| tiny | bf16 | cuBLASLt | yes",
            "| tiny | f16 | cuBLASLt, timed | yes",
            "| tiny | f32 | own | yes",
            "| tiny-mean | f32 | own | yes",
            "| bert-1x60x3x100 | f32 | cuBLASLt, timed | yes",
            "| bert-1x60x3x100 | bf16 | own | yes",
        ];
        // Rows that the library does not take.
        ensure!(!markdown.contains("| bert-1x60x3x100 | bf16 | cuBLASLt"), "{markdown}");
        for words in kinds.into_iter().chain(["halvings", "Short:", "in the same process"]) {
            ensure!(markdown.contains(words), "`{words}` is not in {markdown}");
        }
        Ok(())
    })?)
}

#[test]
fn a_pass_for_a_profiler_runs_with_each_kind_of_products() -> Result<(), Failed> {
    let path = library_path(&[gpu()?, cublaslt()?])?;
    for products in ["library", "timed", "own"] {
        let mut command = Command::new(program("vramq-gpu")?);
        command.current_dir(root()).args(["pass", "tiny", "f16", products, "70"]);
        command.env("LD_LIBRARY_PATH", &path).env_remove("CUDA_VISIBLE_DEVICES").kill_on_drop(true);
        let ended = to_its_end(command)?;
        if ended.code != Some(0) || !ended.stdout.contains("70 tokens in") {
            return Err(anyhow::anyhow!("{products}: {ended:?}").into());
        }
    }
    Ok(())
}

#[test]
fn on_a_device_all_checks_hold() -> Result<(), Failed> {
    Ok(run(&[("FAKE_CUDA_FAIL", "cuLaunchKernel:1:700")], |ended, reports| {
        ensure!(ended.code == Some(0), "{ended:?}");
        let [_, report] = &reports[..] else { anyhow::bail!("{reports:?}") };
        ensure!(report.contains("All checks hold."), "{report}");
        for expected in [
            "Fake GPU 0",
            "CUDA_ERROR_ILLEGAL_ADDRESS (700)",
            "out-of-memory errors leak nothing",
            "cuda:0",
            "The doctor",
        ] {
            ensure!(report.contains(expected), "{expected} is not in {report}");
        }
        ensure!(!report.contains("**no**"), "{report}");
        Ok(())
    })?)
}

#[test]
fn stages_that_no_time_is_left_for_are_named() -> Result<(), Failed> {
    let path = library_path(&[driver()?, nvml()?])?;
    let arguments = ["--only", "check doctor", "--models", "tiny", "--within", "0"];
    Ok(run_with(path, &[], &arguments, |ended, reports| {
        ensure!(ended.code == Some(0), "{ended:?}");
        let [_, report] = &reports[..] else { anyhow::bail!("{reports:?}") };
        ensure!(report.contains("All checks that ran hold; stages that did not: 2."), "{report}");
        ensure!(report.contains("| check | not run: no time left | 0 |"), "{report}");
        Ok(())
    })?)
}

#[test]
fn what_the_script_does_not_know_is_refused() -> Result<(), Failed> {
    for (arguments, problem) in [
        (["--only", "check kernel"], "there is no stage kernel; there are: check doctor"),
        (["--within", "5m"], "--within takes seconds, not 5m"),
    ] {
        let path = library_path(&[driver()?, nvml()?])?;
        run_with(path, &[], &arguments, |ended, reports| {
            ensure!(ended.code == Some(2) && reports.is_empty(), "{ended:?} {reports:?}");
            ensure!(ended.stderr.contains(problem), "{ended:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// As Nsight Compute writes it with `--csv --page raw`: a row of units, and a metric that it could not measure.
const NCU: &str = r#"==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Block Size","Grid Size","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum"
"","","","","","%","ns"
"0","7","attention_32_f16","(128, 1, 1)","(52, 12, 1)","14.5","10,000"
"1","7","attention_32_f16","(128, 1, 1)","(52, 12, 1)","n/a","20,000"
"2","7","pool_f16","(256, 1, 1)","(13, 1, 1)","2","10,000"
"#;

#[tokio::test]
async fn the_kernels_of_a_pass_are_added_up() -> Result<(), Failed> {
    let folder = TempDir::new().context("a folder")?;
    let [figures, input] = ["figures", "ncu"].map(|name| folder.path().join(name));
    std::fs::write(&input, NCU).context("write")?;
    let mut command = Command::new(python()?);
    command.arg(root().join("tests/gpu/kernel_times.py")).arg(&figures).args(["m", "f16", "own", "2048"]);
    command.stdin(std::fs::File::open(&input).context("open")?);
    let ended = run_to_end_within(command, DEADLINE).await?;
    for expected in [
        "3 launches, 40 us without the gaps between them.",
        "| attention_32_f16 | (52,12,1) (128,1,1) | 2 | 15.0 | 75.0 % | 14 | - | - | - | - |",
        "| pool_f16 | (13,1,1) (256,1,1) | 1 | 10.0 | 25.0 % | 2 | - | - | - | - |",
    ] {
        if !ended.stdout.contains(expected) {
            return Err(anyhow::anyhow!("`{expected}` is not in {ended:?}").into());
        }
    }
    let figure: Value = serde_json::from_slice(&std::fs::read(&figures).context("read")?).context("JSON")?;
    if figure["us"] != 40.0 || figure["launches"] != 3 {
        return Err(anyhow::anyhow!("{figure}").into());
    }
    Ok(())
}

#[test]
fn a_check_that_fails_is_reported() -> Result<(), Failed> {
    // Launches succeed and do nothing: no address is illegal.
    Ok(run(&[("FAKE_CUDA_FAIL", "cuLaunchKernel:1:1")], |ended, reports| {
        ensure!(ended.code == Some(1), "{ended:?}");
        let [_, report] = &reports[..] else { anyhow::bail!("{reports:?}") };
        ensure!(report.contains("Not all checks hold") && report.contains("| **no** |"), "{report}");
        Ok(())
    })?)
}

#[test]
fn without_a_device_no_check_passes() -> Result<(), Failed> {
    let path = library_path(&[broken_driver()?]).map_err(Failed::from)?;
    Ok(run_with(path, &[], &[], |ended, reports| {
        ensure!(ended.code == Some(4) && reports.is_empty(), "{ended:?} {reports:?}");
        ensure!(
            ended.stderr.contains("no usable NVIDIA GPU") && ended.stderr.contains("libcuda"),
            "{ended:?}"
        );
        Ok(())
    })?)
}

fn run(variables: &[(&str, &str)], look: impl FnOnce(Ended, Vec<String>) -> Result<()>) -> Result<()> {
    // This fake driver has no kernels.
    let stages = ["--only", "check doctor", "--models", "tiny"];
    run_with(library_path(&[driver()?, nvml()?])?, variables, &stages, look)
}

/// Runs the script on some machine, and looks at what it wrote: as JSON, then for people.
fn run_with(
    path: OsString,
    variables: &[(&str, &str)],
    arguments: &[&str],
    look: impl FnOnce(Ended, Vec<String>) -> Result<()>,
) -> Result<()> {
    let folder = TempDir::new()?;
    let programs = program("vramq-worker")?;
    program("vramq-gpu")?;
    program("vramq")?;
    let reports = folder.path().join("reports");
    let mut command = Command::new(root().join("tests/gpu/run"));
    command
        .arg("--programs")
        .arg(programs.parent().context("a program has a folder")?)
        .arg("--report")
        .arg(&reports)
        .args(arguments)
        .env("LD_LIBRARY_PATH", path)
        .env("FAKE_CUDA_SHARED", folder.path().join("device"))
        .env("FAKE_CUDA_MEMORY_MIB", "4096")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("VRAMQ_BROKER_URL")
        .envs(variables.iter().copied())
        .kill_on_drop(true);
    look(to_its_end(command)?, written(&reports)?)
}

fn to_its_end(command: Command) -> Result<Ended> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run_to_end_within(command, DEADLINE))
}

fn written(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut files = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    files.iter().map(|file| Ok(std::fs::read_to_string(file)?)).collect()
}
