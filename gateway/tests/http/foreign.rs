//! Clients in Python and JavaScript, run as programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{clean, required};

/// The folder of these tests and of their programs in other languages.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http");

/// Runs Python with a program of this folder, or with `-m` and a module, and with arguments. What it prints.
pub fn python(arguments: &[&str]) -> String {
    // Tools may leave files in their current folder.
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = clean(Path::new(&required("VRAMQ_TEST_PYTHON")));
    let with_path = |argument: &&str| match argument.ends_with(".py") {
        true => Path::new(SCRIPTS).join(argument),
        false => PathBuf::from(argument),
    };
    printed(command.current_dir(&folder).args(arguments.iter().map(with_path)))
}

/// What a program prints, which must succeed.
fn printed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    out.into_owned()
}

/// Runs a Node.js program of this folder, with arguments. Its modules are those that scripts/setup got.
pub fn node(script: &str, arguments: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    // Modules are looked for beside the program, so it runs from where they are.
    let modules = required("VRAMQ_TEST_NODE_MODULES");
    std::os::unix::fs::symlink(modules, folder.path().join("node_modules")).expect("a link");
    for entry in std::fs::read_dir(SCRIPTS).expect("the tests' folder") {
        let path = entry.expect("a file").path();
        if path.extension().is_some_and(|extension| extension == "mjs") {
            let name = path.file_name().expect("a name");
            std::fs::copy(&path, folder.path().join(name)).expect("copy a program");
        }
    }
    let mut command = clean(Path::new(&required("VRAMQ_TEST_NODE")));
    printed(command.arg(folder.path().join(script)).args(arguments))
}
