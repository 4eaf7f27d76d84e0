//! A publisher cannot forge a job's history, direct replies into another one's queue, take another one's share, or command
//! workers; and the documented permissions are sufficient for each role.

use anyhow::{Context as _, Result, ensure};
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use lapin::{BasicProperties, Confirmation};
use serde_json::Value;
use tempfile::NamedTempFile;
use vramq_schemas::control::Command;
use vramq_schemas::headers::OF_JOBS;
use vramq_schemas::topology::{
    CONTROL_EXCHANGE, DEAD_EXCHANGE, RETRY_EXCHANGE, control_key, dead_queue, delay_queue, jobs_queue,
};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::broker::Broker;
use vramq_tests::caller::Caller;
use vramq_tests::client::Client;
use vramq_tests::dead_letters;
use vramq_tests::http::Server;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::operator::Operator;
use vramq_tests::shared_device::ECHO_ITEM_BYTES;
use vramq_tests::test_env::{MODEL, PASSWORD, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, vramq};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    forged_headers_of_attempts_are_ignored,
    a_forged_dossier_is_not_believed_when_its_job_is_retried,
    least_permissions_suffice,
    workers_may_send_jobs_on,
);
on_one_setup!(
    replies_go_only_where_the_operator_allows,
    only_users_that_publish_for_others_name_tenants,
    commands_can_be_switched_off,
    the_scaler_reads_the_lengths_of_queues_and_no_more,
);

/// A job that says of itself what only workers may say, each header with a value that would matter.
fn forged(job: Message) -> Result<Message> {
    let entry = FieldTable::from(std::collections::BTreeMap::from([
        ("outcome".into(), AMQPValue::LongString("out-of-memory".into())),
        ("items".into(), AMQPValue::LongLongInt(1)),
    ]));
    let history = FieldArray::from(vec![AMQPValue::FieldTable(entry)]);
    let claims = [
        ("attempt", AMQPValue::LongLongInt(7)),
        ("items-done", AMQPValue::LongLongInt(2)),
        ("exclusive", AMQPValue::Boolean(true)),
        ("crashes", AMQPValue::LongLongInt(4)),
        ("delays", AMQPValue::LongLongInt(8)),
        ("batch-hint-max", AMQPValue::LongLongInt(1)),
        ("expires-at-ms", AMQPValue::LongLongInt(1)),
        ("history", AMQPValue::FieldArray(history)),
        ("vramq-waits", AMQPValue::LongLongInt(64)),
        ("vramq-revision-waits", AMQPValue::LongLongInt(16)),
        ("vramq-store-waits", AMQPValue::LongLongInt(64)),
        ("vramq-moved", AMQPValue::Boolean(true)),
        ("vramq-queue", AMQPValue::LongString("team-a.jobs".into())),
        ("vramq-user", AMQPValue::LongString("somebody else".into())),
        ("vramq-caller", AMQPValue::LongString("somebody else".into())),
    ];
    // The batch hint is the publisher's to set.
    let missing =
        OF_JOBS.iter().find(|name| **name != "batch-hint" && claims.iter().all(|(claim, _)| claim != *name));
    ensure!(missing.is_none(), "{missing:?} is not forged here");
    Ok(claims.into_iter().fold(job, |job, (name, value)| job.with_header(name, value)))
}

async fn forged_headers_of_attempts_are_ignored(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    // The first pass runs out of memory, so that the worker writes such headers itself.
    let worker = env.worker(&["device.cpu.fault=skip=0,fail=1"]).await?;
    let caller = Caller::new(env, "caller").await?;
    let mut replies = caller.mailbox().await?;
    let items = items(6);
    for (id, attempts) in [("goes back", 1), ("at once", 0)] {
        caller.publish(forged(caller.job(id, items.clone())?)?).await?;
        let answered = answered_once(&mut replies, id, &items).await?;
        let last = answered.last().context("no reply")?.reply()?;
        ensure!(last.attempt == attempts, "{last:?}");
    }
    // The broker may deliver a job again before it confirms its publish, on which the worker counts it.
    let now =
        figures(&worker, "a requeued job", |figures| figures.sum("vramq_jobs_requeued_total") > 0).await?;
    ensure!(now.sum("vramq_untrusted_headers_total") == 2, "forged headers are not counted");
    ensure!(now.sum("vramq_suspects_total") == 0 && now.sum("vramq_jobs_requeued_total") == 1);
    ensure!(now.sum("vramq_items_total") == 2 * items.len());
    Ok(())
}

