//! The metrics of a worker by caller.

use anyhow::{Result, ensure};
use vramq_schemas::fields;
use vramq_schemas::headers::TENANT;
use vramq_tests::answers::{answered_once, items};
use vramq_tests::metrics::Scrape;
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(each_caller_has_figures_of_its_own);

/// The user that tests publish as.
const USER: &str = "guest";

async fn each_caller_has_figures_of_its_own(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "job dead-lettered", "allocations of passes are made to fail"] {
        env.announce(text);
    }
    let worker = env.worker(&["fairness.tenant_users=guest", "device.cpu.fault=skip=0,fail=1"]).await?;
    let mut replies = env.replies().await?;
    // The first one runs out of memory, and is requeued: its caller goes with it.
    for (id, user, tenant, count) in [
        ("large", Some(USER), Some("acme"), 8),
        ("tenant", Some(USER), Some("acme"), 3),
        ("other tenant", Some(USER), Some("zeta"), 5),
        ("user", Some(USER), None, 2),
        ("nobody", None, None, 4),
        // A user without `user_id` cannot name the caller that it publishes for.
        ("claims", None, Some("acme"), 1),
    ] {
        let items = items(count);
        let mut job = env.job(id, items.clone())?;
        if let Some(user) = user {
            job = job.with(|properties| properties.with_user_id(user.into()));
        }
        if let Some(tenant) = tenant {
            job = job.with_header(TENANT, fields::text(tenant));
        }
        env.client.publish(MODEL, job).await?;
        answered_once(&mut replies, id, &items).await?;
    }
    let bad = env.job("bad", ["x"])?.with_body("no job");
    env.client.publish(MODEL, bad.with(|properties| properties.with_user_id(USER.into()))).await?;
    ensure!(replies.next().await?.id() == "bad");
    ensure!(env.dead_letters().await?.next().await?.id() == "bad");

    let scrape = until("all jobs to be settled", async || {
        let scrape = Scrape::of(&worker).await?;
        Ok((scrape.sum("vramq_jobs_in_hand", &[]) == 0.0).then_some(scrape))
    })
    .await?;
    for (caller, jobs, items, started) in [
        // The pass that ran out of memory has no items; the job started twice.
        ("guest/acme", 2, 11, 3),
        ("guest/zeta", 1, 5, 1),
        ("guest", 2, 2, 1),
        ("(anonymous)", 2, 5, 2),
        ("(others)", 0, 0, 0),
    ] {
        let of = |name| scrape.sum(name, &[("caller", caller)]);
        let found = (of("vramq_caller_jobs_total"), of("vramq_caller_items_total"));
        ensure!(found == (f64::from(jobs), f64::from(items)), "{caller}: {found:?} jobs and items");
        let waits = of("vramq_caller_queued_seconds_count");
        ensure!(waits == f64::from(started), "{caller}: {waits} waits");
        let seconds = of("vramq_caller_device_seconds_total");
        ensure!((seconds > 0.0) == (items > 0), "{caller}: {seconds} s");
    }
    // Nothing is left over, and nothing is counted twice.
    for (of_callers, of_all) in [
        ("vramq_caller_items_total", "vramq_items_total"),
        ("vramq_caller_cost_total", "vramq_cost_total"),
        ("vramq_caller_device_seconds_total", "vramq_pass_duration_seconds_sum"),
        ("vramq_caller_queued_seconds_count", "vramq_job_queued_seconds_count"),
    ] {
        let (callers, all) = (scrape.sum(of_callers, &[]), scrape.sum(of_all, &[]));
        ensure!((callers - all).abs() < 1e-6, "{of_callers} is {callers} in all, {of_all} is {all}");
    }
    worker.drain().await
}
