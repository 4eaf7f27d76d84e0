//! The `vramq` command as a process, and what it writes.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

use super::{Broker, in_time, worker};

/// A folder of the test's own, removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        let path = std::env::temp_dir().join(format!("vramq-test-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn command(url: &str, args: &[&str]) -> Command {
    let mut command = Command::new(vramq_tests::programs::program("vramq").unwrap());
    command
        .arg("submit")
        .args(args)
        .env("VRAMQ_BROKER_URL", url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub async fn submit(broker: &Broker, args: &[&str]) -> Output {
    in_time(command(&broker.url(), args).output()).await.unwrap()
}

pub async fn submit_stdin(broker: &Broker, args: &[&str], input: &str) -> Output {
    let mut child = command(&broker.url(), args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let feed = tokio::spawn(async move {
        // The command may end before it has read everything.
        let _ = stdin.write_all(input.as_bytes()).await;
    });
    let output = in_time(child.wait_with_output()).await.unwrap();
    feed.await.unwrap();
    output
}

/// Interrupts a command, as from the keyboard, and waits for its end.
pub async fn interrupt(child: Child) -> Output {
    let pid = child.id().unwrap().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().await.unwrap().success());
    in_time(child.wait_with_output()).await.unwrap()
}

#[track_caller]
pub fn code(output: &Output, expected: i32) {
    assert_eq!(output.status.code(), Some(expected), "{}", stderr(output));
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn lines(bytes: &[u8]) -> Vec<serde_json::Value> {
    let text = std::str::from_utf8(bytes).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// What the test's worker answers, as the command prints it.
pub fn line(index: usize, text: &str) -> serde_json::Value {
    let vector = serde_json::to_string(&worker::vector(text)).unwrap();
    serde_json::from_str(&format!(r#"{{"index": {index}, "embedding": {vector}}}"#)).unwrap()
}

pub fn read_npy(path: &Path) -> (String, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let (head, data) = bytes.split_at(128);
    let numbers = data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    (String::from_utf8_lossy(&head[10..]).trim_end().to_owned(), numbers)
}