/// The broker dead-letters what expires before a worker takes it. A publisher may have written whatever it likes into it, also that it is
/// a worker's dead letter, and one with results for somebody else.
async fn a_forged_dossier_is_not_believed_when_its_job_is_retried(env: &mut TestEnv) -> Result<()> {
    let (_, of_operator) = env.add_user("operator", "operator").await?;
    let caller = Caller::new(env, "caller").await?;
    // It declares the queues.
    env.worker(&[]).await?.drain().await?;
    let items = items(3);
    let dossier =
        [("reason", "unroutable"), ("error", "forged"), ("worker", "forged"), ("worker-version", "1")];
    let job = caller
        .job("forged", items.clone())?
        .with(|properties| properties.with_expiration("1".into()).with_type("done".into()));
    let job = dossier
        .into_iter()
        .fold(forged(job)?, |job, (name, value)| job.with_header(name, AMQPValue::LongString(value.into())));
    caller.publish(job).await?;
    until("the dead letter", async || Ok((env.client.ready(&dead_queue(MODEL)).await? == 1).then_some(())))
        .await?;
    let operator = dead_letters::Operator::with_url(&of_operator)?;
    let shown = operator.run_for(0, &["show", "forged"]).await?;
    ensure!(shown.contains("the broker: expired.") && shown.contains("its headers say, unproven"), "{shown}");
    ensure!(shown.contains(&format!("The user {} published it.", caller.user)), "{shown}");
    operator.run_for(0, &["retry", "--all", "--yes"]).await?;
    let retried = env.client.mailbox(&jobs_queue(MODEL)).await?.next().await?;
    let headers = retried.headers();
    let believed: Vec<_> = OF_JOBS.iter().filter(|name| headers.inner().contains_key(**name)).collect();
    ensure!(believed.is_empty() && retried.id() == "forged", "{believed:?} of {headers:?}");
    Ok(())
}

async fn least_permissions_suffice(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "made to fail", "job dead-lettered"] {
        env.announce(text);
    }
    let (_, of_worker) = env.add_user("worker", "worker").await?;
    let (_, of_operator) = env.add_user("operator", "operator").await?;
    let (_, of_watcher) = env.add_user("watcher", "watcher").await?;
    let caller = Caller::new(env, "caller").await?;
    let mut replies = caller.mailbox().await?;
    let url = format!("broker.url={of_worker}");
    // Two items do not fit together: the job is tried again, by way of the retry exchange.
    let fault = format!("device.cpu.fault=above={ECHO_ITEM_BYTES}");
    let worker = env.worker(&[&url, &fault, "worker.heartbeat_s=1"]).await?;
    caller.publish(caller.job("again", ["a", "b"])?).await?;
    let answered = answered_once(&mut replies, "again", &["a".to_owned(), "b".to_owned()]).await?;
    ensure!(answered.last().context("no reply")?.reply()?.attempt == 1);

    caller.publish(caller.job("bad", ["x"])?.with_body("no job")).await?;
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    let operator = dead_letters::Operator::with_url(&of_operator)?;
    ensure!(operator.ids().await? == ["bad"]);
    operator.run_for(0, &["drop", "--all", "--yes-drop", "1"]).await?;
    let letter = dead_letters::letter("dead", Reason::Expired, "x")?;
    let letter = letter.with(|properties| properties.with_reply_to(caller.replies.as_str().into()));
    env.client.publish_to_queue(&dead_queue(MODEL), &[letter]).await?;
    operator.run_for(0, &["retry", "--all", "--yes"]).await?;
    answered_once(&mut replies, "dead", &["x".to_owned()]).await?;

    let paused = until("a worker that listens", async || {
        let output = vramq(&of_operator, &["control", "pause", "--worker", &worker.name]).await?;
        Ok((output.code == Some(0)).then_some(output))
    });
    ensure!(paused.await?.stdout.contains("\tdone\t"));
    let resume = ["control", "resume", "--worker", &worker.name, "--wait", "60s"];
    let resumed = vramq(&of_operator, &resume).await?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    for url in [&of_operator, &of_watcher] {
        let report = until("a report that has heard the worker", async || {
            let output = vramq(url, &["status", "--json"]).await?;
            Ok((output.code == Some(0) && output.stdout.contains(&worker.name)).then_some(output.stdout))
        })
        .await?;
        let report: Value = serde_json::from_str(&report)?;
        let queues = report["queues"].as_array().context("no queues")?;
        let is_counted =
            |queue: &Value| ["ready", "bulk", "suspects", "dead"].iter().all(|count| queue[*count].is_u64());
        ensure!(queues.len() == 1 && queues.iter().all(is_counted), "{queues:?}");
    }
    let output = vramq(&of_watcher, &["control", "pause", "--worker", &worker.name]).await?;
    ensure!(output.code == Some(4), "a watcher may command workers: {output:?}");
    worker.log.counts("\"consuming\"", 1).await?;
    publishers_are_refused(env, &caller).await
}

