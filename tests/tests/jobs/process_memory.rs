//! Device memory that programs keep between their passes.

use anyhow::{Context as _, Result, ensure};
use vramq_tests::on_one_setup;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};

use crate::process::{Served, consuming, outputs};

on_one_setup!(caches_of_a_program_do_not_stop_it);

/// The worker looks every 10 s at what a busy program holds, and has it trimmed after 50 passes. This test's passes take 14 s and are
/// fewer, so one look finds that the program keeps more than half of the device.
async fn caches_of_a_program_do_not_stop_it(env: &mut TestEnv) -> Result<()> {
    const JOBS: usize = 48;
    let device = SharedDevice::new(1000)?;
    let [file, memory, reserve] = device.settings();
    let path = file.split_once('=').context("no file")?.1.to_owned();
    let keys = "instances = 1\nitems_max = 1";
    let _served = Served::new(env, keys, &[("DEVICE", &path), ("BASE_MIB", "100")])?;
    let worker = consuming(env, &[&file, &memory, &reserve]).await?;
    let mut replies = env.replies().await?;
    for job in 0..JOBS {
        env.client.publish(MODEL, env.job(&job.to_string(), ["keep 600"])?).await?;
    }
    for job in 0..JOBS {
        outputs(&mut replies, &job.to_string()).await?;
    }
    ensure!(device.memory().free <= 300 << 20, "nothing is kept: {:?}", device.memory());
    ensure!(worker.log.count("not even one item fits") == 0, "{}", worker.log.text());
    worker.drain().await?;
    ensure!(device.memory().free == 1000 << 20, "{:?}", device.memory());
    Ok(())
}
