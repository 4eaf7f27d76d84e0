//! A worker process: starts it, reads its log, sends it signals, waits for its end.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::http::get;
use crate::logs::Log;
use crate::programs::program;
use crate::wait::{DEADLINE, until};

/// A running or ended worker. Clones are the same process.
#[derive(Clone, Debug)]
pub struct Worker {
    /// As it names itself in replies and to the broker.
    pub name: String,
    pub pid: u32,
    pub log: Log,
    exit: watch::Receiver<Option<ExitStatus>>,
}

/// How a program that was run to its end did.
#[derive(Clone, Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A command for one of the workspace's programs, deaf to this machine's own VRAMQ_ settings.
///
/// # Errors
/// There is no such program.
pub fn command(name: &str) -> Result<Command> {
    let mut command = Command::new(program(name)?);
    for (variable, _) in std::env::vars_os() {
        if variable.to_string_lossy().starts_with("VRAMQ_") {
            command.env_remove(variable);
        }
    }
    command.stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

/// Runs a program that ends by itself.
///
/// # Errors
/// It does not within the deadline.
pub async fn run_to_end(command: Command) -> Result<Ended> {
    run_to_end_within(command, DEADLINE).await
}

/// [`run_to_end`], for what takes longer.
///
/// # Errors
/// As for [`run_to_end`].
pub async fn run_to_end_within(mut command: Command, deadline: Duration) -> Result<Ended> {
    let output = timeout(deadline, command.output()).await.context("the program does not end")??;
    Ok(Ended {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Runs `vramq ARGUMENTS` at a broker to its end.
///
/// # Errors
/// It does not end.
pub async fn vramq(url: &str, arguments: &[&str]) -> Result<Ended> {
    let mut vramq = command("vramq")?;
    vramq.args(arguments).args(["--broker-url", url]);
    run_to_end(vramq).await
}

/// A text has all these words.
///
/// # Errors
/// One is missing.
pub fn has_all(text: &str, words: &[&str]) -> Result<()> {
    words.iter().try_for_each(|word| {
        ensure!(text.contains(word), "`{word}` is not in: {text}");
        Ok(())
    })
}

impl Worker {
    /// Starts `vramq-worker run` with options and variables; does not wait for it to consume.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn spawn(
        name: &str,
        url: &str,
        options: &[String],
        environment: &[(String, OsString)],
    ) -> Result<Self> {
        let mut command = command("vramq-worker")?;
        command
            .arg("run")
            .args(["--name", name, "--broker-url", url, "--log-format", "json"])
            .args(options)
            .envs(environment.iter().cloned())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("start vramq-worker")?;
        let pid = child.id().context("a process without an id")?;
        let stderr = child.stderr.take().context("a process without stderr")?;
        let log = Log::default();
        let (sender, exit) = watch::channel(None);
        tokio::spawn({
            let log = log.clone();
            async move {
                // The log's end first, so that a test that sees the exit has the whole log.
                log.collect(stderr).await;
                if let Ok(status) = child.wait().await {
                    sender.send_replace(Some(status));
                }
            }
        });
        Ok(Self { name: name.to_owned(), pid, log, exit })
    }

    /// What it answers to a GET: status and body.
    ///
    /// # Errors
    /// It serves nothing, or does not answer.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let line = self.log.wait_for("serving /livez").await?;
        let address = line.field("address").and_then(serde_json::Value::as_str).context("no address")?;
        get(address, path).await
    }

    /// Waits until it answers a GET with this status; the body.
    ///
    /// # Errors
    /// It does not.
    pub async fn answers(&self, path: &str, status: u16) -> Result<String> {
        until(&format!("{path} to be answered with {status}"), async || {
            let (answered, body) = self.get(path).await?;
            Ok((answered == status).then_some(body))
        })
        .await
    }

    /// Waits until it takes jobs.
    ///
    /// # Errors
    /// It ends or does not get there.
    pub async fn consuming(&self) -> Result<()> {
        tokio::select! {
            line = self.log.wait_for("consuming") => line.map(drop),
            status = self.exited() => anyhow::bail!("the worker ended with {:?}:\n{}", status?, self.log.text()),
        }
    }

    /// Waits until it has opened so many sessions.
    ///
    /// # Errors
    /// It does not get there.
    pub async fn sessions(&self, count: usize) -> Result<()> {
        until(&format!("session {count}"), async || {
            Ok((self.log.count("\"consuming\"") >= count).then_some(()))
        })
        .await
        .with_context(|| self.log.text())
    }

    pub fn is_running(&self) -> bool {
        self.exit.borrow().is_none()
    }

    /// The exit code once it has ended, which is `None` after a signal.
    pub fn ended(&self) -> Option<Option<i32>> {
        self.exit.borrow().map(|status| status.code())
    }

    /// Files and sockets that it has open; `None` when it has ended.
    pub fn open_files(&self) -> Option<usize> {
        Some(std::fs::read_dir(format!("/proc/{}/fd", self.pid)).ok()?.count())
    }

    /// Bytes of memory that it has in use; `None` when it has ended.
    pub fn resident_bytes(&self) -> Option<u64> {
        self.memory_bytes("VmRSS:")
    }

    /// The most bytes of memory that it ever had in use; `None` when it has ended.
    pub fn peak_bytes(&self) -> Option<u64> {
        self.memory_bytes("VmHWM:")
    }

    fn memory_bytes(&self, name: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let kib = status.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix(" kB"))?;
        kib.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    }

    /// # Errors
    /// The system refuses.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        if self.is_running() {
            let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("pid")?;
            kill_process(pid, signal).context("signal the worker")?;
        }
        Ok(())
    }

    /// Waits for the end; the exit code, or `None` after a signal.
    ///
    /// # Errors
    /// It does not end.
    pub async fn exited(&self) -> Result<Option<i32>> {
        self.exited_within(DEADLINE).await
    }

    /// [`exited`](Self::exited) with a deadline of its own.
    ///
    /// # Errors
    /// It does not end.
    pub async fn exited_within(&self, deadline: Duration) -> Result<Option<i32>> {
        let mut exit = self.exit.clone();
        let status = timeout(deadline, exit.wait_for(Option::is_some))
            .await
            .with_context(|| format!("worker {} does not end; its log:\n{}", self.name, self.log.text()))??;
        Ok(status.and_then(|status| status.code()))
    }

    /// A figure of the line that it ends with.
    ///
    /// # Errors
    /// It does not end, or its output has no such figure.
    pub async fn total(&self, name: &str) -> Result<u64> {
        let line = self.log.wait_for("totals").await?;
        let figure = line.field(name).and_then(serde_json::Value::as_u64);
        figure.with_context(|| format!("no {name}: {}", line.text()))
    }

    /// Asks it to drain, and checks that it did.
    ///
    /// # Errors
    /// It ends with another code than 0, or not at all.
    pub async fn drain(&self) -> Result<()> {
        self.signal(Signal::TERM)?;
        let code = self.exited().await?;
        ensure!(code == Some(0), "worker {} drained with {code:?}; its log:\n{}", self.name, self.log.text());
        Ok(())
    }
}
