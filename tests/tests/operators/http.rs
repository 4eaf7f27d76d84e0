//! A worker's HTTP endpoints: `/livez`, `/readyz` and `/metrics`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tempfile::NamedTempFile;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::http::converse;
use vramq_tests::metrics::{Scrape, Shape, documented, figures};
use vramq_tests::named_pipe::model_that_never_loads;
use vramq_tests::programs::echo_program;
use vramq_tests::proxy::Cut;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

on_one_setup!(
    readiness_over_a_workers_life,
    a_worker_that_loads_lives_and_is_not_ready,
    a_pass_that_never_ends_is_reported_while_the_broker_is_away,
    a_loop_that_hangs_is_reported_and_metrics_are_still_served,
    every_metric_is_documented_and_every_documented_one_is_there,
    a_port_that_is_taken_is_an_error_and_of_a_range_the_next_is_taken,
    strange_http_clients_do_not_block_others,
);
on_queue_types!(metrics_match_what_happened);

const JOBS: usize = 30;

async fn readiness_over_a_workers_life(env: &mut TestEnv) -> Result<()> {
    for text in [
        "a failpoint is set",
        "no session yet",
        "session lost, connecting again",
        "will redeliver the unacknowledged jobs",
    ] {
        env.announce(text);
    }
    let proxy = env.proxy().await?;
    proxy.refuse();
    let held = NamedTempFile::new()?;
    let drill = format!("worker.drill=pass=hang,job=held,while={}", held.path().display());
    let url = format!("broker.url={}", proxy.url());
    let worker = env.spawn_worker(&[&url, "broker.connect_s=600", &drill])?;
    // Until its model is loaded it says that.
    until("a worker without a session", async || {
        let (status, why) = worker.get("/readyz").await?;
        Ok((status == 503 && why.starts_with("no-session: ")).then_some(()))
    })
    .await?;
    ensure!(worker.get("/livez").await?.0 == 200, "a broker that is away is no reason to be restarted");
    proxy.pass();
    ensure!(worker.answers("/readyz", 200).await? == "ready: consuming\n");
    proxy.refuse();
    ensure!(proxy.cut(Cut::Reset) > 0);
    ensure!(worker.answers("/readyz", 503).await?.starts_with("no-session: "));
    ensure!(worker.get("/livez").await?.0 == 200);
    proxy.pass();
    worker.answers("/readyz", 200).await?;

    env.client.publish(MODEL, env.job("held", ["x"])?).await?;
    until("a job in hand", async || {
        let scrape = Scrape::of(&worker).await?;
        Ok((scrape.sum("vramq_jobs_in_hand", &[("model", MODEL)]) == 1.0).then_some(()))
    })
    .await?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.answers("/readyz", 503).await? == "draining: asked to stop\n");
    let scrape = Scrape::of(&worker).await?;
    ensure!(scrape.sum("vramq_worker_state", &[("state", "draining")]) == 1.0);
    ensure!(scrape.sum("vramq_worker_state", &[]) == 1.0 && scrape.sum("vramq_consuming", &[]) == 0.0);
    held.close()?;
    ensure!(env.replies().await?.next().await?.id() == "held");
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}

async fn a_worker_that_loads_lives_and_is_not_ready(env: &mut TestEnv) -> Result<()> {
    let folder = model_that_never_loads()?;
    let worker = env.spawn_bare_worker(&[&format!("model.slow.path={}", folder.path().display())])?;
    ensure!(worker.answers("/readyz", 503).await?.starts_with("loading: "));
    ensure!(worker.get("/livez").await?.0 == 200);
    let scrape = Scrape::of(&worker).await?;
    ensure!(scrape.sum("vramq_worker_state", &[("state", "loading")]) == 1.0);
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}

/// Normally the event loop ends a worker whose device hangs. Without a broker there is no event loop, so `/livez` must tell the
/// orchestrator.
async fn a_pass_that_never_ends_is_reported_while_the_broker_is_away(env: &mut TestEnv) -> Result<()> {
    for text in [
        "a failpoint is set",
        "session lost",
        "will redeliver the unacknowledged jobs",
        "no session yet",
        "device lost",
    ] {
        env.announce(text);
    }
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    // Within that time the pass is seen and the connection cut: a worker that has one ends by itself.
    let stuck = env.worker(&[&url, "worker.drill=pass=hang", "worker.job_s=15"]).await?;
    let items = items(3);
    env.client.publish(MODEL, env.job("stuck", items.clone())?).await?;
    figures(&stuck, "a pass on the device", |figures| figures.sum("vramq_admitted_bytes_total") > 0).await?;
    ensure!(stuck.get("/livez").await?.0 == 200, "a pass may take its time");
    proxy.refuse();
    ensure!(proxy.cut(Cut::Reset) > 0);
    let body = stuck.answers("/livez", 503).await?;
    ensure!(body.starts_with("stuck: a pass has been running for "), "{body}");
    stuck.signal(Signal::TERM)?;
    ensure!(stuck.exited().await? == Some(0), "{}", stuck.log.text());
    let well = env.worker(&[]).await?;
    answered_once(&mut env.replies().await?, "stuck", &items).await?;
    well.drain().await
}

