//! The list of all waits for the GPU. Each has tests in `waits.rs`, with it and without it.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use vramq_tests::programs::root;
use vramq_tests::setup::Failed;

/// Every wait of the product: its file below inference/src, its line, and what is tried here with it and without it.
const WAITS: [(&str, &str, &str); 9] = [
    (
        "device/cuda/pool.rs",
        "let waited = unsafe { calls::cuStreamSynchronize(self.stream.handle()) };",
        "an_arenas_end",
    ),
    ("device/cuda/pool.rs", "unsafe { calls::cuStreamSynchronize(self.stream.handle()) }?;", "a_trim"),
    ("device/cuda/stream.rs", "Meaning::Refused => match self.wait() {", "a_refusal"),
    (
        "device/cuda/stream.rs",
        "calls::cuEventRecord(event, self.stream()).and_then(|()| calls::cuEventSynchronize(event))",
        "a_sleep",
    ),
    (
        "device/cuda/stream.rs",
        "self.wait().map_err(|code| self.failed(\"wait for the device\", 0, code))",
        "a_pass",
    ),
    ("device/cuda/timer.rs", ".and_then(|()| calls::cuEventSynchronize(end))", "a_time"),
    ("engine/encoder/cuda/mod.rs", "self.device.synchronize()", "a_pass"),
    ("engine/encoder/cuda/mod.rs", "self.device.synchronize_asleep()", "a_pass_that_is_long"),
    ("engine/encoder/cuda/weights.rs", "Ok(device.synchronize()?)", "an_upload"),
];

/// What waits look like, and what only defines or passes one on.
const CALLS: [&str; 5] =
    ["cuStreamSynchronize(", "cuEventSynchronize(", ".synchronize()", ".synchronize_asleep()", "self.wait()"];
const DEFINITIONS: [&str; 3] = [
    "fn cuStreamSynchronize(",
    "fn cuEventSynchronize(",
    "unsafe { calls::cuStreamSynchronize(self.stream()) }",
];

#[test]
fn every_wait_is_listed() -> Result<(), Failed> {
    Ok(listed()?)
}

fn listed() -> Result<()> {
    let sources = root().join("inference/src");
    let mut found = Vec::new();
    let mut folders = ["device/cuda", "engine/encoder/cuda"].map(|folder| sources.join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        let all = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        let (inner, files): (Vec<PathBuf>, Vec<PathBuf>) = all.into_iter().partition(|path| path.is_dir());
        folders.extend(inner);
        for file in files {
            found.extend(waits_of(&sources, &file)?);
        }
    }
    found.sort();
    let listed: Vec<_> =
        WAITS.iter().map(|(file, line, _)| ((*file).to_owned(), (*line).to_owned())).collect();
    ensure!(found == listed, "the waits are {found:#?}, and those that are listed with a test {listed:#?}");
    let tests = include_str!("waits.rs");
    for (_, line, body) in WAITS {
        let is_tried = |how: &str| tests.contains(&format!(" = {body}_{how}:"));
        ensure!(is_tried("with") && is_tried("without"), "nothing is tried without `{line}`");
    }
    Ok(())
}

/// The waits of a file, in its path below the sources and the lines.
fn waits_of(sources: &Path, file: &Path) -> Result<Vec<(String, String)>> {
    let name = file.strip_prefix(sources)?.display().to_string();
    let text = std::fs::read_to_string(file)?;
    let is_wait = |line: &&str| {
        let has = |words: &[&str]| words.iter().any(|words| line.contains(words));
        has(&CALLS) && !has(&DEFINITIONS) && !line.starts_with("//")
    };
    Ok(text.lines().map(str::trim).filter(is_wait).map(|line| (name.clone(), line.to_owned())).collect())
}
