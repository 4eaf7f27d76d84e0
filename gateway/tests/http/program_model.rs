//! A program as a model: takes JSON inputs, reports on its items, and fails at words that it does not know.

use std::path::Path;
use std::process::Command;

use crate::harness::{Setup, required};

/// Its name.
pub const SERVED: &str = "served";

/// Its revision.
pub const REVISION: &str = "second";

/// Starts a worker with it.
pub fn start(setup: &mut Setup) {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let python = required("VRAMQ_TEST_PYTHON");
    // The interpreter itself: a program's path is absolute.
    let asked =
        Command::new(python).args(["-c", "import sys; print(sys.executable)"]).output().expect("Python");
    let interpreter = String::from_utf8(asked.stdout).expect("a path").trim().to_owned();
    let weights = setup.folder.path().join("weights");
    std::fs::write(&weights, "").expect("written");
    let paths = ["python", "inference/tests/models"].map(|path| repository.join(path).display().to_string());
    let config = format!(
        "[model.{SERVED}]\nengine = \"process\"\ncommand = [{interpreter:?}, \"served.py\"]\nfolder = {:?}\n\
         vram = {{ mib_per_unit = 1 }}\n\
         env = {{ PYTHONPATH = {:?}, FOLDER = {:?}, REVISION = \"{REVISION}\" }}\n",
        repository.join("tests/models"),
        paths.join(":"),
        setup.folder.path(),
    );
    let path = setup.folder.path().join("worker.toml");
    std::fs::write(&path, config).expect("written");
    setup.worker(&[], &["--config", path.to_str().expect("UTF-8")]);
}
