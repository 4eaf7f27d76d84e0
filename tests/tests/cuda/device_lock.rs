//! Workers of the default configuration on one GPU of a fake driver: an exclusive pass of one runs beside no pass of the other.

use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_tests::client::Mailbox;
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::job::Message;
use vramq_tests::on_one_setup;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

on_one_setup!(workers_on_one_gpu_run_exclusive_passes_alone, a_lock_that_cannot_be_opened_is_a_warning);

/// Nothing about the lock: `device.cuda.file` is not set. The reserve is too large for the fake device.
const CUDA: [&str; 2] = ["device.kind=cuda", "device.cuda.reserve_mib=0"];

/// A GPU whose UUID no other test has, so that its lock is not theirs. The files of the lock end with this.
struct Gpu {
    lock: String,
}

impl Gpu {
    /// Workers that start from here on have it.
    fn new(env: &mut TestEnv) -> Result<Self> {
        static GPUS: AtomicU32 = AtomicU32::new(0);
        let machine = std::process::id() << 8 | GPUS.fetch_add(1, Ordering::Relaxed);
        env.set_environment("LD_LIBRARY_PATH", library_path(&[driver()?, nvml()?])?);
        env.set_environment("FAKE_CUDA_MACHINE", machine.to_string());
        Ok(Self { lock: format!("/dev/shm/vramq-GPU-a0a1a2a3-a4a5-a6a7-a8a9-aa{machine:08x}00") })
    }

    /// What a pass locks while it waits for the device.
    fn waiting_file(&self) -> PathBuf {
        format!("{}.gate", self.lock).into()
    }

    /// What it locks while it runs.
    fn running_file(&self) -> PathBuf {
        format!("{}.lane", self.lock).into()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.running_file());
        let _ =
            std::fs::remove_file(self.waiting_file()).or_else(|_| std::fs::remove_dir(self.waiting_file()));
    }
}

/// Whether some process has locked a file, for itself or with others.
fn is_locked(file: PathBuf) -> Result<bool> {
    match File::open(&file).with_context(|| format!("open {}", file.display()))?.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

/// A worker on the GPU, of a model of its own, whose passes need tickets.
struct Neighbour {
    model: &'static str,
    worker: Worker,
    tickets: PassTickets,
}

impl Neighbour {
    async fn start(env: &mut TestEnv, model: &'static str) -> Result<Self> {
        let tickets = PassTickets::new(env)?;
        let (engine, setting) = (format!("model.{model}.engine=echo"), tickets.setting());
        let worker = env.spawn_bare_worker(&[&CUDA[..], &[&engine, &setting]].concat())?;
        worker.consuming().await?;
        Ok(Self { model, worker, tickets })
    }

    /// Publishes a job of one pass.
    async fn publish(&self, env: &TestEnv, exclusive: bool) -> Result<()> {
        let job = Message::texts(env.setup.encoding, self.model, self.model, REPLIES, ["x"])?;
        let job = if exclusive { job.with_header("exclusive", true.into()).as_worker() } else { job };
        env.client.publish(self.model, job).await
    }
}

/// The next replies are of these models' jobs, in any order.
async fn answered(replies: &mut Mailbox, models: &[&str]) -> Result<()> {
    let mut found = Vec::new();
    for _ in models {
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.failure());
        found.push(reply.id().to_owned());
    }
    found.sort();
    ensure!(found == models, "{found:?}, not {models:?}");
    Ok(())
}

/// A pass of the first worker runs, and one of the second waits for it.
async fn waits(
    env: &TestEnv,
    gpu: &Gpu,
    replies: &mut Mailbox,
    (first, first_is_exclusive): (&mut Neighbour, bool),
    (second, second_is_exclusive): (&mut Neighbour, bool),
) -> Result<()> {
    first.publish(env, first_is_exclusive).await?;
    until("the first pass to run", async || Ok(is_locked(gpu.running_file())?.then_some(()))).await?;
    // It would take this ticket at once if it ran.
    second.tickets.give(1)?;
    second.publish(env, second_is_exclusive).await?;
    until("the second pass to wait", async || {
        ensure!(second.tickets.left()? == 1, "it runs beside the first one");
        Ok(is_locked(gpu.waiting_file())?.then_some(()))
    })
    .await?;
    first.tickets.give(1)?;
    answered(replies, &[first.model, second.model]).await
}

async fn workers_on_one_gpu_run_exclusive_passes_alone(env: &mut TestEnv) -> Result<()> {
    let gpu = Gpu::new(env)?;
    let mut one = Neighbour::start(env, "one").await?;
    let mut other = Neighbour::start(env, "other").await?;
    let mut replies = env.replies().await?;
    for is_exclusive in [[false, true], [true, false], [true, true]] {
        waits(env, &gpu, &mut replies, (&mut one, is_exclusive[0]), (&mut other, is_exclusive[1]))
            .await
            .with_context(|| format!("exclusive: {is_exclusive:?}"))?;
    }
    one.worker.drain().await?;
    other.worker.drain().await
}

/// As where another user made the files: this one cannot be opened by any.
async fn a_lock_that_cannot_be_opened_is_a_warning(env: &mut TestEnv) -> Result<()> {
    env.announce("the device lock cannot be opened");
    let gpu = Gpu::new(env)?;
    std::fs::create_dir(gpu.waiting_file())?;
    let mut alone = Neighbour::start(env, "alone").await?;
    let line = alone.worker.log.wait_for("the device lock cannot be opened").await?;
    ensure!(line.field("level").is_some_and(|level| level == "WARN"), "{}", line.text());
    ensure!(line.field("file").is_some_and(|file| *file == gpu.lock.as_str()), "{}", line.text());
    ensure!(line.text().contains("Set `device.cuda.file`"), "{}", line.text());
    let mut replies = env.replies().await?;
    for is_exclusive in [false, true] {
        alone.tickets.give(1)?;
        alone.publish(env, is_exclusive).await?;
        answered(&mut replies, &[alone.model]).await?;
    }
    alone.worker.drain().await
}
