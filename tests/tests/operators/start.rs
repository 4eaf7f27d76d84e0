//! Starting: what a worker needs of its device and of the broker, and what it says without it.

use anyhow::{Context as _, Result, ensure};
use lapin::types::{AMQPValue, FieldTable};
use vramq_schemas::topology::{self, jobs_queue};
use vramq_tests::named_pipe::model_that_never_loads;
use vramq_tests::ports::ClosedPort;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Ended, command, has_all, run_to_end};
use vramq_tests::{on_one_setup, on_queue_types};

on_one_setup!(
    nothing_fits,
    the_doctor_reports_the_same,
    no_broker,
    a_broker_that_refuses,
    a_reply_queue_of_the_users_own_must_exist,
    a_signal_while_a_model_loads,
);
on_queue_types!(
    a_queue_with_other_arguments_is_left_alone,
    declared_queues_say_where_dead_letters_go_and_when_they_are_full,
    without_declare_the_brokers_queues_are_taken_as_they_are,
);

/// Runs a subcommand of the worker with settings.
pub async fn run(subcommand: &str, settings: &[&str]) -> Result<Ended> {
    let mut command = command("vramq-worker")?;
    command.arg(subcommand);
    for setting in settings {
        command.args(["--set", setting]);
    }
    run_to_end(command).await
}

/// A job of 2048 items of 1 KiB takes 2 MiB, and 1 MiB is left.
const TOO_SMALL: [&str; 4] = [
    "model.echo.engine=echo",
    "model.echo.job_items=2048",
    "device.cpu.memory_mib=2",
    "device.cpu.reserve_mib=1",
];

async fn nothing_fits(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let worker = env.spawn_bare_worker(&TOO_SMALL)?;
    ensure!(worker.exited().await? == Some(4));
    let line = worker.log.find("cannot start").context("no message")?;
    let figures =
        ["2.0 MiB free", "0.0 MiB of weights", "1.0 MiB reserve", "needs 2.0 MiB", "1.0 MiB are missing"];
    has_all(line.text(), &figures)?;
    ensure!(env.vhost.worker_connections().await?.is_empty());
    Ok(())
}

async fn the_doctor_reports_the_same(_: &mut TestEnv) -> Result<()> {
    let well = run("doctor", &["model.echo.engine=echo", "model.echo.slots_max=7"]).await?;
    ensure!(well.code == Some(0), "{well:?}");
    has_all(
        &well.stdout,
        &["DEVICE", "2048.0 MiB", "SLOTS", "echo", "7", "jobs/s", "KEDA value for a wait of 30 s"],
    )?;

    let mut json = command("vramq-worker")?;
    json.args(["doctor", "--json", "--set", "model.echo.engine=echo", "--set", "model.echo.slots_max=7"]);
    let output = run_to_end(json).await?;
    let report: serde_json::Value = serde_json::from_str(&output.stdout)?;
    ensure!(report["models"][0]["slots"] == 7 && report["device"]["total"] == 2048u64 << 20, "{report}");
    let throughput = &report["models"][0]["throughput"];
    let number = |field: &str| throughput[field].as_f64().with_context(|| format!("no {field} in {report}"));
    let waited = number("jobs_per_s")? * number("wait_s")?;
    ensure!(waited > 0.0 && (number("keda_value")? - waited).abs() <= 1.0, "{throughput}");

    let ill = run("doctor", &TOO_SMALL).await?;
    ensure!(ill.code == Some(4), "{ill:?}");
    ensure!(!ill.stdout.contains("jobs/s"), "measured a model that has no slot: {ill:?}");
    has_all(&ill.stdout, &["none", "1.0 MiB are missing"])
}

async fn no_broker(env: &mut TestEnv) -> Result<()> {
    env.announce("no session yet");
    env.announce("cannot start");
    let gone = ClosedPort::new()?;
    let url = format!("broker.url=amqp://guest:secret@{}/%2f", gone.address);
    let worker = env.spawn_worker(&[&url, "broker.connect_s=1"])?;
    ensure!(worker.exited().await? == Some(3));
    let line = worker.log.find("cannot start").context("no message")?;
    has_all(line.text(), &[&gone.address.to_string()])?;
    ensure!(!worker.log.text().contains("secret"), "a password in the log");
    Ok(())
}

async fn a_broker_that_refuses(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let wrong_vhost = env.url.replace(&env.vhost.name, "no-such-vhost");
    let wrong_password = env.url.replace("guest:guest@", "guest:wrong@");
    for url in [wrong_vhost, wrong_password] {
        // Not worth 30 s of trying.
        let worker = env.spawn_worker(&[&format!("broker.url={url}"), "broker.connect_s=600"])?;
        ensure!(worker.exited().await? == Some(3), "{url}");
        has_all(&worker.log.text(), &["refuses the connection"])?;
    }
    Ok(())
}

async fn a_reply_queue_of_the_users_own_must_exist(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let worker = env.spawn_worker(&["model.echo.reply_queue=mine"])?;
    ensure!(worker.exited().await? == Some(2));
    has_all(&worker.log.text(), &["mine", "NOT_FOUND"])?;

    env.client.declare_queue("mine", FieldTable::default()).await?;
    env.worker(&["model.echo.reply_queue=mine"]).await?;
    let job = env
        .job("x", ["x"])?
        .with(|_| lapin::BasicProperties::default().with_message_id("no reply_to".into()));
    env.client.publish(MODEL, job).await?;
    ensure!(env.client.mailbox("mine").await?.next().await?.id() == "no reply_to");
    Ok(())
}