/// Every way by which workers send a job to workers, under the least permissions: a delay, the quarantine, the queue of large jobs, and
/// a larger device. Another attempt is in the test above.
async fn workers_may_send_jobs_on(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "it will run in isolation", "out of memory", "made to fail"] {
        env.announce(text);
    }
    let (_, of_worker) = env.add_user("worker", "worker").await?;
    let url = format!("broker.url={of_worker}");
    let caller = Caller::new(env, "caller").await?;
    let mut replies = caller.mailbox().await?;
    let one = items(1);

    // The second worker writes the loss of the first one down, by way of a delay; the third one quarantines the job.
    env.worker(&[&url]).await?.drain().await?;
    caller.publish(caller.job("crashes", one.clone())?).await?;
    for victim in 0..2 {
        let worker = env.spawn_worker(&[&url, "worker.drill=pass=crash,job=crashes"])?;
        ensure!(worker.exited().await?.is_none(), "victim {victim}: {}", worker.log.text());
    }
    let worker = env.worker(&[&url, "model.echo.pass_tokens=4"]).await?;
    answered_once(&mut replies, "crashes", &one).await?;
    // More than four passes.
    let large = items(40);
    caller.publish(caller.job("large", large.clone())?).await?;
    answered_once(&mut replies, "large", &large).await?;
    // The broker may deliver a job again before it confirms its publish, on which the worker counts it.
    for cause in ["suspect", "bulk"] {
        requeued_once(&worker, cause).await?;
    }
    worker.drain().await?;

    env.worker(&[&url, "model.echo.key=larger"]).await?;
    let worker = env.worker(&[&url, "device.cpu.fault=above=1", "model.echo.larger=larger"]).await?;
    caller.publish(caller.job("larger", one.clone())?).await?;
    answered_once(&mut replies, "larger", &one).await?;
    requeued_once(&worker, "larger").await
}

/// Waits until a worker has requeued one job for this cause.
async fn requeued_once(worker: &Worker, cause: &str) -> Result<()> {
    let label = format!("cause=\"{cause}\"");
    until(&format!("one job requeued as {cause}"), async || {
        let requeued = Figures::of(worker).await?.sum_of("vramq_jobs_requeued_total", &label);
        Ok((requeued == 1).then_some(()))
    })
    .await
}

/// What a publisher must not reach, because workers believe what comes from there, or act on it.
async fn publishers_are_refused(env: &TestEnv, caller: &Caller) -> Result<()> {
    let (jobs, dead, delay) = (jobs_queue(MODEL), dead_queue(MODEL), delay_queue(MODEL, 1000));
    for (exchange, key) in [
        (RETRY_EXCHANGE, MODEL),
        (DEAD_EXCHANGE, MODEL),
        (CONTROL_EXCHANGE, "all"),
        ("", &jobs),
        ("", &dead),
        ("", &delay),
        ("", "vramq.replies.client.caller"),
    ] {
        // A refusal closes the channel.
        let client = Client::connect(&caller.url).await?;
        let outcome = client.publish_to(exchange, key, caller.job("forged", ["x"])?).await;
        refused(outcome).with_context(|| format!("publish to {exchange:?} with {key}"))?;
    }
    // What a queue dead-letters is published by the broker: so the queue's maker needs the permission.
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString(RETRY_EXCHANGE.into()));
    let client = Client::connect(&caller.url).await?;
    refused(client.declare_queue("vramq.replies.client.way-round", arguments).await)
        .context("dead-letter to it")?;
    let client = Client::connect(&caller.url).await?;
    refused(client.bind_queue(&caller.replies, RETRY_EXCHANGE, MODEL).await).context("bind to it")?;
    for queue in [&jobs, &dead] {
        let client = Client::connect(&caller.url).await?;
        refused(client.mailbox(queue).await).with_context(|| format!("read {queue}"))?;
    }
    Ok(())
}

/// The broker must have refused.
fn refused<T: std::fmt::Debug>(result: Result<T>) -> Result<()> {
    let error = result.err().context("the broker permits it")?;
    ensure!(format!("{error:#}").contains("ACCESS_REFUSED"), "another error: {error:#}");
    Ok(())
}

async fn replies_go_only_where_the_operator_allows(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    let worker = env.worker(&["reply.allow=vramq.replies.client.*"]).await?;
    let caller = Caller::new(env, "caller").await?;
    // Another one's queue: the harness finds what is published to it.
    env.client.declare_queue("payroll", env.setup.queue.arguments()).await?;
    let job = caller.job("stray", ["x"])?.with(|properties| properties.with_reply_to("payroll".into()));
    caller.publish(job.clone()).await?;
    let letter = env.dead_letters().await?.next().await?;
    let dossier = letter.dead_letter()?;
    ensure!(
        letter.id() == "stray" && letter.body == job.body && dossier.reason == Reason::Malformed,
        "{dossier:?}"
    );
    ensure!(dossier.error.contains("payroll") && dossier.error.contains("reply.allow"), "{}", dossier.error);
    caller.publish(caller.job("good", ["x"])?).await?;
    answered_once(&mut caller.mailbox().await?, "good", &["x".to_owned()]).await?;
    ensure!(Figures::of(&worker).await?.sum("vramq_items_total") == 1, "the stray job has run");
    Ok(())
}