/// The event loop blocks the runtime's only thread, so HTTP must not depend on that thread.
async fn a_loop_that_hangs_is_reported_and_metrics_are_still_served(env: &mut TestEnv) -> Result<()> {
    for text in
        ["a failpoint is set", "session lost, connecting again", "will redeliver the unacknowledged jobs"]
    {
        env.announce(text);
    }
    let folder = tempfile::tempdir()?;
    let hangs = folder.path().join("hangs");
    std::fs::write(&hangs, "")?;
    let drill = format!("worker.drill=received=hang,job=bad,while={}", hangs.display());
    let worker = env.worker(&[&drill]).await?;
    ensure!(worker.get("/livez").await?.0 == 200);
    env.client.publish(MODEL, env.job("bad", ["x"])?).await?;
    // Every look on the way there has to be answered.
    let body = worker.answers("/livez", 503).await?;
    ensure!(body.starts_with("stuck: the event loop has not ticked for "), "{body}");
    let received = [("model", MODEL)];
    ensure!(Scrape::of(&worker).await?.sum("vramq_jobs_received_total", &received) == 0.0);
    worker.get("/readyz").await?;
    // What only seemed dead goes on. A broker that seemed silent meanwhile costs the session, and the job is redelivered.
    env.leave(&jobs_queue(MODEL));
    std::fs::remove_file(&hangs)?;
    worker.answers("/livez", 200).await?;
    answered_once(&mut env.replies().await?, "bad", &["x".to_owned()]).await?;
    worker.drain().await
}

async fn every_metric_is_documented_and_every_documented_one_is_there(env: &mut TestEnv) -> Result<()> {
    let [every, cuda, programs] = documented()?;
    let worker = env.worker(&[]).await?;
    are_documented(&worker, &every).await?;
    let [engine, command] = echo_program("program")?;
    let worker = env.worker(&[&engine, &command]).await?;
    are_documented(&worker, &every.clone().into_iter().chain(programs).collect()).await?;
    // What there is of a CUDA device besides; with a fake driver.
    env.set_environment("LD_LIBRARY_PATH", library_path(&[driver()?, nvml()?])?);
    let worker = env.worker(&["device.kind=cuda", "device.cuda.reserve_mib=0"]).await?;
    until("sensors to be read", async || {
        Ok(worker.get("/metrics").await?.1.contains("celsius").then_some(()))
    })
    .await?;
    are_documented(&worker, &every.into_iter().chain(cuda).collect()).await
}

/// All series exist before the first job, so that a count from the first scrape on misses nothing.
async fn are_documented(worker: &Worker, documented: &BTreeMap<String, Shape>) -> Result<()> {
    let found = Scrape::of(worker).await?.shapes()?;
    for (name, shape) in documented {
        ensure!(
            found.get(name) == Some(shape),
            "{name} is documented as {shape:?}, and is {:?}",
            found.get(name)
        );
    }
    for name in found.keys() {
        ensure!(documented.contains_key(name), "{name} is not in docs/metrics.md");
    }
    Ok(())
}

