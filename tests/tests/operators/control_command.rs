//! `vramq control`, and what workers and commands write for people: answers, exit codes, colours.

use std::fs::File;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;
use vramq_schemas::ReplyKind;
use vramq_tests::metrics::figures;
use vramq_tests::node::Node;
use vramq_tests::ports::ClosedPort;
use vramq_tests::programs::program;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until, until_within};
use vramq_tests::worker::{Ended, Worker, command, run_to_end, vramq};
use vramq_tests::{on_one_setup, on_own_node};

on_one_setup!(
    commands_reach_all_or_selected_workers,
    a_worker_that_does_not_answer_is_named,
    a_job_is_cancelled_by_its_id,
    nobody_is_there,
    an_output_that_takes_nothing_ends_the_command,
    colours_are_for_terminals_that_want_them,
);
on_own_node!(without_channels_for_operators_jobs_go_on);

/// Within this time a worker answers, also on a busy machine. Commands that listen for one that does not answer take so long.
const ANSWERED: &str = "15s";

/// The same for commands that stop listening when all have answered.
const PATIENT: &str = "60s";

async fn control(env: &TestEnv, arguments: &[&str]) -> Result<Ended> {
    vramq(&env.url, &[&["control"], arguments].concat()).await
}

/// Waits until a worker hears commands: it may consume jobs before.
async fn listens(env: &TestEnv, worker: &Worker) -> Result<()> {
    until("a worker that listens", async || {
        let output = control(env, &["resume", "--worker", &worker.name]).await?;
        Ok((output.code == Some(0)).then_some(()))
    })
    .await
}

/// Workers that hear commands.
async fn workers<const N: usize>(env: &mut TestEnv) -> Result<[Worker; N]> {
    let mut workers = Vec::new();
    for _ in 0..N {
        workers.push(env.worker(&["worker.heartbeat_s=1"]).await?);
    }
    for worker in &workers {
        listens(env, worker).await?;
    }
    workers.try_into().map_err(|_| anyhow::anyhow!("not so many workers"))
}

async fn commands_reach_all_or_selected_workers(env: &mut TestEnv) -> Result<()> {
    let [first, second] = workers(env).await?;
    let paused = control(env, &["pause", "--all", "--expect", "2", "--wait", PATIENT]).await?;
    ensure!(paused.code == Some(0), "{paused:?}");
    for worker in [&first, &second] {
        let line = format!("{}\tdone\ttakes no more jobs; 0 unacknowledged jobs go on\n", worker.name);
        ensure!(paused.stdout.contains(&line), "{paused:?}");
        worker.answers("/readyz", 503).await?;
    }
    // Without a number it listens for those that may still answer.
    let resumed = control(env, &["resume", "--all", "--wait", ANSWERED, "--json"]).await?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    let lines = resumed.stdout.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    ensure!(
        lines.len() == 2 && lines.iter().all(|line| line["outcome"] == "done" && line["last"] == true),
        "{lines:?}"
    );

    let set = control(
        env,
        &["set", "log=debug", "--worker", &first.name, "--worker", &second.name, "--wait", PATIENT],
    )
    .await?;
    ensure!(set.code == Some(0) && set.stdout.lines().count() == 2, "{set:?}");
    let drained = control(env, &["drain", "--worker", &first.name, "--wait", PATIENT]).await?;
    ensure!(drained.code == Some(0), "{drained:?}");
    ensure!(first.exited().await? == Some(0) && second.is_running());
    // A word that is no level would end the logs.
    let misspelt = control(env, &["set", "log=wran", "--all"]).await?;
    ensure!(
        misspelt.code == Some(2) && misspelt.stderr.contains("`wran` is not a log level"),
        "{misspelt:?}"
    );
    let refused = control(env, &["set", "log=[", "--all", "--expect", "1", "--wait", PATIENT]).await?;
    ensure!(refused.code == Some(1) && refused.stdout.contains("refused"), "{refused:?}");
    Ok(())
}

async fn a_worker_that_does_not_answer_is_named(env: &mut TestEnv) -> Result<()> {
    let [first, second] = workers(env).await?;
    second.signal(Signal::STOP)?;
    let output =
        control(env, &["pause", "--worker", &first.name, "--worker", &second.name, "--wait", ANSWERED])
            .await?;
    second.signal(Signal::CONT)?;
    ensure!(output.code == Some(1), "{output:?}");
    ensure!(output.stdout.starts_with(&first.name) && output.stdout.lines().count() == 1, "{output:?}");
    ensure!(output.stderr.contains(&format!("{}\tno answer within {ANSWERED}", second.name)), "{output:?}");
    let unknown =
        control(env, &["pause", "--worker", "nobody", "--worker", &first.name, "--wait", ANSWERED]).await?;
    ensure!(
        unknown.code == Some(1) && unknown.stderr.contains("nobody\tno worker of this name takes commands"),
        "{unknown:?}"
    );
    Ok(())
}

