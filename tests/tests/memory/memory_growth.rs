//! A worker's memory does not grow with the number of jobs that it has run.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use vramq_tests::flow::Flow;
use vramq_tests::on_queue_types;
use vramq_tests::test_env::TestEnv;

on_queue_types!(
    #[ignore = "200,000 jobs take minutes: run `make nightly`"]
    memory_does_not_grow_with_jobs
);

const JOBS: usize = 200_000;

/// Between looks at the worker's memory.
const STEP: usize = 2_000;

/// Jobs after which allocator, connection and queues have reached their size.
const WARM: usize = 40_000;

/// A job that left anything behind would take more than this: its id alone is as large, and its message ten times larger.
const BYTES_PER_JOB_MAX: f64 = 16.0;

/// The slope of the line through the points that has the least squares.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let along: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    along / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}

async fn memory_does_not_grow_with_jobs(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&["model.echo.slots_max=64"]).await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    let mut points = Vec::with_capacity(JOBS / STEP);
    let started = Instant::now();
    while flow.published < JOBS {
        flow.publish(env, STEP).await?;
        flow.collect(&mut replies, 0).await?;
        let resident = worker.resident_bytes().context("the worker ended")?;
        points.push((flow.published as f64, resident as f64));
    }
    let took = started.elapsed();
    let mib = |point: Option<&(f64, f64)>| point.map_or(0.0, |(_, bytes)| bytes / f64::from(1 << 20));
    let warm = &points[WARM / STEP..];
    let bytes_per_job = slope(warm);
    println!(
        "{} jobs in {took:.0?}: {:.1} MiB after {STEP}, {:.1} after {WARM}, {:.1} at the end; {bytes_per_job:.2} bytes a job",
        flow.published,
        mib(points.first()),
        mib(warm.first()),
        mib(points.last())
    );
    ensure!(bytes_per_job < BYTES_PER_JOB_MAX, "{bytes_per_job:.2} bytes a job");
    Ok(())
}
