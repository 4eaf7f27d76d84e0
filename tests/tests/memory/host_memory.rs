//! Host memory: large bodies and jobs of many items take no more than the configuration allows.

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_tests::answers::items;
use vramq_tests::bert::fixture;
use vramq_tests::caller::Caller;
use vramq_tests::test_env::TestEnv;
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(large_jobs_stay_within_host_memory);
// What an encoder takes for a job does not depend on the queue that the job came from.
on_one_setup!(jobs_of_an_encoder_stay_within_host_memory);

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
    stayed_within(&worker)
}

fn stayed_within(worker: &Worker) -> Result<()> {
    let peak = worker.peak_bytes().context("the worker ended")? / MIB;
    let most = COPIES * HOST_MEMORY_MIB + BASE_MIB;
    println!("{peak} MiB at the peak, of {most} MiB");
    ensure!(peak <= most, "the worker took {peak} MiB, more than {most} MiB");
    Ok(())
}

const ENCODER: &str = "tiny";

/// Jobs of one text of 15 MiB each, as a caller may send them.
const OF_ONE_TEXT: usize = 4;

/// Jobs of [`MANY_TEXTS`] texts: three times those that a worker has slots for.
const ENCODED: usize = 6;

/// A real encoder, which tokenises, and whose vectors are larger than its texts.
async fn jobs_of_an_encoder_stay_within_host_memory(env: &mut TestEnv) -> Result<()> {
    let path = format!("model.{ENCODER}.path={}", fixture("tiny-long"));
    let host_memory = format!("worker.host_memory_mib={HOST_MEMORY_MIB}");
    let worker = env.spawn_bare_worker(&[&path, &host_memory, "worker.drain_s=60"])?;
    worker.consuming().await?;
    let (one, many) = (Caller::new(env, "one").await?, Caller::new(env, "many").await?);
    let texts = items(MANY_TEXTS);
    for at in 0..ENCODED {
        let id = at.to_string();
        if at < OF_ONE_TEXT {
            one.publish_for(ENCODER, one.job_for(ENCODER, &id, ["x".repeat(LARGE_TEXT)])?).await?;
        }
        let texts = texts.iter().map(String::as_str);
        many.publish_for(ENCODER, many.job_for(ENCODER, &id, texts)?).await?;
    }
    for (caller, jobs) in [(&one, OF_ONE_TEXT), (&many, ENCODED)] {
        let (mut replies, mut done) = (caller.mailbox().await?, 0);
        while done < jobs {
            let reply = replies.next().await?;
            ensure!(reply.kind()? != ReplyKind::Failed, "{:?}", reply.failure());
            done += usize::from(reply.kind()? == ReplyKind::Done);
        }
    }
    stayed_within(&worker)
}
