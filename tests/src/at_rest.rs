//! Waits until a worker and the broker have nothing left to do.

use anyhow::Result;

use crate::metrics::Figures;
use crate::test_env::TestEnv;
use crate::wait::until;
use crate::worker::Worker;

/// Waits until no queue has a message and the worker holds no job, at several looks in a row: a single look may miss a job that is on its
/// way between a queue and the worker. On classic queues a job that a dead worker held first waits for a second in a delay queue.
///
/// # Errors
/// It does not come to that.
pub async fn comes_to_rest(env: &TestEnv, worker: &Worker) -> Result<()> {
    const LOOKS: usize = 10;
    let queues = env.vhost.queues().await?;
    let mut quiet = 0;
    until("no job in a queue or at the worker", async || {
        let mut jobs = Figures::of(worker).await?.sum("vramq_jobs_in_hand");
        for queue in &queues {
            jobs += env.client.ready(queue).await? as usize;
        }
        quiet = if jobs == 0 { quiet + 1 } else { 0 };
        Ok((quiet >= LOOKS).then_some(()))
    })
    .await
}