/// The figures are what was published and what came of it, and the same as those of the log.
async fn metrics_match_what_happened(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "job dead-lettered", "allocations of passes are made to fail"] {
        env.announce(text);
    }
    let worker = env.worker(&["device.cpu.fault=skip=0,fail=1"]).await?;
    let mut replies = env.replies().await?;
    // Runs out of memory once, and comes again with half of the hint.
    let items = items(8);
    env.client.publish(MODEL, env.job("large", items.clone())?).await?;
    answered_once(&mut replies, "large", &items).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut replies, JOBS).await?;
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("no job")).await?;
    let reply = replies.next().await?;
    ensure!(reply.kind()? == ReplyKind::Failed && reply.failure()?.reason == Reason::Malformed);
    ensure!(env.dead_letters().await?.next().await?.id() == "bad");

    let settled = until("all jobs to be settled", async || {
        let scrape = Scrape::of(&worker).await?;
        Ok((scrape.sum("vramq_jobs_in_hand", &[]) == 0.0).then_some(scrape))
    });
    let scrape = settled.await?;
    let of_model = [("model", MODEL)];
    let expect = |name: &str, labels: &[(&str, &str)], expected: usize| {
        let found = scrape.sum(name, &[&of_model, labels].concat());
        ensure!(found == expected as f64, "{name} {labels:?} is {found}, not {expected}");
        Ok(())
    };
    expect("vramq_jobs_received_total", &[], JOBS + 3)?;
    expect("vramq_jobs_answered_total", &[], JOBS + 1)?;
    expect("vramq_jobs_dead_lettered_total", &[("reason", "malformed")], 1)?;
    expect("vramq_jobs_dead_lettered_total", &[], 1)?;
    expect("vramq_jobs_requeued_total", &[("cause", "smaller")], 1)?;
    expect("vramq_jobs_requeued_total", &[], 1)?;
    expect("vramq_items_total", &[], JOBS + items.len())?;
    expect("vramq_out_of_memory_total", &[("kind", "alone"), ("device", "cpu")], 1)?;
    expect("vramq_passes_total", &[("outcome", "out-of-memory")], 1)?;
    expect("vramq_jobs_waiting", &[], 0)?;
    // A job counts as often as it ran here.
    expect("vramq_job_run_seconds_count", &[], JOBS + 2)?;
    expect("vramq_job_queued_seconds_count", &[], JOBS + 2)?;
    let passes = scrape.sum("vramq_passes_total", &[]);
    ensure!(scrape.sum("vramq_pass_duration_seconds_count", &of_model) == passes && passes >= 3.0);
    ensure!(scrape.sum("vramq_sessions_opened_total", &[]) == 1.0);
    ensure!(scrape.sum("vramq_device_memory_size_bytes", &[("device", "cpu")]) == 2_147_483_648.0);
    ensure!(scrape.sum("process_resident_memory_bytes", &[]) > 1e6);

    worker.drain().await?;
    for (total, metric) in [
        ("jobs", "vramq_jobs_answered_total"),
        ("items", "vramq_items_total"),
        ("passes", "vramq_passes_total"),
        ("tokens", "vramq_cost_total"),
        ("requeued", "vramq_jobs_requeued_total"),
        ("dead", "vramq_jobs_dead_lettered_total"),
        ("oom_alone", "vramq_out_of_memory_total"),
        ("bytes_admitted", "vramq_admitted_bytes_total"),
    ] {
        let (logged, scraped) = (worker.total(total).await?, scrape.sum(metric, &[]));
        ensure!(logged as f64 == scraped, "{total} is {logged} in the log and {scraped} as {metric}");
    }
    Ok(())
}

async fn a_port_that_is_taken_is_an_error_and_of_a_range_the_next_is_taken(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let taken = TcpListener::bind("127.0.0.1:0").await?;
    let address = taken.local_addr()?;
    let refused = env.spawn_worker(&[&format!("http.listen={address}")])?;
    ensure!(refused.exited().await? == Some(2), "{}", refused.log.text());
    let line = refused.log.find("cannot start").context("no message")?;
    ensure!(line.text().contains(&format!("cannot listen on {address}")), "{}", line.text());

    let range = format!("http.listen={address}-{}", address.port().saturating_add(100));
    let other = env.worker(&[&range]).await?;
    other.answers("/readyz", 200).await?;

    env.announce("not serving health and metrics over HTTP");
    let (low, _high) = neighbours().await?;
    let full = env.worker(&[&format!("http.listen=127.0.0.1:{low}-{}", low + 1)]).await?;
    full.log.wait_for("not serving health and metrics over HTTP").await?;
    let quiet = env.worker(&["http.listen=off"]).await?;
    ensure!(quiet.log.find("serving").is_none());
    Ok(())
}

/// Two ports next to each other, the lower one's number first, that are taken as long as what is given is kept.
async fn neighbours() -> Result<(u16, [TcpListener; 2])> {
    for _ in 0..100 {
        let lower = TcpListener::bind("127.0.0.1:0").await?;
        let port = lower.local_addr()?.port();
        if let Some(next) = port.checked_add(1)
            && let Ok(upper) = TcpListener::bind(("127.0.0.1", next)).await
        {
            return Ok((port, [lower, upper]));
        }
    }
    anyhow::bail!("no two ports next to each other are free")
}

/// More than the worker lets in at a time.
const IDLERS: usize = 20;

async fn strange_http_clients_do_not_block_others(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let line = worker.log.wait_for("serving /livez").await?;
    let address = line.field("address").and_then(|it| it.as_str()).context("no address")?.to_owned();
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        ("POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", 405),
        ("DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        ("\0\x01\x02 HTTP/9\r\n\r\n", 400),
    ] {
        let (answered, body) = converse(&address, request.as_bytes()).await?;
        ensure!(answered == status, "{request:?}: {answered} {body}");
    }
    // Too much: answered with an error, or the connection is closed while it is still sent.
    let endless = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20));
    let answered = converse(&address, endless.as_bytes()).await;
    ensure!(answered.as_ref().map_or(true, |(status, _)| (400..500).contains(status)), "{answered:?}");

    let mut idlers = Vec::new();
    for _ in 0..IDLERS {
        let mut idler = TcpStream::connect(&address).await?;
        idler.write_all(b"GET /met").await?;
        idlers.push(idler);
    }
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    // They are given up one after the other, and then it is everybody's turn.
    ensure!(worker.get("/livez").await?.0 == 200);
    Ok(())
}
