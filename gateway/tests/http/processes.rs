//! Programs of this workspace as processes, each with its log.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::harness::until;

/// A process and its log. Killed when dropped.
pub struct Program {
    pub name: String,
    child: Child,
    log: PathBuf,
}

impl Program {
    pub fn start(command: &mut Command, name: &str, folder: &Path) -> Self {
        let log = folder.join(format!("{name}.log"));
        let file = std::fs::File::create(&log).expect("a log");
        command.args(["--log-format", "json"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
        let child = command.spawn().unwrap_or_else(|e| panic!("start {name}: {e}"));
        Self { name: name.to_owned(), child, log }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn lines(&self) -> Vec<Value> {
        self.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("run kill");
        assert!(sent.success(), "kill -{name} {pid}");
    }

    /// Waits for its end; the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let child = &mut self.child;
        until("the process ends", || child.try_wait().expect("wait")).code()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Also one that is stopped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The path of a program of this workspace, which must have been built.
pub fn program(name: &str) -> PathBuf {
    // target/debug/deps/TEST: the programs are two levels up.
    let test = std::env::current_exe().expect("the test's own path");
    let program = test.ancestors().nth(2).expect("a target folder").join(name);
    assert!(program.exists(), "{} is missing: cargo build -p {name}", program.display());
    program
}

/// A command that ignores this machine's own `VRAMQ_` settings.
pub fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("VRAMQ_") {
            command.env_remove(variable);
        }
    }
    command
}