/// A queue that jobs come from besides the model's own.
const FURTHER: &str = "team-a.jobs";

/// Each of the worker's queues, made by somebody else with another length bound, with a message in it.
async fn a_queue_with_other_arguments_is_left_alone(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let names = [
        jobs_queue(MODEL),
        FURTHER.to_owned(),
        topology::bulk_queue(MODEL),
        topology::suspects_queue(MODEL),
        topology::dead_queue(MODEL),
        topology::default_reply_queue(MODEL),
    ];
    for name in names {
        let mut arguments = env.setup.queue.arguments();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(77));
        env.client.declare_queue(&name, arguments).await?;
        env.client.publish_to_queue(&name, &[env.job("kept", ["x"])?]).await?;

        let worker = env.spawn_worker(&[&format!("model.echo.queues={FURTHER}=1")])?;
        ensure!(worker.exited().await? == Some(2), "{name}");
        let line = worker.log.find("cannot start").context("no message")?;
        has_all(line.text(), &[&name, "PRECONDITION_FAILED", "x-", "declare = false"])?;
        ensure!(env.client.ready(&name).await? == 1, "`{name}` was touched");
        let listed = env.vhost.queue(&name).await?;
        ensure!(listed["arguments"]["x-max-length"] == 77, "{listed}");
        // What the worker declared before it came to this one.
        for queue in env.vhost.queues().await? {
            if queue.starts_with("vramq.") || queue == FURTHER {
                env.vhost.delete_queue(&queue).await?;
            }
        }
    }
    Ok(())
}

/// The queues that a worker declares say where dead letters go and reject publishes when they are full.
async fn declared_queues_say_where_dead_letters_go_and_when_they_are_full(env: &mut TestEnv) -> Result<()> {
    env.worker(&["broker.queue_length_max=7"]).await?;
    let jobs = env.vhost.queue(&jobs_queue(MODEL)).await?;
    let expected = [
        ("x-queue-type", serde_json::json!(env.setup.queue.as_str())),
        ("x-max-length", serde_json::json!(7)),
        ("x-overflow", serde_json::json!("reject-publish")),
        ("x-dead-letter-exchange", serde_json::json!(topology::DEAD_EXCHANGE)),
    ];
    for (name, value) in expected {
        ensure!(jobs["arguments"][name] == value, "{name} in {}", jobs["arguments"]);
    }
    ensure!(jobs["durable"] == true);
    // What the broker dead-letters must not be lost on the way. A quorum queue keeps it only if it rejects publishes as well.
    let mut dead_lettering = Vec::new();
    for queue in env.vhost.queues().await? {
        let arguments = env.vhost.queue(&queue).await?["arguments"].clone();
        if arguments["x-dead-letter-exchange"].is_null() {
            continue;
        }
        ensure!(arguments["x-overflow"] == "reject-publish", "{queue}: {arguments}");
        if arguments["x-queue-type"] == "quorum" {
            ensure!(arguments["x-dead-letter-strategy"] == "at-least-once", "{queue}: {arguments}");
        }
        dead_lettering.push(queue);
    }
    for queue in [jobs_queue(MODEL), topology::bulk_queue(MODEL), topology::suspects_queue(MODEL)] {
        ensure!(dead_lettering.contains(&queue), "{queue} is not among {dead_lettering:?}");
    }
    // Looking at a dead letter, and giving it back, destroys nothing, however often.
    let dead = topology::dead_queue(MODEL);
    env.client.publish_to_queue(&dead, &[env.job("dead", ["x"])?]).await?;
    env.client.look_and_give_back(&dead, 30).await?;
    ensure!(env.client.mailbox(&dead).await?.next().await?.id() == "dead");
    Ok(())
}

async fn without_declare_the_brokers_queues_are_taken_as_they_are(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let worker = env.spawn_worker(&["broker.declare=false"])?;
    ensure!(worker.exited().await? == Some(2));
    has_all(&worker.log.text(), &["NOT_FOUND"])?;
    let queues = env.vhost.queues().await?;
    ensure!(queues == ["replies"], "it declared {queues:?}");

    // A first worker makes everything; the operator then gives the queue a bound of another kind.
    env.worker(&[]).await?.drain().await?;
    env.vhost.delete_queue(&jobs_queue(MODEL)).await?;
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(77));
    env.client.declare_queue(&jobs_queue(MODEL), arguments).await?;
    env.client.bind_queue(&jobs_queue(MODEL), topology::JOBS_EXCHANGE, MODEL).await?;
    env.worker(&["broker.declare=false"]).await?;
    env.client.publish(MODEL, env.job("taken", ["x"])?).await?;
    ensure!(env.replies().await?.next().await?.id() == "taken");
    Ok(())
}

async fn a_signal_while_a_model_loads(env: &mut TestEnv) -> Result<()> {
    let folder = model_that_never_loads()?;
    let worker = env.spawn_bare_worker(&[&format!("model.slow.path={}", folder.path().display())])?;
    until("the signals to be heard", async || {
        // SigCgt of proc(5): bit 14 is SIGTERM.
        let status = std::fs::read_to_string(format!("/proc/{}/status", worker.pid))?;
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0").trim();
        Ok((u64::from_str_radix(caught, 16)? & (1 << 14) != 0).then_some(()))
    })
    .await?;
    worker.signal(rustix::process::Signal::TERM)?;
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}
