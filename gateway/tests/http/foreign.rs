//! Clients in Python and JavaScript, run as programs.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::json;
use tempfile::TempDir;

use crate::harness::{clean, required};

/// The folder of these tests and of their programs in other languages.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/http");

/// Runs Python with a program of this folder, or with `-m` and a module, and with arguments. What it prints.
pub fn python(arguments: &[&str]) -> String {
    let (mut command, _folder) = python_command(arguments);
    printed(&mut command)
}

/// Runs a Node.js program of this folder, with arguments. What it prints.
pub fn node(script: &str, arguments: &[&str]) -> String {
    let (mut command, _folder) = node_command(script);
    printed(command.args(arguments))
}

/// Where it runs: tools may leave files in their current folder.
fn python_command(arguments: &[&str]) -> (Command, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = clean(Path::new(&required("VRAMQ_TEST_PYTHON")));
    let with_path = |argument: &&str| match argument.ends_with(".py") {
        true => Path::new(SCRIPTS).join(argument),
        false => PathBuf::from(argument),
    };
    command.current_dir(&folder).args(arguments.iter().map(with_path));
    (command, folder)
}

/// Its modules are those that scripts/setup got. Modules are looked for beside the program, so it runs from where they are.
fn node_command(script: &str) -> (Command, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
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
    command.arg(folder.path().join(script));
    (command, folder)
}

/// What a program prints, which must succeed.
fn printed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    out.into_owned()
}

/// A program that serves one command after the other: to load OpenAI's client takes more processor time than what the tests do with it.
/// Killed when dropped.
pub struct Served {
    child: Child,
    commands: ChildStdin,
    results: BufReader<ChildStdout>,
    _folder: TempDir,
}

impl Served {
    pub fn python(script: &str) -> Self {
        Self::start(python_command(&[script]))
    }

    pub fn node(script: &str) -> Self {
        Self::start(node_command(script))
    }

    fn start((mut command, folder): (Command, TempDir)) -> Self {
        command.arg("serve").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let commands = child.stdin.take().expect("its input");
        let results = BufReader::new(child.stdout.take().expect("its output"));
        Self { child, commands, results, _folder: folder }
    }

    /// What the program prints for a command. It must succeed: one that fails ends the program.
    pub fn ask(&mut self, command: &[&str]) -> String {
        writeln!(self.commands, "{}", json!(command)).unwrap_or_else(|e| panic!("ask for {command:?}: {e}"));
        let mut printed = String::new();
        self.results.read_line(&mut printed).expect("its output");
        assert!(printed.ends_with('\n'), "{command:?} failed: standard error has more");
        printed
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
