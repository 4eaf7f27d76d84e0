//! A worker that does not answer, for tests of clients that give up on their jobs.

use anyhow::{Context as _, Result, ensure};
use lapin::{BasicProperties, Confirmation, ExchangeKind};
use tempfile::NamedTempFile;
use vramq_producer::{Client, JobError, Reason, SubmitOptions};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::{DIGEST, TYPE, Withdrawal};
use vramq_tests::job::Message;
use vramq_tests::permissions::{Permissions, documented};
use vramq_tests::proxy::Proxy;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

use super::{in_time, job};

/// A real worker that answers its first job of one item. From the second pass on, passes wait while a file exists. Every item fills a pass,
/// so one job is in the waiting pass, one in the pass made ahead, and the others in none.
pub struct HeldWorker {
    worker: Worker,
    file: NamedTempFile,
}

impl HeldWorker {
    pub async fn start(env: &mut TestEnv) -> Result<Self> {
        env.announce("a failpoint is set");
        let file = NamedTempFile::new().context("make a file")?;
        let drill = format!("worker.drill=pass=hang,skip=1,while={}", file.path().display());
        let worker = env.worker(&[&drill, &format!("model.{MODEL}.pass_tokens=1")]).await?;
        // It may consume jobs before it receives withdrawals.
        env.client.declare_exchange(WITHDRAWALS_EXCHANGE, ExchangeKind::Fanout).await?;
        publish(env, b"nonsense".to_vec()).await?;
        Ok(Self { worker, file })
    }

    /// Lets the passes go on.
    pub fn release(&self) -> Result<()> {
        std::fs::remove_file(self.file.path()).context("remove the file")
    }

    /// Waits until a figure of the worker has this value.
    pub async fn until_counted(&self, counter: &str, value: f64) -> Result<()> {
        until(&format!("{counter} to be {value}"), async || {
            Ok((self.count(counter).await? == value).then_some(()))
        })
        .await
    }

    async fn count(&self, counter: &str) -> Result<f64> {
        let (status, text) = self.worker.get("/metrics").await?;
        ensure!(status == 200, "{status} {text}");
        let lines = text.lines().filter(|line| line.starts_with(counter));
        Ok(lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }

    /// Lets the passes go on. All jobs except the first then end as withdrawn, `jobs` of them, without a dead letter. One of them must be
    /// in the held pass.
    pub async fn all_are_withdrawn(&self, env: &TestEnv, jobs: u32) -> Result<()> {
        self.has_read_all_withdrawals(env).await?;
        self.release()?;
        self.until_counted("vramq_jobs_withdrawn_total", f64::from(jobs + 1)).await?;
        self.worker.drain().await?;
        let (passes, dead) = (self.worker.total("passes").await?, self.worker.total("dead").await?);
        ensure!(passes <= 2 && dead == 0, "{passes} passes, {dead} dead letters: {}", self.worker.log.text());
        Ok(())
    }

    /// The worker handles withdrawals in order: when that of another job took effect, all earlier ones have. This other job ends at once,
    /// because it is not in the held pass.
    async fn has_read_all_withdrawals(&self, env: &TestEnv) -> Result<()> {
        let withdrawal = Withdrawal { job: "the last".to_owned(), secret: "of the test".to_owned() };
        let client = Client::connect(env.url.as_str()).await?;
        let options = SubmitOptions {
            id: Some(withdrawal.job.clone()),
            headers: vec![(DIGEST.to_owned(), withdrawal.digest().to_string())],
            ..SubmitOptions::default()
        };
        let pending = client.submit(job(MODEL, &["x"]), options).await?;
        publish(env, withdrawal.to_json()).await?;
        let end = in_time(pending.outputs()).await;
        ensure!(
            matches!(&end, Err(JobError::Failed(failed)) if failed.reason == Reason::Withdrawn),
            "{end:?}"
        );
        client.close().await;
        Ok(())
    }
}

/// Jobs of a caller that may not withdraw jobs at first: one is answered, one holds the device, one is in the next pass, and one is
/// withdrawn.
const JOBS_OF_UNPERMITTED: usize = 4;

/// Attempts to withdraw a job that the broker refuses, before the caller may.
const REFUSED_ATTEMPTS: usize = 3;

/// A caller that may not withdraw jobs, behind a proxy that counts what it publishes.
pub struct UnpermittedCaller {
    user: String,
    proxy: Proxy,
}

impl UnpermittedCaller {
    pub async fn new(env: &mut TestEnv) -> Result<Self> {
        let write = r"^vramq\.jobs$".to_owned();
        let jobs_alone = Permissions { write, ..documented("publisher")? };
        let (user, url) = env.add_user_with("jobs-alone", &jobs_alone).await?;
        Ok(Self { user, proxy: Proxy::to(&url).await? })
    }

    pub fn url(&self) -> &str {
        self.proxy.url()
    }

    /// Gives the caller the permission after some refused attempts, and waits until the worker has the withdrawal. Then the other jobs
    /// go on.
    pub async fn is_permitted_later(&self, env: &TestEnv, held: &HeldWorker) -> Result<()> {
        let published = JOBS_OF_UNPERMITTED + REFUSED_ATTEMPTS;
        until("refused withdrawals", async || Ok((self.proxy.published() >= published).then_some(())))
            .await?;
        held.until_counted("vramq_jobs_withdrawn_total", 0.0).await?;
        env.permit(&self.user, &documented("publisher")?).await?;
        held.until_counted("vramq_jobs_withdrawn_total", 1.0).await?;
        held.release()
    }
}

/// Publishes a withdrawal, as soon as a worker receives withdrawals.
async fn publish(env: &TestEnv, body: Vec<u8>) -> Result<()> {
    let properties = BasicProperties::default().with_type(TYPE.into());
    let message = Message { properties, body, as_worker: false };
    until("a worker that receives withdrawals", async || {
        let confirmation = env.client.publish_to(WITHDRAWALS_EXCHANGE, "", message.clone()).await?;
        Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
    })
    .await
}
