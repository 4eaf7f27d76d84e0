//! The metrics of a worker by caller.

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::fields;
use vramq_schemas::headers::TENANT;
use vramq_tests::answers::{answered_once, items};
use vramq_tests::caller::Caller;
use vramq_tests::metrics::Scrape;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(each_caller_has_figures_of_its_own);
on_one_setup!(callers_beyond_the_most_are_counted_together_and_announced_once);

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

async fn callers_beyond_the_most_are_counted_together_and_announced_once(env: &mut TestEnv) -> Result<()> {
    const WARNING: &str = "counted together as `(others)`";
    env.announce(WARNING);
    let worker = env.worker(&["metrics.callers_max=2"]).await?;
    let mut users = Vec::new();
    for (at, name) in ["first", "second", "third", "fourth"].into_iter().enumerate() {
        let caller = Caller::new(env, name).await?;
        caller.publish(caller.job(name, ["x"])?).await?;
        answered_once(&mut caller.mailbox().await?, name, &["x".to_owned()]).await?;
        let most = at.saturating_sub(1).min(1);
        until("the job to be counted", async || {
            let jobs = Scrape::of(&worker).await?.sum("vramq_caller_jobs_total", &[]);
            Ok((jobs == (at + 1) as f64).then_some(()))
        })
        .await?;
        worker.log.counts(WARNING, most).await.context(name)?;
        users.push(caller.user);
    }
    let scrape = Scrape::of(&worker).await?;
    let jobs = |caller: &str| scrape.sum("vramq_caller_jobs_total", &[("caller", caller)]);
    let found: Vec<_> = users.iter().map(|user| jobs(user)).chain([jobs("(others)")]).collect();
    ensure!(found == [1.0, 1.0, 0.0, 0.0, 2.0], "{found:?}");
    let warning = worker.log.wait_for(WARNING).await?;
    ensure!(warning.text().contains(&users[2]), "it names another caller: {}", warning.text());
    Ok(())
}
