//! Slots: the prefetch of a worker's consumers is at most its slots, and it never holds more jobs.

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::{bulk_queue, jobs_queue};
use vramq_tests::management::{ConsumerView, Depth};
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(prefetch_is_the_slots_and_no_more_is_ever_held);
on_one_setup!(slots_follow_from_memory);

async fn prefetch_is_the_slots_and_no_more_is_ever_held(env: &mut TestEnv) -> Result<()> {
    for slots in [1, 3, 40] {
        let device = SharedDevice::new(64)?;
        let [file, memory, reserve] = device.settings();
        let slots_max = format!("model.echo.slots_max={slots}");
        let worker = env.worker(&[&slots_max, &file, &memory, &reserve]).await?;
        // Passes wait for the device, so that nothing that the worker holds ends.
        let busy = device.block().await?;
        let mut replies = env.replies().await?;
        let jobs = slots * 2 + 5;
        for at in 0..jobs {
            env.client.publish(MODEL, env.job(&at.to_string(), ["x"])?).await?;
        }
        let queue = jobs_queue(MODEL);
        // One is for a large job, as soon as there are some to spare; a second one once it is known that large jobs are short.
        let of_bulk = (slots / 2).min(1);
        let full = Depth { ready: jobs - (slots - of_bulk), unacked: slots - of_bulk };
        until("as many unacknowledged jobs as slots", async || {
            let depth = env.vhost.depth(&queue).await?;
            Ok(depth.filter(|depth| *depth == full))
        })
        .await?;
        let by_queue = until("the broker's view of the consumers", async || {
            let prefetch = |of: &str, all: &[ConsumerView]| -> u64 {
                all.iter().filter(|consumer| consumer.queue == of).map(|consumer| consumer.prefetch).sum()
            };
            let all = env.vhost.consumers().await?;
            let by_queue = (prefetch(&queue, &all), prefetch(&bulk_queue(MODEL), &all));
            Ok(Some(by_queue).filter(|(of_jobs, of_bulk)| of_jobs + of_bulk >= slots))
        });
        ensure!(by_queue.await? == (slots - of_bulk, of_bulk), "the prefetch is not the {slots} slots");
        // A channel may have been counted when it did not hold all of them yet. What it holds stays.
        let mut by_channel = Vec::new();
        let counted = until("one channel that holds all of them", async || {
            by_channel = env.vhost.unacked_by_channel().await?;
            Ok((by_channel == [slots - of_bulk]).then_some(()))
        })
        .await;
        counted.with_context(|| format!("the channels hold {by_channel:?}"))?;

        drop(busy);
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
    let prefetch = until("the broker's view of the consumers", async || {
        let all = env.vhost.consumers().await?;
        Ok(Some(all.iter().map(|consumer| consumer.prefetch).sum::<u64>()).filter(|prefetch| *prefetch >= 4))
    });
    ensure!(prefetch.await? == 4);
    Ok(())
}
