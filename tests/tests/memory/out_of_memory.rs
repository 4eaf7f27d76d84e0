//! Running out of memory: it affects only the job that caused it, and keeps finished items.

use anyhow::{Context as _, Result, ensure};
use lapin::Confirmation;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{JobHeaders, MinimumRequirement, Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::client::Received;
use vramq_tests::setup::Queue;
use vramq_tests::shared_device::ECHO_ITEM_BYTES as ITEM;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;
use vramq_tests::{on_all_setups, on_queue_types};

on_all_setups!(a_job_is_halved_until_it_fits, finished_items_are_not_computed_again);
on_queue_types!(
    a_requeued_job_overtakes_the_backlog,
    a_full_queue_takes_a_job_back_later,
    an_item_that_never_fits_is_dead_lettered_with_its_history,
    a_job_that_does_not_fit_goes_to_a_larger_device,
);

/// The dead letter's headers as a job's.
fn reached(letter: &Received) -> Result<JobHeaders> {
    Ok(JobHeaders::read(&letter.headers())?)
}

async fn a_job_is_halved_until_it_fits(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    // Passes of more than 9 items fail.
    let fault = format!("device.cpu.fault=above={}", 9 * ITEM);
    env.announce("made to fail");
    let worker = env.worker(&[&fault]).await?;
    let items = items(100);
    env.client.publish(MODEL, env.job("halved", items.clone())?).await?;
    let replies = answered_once(&mut env.replies().await?, "halved", &items).await?;
    // Passes of 100, 50, 25 and 12 ran out of memory; 6 fits. Each was tried once: no learned limit skipped one.
    let last = replies.last().context("no replies")?.reply()?;
    ensure!(last.attempt >= 1 && last.attempt <= 4, "{last:?}");
    let line = worker.log.wait_for("out of memory").await?;
    for (name, value) in [("items", "100"), ("asked", "0.1 MiB"), ("total", "2048.0 MiB"), ("alone", "true")]
    {
        let found = line.field(name).with_context(|| format!("no {name} in {}", line.text()))?;
        ensure!(found.to_string().trim_matches('"') == value, "{name} is {found}, not {value}");
    }
    worker.drain().await?;
    ensure!(worker.total("oom_alone").await? == u64::from(last.attempt));
    ensure!(worker.total("requeued").await? == u64::from(last.attempt));
    ensure!(worker.total("recomputed").await? == 0);
    ensure!(worker.total("items").await? == 100);
    Ok(())
}

/// A job of 10,000 items runs out of memory in the middle on one worker, and another one finishes it.
async fn finished_items_are_not_computed_again(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    // Passes of 2,048 items: two fit, the third does not. A job of more than four passes would wait until it is moved to the large jobs.
    let first = env.worker(&[&url, "device.cpu.fault=skip=2,fail=1000"]).await?;
    // The job waits for the confirm of its finished items, so it is still there when the worker is asked to drain.
    proxy.hold_confirms();
    let items = items(8_000);
    env.client.publish(MODEL, env.job("moved", items.clone())?).await?;
    first.log.wait_for("out of memory").await?;
    first.signal(rustix::process::Signal::TERM)?;
    first.log.wait_for("\"draining\"").await?;
    proxy.pass();
    ensure!(first.exited().await? == Some(0));

    let second = env.worker(&[]).await?;
    let replies = answered_once(&mut env.replies().await?, "moved", &items).await?;
    let by = |worker: &Worker| -> Result<usize> {
        let headers: Vec<_> = replies.iter().map(Received::reply).collect::<Result<_>>()?;
        Ok(headers.iter().filter(|h| h.worker == worker.name).map(|h| h.items as usize).sum())
    };
    ensure!(by(&first)? == 4096 && by(&second)? == 8_000 - 4096, "{} and {}", by(&first)?, by(&second)?);
    second.drain().await?;
    ensure!(first.total("items").await? == 4096 && second.total("items").await? == 8_000 - 4096);
    ensure!(first.total("recomputed").await? == 0 && first.total("parts").await? >= 1);
    Ok(())
}

async fn an_item_that_never_fits_is_dead_lettered_with_its_history(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    env.announce("job dead-lettered");
    // The fourth pass and all later ones fail: with a hint of 1 the items go one by one.
    let worker = env.worker(&["device.cpu.fault=skip=3,fail=1000"]).await?;
    let job = env.job("too large", items(9))?.with_header("batch-hint", 1.into());
    env.client.publish(MODEL, job.clone()).await?;

    let mut replies = env.replies().await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.reply()?.items == 3, "{:?}", part.reply());
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::OutOfMemory, "{failure:?}");

    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body);
    let dossier = letter.dead_letter()?;
    ensure!(
        dossier.requirement == Some(MinimumRequirement { item: 3, cost: 1, needs_bytes: ITEM }),
        "{dossier:?}"
    );
    ensure!(dossier.error.contains("item 3") && dossier.error == failure.error, "{}", dossier.error);
    let headers = reached(&letter)?;
    ensure!((headers.items_done, headers.attempt) == (3, 1), "{headers:?}");
    let attempt = headers.history.last().context("no history")?;
    ensure!((attempt.items, attempt.asked, attempt.total) == (1, ITEM, 2048 << 20), "{attempt:?}");
    ensure!(attempt.alone && attempt.worker == worker.name && attempt.device == "cpu", "{attempt:?}");
    Ok(())
}

