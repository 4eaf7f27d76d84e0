//! A RabbitMQ node for one test, which can kill it, restart it and change its settings without affecting other tests.

use std::fs::{File, TryLockError};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::broker::Broker;
use crate::programs::{root, target};

/// A shell script. Starts the node in the folder `$1`, in the cluster of the node in the folder `$2` if given, waits for the end of its
/// input, and stops the node. Only the test's process holds the other end of its input, which therefore ends when the test drops the node
/// or is killed. If it is killed while the node starts, `echo` ends by SIGPIPE, so that has a shell of its own; and nothing else removes the
/// folder around the node's.
const KEEPER: &str = r#""$0" start "$@" >/dev/null && (echo ready); cat >/dev/null; "$0" stop "$1"; rmdir -- "${1%/*}" 2>/dev/null"#;

/// Where nodes have their folders, if not where temporary files are: see `scripts/with-rabbitmq`.
const FOLDERS: &str = "VRAMQ_RABBITMQ_FOLDERS";

/// How many nodes run at once, over all test processes of one target folder. A node takes a core for some seconds to start, so more would
/// not start sooner. `.config/nextest.toml` has the same number, so that tests which wait here do not take the places of others. Nodes that
/// join another node are not counted.
const NODES_MAX: usize = 2;

/// How often a test that waits looks whether another node has ended.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A running node. Stopped, with all that it holds, when it is dropped.
#[derive(Debug)]
pub struct Node {
    keeper: Child,
    folder: PathBuf,
    broker: Broker,
    /// Removed after the node's own folder in it.
    _around: TempDir,
    /// Unlocked when it is closed, after everything else. A node that joins another has no permit: two tests that each waited for a second
    /// one would wait for ever.
    _permit: Option<File>,
}

impl Node {
    /// Starts one, and waits until it answers.
    ///
    /// # Errors
    /// It does not start; why is on standard error.
    pub async fn start() -> Result<Self> {
        tokio::task::spawn_blocking(|| Self::start_now(Some(permit()?), None)).await?
    }

    /// Starts another one in the cluster of this one, and waits until it answers. The other one has to be dropped first. A quorum queue
    /// that is declared from then on has a member on each; one that was there before keeps its only member.
    ///
    /// # Errors
    /// As for [`start`](Self::start). There is no cluster of containers (`VRAMQ_RABBITMQ=docker`).
    pub async fn start_peer(&self) -> Result<Self> {
        let seed = self.folder.clone();
        tokio::task::spawn_blocking(move || Self::start_now(None, Some(&seed))).await?
    }

    fn start_now(permit: Option<File>, seed: Option<&Path>) -> Result<Self> {
        let around = match std::env::var_os(FOLDERS) {
            Some(parent) => TempDir::new_in(parent),
            None => TempDir::new(),
        };
        let around = around.context("make a folder")?;
        let folder = around.path().join("broker");
        let mut keeper = Command::new("sh")
            .args(["-c", KEEPER])
            .arg(script())
            .arg(&folder)
            .args(seed)
            // Ignore ports from the environment: those are of the broker that all tests share.
            .env_remove("VRAMQ_AMQP_PORT")
            .env_remove("VRAMQ_MANAGEMENT_PORT")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Outlives an interruption of the test's process group, to clean up.
            .process_group(0)
            .spawn()
            .context("start the keeper of a node")?;
        let stdout = keeper.stdout.take().context("a process without stdout")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let broker =
            if line == "ready\n" { Broker::from_file(&folder.join("env")) } else { Err(not_started()) };
        match broker {
            Ok(broker) => Ok(Self { keeper, folder, broker, _around: around, _permit: permit }),
            Err(error) => {
                end(&mut keeper);
                Err(error)
            }
        }
    }

    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// Kills it, as a power cut does; its data stay.
    ///
    /// # Errors
    /// The script's.
    pub async fn kill(&self) -> Result<()> {
        self.script("kill", &[]).await.map(drop)
    }

    /// Starts it again on its data, at the same addresses, and waits until it answers.
    ///
    /// # Errors
    /// It does not start.
    pub async fn restart(&self) -> Result<()> {
        self.script("restart", &[]).await.map(drop)
    }

    /// Adds to its configuration, and starts it again with that.
    ///
    /// # Errors
    /// It does not start.
    pub async fn configure(&self, lines: &str) -> Result<()> {
        std::fs::write(self.folder.join("conf.d/50-test.conf"), lines).context("write its configuration")?;
        self.restart().await
    }

    /// Puts a file into its folder. The path of it, as the node sees it: in a folder of its own root it is elsewhere.
    ///
    /// # Errors
    /// The system has no room for it.
    pub fn put(&self, name: &str, text: &str) -> Result<String> {
        std::fs::write(self.folder.join(name), text).context("write a file for the node")?;
        let own_root = std::env::var("VRAMQ_RABBITMQ").is_ok_and(|kind| kind == "node4" || kind == "node43");
        let folder = if own_root { PathBuf::from("/here") } else { self.folder.clone() };
        Ok(folder.join(name).display().to_string())
    }

    /// Runs `rabbitmqctl`; what it prints.
    ///
    /// # Errors
    /// It fails.
    pub async fn ctl(&self, arguments: &[&str]) -> Result<String> {
        self.script("ctl", arguments).await
    }

    /// Suspends the processes of classic queues: the broker goes on, and answers nothing that these would have to answer.
    ///
    /// # Errors
    /// There is no such queue.
    pub async fn suspend(&self, vhost: &str, queues: &[String]) -> Result<()> {
        self.of_queues("suspend", vhost, queues).await
    }

    /// Lets suspended processes of queues go on: they answer what they were asked meanwhile.
    ///
    /// # Errors
    /// There is no such queue.
    pub async fn resume(&self, vhost: &str, queues: &[String]) -> Result<()> {
        self.of_queues("resume", vhost, queues).await
    }

    async fn of_queues(&self, act: &str, vhost: &str, queues: &[String]) -> Result<()> {
        let names: Vec<_> = queues.iter().map(|queue| format!("<<\"{queue}\">>")).collect();
        let eval = format!(
            "[begin {{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>, queue, Name)), \
             ok = sys:{act}(amqqueue:get_pid(Q)) end || Name <- [{}]].",
            names.join(", ")
        );
        self.ctl(&["eval", &eval]).await.map(drop)
    }

    async fn script(&self, command: &str, arguments: &[&str]) -> Result<String> {
        let mut run = tokio::process::Command::new(script());
        run.arg(command).arg(&self.folder).args(arguments).stdin(Stdio::null());
        let output = run.output().await.with_context(|| format!("run scripts/rabbitmq {command}"))?;
        ensure!(
            output.status.success(),
            "scripts/rabbitmq {command} {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        end(&mut self.keeper);
    }
}

/// Lets the keeper stop the node, and waits for it.
fn end(keeper: &mut Child) {
    drop(keeper.stdin.take());
    if let Err(error) = keeper.wait() {
        eprintln!("wait for the keeper of a node: {error}");
    }
}

/// Waits until fewer than [`NODES_MAX`] nodes run: one of as many files, locked. The system unlocks it if the test is killed.
fn permit() -> Result<File> {
    let folder = target()?.join("own-nodes");
    std::fs::create_dir_all(&folder).context("make a folder for locks")?;
    loop {
        for number in 0..NODES_MAX {
            let file = File::create(folder.join(number.to_string())).context("make a file to lock")?;
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(error).context("lock a file"),
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn script() -> PathBuf {
    root().join("scripts/rabbitmq")
}

fn not_started() -> anyhow::Error {
    anyhow::anyhow!("no node of the test's own: see standard error")
}
