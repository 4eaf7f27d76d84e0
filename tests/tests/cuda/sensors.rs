//! A GPU's sensors, from NVML to the operator: on a fake driver and a fake NVML.

use anyhow::{Result, ensure};
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::metrics::Scrape;
use vramq_tests::on_one_setup;
use vramq_tests::operator::Operator;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::TestEnv;
use vramq_tests::wait::until;
use vramq_tests::worker::vramq;

on_one_setup!(sensors_are_reported_to_operators, a_driver_that_hangs_gives_no_old_readings_and_delays_no_job);

const CUDA: [&str; 3] = ["device.kind=cuda", "device.cuda.reserve_mib=0", "worker.heartbeat_s=1"];
const JOBS: usize = 20;

fn fake_driver(env: &mut TestEnv) -> Result<()> {
    env.set_environment("LD_LIBRARY_PATH", library_path(&[driver()?, nvml()?])?);
    // At its power limit, and too hot.
    env.set_environment("FAKE_CUDA_THROTTLES", (0x04 | 0x20).to_string());
    Ok(())
}

async fn sensors_are_reported_to_operators(env: &mut TestEnv) -> Result<()> {
    fake_driver(env)?;
    let worker = env.worker(&CUDA).await?;
    let read = until("sensors to be read", async || {
        let scrape = Scrape::of(&worker).await?;
        Ok(scrape.has("vramq_device_temperature_celsius").then_some(scrape))
    });
    let scrape = read.await?;
    let device = ("device", "cuda:0");
    for (name, expected) in [
        // All that the fake driver's context takes.
        ("vramq_device_memory_used_bytes", f64::from(300 << 20)),
        ("vramq_device_utilization_ratio", 0.42),
        ("vramq_device_memory_utilization_ratio", 0.17),
        ("vramq_device_temperature_celsius", 61.0),
        ("vramq_device_power_watts", 123.456),
        ("vramq_device_power_limit_watts", 700.0),
        ("vramq_device_sm_clock_hertz", 1.98e9),
        ("vramq_device_memory_clock_hertz", 2.619e9),
        ("vramq_device_throttled", 2.0),
    ] {
        let value = scrape.sum(name, &[device]);
        ensure!((value - expected).abs() < expected * 1e-9, "{name} is {value}, not {expected}");
    }
    for reason in ["sw_power_cap", "sw_thermal_slowdown"] {
        ensure!(scrape.sum("vramq_device_throttled", &[device, ("reason", reason)]) == 1.0, "not {reason}");
    }

    let mut operator = Operator::new(env).await?;
    let heard = operator.heartbeat(|heartbeat| heartbeat.devices[0].temperature_celsius.is_some()).await?;
    let device = &heard.devices[0];
    ensure!((device.temperature_celsius, device.utilization_percent) == (Some(61), Some(42)), "{device:?}");
    ensure!(device.throttled == ["sw_power_cap", "sw_thermal_slowdown"], "{device:?}");
    let value = until("a report that has heard the worker", async || {
        let value = vramq(&env.url, &["status", "--for", "2s"]).await?;
        Ok((value.code == Some(0)).then_some(value))
    })
    .await?;
    ensure!(value.stdout.contains(" cuda:0 61°C 42% "), "{value:?}");
    let slow =
        format!("{}: cuda:0 is slowed down by heat or lack of power: sw_thermal_slowdown", worker.name);
    ensure!(value.stdout.contains(&slow) && !value.stdout.contains("sw_power_cap"), "{}", value.stdout);
    Ok(())
}

async fn a_driver_that_hangs_gives_no_old_readings_and_delays_no_job(env: &mut TestEnv) -> Result<()> {
    fake_driver(env)?;
    let folder = tempfile::tempdir()?;
    let hangs = folder.path().join("hangs");
    env.set_environment("FAKE_CUDA_HANGS", &hangs);
    let worker = env.worker(&CUDA).await?;
    let until_shown = async |wanted: bool| {
        let what = if wanted { "figures of sensors" } else { "no figures of sensors" };
        until(what, async || {
            let (status, page) = worker.get("/metrics").await?;
            ensure!(status == 200, "{status}");
            Ok((page.contains("vramq_device_temperature_celsius") == wanted).then_some(()))
        })
        .await
    };
    until_shown(true).await?;
    std::fs::write(&hangs, "")?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    until_shown(false).await?;
    ensure!(worker.get("/livez").await?.0 == 200);
    std::fs::remove_file(&hangs)?;
    until_shown(true).await
}
