//! Host memory: large bodies and jobs of many items take no more than the configuration allows.

use anyhow::{Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_tests::answers::items;
use vramq_tests::caller::Caller;
use vramq_tests::on_queue_types;
use vramq_tests::test_env::TestEnv;

on_queue_types!(large_jobs_stay_within_host_memory);

const MIB: u64 = 1 << 20;

/// For the bodies of unacknowledged jobs: six of the largest. Two of these slots are for jobs of many items.
const HOST_MEMORY_MIB: u64 = 96;

/// What a job takes of host memory, in bodies: the body, what was read of it, and its reply. By default a third of the machine
/// is for bodies.
const COPIES: u64 = 3;

/// What a worker of the echo engine takes without jobs: its program, threads and buffers of the connections.
const BASE_MIB: u64 = 64;

/// More than the worker may hold.
const LARGE: usize = 8;
const LARGE_TEXT: usize = 15 << 20;
const MANY: usize = 40;
const MANY_TEXTS: usize = 60_000;

async fn large_jobs_stay_within_host_memory(env: &mut TestEnv) -> Result<()> {
    let host_memory = format!("worker.host_memory_mib={HOST_MEMORY_MIB}");
    let worker = env.worker(&[&host_memory]).await?;
    let (one, many) = (Caller::new(env, "one").await?, Caller::new(env, "many").await?);
    let texts = items(MANY_TEXTS);
    for at in 0..MANY {
        if at < LARGE {
            one.publish(one.job(&at.to_string(), ["x".repeat(LARGE_TEXT)])?).await?;
        }
        many.publish(many.job(&at.to_string(), texts.iter().map(String::as_str))?).await?;
    }
    for (caller, jobs) in [(&one, LARGE), (&many, MANY)] {
        let (mut replies, mut done) = (caller.mailbox().await?, 0);
        while done < jobs {
            let kind = replies.next().await?.kind()?;
            ensure!(kind != ReplyKind::Failed, "a job failed");
            done += usize::from(kind == ReplyKind::Done);
        }
    }
    let peak = worker.peak_bytes().unwrap_or(u64::MAX) / MIB;
    let most = COPIES * HOST_MEMORY_MIB + BASE_MIB;
    println!("{peak} MiB at the peak, of {most} MiB");
    ensure!(peak <= most, "the worker took {peak} MiB, more than {most} MiB");
    Ok(())
}