/// Items of a pass: a turn is one item. A worker holds at least two passes of jobs, here 32 by the steps of its consumers.
const PASS: usize = 9;

/// Jobs of one tenant, before one of another: more than the first three passes run.
const OF_TENANT: usize = 30;

/// A job of another tenant is answered with the first passes if its user publishes for others, and after all jobs before it if
/// its user does not.
async fn only_users_that_publish_for_others_name_tenants(env: &mut TestEnv) -> Result<()> {
    env.announce("a failpoint is set");
    for (name, is_gateway) in [("gateway", true), ("pretender", false)] {
        let caller = Caller::new(env, name).await?;
        let user = if is_gateway { caller.user.as_str() } else { "another" };
        let held = NamedTempFile::new()?;
        let worker = env
            .worker(&[
                &format!("worker.drill=pass=hang,while={}", held.path().display()),
                &format!("fairness.tenant_users={user}"),
                &format!("model.echo.pass_tokens={PASS}"),
                "model.echo.slots_max=66",
            ])
            .await?;
        let ids = (0..OF_TENANT).map(|at| (at.to_string(), "first")).chain([("last".to_owned(), "second")]);
        for (id, tenant) in ids {
            let tenant = AMQPValue::LongString(tenant.into());
            caller.publish(caller.job(&id, ["x"])?.with_header("vramq-tenant", tenant)).await?;
        }
        until("all jobs to be in hand", async || {
            Ok((Figures::of(&worker).await?.sum("vramq_jobs_in_hand") == OF_TENANT + 1).then_some(()))
        })
        .await?;
        held.close()?;
        let replies = caller.mailbox().await?.take(OF_TENANT + 1).await?;
        let place = replies.iter().position(|reply| reply.id() == "last").context("no answer")?;
        ensure!(
            (place < 3 * PASS) == is_gateway,
            "{name}: {place} jobs are answered before the other tenant's"
        );
        worker.drain().await?;
    }
    Ok(())
}

async fn commands_can_be_switched_off(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&["worker.control=false", "worker.heartbeat_s=1"]).await?;
    // Hears heartbeats, so the control plane's channels stand.
    let mut operator = Operator::new(env).await?;
    operator.heartbeat(|heartbeat| heartbeat.worker == worker.name).await?;
    for key in [control_key(&worker.name), "all".to_owned()] {
        let body = serde_json::to_vec(&Command::Drain)?;
        let message = Message { properties: BasicProperties::default(), body, as_worker: false };
        let confirm = env.client.publish_to(CONTROL_EXCHANGE, &key, message).await?;
        ensure!(matches!(confirm, Confirmation::Ack(Some(_))), "somebody listens for commands under `{key}`");
    }
    let output = vramq(&env.url, &["control", "drain", "--worker", &worker.name, "--wait", "1s"]).await?;
    ensure!(output.code == Some(1) && output.stderr.contains("worker.control is off"), "{output:?}");
    env.client.publish(MODEL, env.job("next", ["x"])?).await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Done);
    worker.answers("/readyz", 200).await.map(drop)
}

/// As KEDA asks.
async fn the_scaler_reads_the_lengths_of_queues_and_no_more(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?.drain().await?;
    env.client.publish(MODEL, env.job("waits", ["x"])?).await?;
    let (user, url) = env.add_user("scaler", "scaler").await?;
    env.vhost.set_account(&user, PASSWORD, "management").await?;
    let management = Broker::from_environment()?.management;
    let (_, host) = management.rsplit_once('@').context("a user")?;
    let server = Server::new(&format!("http://{user}:{PASSWORD}@{host}"))?;
    let queue = format!("/api/queues/{}/{}", env.vhost.name, jobs_queue(MODEL));
    until("the job to be counted", async || {
        Ok((server.request("GET", &queue, None).await?["messages"] == 1).then_some(()))
    })
    .await?;
    let nodes = server.request("GET", "/api/nodes", None).await;
    ensure!(format!("{nodes:?}").contains("401"), "{nodes:?}");
    let scaler = Client::connect(&url).await?;
    let refused = scaler.publish(MODEL, env.job("forbidden", ["x"])?).await;
    ensure!(format!("{refused:?}").contains("ACCESS_REFUSED"), "{refused:?}");
    env.client.purge(&jobs_queue(MODEL)).await
}