async fn a_job_is_cancelled_by_its_id(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let device = SharedDevice::new(8)?;
    let worker = env.worker(&device.settings().each_ref().map(String::as_str)).await?;
    listens(env, &worker).await?;
    let leave = device.block().await?;
    env.client.publish(MODEL, env.job("4711", ["x"])?).await?;
    // Deliveries and commands come on different channels, in any order.
    figures(&worker, "the job", |figures| figures.sum("vramq_jobs_in_hand") == 1).await?;
    let cancelling = control(env, &["cancel", "4711", "--wait", PATIENT]);
    let freed = async {
        worker.log.wait_for("\"outcome\":\"requested\"").await?;
        drop(leave);
        Ok(())
    };
    let (cancelled, ()) = tokio::try_join!(cancelling, freed)?;
    ensure!(cancelled.code == Some(0), "{cancelled:?}");
    let outcomes: Vec<_> = cancelled.stdout.lines().filter_map(|line| line.split('\t').nth(1)).collect();
    ensure!(outcomes == ["requested", "stopped", "memory-back"], "{cancelled:?}");
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Failed);
    ensure!(env.dead_letters().await?.next().await?.id() == "4711");
    let again = control(env, &["cancel", "4711", "--expect", "1", "--wait", PATIENT]).await?;
    ensure!(again.code == Some(1) && again.stdout.contains("\tnot-here\t"), "{again:?}");
    Ok(())
}

async fn nobody_is_there(env: &mut TestEnv) -> Result<()> {
    // Makes the exchanges.
    let [worker] = workers(env).await?;
    worker.drain().await?;
    let output = control(env, &["pause", "--all", "--wait", "1s"]).await?;
    ensure!(output.code == Some(1) && output.stderr.contains("no worker answers"), "{output:?}");
    ensure!(!output.stderr.contains("warning"), "{output:?}");
    let of_old = control(env, &["pause", "--all", "--timeout", "1s"]).await?;
    ensure!(
        of_old.code == Some(1) && of_old.stderr.contains("warning: --timeout is now --wait"),
        "{of_old:?}"
    );
    let nobody = ClosedPort::new()?;
    let mut unreachable = command("vramq")?;
    unreachable.args([
        "control",
        "pause",
        "--all",
        "--broker-url",
        &format!("amqp://guest:hunter2@{}/%2f", nobody.address),
    ]);
    let output = run_to_end(unreachable).await?;
    ensure!(output.code == Some(3) && !output.stderr.contains("hunter2"), "{output:?}");
    for wrong in [&["pause"][..], &["pause", "-a", "--worker", "x"], &["set", "level=3", "-a"], &["cancel"]] {
        let output = control(env, wrong).await?;
        ensure!(output.code == Some(2) && output.stderr.starts_with("error: "), "{wrong:?}: {output:?}");
    }
    Ok(())
}

/// The reader of the answers has gone, or their disk is full. What cannot be said on standard error changes nothing.
async fn an_output_that_takes_nothing_ends_the_command(env: &mut TestEnv) -> Result<()> {
    let [worker] = workers(env).await?;
    let (reader, closed) = std::io::pipe()?;
    drop(reader);
    let full = || File::options().write(true).open("/dev/full").map(Stdio::from);
    for (stdout, code, says) in [(Stdio::from(closed), 141, ""), (full()?, 1, "error: write the answers: ")] {
        let mut pause = command("vramq")?;
        pause.args(["control", "pause", "--worker", &worker.name, "--broker-url", &env.url]);
        pause.args(["--wait", PATIENT]);
        let pause = pause.stdout(stdout).stderr(Stdio::piped()).spawn()?;
        let ended =
            timeout(DEADLINE, pause.wait_with_output()).await.context("the command does not end")??;
        let stderr = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.code() == Some(code), "{ended:?}");
        ensure!(stderr.starts_with(says) && stderr.is_empty() == says.is_empty(), "{stderr}");
    }
    let nobody = ClosedPort::new()?;
    let mut unreachable = command("vramq")?;
    unreachable.args([
        "control",
        "pause",
        "--all",
        "--broker-url",
        &format!("amqp://{}/%2f", nobody.address),
    ]);
    let ended = timeout(DEADLINE, unreachable.stderr(full()?).status()).await;
    let ended = ended.context("the command does not end")??;
    ensure!(ended.code() == Some(3), "{ended:?}");
    // The worker has carried it out.
    worker.answers("/readyz", 503).await.map(drop)
}

