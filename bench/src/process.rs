//! Workers and reference programs as child processes.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context;
use lapin::Connection;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};

/// A measurement that stands still for this long has gone wrong.
pub const STALLED: Duration = Duration::from_secs(30);

/// Starts a worker with `KEY=VALUE` settings.
pub fn spawn_worker(url: &str, worker: &Path, settings: &[String]) -> anyhow::Result<Child> {
    start(url, worker, settings.iter().flat_map(|setting| ["--set", setting].map(str::to_owned)))
}

/// Starts a worker with a configuration file.
pub fn spawn_configured(url: &str, worker: &Path, file: &Path) -> anyhow::Result<Child> {
    start(url, worker, ["--config".to_owned(), file.display().to_string()])
}

fn start(url: &str, worker: &Path, arguments: impl IntoIterator<Item = String>) -> anyhow::Result<Child> {
    let mut command = Command::new(worker);
    command.args(["run", "--broker-url", url, "--log", "error"]).args(arguments).kill_on_drop(true);
    command.spawn().with_context(|| format!("start {}", worker.display()))
}

/// Ends a process by SIGTERM and waits for it.
pub async fn stop(child: &mut Child) -> anyhow::Result<()> {
    if let Some(pid) = child.id() {
        Command::new("kill").args(["-TERM", &pid.to_string()]).status().await?;
    }
    child.wait().await?;
    Ok(())
}

/// Processor time that a process has used, in microseconds.
pub fn cpu_us(child: &Child) -> anyhow::Result<f64> {
    /// The kernel's unit of time in /proc, the same on every Linux (`getconf CLK_TCK`).
    const TICKS_PER_S: f64 = 100.0;
    let pid = child.id().context("the process has ended")?;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Fields count from behind the command's name, which may hold anything: utime is the 12th, stime the 13th.
    let (_, fields) = stat.rsplit_once(')').context("odd /proc/PID/stat")?;
    let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>).sum::<Result<f64, _>>()?;
    Ok(ticks / TICKS_PER_S * 1e6)
}

/// Waits until a queue has a consumer.
pub async fn wait_for_consumer(connection: &Connection, queue: &str) -> anyhow::Result<()> {
    let deadline = Instant::now() + STALLED;
    loop {
        // A passive declare of a queue that is not there closes its channel.
        let channel = connection.create_channel().await?;
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        if let Ok(found) = channel.queue_declare(queue.into(), passive, FieldTable::default()).await {
            channel.close(200, "seen".into()).await?;
            if found.consumer_count() > 0 {
                return Ok(());
            }
        }
        anyhow::ensure!(Instant::now() < deadline, "{queue} has no consumer");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A port of this machine that nobody listens at.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A GET to a port of this machine; the answer's body.
pub async fn get(port: u16, path: &str) -> anyhow::Result<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP")?;
    anyhow::ensure!(head.contains(" 200 "), "GET {path}: {head}");
    Ok(body.to_owned())
}

/// The sum of a worker's metric over its labels.
pub async fn metric(port: u16, name: &str) -> anyhow::Result<f64> {
    let metrics = get(port, "/metrics").await?;
    let lines = metrics.lines().filter(|line| line.split(['{', ' ']).next() == Some(name));
    Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
}

/// Runs a reference program and reads the figures that it prints as its last line.
pub async fn figures<T: DeserializeOwned>(command: &mut Command) -> anyhow::Result<T> {
    let output =
        command.stderr(Stdio::inherit()).output().await.with_context(|| format!("run {command:?}"))?;
    anyhow::ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let line = text.lines().last().context("no output")?;
    serde_json::from_str(line).with_context(|| format!("{line:?} are no figures"))
}

/// Runs a program in the background, and kills the process group when standard input ends. In a shell that is not interactive a
/// background program stays in the shell's process group.
const KEEPER: &str = "\"$@\" & read -r _; kill -KILL 0";

/// A program that starts processes itself. All of them end with this value, and also when this process is killed: the kernel closes the
/// pipe that their keeper reads.
pub struct Group {
    keeper: Child,
}

impl Group {
    /// Starts the program of a command, with its arguments and variables.
    pub fn start(command: &Command) -> anyhow::Result<Self> {
        let command = command.as_std();
        let mut keeper = Command::new("sh");
        keeper.args(["-c", KEEPER, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => keeper.env(name, value),
                None => keeper.env_remove(name),
            };
        }
        keeper.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let keeper = keeper.spawn().with_context(|| format!("start the keeper of {command:?}"))?;
        Ok(Self { keeper })
    }

    /// Ends all processes of the group.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        drop(self.keeper.stdin.take());
        self.keeper.wait().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a process runs. A zombie does not.
    fn runs(pid: &str) -> bool {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat"));
        stat.is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, fields)| !fields.starts_with('Z')))
    }

    async fn until(what: &str, is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + STALLED;
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// A drop closes the pipe, as the kernel does when this process is killed.
    #[tokio::test]
    async fn a_group_ends_with_its_pipe() {
        let file = std::env::temp_dir().join(format!("vramq-bench-group-{}", std::process::id()));
        let mut command = Command::new("sh");
        // A program, and a process that it starts.
        command.args(["-c", "sleep 1000 & echo $$ $! \"$WORD\" >\"$0\"; wait"]).arg(&file).env("WORD", "end");
        let group = Group::start(&command).unwrap();
        let pids = || {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            text.strip_suffix(" end\n").map(|pids| pids.split(' ').map(str::to_owned).collect::<Vec<_>>())
        };
        until("no processes", || pids().is_some()).await;
        let pids = pids().unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(pids.len() == 2 && pids.iter().all(|pid| runs(pid)), "{pids:?}");
        drop(group);
        until("they still run", || !pids.iter().any(|pid| runs(pid))).await;
    }
}
