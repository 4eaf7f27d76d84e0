//! The worker's capacity: prefetch is its slots, and it never holds more.

use anyhow::{Result, ensure};
use vramq_schemas::topology::jobs_queue;
use vramq_tests::blocked_reply_queue::BlockedReplyQueue;
use vramq_tests::management::{ConsumerView, Depth};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(prefetch_is_the_slots_and_no_more_is_ever_held);
on_one_setup!(slots_follow_from_memory);

async fn prefetch_is_the_slots_and_no_more_is_ever_held(env: &mut TestEnv) -> Result<()> {
    for slots in [1, 3, 40] {
        let worker = env.worker(&[&format!("model.echo.slots_max={slots}")]).await?;
        let consumer = ConsumerView { queue: jobs_queue(MODEL), prefetch: slots };
        let consumers = until("the broker's view of the consumer", async || {
            Ok(Some(env.vhost.consumers().await?).filter(|all| all.iter().any(|c| c.queue == consumer.queue)))
        });
        ensure!(consumers.await? == [consumer], "not one consumer with prefetch {slots}");

        let blocked = BlockedReplyQueue::declare(&env.client, env.setup.queue).await?;
        let jobs = slots * 2 + 5;
        for at in 0..jobs {
            env.client.publish(MODEL, blocked.receives(env.job(&at.to_string(), ["x"])?)).await?;
        }
        let queue = jobs_queue(MODEL);
        let full = Depth { ready: jobs - slots, unacked: slots };
        until("as many jobs in hand as slots", async || {
            let depth = env.vhost.depth(&queue).await?;
            Ok(depth.filter(|depth| *depth == full))
        })
        .await?;
        let by_channel = until("the channels' counts", async || {
            Ok(Some(env.vhost.unacked_by_channel().await?).filter(|all| all.iter().sum::<u64>() > 0))
        });
        ensure!(by_channel.await? == [slots], "a channel holds more than its slots");

        let mut replies = blocked.unblock().await?;
        for _ in 0..jobs {
            replies.next().await?;
            if let Some(depth) = env.vhost.depth(&queue).await? {
                ensure!(depth.unacked <= slots, "{depth:?} with {slots} slots");
            }
        }
        worker.drain().await?;
    }
    Ok(())
}

async fn slots_follow_from_memory(env: &mut TestEnv) -> Result<()> {
    // Of 3 MiB 1 is reserved; a job of 512 items of 1 KiB takes half a MiB.
    let settings = ["device.cpu.memory_mib=3", "device.cpu.reserve_mib=1", "model.echo.job_items=512"];
    let worker = env.worker(&settings).await?;
    let loaded = worker.log.wait_for("model loaded").await?;
    ensure!(loaded.field("slots").and_then(|n| n.as_u64()) == Some(4), "{}", loaded.text());
    let prefetch = until("the broker's view of the consumer", async || {
        Ok(env.vhost.consumers().await?.first().map(|consumer| consumer.prefetch))
    });
    ensure!(prefetch.await? == 4);
    Ok(())
}