/// Runs a command line on a terminal; what it shows there. Variables that change whether there are colours, such as `CI`, are removed.
async fn on_a_terminal(line: &str, no_color: Option<&str>) -> Result<String> {
    let mut command = Command::new("script");
    command.args(["-qec", line, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null());
    for name in ["NO_COLOR", "CI", "CLICOLOR", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command.kill_on_drop(true).envs(no_color.map(|value| ("NO_COLOR", value)));
    Ok(run_to_end(command).await.context("script, of Debian's bsdutils")?.stdout)
}

async fn colours_are_for_terminals_that_want_them(env: &mut TestEnv) -> Result<()> {
    let url = "--broker-url amqp://127.0.0.1:1";
    let worker = program("vramq-worker")?;
    // One logs an error, the other tells of a mistake.
    let worker = format!(
        "{} run {url} --set model.m.engine=echo --http-listen off --set broker.connect_s=0",
        worker.display()
    );
    let vramq = format!("{} control pause {url}", program("vramq")?.display());
    for line in [&worker, &vramq] {
        for (no_color, coloured) in [(None, true), (Some(""), true), (Some("1"), false)] {
            let shown = on_a_terminal(line, no_color).await?;
            ensure!(shown.contains("rror") || shown.contains("ERROR"), "{line}: {shown:?}");
            ensure!(shown.contains('\u{1b}') == coloured, "{line} with NO_COLOR={no_color:?}: {shown:?}");
        }
    }
    // An editor's terminal takes none.
    for line in [&format!("TERM=dumb {worker}"), &format!("TERM=dumb {vramq}"), &format!("TERM= {worker}")] {
        let shown = on_a_terminal(line, None).await?;
        ensure!(shown.to_lowercase().contains("error") && !shown.contains('\u{1b}'), "{line}: {shown:?}");
    }
    let watch =
        format!("TERM=dumb {} status --watch --broker-url '{}'", program("vramq")?.display(), env.url);
    let shown = on_a_terminal(&watch, None).await?;
    ensure!(shown.contains("repeat it without --watch") && !shown.contains('\u{1b}'), "{shown:?}");
    // And not in files, nor in what is read by programs.
    let output = control(env, &["pause"]).await?;
    ensure!(!output.stderr.contains('\u{1b}'), "{output:?}");
    Ok(())
}

/// A user with as many channels as jobs take, and no more: RabbitMQ closes the connection of a client that opens another.
async fn without_channels_for_operators_jobs_go_on(env: &mut TestEnv, node: &Node) -> Result<()> {
    const JOBS: usize = 30;
    const MOMENT: Duration = Duration::from_secs(3);
    for text in ["allows this user no channels", "session lost", "no session yet"] {
        env.announce(text);
    }
    node.ctl(&["add_user", "small", "small"]).await?;
    node.ctl(&["set_permissions", "-p", &env.vhost.name, "small", ".*", ".*", ".*"]).await?;
    node.ctl(&["set_user_limits", "small", r#"{"max-channels": 2}"#]).await?;
    let url = format!("broker.url={}", env.url.replace("guest:guest@", "small:small@"));
    let worker = env.worker(&[&url]).await?;
    // RabbitMQ counts channels a moment after they were opened: not every session meets its limit.
    let refused = "allows this user no channels";
    let mut cut = 0;
    while until_within(MOMENT, refused, async || Ok(worker.log.find(refused))).await.is_err() {
        cut += env.vhost.cut_worker(&worker.name).await?;
        ensure!(cut < 10, "no session was refused channels");
    }
    until("a session without", async || Ok((worker.log.count("session open") == cut + 1).then_some(())))
        .await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    let mut counter = ReplyCounter::default();
    counter.collect(&mut env.replies().await?, JOBS).await?;
    worker.log.counts("allows this user no channels", 1).await?;
    worker.log.counts("session lost", cut).await?;
    let output = control(env, &["pause", "--worker", &worker.name, "--wait", "1s"]).await?;
    ensure!(output.code != Some(0), "{output:?}");
    ensure!(worker.get("/readyz").await?.0 == 200 && worker.get("/livez").await?.0 == 200);
    worker.drain().await
}
