//! The units of systemd under `deploy/`.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use vramq_tests::programs::root;

fn units(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in folder.read_dir()? {
        let path = entry?.path();
        if path.is_dir() {
            units(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "service") {
            found.push(path);
        }
    }
    Ok(())
}

/// systemd compares `RestartPreventExitStatus` only with the exit code of the service itself. If `ExecStartPre` fails, systemd restarts for
/// ever, whatever the exit code.
#[test]
fn no_unit_has_both_exec_start_pre_and_restart_prevent_exit_status() -> Result<()> {
    let mut found = Vec::new();
    units(&root().join("deploy"), &mut found)?;
    ensure!(found.len() >= 2, "{found:?}");
    for unit in found {
        let text = read_to_string(&unit)?;
        let has = |setting: &str| {
            text.lines().any(|line| {
                line.trim_start().strip_prefix(setting).is_some_and(|rest| rest.trim_start().starts_with('='))
            })
        };
        ensure!(!(has("ExecStartPre") && has("RestartPreventExitStatus")), "{}", unit.display());
    }
    Ok(())
}
