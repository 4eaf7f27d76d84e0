//! Finds the programs under test, and checks that they are not older than their sources.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context as _, Result, ensure};

/// What makes the programs, for messages.
const BUILD: &str = "`make test` builds it; by hand: cargo build --workspace --bins";

/// The workspace's root folder. A program that was built on another machine is started in it (tests/gpu/run).
pub fn root() -> &'static Path {
    let built = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    if built.exists() { built } else { Path::new(".") }
}

/// The folder that the tests and the programs were built in.
///
/// # Errors
/// The test does not run from such a folder.
pub fn target() -> Result<PathBuf> {
    // target/debug/deps/TEST: the programs are two levels up.
    let test = std::env::current_exe()?;
    Ok(test.ancestors().nth(2).context("tests run from a target folder")?.to_owned())
}

/// The path of one of the workspace's programs.
///
/// # Errors
/// It is not built, or was built before one of its sources changed: a test of the code of yesterday proves nothing.
pub fn program(name: &str) -> Result<PathBuf> {
    let program = target()?.join(name);
    let built = changed(&program).with_context(|| format!("{} is missing: {BUILD}", program.display()))?;
    // Cargo's own list of the sources: "PROGRAM: SOURCE SOURCE".
    let listed = std::fs::read_to_string(program.with_extension("d"))
        .context("read Cargo's list of sources (PROGRAM.d)")?;
    for source in listed.split_whitespace().skip(1) {
        ensure!(
            changed(Path::new(source)).is_none_or(|at| at <= built),
            "{} is older than {source}: {BUILD}",
            program.display()
        );
    }
    Ok(program)
}

/// What `make test` set up for another language.
///
/// # Errors
/// It did not.
pub fn setting(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os(name).with_context(|| {
        format!("{name} is not set: `make test` sets it; by hand: scripts/setup python node, then see the Makefile")
    })?;
    let path = PathBuf::from(path);
    ensure!(
        path.exists(),
        "{name} is {}, which does not exist: run scripts/setup python node",
        path.display()
    );
    Ok(path)
}

/// The interpreter that `make test` set up, and not a script that looks for it: a program's path is absolute.
///
/// # Errors
/// It was not set up.
pub fn python() -> Result<PathBuf> {
    let asked = Command::new(setting("VRAMQ_TEST_PYTHON")?)
        .args(["-c", "import sys; print(sys.executable)"])
        .output()
        .context("ask Python where it is")?;
    Ok(PathBuf::from(String::from_utf8(asked.stdout)?.trim()))
}

/// Settings of a worker with a model that is `tests/models/echo.py`.
///
/// # Errors
/// No Python was set up.
pub fn echo_program(model: &str) -> Result<[String; 2]> {
    let script = root().canonicalize()?.join("tests/models/echo.py");
    let command = format!("model.{model}.command=[{:?}, {script:?}]", python()?);
    Ok([format!("model.{model}.engine=process"), command])
}

fn changed(file: &Path) -> Option<SystemTime> {
    file.metadata().ok()?.modified().ok()
}
