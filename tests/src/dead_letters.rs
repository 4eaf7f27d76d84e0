//! Runs `vramq dlq` as a process, as an operator would, and makes dead letters for it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::Confirmation;
use lapin::types::{AMQPValue, FieldTable};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{DeadLetter, Encoding, JobHeaders, Reason};

use crate::job::Message;
use crate::setup::full;
use crate::test_env::{MODEL, REPLIES, TestEnv};
use crate::worker::{Ended, command, run_to_end};

/// `vramq dlq` with a home, a folder and an action log of its own.
#[derive(Debug)]
pub struct Operator {
    url: String,
    folder: TempDir,
}

impl Operator {
    /// # Errors
    /// No folder.
    pub fn at(env: &TestEnv) -> Result<Self> {
        Self::with_url(&env.url)
    }

    /// The same as another user of the broker.
    ///
    /// # Errors
    /// No folder.
    pub fn with_url(url: &str) -> Result<Self> {
        Ok(Self { url: url.to_owned(), folder: tempfile::tempdir()? })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `vramq dlq ARGS`, about [`MODEL`].
    ///
    /// # Errors
    /// There is no such program.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command_without_model(args)?;
        command.args(["--model", MODEL]);
        Ok(command)
    }

    /// `vramq dlq ARGS`, about the models that it learns of.
    ///
    /// # Errors
    /// There is no such program.
    pub fn command_without_model(&self, args: &[&str]) -> Result<Command> {
        let mut command = command("vramq")?;
        command
            .arg("dlq")
            .args(args)
            .arg("--quiet")
            .env("VRAMQ_BROKER_URL", &self.url)
            .env("XDG_STATE_HOME", self.folder.path())
            .current_dir(self.folder.path());
        Ok(command)
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// It does not end.
    pub async fn run(&self, args: &[&str]) -> Result<Ended> {
        run_to_end(self.command(args)?).await
    }

    /// The same without a model.
    ///
    /// # Errors
    /// It does not end.
    pub async fn run_without_model(&self, args: &[&str]) -> Result<Ended> {
        run_to_end(self.command_without_model(args)?).await
    }

    /// Like [`run`](Self::run), with a limit of `kib` KiB for every file. As on a full disk, a write beyond it fails.
    ///
    /// # Errors
    /// It does not end.
    pub async fn run_with_files_up_to(&self, kib: u32, args: &[&str]) -> Result<Ended> {
        let vramq = self.command(args)?;
        let vramq = vramq.as_std();
        let mut command = Command::new("bash");
        // A process that ignores the signal gets an error instead.
        command.args(["-c", &format!("trap '' XFSZ; ulimit -f {kib}; exec \"$@\""), "bash"]);
        command.arg(vramq.get_program()).args(vramq.get_args()).env_clear();
        command.envs(vramq.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).current_dir(self.folder.path());
        run_to_end(command).await
    }

    /// The same; what it wrote to standard output.
    ///
    /// # Errors
    /// It exits with another code.
    pub async fn run_for(&self, code: i32, args: &[&str]) -> Result<String> {
        let ended = self.run(args).await?;
        ensure!(ended.code == Some(code), "{args:?} exits with {:?}: {}", ended.code, ended.stderr);
        Ok(ended.stdout)
    }

    /// Ends it in the middle: with a signal, after so long. Whether it was still running.
    ///
    /// # Errors
    /// The process cannot be started or signalled.
    pub async fn cut_off(&self, args: &[&str], signal: Signal, after: Duration) -> Result<bool> {
        let mut child = self.spawn(args)?;
        let early = timeout(after, child.wait()).await.is_err();
        if early {
            let pid = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
            rustix::process::kill_process(pid.context("a process without an id")?, signal)?;
            timeout(crate::wait::DEADLINE, child.wait()).await.context("it does not end")??;
        }
        Ok(early)
    }

    /// Runs it on a terminal, where somebody types. What the terminal shows, and the exit code.
    ///
    /// # Errors
    /// It does not end.
    pub async fn at_terminal(&self, args: &[&str], typed: &str) -> Result<(String, Option<i32>)> {
        let vramq = self.command(args)?;
        let vramq = vramq.as_std();
        let words = [vramq.get_program()].into_iter().chain(vramq.get_args());
        let line = words.map(|word| format!("'{}'", word.to_string_lossy())).collect::<Vec<_>>().join(" ");
        // A pseudo-terminal around the command, fed from a pipe; with the command's exit code.
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env_clear();
        command.envs(vramq.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).current_dir(self.folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().context("start script (util-linux)")?;
        let mut stdin = child.stdin.take().context("a process without stdin")?;
        tokio::io::AsyncWriteExt::write_all(&mut stdin, typed.as_bytes()).await?;
        let ended =
            timeout(crate::wait::DEADLINE, child.wait_with_output()).await.context("it does not end")??;
        drop(stdin);
        Ok((String::from_utf8_lossy(&ended.stdout).into_owned(), ended.status.code()))
    }

    /// # Errors
    /// The process cannot be started.
    pub fn spawn(&self, args: &[&str]) -> Result<Child> {
        let mut command = self.command(args)?;
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().context("start vramq")
    }

    /// The letters of the queue as `export` tells them, in order.
    ///
    /// # Errors
    /// It does not.
    pub async fn letters(&self) -> Result<Vec<Value>> {
        let output = self.run_for(0, &["export", "--all"]).await?;
        output.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Their ids, in order.
    ///
    /// # Errors
    /// As for [`letters`](Self::letters).
    pub async fn ids(&self) -> Result<Vec<String>> {
        let ids = |letter: &Value| letter["properties"]["message_id"].as_str().unwrap_or_default().to_owned();
        Ok(self.letters().await?.iter().map(ids).collect())
    }

    /// What the action log says.
    ///
    /// # Errors
    /// There is none.
    pub fn log(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.path("vramq/actions.jsonl"))?;
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

/// A dead letter as a worker writes it, of a job that would run.
///
/// # Errors
/// The text has no form in the encoding.
pub fn letter(id: &str, reason: Reason, text: &str) -> Result<Message> {
    let job = Message::texts(Encoding::Json, MODEL, id, REPLIES, [text])?;
    let mut headers = FieldTable::default();
    JobHeaders { attempt: 1, ..JobHeaders::default() }.write(&mut headers);
    let letter = DeadLetter {
        reason,
        error: format!("for the test: {reason}"),
        dead_at_ms: 1_700_000_000_000,
        worker: "gone".to_owned(),
        worker_version: "0.0.1".to_owned(),
        requirement: None,
    };
    letter.write(&mut headers);
    headers.insert("mine".into(), AMQPValue::LongString("kept".into()));
    Ok(job.with(|properties| properties.with_headers(headers)))
}

/// Declares the queues of a model whose workers have gone, with letters in the dead queue. The test has to empty both.
///
/// # Errors
/// The broker does not take them.
pub async fn add_dead_letters(env: &mut TestEnv, letters: Vec<Message>) -> Result<()> {
    let worker = env.worker(&[]).await?;
    worker.drain().await?;
    env.leave(&dead_queue(MODEL));
    env.leave(&jobs_queue(MODEL));
    for some in letters.chunks(500) {
        let confirmation = env.client.publish_to_queue(&dead_queue(MODEL), some).await?;
        ensure!(
            confirmation.iter().all(|confirmation| *confirmation == Confirmation::Ack(None)),
            "a letter was not taken"
        );
    }
    Ok(())
}

/// How often each id is in a queue; takes it out.
///
/// # Errors
/// There is no such queue, or its messages do not come.
pub async fn drained(env: &TestEnv, queue: &str) -> Result<BTreeMap<String, usize>> {
    let mut counts = BTreeMap::new();
    let count = env.client.ready(queue).await?;
    let mut mailbox = env.client.mailbox(queue).await?;
    for message in mailbox.take(count as usize).await? {
        *counts.entry(message.id().to_owned()).or_default() += 1;
    }
    Ok(counts)
}

/// How many letters a test of many has.
pub fn scale() -> usize {
    if full() { 10_000 } else { 400 }
}

/// Letters of several kinds, with the ids of [`ids`].
///
/// # Errors
/// The text has no form in the encoding.
pub fn letters(count: usize) -> Result<Vec<Message>> {
    let reasons = [Reason::Expired, Reason::OutOfMemory, Reason::EngineFailed, Reason::Unroutable];
    (0..count).map(|at| letter(&format!("job-{at}"), reasons[at % reasons.len()], "a text")).collect()
}

pub fn ids(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("job-{at}")).collect()
}