/// A job that ran out of memory goes before the backlog, where the broker has priorities.
async fn a_requeued_job_overtakes_the_backlog(env: &mut TestEnv) -> Result<()> {
    const JOBS: usize = 50;
    env.announce("out of memory");
    env.announce("made to fail");
    // The first one makes the queues.
    env.worker(&[]).await?.drain().await?;
    for at in 0..JOBS {
        let id = if at == 0 { "again".to_owned() } else { at.to_string() };
        env.client.publish(MODEL, env.job(&id, items(2))?).await?;
    }
    env.worker(&["device.cpu.fault=skip=0,fail=1", "model.echo.slots_max=1"]).await?;
    let replies = env.replies().await?.take(JOBS).await?;
    let place = replies.iter().position(|reply| reply.id() == "again");
    // Quorum queues know priorities from RabbitMQ 4.0 on. Before that the job goes to the end of its queue.
    let has_priorities = env.setup.queue == Queue::Classic || env.vhost.broker_is_at_least(4, 0).await?;
    let expected = if has_priorities { 0..=2 } else { JOBS - 1..=JOBS - 1 };
    ensure!(place.is_some_and(|place| expected.contains(&place)), "{place:?}, not within {expected:?}");
    Ok(())
}

/// A reply queue apart from that of the jobs that fill the job queue.
const AGAIN: &str = "replies-again";

/// A job that has to go back to a queue that is full neither blocks its worker nor runs again as it was.
async fn a_full_queue_takes_a_job_back_later(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "made to fail", "the queue of the requeued job is full"] {
        env.announce(text);
    }
    // Two items a pass, of which the second one fails; one job at a time.
    let settings = [
        "broker.queue_length_max=5",
        "model.echo.slots_max=1",
        "model.echo.pass_tokens=2",
        "device.cpu.fault=skip=1,fail=1",
    ];
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    let worker = env.worker(&[&settings[..], &[url.as_str()]].concat()).await?;
    let items = items(4);
    let again = env.job("again", items.clone())?;
    env.client.declare_queue(AGAIN, env.setup.queue.arguments()).await?;
    let again = again.with(|properties| properties.with_reply_to(AGAIN.into()));
    proxy.hold_confirms();
    env.client.publish(MODEL, again).await?;
    worker.log.wait_for("out of memory").await?;
    // The confirm of what is finished of it is not there yet: time to fill the queue.
    let mut fillers = 0;
    until("a full queue", async || {
        let filler = env.job(&fillers.to_string(), ["filler"])?;
        let confirmation = env.client.publish_to_queue(&jobs_queue(MODEL), &[filler]).await?;
        let taken = matches!(confirmation[..], [Confirmation::Ack(_)]);
        fillers += usize::from(taken);
        Ok((!taken).then_some(()))
    })
    .await?;
    proxy.pass();
    worker.log.wait_for("the queue of the requeued job is full").await?;
    env.replies().await?.take(fillers).await?;
    let replies = answered_once(&mut env.client.mailbox(AGAIN).await?, "again", &items).await?;
    let offsets: Vec<_> = replies.iter().map(|reply| Ok(reply.reply()?.offset)).collect::<Result<_>>()?;
    ensure!(offsets == [0, 2] || offsets == [0, 2, 3], "{offsets:?}");
    worker.drain().await?;
    ensure!(worker.total("requeued").await? == 1 && worker.total("items").await? == 4 + fillers as u64);
    Ok(())
}

async fn a_job_that_does_not_fit_goes_to_a_larger_device(env: &mut TestEnv) -> Result<()> {
    for text in
        ["out of memory", "made to fail", "job dead-lettered", "cannot pass the job on to other workers"]
    {
        env.announce(text);
    }
    let small = env.worker(&["device.cpu.fault=above=1000", "model.echo.larger=echo-large"]).await?;
    let job = env.job("large", items(2))?.with_header("mine", 7.into());
    // No worker has made the queue for larger devices yet.
    env.client.publish(MODEL, job.clone()).await?;
    let mut letters = env.dead_letters().await?;
    let mut replies = env.replies().await?;
    ensure!(letters.next().await?.dead_letter()?.reason == Reason::OutOfMemory);
    ensure!(replies.next().await?.failure()?.reason == Reason::OutOfMemory);

    let large = env.worker(&["model.echo.key=echo-large"]).await?;
    env.client.publish(MODEL, job.clone()).await?;
    let reply = replies.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.outputs()?.outputs.len() == 2);
    ensure!(reply.reply()?.worker == large.name && reply.reply()?.attempt >= 1, "{:?}", reply.reply());
    large.drain().await?;

    // The larger worker gets the job with its history, as if it had never been tried.
    env.client.publish(MODEL, job.clone()).await?;
    let sent = env.client.mailbox(&jobs_queue("echo-large")).await?.next().await?;
    ensure!(sent.body == job.body && sent.id() == "large");
    let headers = reached(&sent)?;
    ensure!(headers.batch_hint.is_none() && !headers.exclusive && headers.items_done == 0, "{headers:?}");
    ensure!(headers.history.len() == headers.attempt as usize && headers.attempt >= 1, "{headers:?}");
    ensure!(sent.headers().inner().contains_key("mine"), "a header of the publisher's is lost");
    small.drain().await?;
    // The first had nowhere to go.
    ensure!(small.total("enlarged").await? == 2 && small.total("dead").await? == 1);
    Ok(())
}
