//! Runs the README's commands for a worker, jobs and HTTP as they are written, except for the broker's address and the port.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::on_one_setup;
use vramq_tests::ports::free_port;
use vramq_tests::programs::{program, root, setting};
use vramq_tests::test_env::TestEnv;
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::worker::{Ended, run_to_end};

use super::help::shell;

on_one_setup!(worker_jobs_and_gateway_run_as_written);

/// The model of the README, and the width of its vectors.
const MODEL: &str = "minilm";
const WIDTH: usize = 384;

/// What the README and other pages name as broker and as the gateway's port.
pub(super) const BROKER: &str = "amqp://guest:guest@localhost:5672/%2f";
pub(super) const PORT: &str = ":8080";

/// The README's commands, and where they run.
struct Reader<'a> {
    readme: String,
    url: &'a str,
    port: u16,
    folder: &'a Path,
}

impl Reader<'_> {
    /// The only line of the README that begins like this, as a shell's command.
    fn command(&self, start: &str) -> Result<Command> {
        let mut lines = self.readme.lines().filter(|line| line.starts_with(start));
        let (Some(line), None) = (lines.next(), lines.next()) else {
            bail!("not one line of the README begins with `{start}`");
        };
        let line = line.replace(BROKER, self.url).replace(PORT, &format!(":{}", self.port));
        // They are beside `vramq`; none may be of yesterday.
        for name in ["vramq-worker", "vramq-gateway"] {
            program(name)?;
        }
        shell(&line, self.folder, self.url)
    }

    /// Runs a command that ends with 0.
    async fn run(&self, start: &str) -> Result<Ended> {
        let ended = run_to_end(self.command(start)?).await?;
        ensure!(ended.code == Some(0), "{start}: {ended:?}");
        Ok(ended)
    }

    /// Starts a command that goes on, with its log in the folder.
    fn start(&self, start: &str, log: &str) -> Result<Child> {
        let log = std::fs::File::create(self.folder.join(log))?;
        Ok(self.command(start)?.stdout(Stdio::null()).stderr(log).spawn()?)
    }
}

async fn worker_jobs_and_gateway_run_as_written(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    // The README's reader is in a clone, with the model that `models/fetch` has fetched.
    std::fs::create_dir(folder.path().join("models"))?;
    let model = setting("VRAMQ_TEST_MODEL")?.canonicalize()?;
    std::os::unix::fs::symlink(model, folder.path().join("models/all-MiniLM-L6-v2"))?;
    std::fs::write(folder.path().join("texts.txt"), "one\ntwo\nthree\n")?;
    let readme = std::fs::read_to_string(root().join("README.md"))?;
    let port = free_port()?;
    let reader = Reader { readme, url: &env.url, port, folder: folder.path() };

    let mut worker = reader.start("vramq-worker run --model", "worker.log")?;
    until("a worker that consumes", async || {
        if let Some(status) = worker.try_wait()? {
            let log = std::fs::read_to_string(folder.path().join("worker.log"))?;
            bail!("the worker ended: {status}\n{log}");
        }
        Ok((env.vhost.consumers_of(&jobs_queue(MODEL)).await? > 0).then_some(()))
    })
    .await?;
    let answered = reader.run("vramq submit --model minilm \"A man").await?;
    let lines = answered.stdout.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
    ensure!(lines.len() == 2 && lines.iter().all(|line| has_vector(&line["embedding"])), "{answered:?}");
    reader.run("vramq submit --model minilm --file").await?;
    let vectors = std::fs::read(folder.path().join("vectors.npy"))?;
    ensure!(String::from_utf8_lossy(&vectors[..128]).contains("'shape': (3, 384)"), "another shape");
    let listed = reader.run("vramq dlq list --model minilm").await?;
    ensure!(listed.stdout == "no dead letters\n", "{listed:?}");

    let gateway = reader.start("vramq-gateway run --listen", "gateway.log")?;
    let request = "curl localhost:8080/v1/embeddings -H 'content-type";
    let answer = until("the gateway's answer", async || {
        // Until it listens, and knows a worker of the model, there is none.
        let ended = run_to_end(reader.command(request)?).await?;
        let answer = serde_json::from_str::<Value>(&ended.stdout).unwrap_or_default();
        Ok(answer["data"].is_array().then_some(answer))
    })
    .await?;
    ensure!(has_vector(&answer["data"][0]["embedding"]), "{answer}");
    drains(gateway).await?;
    drains(worker).await
}

fn has_vector(value: &Value) -> bool {
    value.as_array().is_some_and(|vector| vector.len() == WIDTH)
}

/// Ends a program by SIGTERM; it ends well.
async fn drains(mut child: Child) -> Result<()> {
    let pid = i32::try_from(child.id().context("it has ended")?)?;
    kill_process(Pid::from_raw(pid).context("no process")?, Signal::TERM)?;
    let status = timeout(DEADLINE, child.wait()).await.context("it does not end")??;
    ensure!(status.code() == Some(0), "{status}");
    Ok(())
}
