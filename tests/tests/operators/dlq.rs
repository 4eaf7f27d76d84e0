//! Reading with `vramq dlq`: it changes nothing, explains what happened, and escapes control characters.
//!
//! With a few hundred letters; with `VRAMQ_TEST_FULL=1` ten thousand.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lapin::types::{AMQPValue, FieldTable};
use rustix::process::Signal;
use serde_json::Value;
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::answered_once;
use vramq_tests::broker::Broker;
use vramq_tests::dead_letters::{Operator, add_dead_letters, ids, letter, letters, scale};
use vramq_tests::proxy::Proxy;
use vramq_tests::random::Random;
use vramq_tests::shared_device::ECHO_ITEM_BYTES;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::vramq;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    reading_changes_nothing,
    memory_is_flat,
    a_list_is_filtered_and_a_dead_letter_is_explained,
    identical_dead_letters_are_shown_once,
    dead_letters_of_the_broker_are_restored_unchanged,
    an_out_of_memory_is_explained_and_its_job_runs_where_there_is_room,
    changes_are_refused_or_logged,
    an_operator_at_a_terminal_is_asked,
);
on_one_setup!(
    without_a_model_those_of_the_workers_are_read,
    without_a_worker_the_broker_lists_the_models,
    a_connection_is_closed_also_where_there_is_no_queue,
);

/// The time that it takes if nobody interrupts it.
async fn timed(operator: &Operator, args: &[&str]) -> Result<Duration> {
    let start = Instant::now();
    operator.run_for(0, args).await?;
    Ok(start.elapsed())
}

/// As after an import with `--duplicates`.
async fn identical_dead_letters_are_shown_once(env: &mut TestEnv) -> Result<()> {
    let twin = letter("twin", Reason::Malformed, "x")?;
    add_dead_letters(env, vec![twin.clone(), twin, letter("other", Reason::Malformed, "x")?]).await?;
    let operator = Operator::at(env)?;
    let shown = operator.run_for(0, &["show", "twin", "--save", "body"]).await?;
    ensure!(shown.matches("Dead letter ").count() == 1, "{shown}");
    ensure!(shown.contains("There are 2 identical ones") && operator.path("body").exists(), "{shown}");
    ensure!(!operator.run_for(0, &["show", "other"]).await?.contains("identical"));
    operator.run_for(0, &["drop", "twin", "--first", "1", "--yes-drop", "1"]).await?;
    ensure!(operator.ids().await?.len() == 2, "not one of the two is dropped");
    Ok(())
}

/// Waits until the broker has put back what a killed reader held. It notices the end of a connection a little later.
async fn all_ready(env: &TestEnv, count: usize) -> Result<()> {
    let all = async || Ok((env.client.ready(&dead_queue(MODEL)).await? as usize == count).then_some(()));
    until("all letters to be ready again", all).await
}

async fn reading_changes_nothing(env: &mut TestEnv) -> Result<()> {
    let count = scale();
    add_dead_letters(env, letters(count)?).await?;
    let operator = Operator::at(env)?;
    let before = operator.letters().await?;
    ensure!(operator.ids().await? == ids(count), "not in the order of their publishing");
    let took = timed(&operator, &["list"]).await?;
    println!("list of {count}: {took:.2?}");
    let (mut random, mut cut_off) = (Random::new(7), 0);
    for look in 0..50 {
        let after = took.mul_f64(random.below(1200) as f64 / 1000.0);
        let signal = if look % 2 == 0 { Signal::KILL } else { Signal::INT };
        cut_off += usize::from(operator.cut_off(&["list"], signal, after).await?);
        if look % 10 == 0 {
            all_ready(env, count).await?;
            let now = operator.letters().await?;
            let first = before.iter().zip(&now).find(|(before, now)| before != now);
            ensure!(
                now == before,
                "changed by look {look}, cut off after {after:?}: {} letters, first: {first:?}",
                now.len()
            );
        }
    }
    ensure!(cut_off > 0, "each command had ended before it was to be cut off");
    all_ready(env, count).await?;
    let (one, other) =
        tokio::join!(operator.run_for(0, &["list", "--json"]), operator.run_for(0, &["list", "--json"]));
    ensure!(one? == other?, "two at once do not see the same");
    ensure!(operator.letters().await? == before, "changed by two at once");
    all_ready(env, count).await
}

async fn memory_is_flat(env: &mut TestEnv) -> Result<()> {
    /// With however many letters: the program itself, what may wait at its gate, and what may await its confirm.
    const PEAK_MIB_MAX: u64 = 110;
    // More than wait at the gate.
    let count = scale().max(1500);
    let text = "x".repeat(20_000);
    let letters = (0..count).map(|at| letter(&format!("job-{at}"), Reason::Expired, &text));
    add_dead_letters(env, letters.collect::<Result<_>>()?).await?;
    let operator = Operator::at(env)?;
    for args in [&["list"][..], &["export", "--all", "-o", "all.jsonl"], &["retry", "--all", "--yes"]] {
        let start = Instant::now();
        let mut child = operator.spawn(args)?;
        let status = format!("/proc/{}/status", child.id().context("no id")?);
        let mut peak = 0;
        let ended = until("its end", async || {
            let message = std::fs::read_to_string(&status).unwrap_or_default();
            let kib =
                message.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
            peak = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0).max(peak);
            Ok(child.try_wait()?)
        });
        ensure!(ended.await?.success());
        println!("{} of {count} letters of 20 KB: {} MiB, {:.2?}", args[0], peak / 1024, start.elapsed());
        ensure!(peak / 1024 < PEAK_MIB_MAX, "{} MiB", peak / 1024);
    }
    Ok(())
}

async fn a_list_is_filtered_and_a_dead_letter_is_explained(env: &mut TestEnv) -> Result<()> {
    let mut all = letters(8)?;
    all.push(letter("\u{1b}[2Jhostile\u{202e}", Reason::Malformed, "x")?.with_body(*b"\x1b]0;no job\x07"));
    add_dead_letters(env, all).await?;
    let operator = Operator::at(env)?;
    let output = operator.run_for(0, &["list"]).await?;
    ensure!(output.contains("expired/echo/0.0.1") && output.contains("job-7"), "{output}");
    ensure!(output.contains("\\u{1b}[2Jhostile\\u{202e}") && !output.contains('\u{1b}'), "{output}");
    let names = operator.run_for(0, &["list", "--fingerprints", "--reason", "expired"]).await?;
    ensure!(names.lines().count() == 2, "{names}");
    for name in names.lines() {
        ensure!(
            operator.run_for(0, &["show", name]).await?.starts_with(&format!("Dead letter {name}\n")),
            "{name}"
        );
    }
    for (args, count) in [
        (&["--reason", "expired"][..], 2),
        (&["--reason", "expired", "--reason", "malformed"], 3),
        (&["--group", "out-of-memory/echo/0.0.1"], 2),
        (&["--since", "1h"], 0),
        (&["--since", "2023-11-01T00:00:00Z"], 9),
        (&["--limit", "4"], 4),
        (&["--error", "FOR THE TEST: EXPIRED"], 2),
        (&["--error", "for the test", "--reason", "out-of-memory"], 2),
        (&["--worker", "gone"], 9),
        (&["--worker", "gon"], 0),
        (&["--trace", "4bf92f3577b34da6a3ce929d0e0e4736"], 0),
    ] {
        let output = operator.run_for(0, &[&["list", "--json"], args].concat()).await?;
        let letters = output.lines().filter(|line| line.contains(r#""kind":"letter""#)).count();
        ensure!(letters == count, "{args:?}: {letters} letters in {output}");
    }
    let output = operator.run_for(0, &["list", "--json", "--reason", "malformed"]).await?;
    let hostile: Value = serde_json::from_str(output.lines().last().context("no line")?)?;
    let fingerprint = hostile["fingerprint"].as_str().context("no fingerprint")?;
    let output = operator.run_for(0, &["show", fingerprint, "--save", "body"]).await?;
    ensure!(
        output.contains("Why it ended") && output.contains("What to do") && !output.contains('\u{1b}'),
        "{output}"
    );
    ensure!(std::fs::read(operator.path("body"))? == b"\x1b]0;no job\x07");
    let again = operator.run(&["show", fingerprint, "--save", "body"]).await?;
    ensure!(again.code == Some(2) && again.stderr.contains("create body: File exists"), "{again:?}");
    let short = operator.run(&["show", &fingerprint[..5]]).await?;
    ensure!(short.code == Some(1) && short.stderr.contains("at least 6 digits"), "{short:?}");
    operator.run_for(0, &["show", "job-3", "--body"]).await?;
    operator.run_for(1, &["show", "nobody"]).await?;
    // A misspelt reason would select nothing, which looks as if all were well.
    operator.run_for(2, &["list", "--reason", "out_of_memory"]).await?;
    operator.run_for(2, &["drop"]).await?;
    operator.run_for(2, &["retry", "--all"]).await?;
    operator.run_for(1, &["drop", "--all", "--yes-drop", "8"]).await?;
    let elsewhere = operator.command(&["list", "--model", "nothing"])?;
    ensure!(vramq_tests::worker::run_to_end(elsewhere).await?.code == Some(4));
    ensure!(operator.ids().await?.len() == 9, "letters are missing");
    Ok(())
}

async fn dead_letters_of_the_broker_are_restored_unchanged(env: &mut TestEnv) -> Result<()> {
    add_dead_letters(env, Vec::new()).await?;
    let job = env.job("late", ["x"])?.with(|properties| properties.with_expiration("1".into()));
    env.client.publish(MODEL, job).await?;
    until("an expired job", async || Ok((env.client.ready(&dead_queue(MODEL)).await? == 1).then_some(())))
        .await?;
    let operator = Operator::at(env)?;
    let output = operator.run_for(0, &["list"]).await?;
    ensure!(output.contains("expired/echo/broker"), "{output}");
    let output = operator.run_for(0, &["show", "late"]).await?;
    ensure!(output.contains("the broker took it from the queue vramq.jobs.echo"), "{output}");
    let before = operator.letters().await?;
    operator.run_for(0, &["drop", "late", "--yes-drop", "1", "--archive", "late.jsonl"]).await?;
    operator.run_for(0, &["restore", "late.jsonl"]).await?;
    let mut after = operator.letters().await?;
    after[0]["headers"].as_object_mut().context("no headers")?.remove("publish-seq");
    ensure!(after == before, "{after:?}\nnot\n{before:?}");
    operator
        .run_for(0, &["retry", "late", "--yes", "--change", "expiration=10m", "--change", "batch-hint=3"])
        .await?;
    let worker = env.worker(&[]).await?;
    let answer = env.replies().await?.next().await?;
    ensure!(answer.kind()? == ReplyKind::Done && answer.id() == "late");
    worker.drain().await
}

/// A worker writes a dead letter, an operator reads it, and the advised command runs the job.
async fn an_out_of_memory_is_explained_and_its_job_runs_where_there_is_room(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "made to fail", "job dead-lettered"] {
        env.announce(text);
    }
    // Not even one item fits.
    let fault = format!("device.cpu.fault=above={}", ECHO_ITEM_BYTES - 1);
    let small = env.worker(&[&fault]).await?;
    let items: Vec<_> = (0..8).map(|at| format!("item {at}")).collect();
    env.client.publish(MODEL, env.job("large", items.clone())?).await?;
    let mut replies = env.replies().await?;
    ensure!(replies.next().await?.failure()?.reason == Reason::OutOfMemory);
    until("its letter", async || Ok((env.client.ready(&dead_queue(MODEL)).await? == 1).then_some(())))
        .await?;
    small.drain().await?;

    let operator = Operator::at(env)?;
    let output = operator.run_for(0, &["show", "large"]).await?;
    let attempts: Vec<_> = output.lines().filter(|line| line.contains("ran out of memory")).collect();
    ensure!(attempts.len() == 4, "{output}");
    for (attempt, (items, asked)) in attempts.iter().zip([
        ("8 items", "8.0 KiB"),
        ("4 items", "4.0 KiB"),
        ("2 items", "2.0 KiB"),
        ("1 item", "1.0 KiB"),
    ]) {
        let what = format!(
            "{} ran {items} from number 0 on, the longest of cost 1, with no other process on the device",
            small.name
        );
        ensure!(
            attempt.contains(&what) && attempt.contains(&format!("asked cpu for {asked}; free were ")),
            "{attempt}"
        );
        ensure!(attempt.contains(" of 2.0 GiB"), "{attempt}");
    }
    let fits = "What would fit\n  Item 0, of cost 1, runs alone on a device with 1.0 KiB free beside the model's weights (1024 bytes).\n";
    ensure!(output.contains(fits), "{output}");
    let advice =
        output.split_once("What to do\n").and_then(|(_, rest)| rest.lines().next()).context("no advice")?;
    let advised = advice.split('`').nth(1).context("no command")?;
    let words: Vec<_> = advised.split(' ').collect();
    let ["vramq", "dlq", "retry", "--model", MODEL, fingerprint] = words[..] else {
        anyhow::bail!("the advice is `{advised}`");
    };

    let roomy = env.worker(&[]).await?;
    operator.run_for(0, &["retry", fingerprint, "--yes"]).await?;
    answered_once(&mut replies, "large", &items).await?;
    roomy.drain().await?;
    ensure!(roomy.total("oom_alone").await? == 0 && operator.ids().await?.is_empty());
    Ok(())
}

async fn changes_are_refused_or_logged(env: &mut TestEnv) -> Result<()> {
    add_dead_letters(env, letters(4)?).await?;
    let operator = Operator::at(env)?;
    for args in
        [&["retry", "--all", "--yes"][..], &["drop", "--all", "--yes-drop", "4"], &["import", "x.jsonl"]]
    {
        let mut command = operator.command(args)?;
        command.env("VRAMQ_READ_ONLY", "1");
        ensure!(vramq_tests::worker::run_to_end(command).await?.code == Some(2), "{args:?}");
    }
    ensure!(operator.log().is_err(), "what was refused is on record");
    operator.run_for(0, &["retry", "job-0", "--yes"]).await?;
    operator.run_for(0, &["drop", "job-1", "--yes-drop", "1", "--archive", "one.jsonl"]).await?;
    operator.run_for(0, &["restore", "one.jsonl"]).await?;
    let log = operator.log()?;
    let phases: Vec<_> =
        log.iter().map(|entry| (entry["command"].as_str(), entry["phase"].as_str())).collect();
    let pair = |command| [(Some(command), Some("begin")), (Some(command), Some("end"))];
    ensure!(phases == [pair("retry"), pair("drop"), pair("import")].concat(), "{phases:?}");
    ensure!(log[0]["letters"][0]["id"] == "job-0" && log[1]["count"] == 1, "{log:?}");
    ensure!(log.iter().all(|entry| entry["who"].as_str().is_some_and(|who| who.contains('@'))));
    // Where it cannot be put on record, it is not done.
    let refused = operator.run(&["retry", "job-2", "--yes", "--action-log", "/proc/nothing/log"]).await?;
    ensure!(refused.code == Some(2), "{}", refused.stderr);
    let of_old = operator.run(&["retry", "job-2", "--dry-run", "--set", "batch-hint=3"]).await?;
    ensure!(of_old.code == Some(0) && of_old.stderr.contains("warning: --set is now --change"), "{of_old:?}");
    // Elsewhere --log is what to log.
    let renamed = operator.run(&["retry", "job-2", "--yes", "--log", "actions.jsonl"]).await?;
    ensure!(renamed.code == Some(2) && renamed.stderr.contains("--action-log"), "{}", renamed.stderr);
    ensure!(operator.ids().await? == ["job-2", "job-3", "job-1"]);
    Ok(())
}

async fn an_operator_at_a_terminal_is_asked(env: &mut TestEnv) -> Result<()> {
    add_dead_letters(env, letters(4)?).await?;
    let operator = Operator::at(env)?;
    for (args, typed, code, shown, left) in [
        (&["retry", "--all"][..], "n\n", 1, "4 jobs to the exchange vramq.retry, routing key echo", 4),
        (&["retry", "job-0"], "y\n", 0, "Retry them? [y/N]", 3),
        (&["drop", "--all"], "4\n", 1, "Type 3 to drop them:", 3),
        (&["drop", "--all"], "3\n", 0, "vramq dlq restore vramq-dropped-", 0),
    ] {
        let (screen, exited) = operator.at_terminal(args, typed).await?;
        ensure!(exited == Some(code) && screen.contains(shown), "{args:?}, {typed:?}: {exited:?} {screen}");
        ensure!(operator.ids().await?.len() == left, "{args:?}, {typed:?}: not {left} left");
    }
    Ok(())
}

async fn without_a_model_those_of_the_workers_are_read(env: &mut TestEnv) -> Result<()> {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    add_dead_letters(env, letters(3)?).await?;
    let operator = Operator::at(env)?;
    // Nobody says which models there are.
    let unknown = operator.run_without_model(&["list"]).await?;
    ensure!(unknown.code == Some(1) && unknown.stderr.contains("give --model NAME"), "{}", unknown.stderr);

    let models = ["model.other.engine=echo", "model.empty.engine=echo"];
    let worker = env.worker(&[&models[..], &["worker.heartbeat_s=1"]].concat()).await?;
    let elsewhere = letter("elsewhere", Reason::EngineFailed, "a text")?
        .with_header("traceparent", AMQPValue::LongString(format!("00-{TRACE}-00f067aa0ba902b7-01").into()));
    env.client.publish_to_queue(&dead_queue("other"), &[elsewhere]).await?;
    let (list, traced, shown, all) = tokio::join!(
        operator.run_without_model(&["list"]),
        operator.run_without_model(&["list", "--json", "--trace", TRACE]),
        operator.run_without_model(&["show", "elsewhere"]),
        operator.run_without_model(&["retry", "--all", "--yes"]),
    );
    let (list, traced, shown) = (list?, traced?, shown?);
    ensure!(list.code == Some(0) && list.stdout.contains("  MODEL"), "{list:?}");
    ensure!(["job-0", "job-1", "elsewhere"].iter().all(|id| list.stdout.contains(id)), "{list:?}");
    let traced = traced.stdout.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    ensure!(traced.len() == 2 && traced[1]["model"] == "other" && traced[1]["trace"] == TRACE, "{traced:?}");
    ensure!(shown.code == Some(0) && shown.stdout.contains("in vramq.dead.other"), "{shown:?}");
    // Whole queues are not changed unnamed.
    let all = all?;
    ensure!(all.code == Some(2) && all.stderr.contains("there are echo, other"), "{all:?}");
    // A filter selects in all of them.
    let filtered = ["drop", "--error", "test: ENGINE", "--worker", "gone", "--yes-drop", "2"];
    let dropped = operator.run_without_model(&filtered).await?;
    ensure!(dropped.code == Some(0), "{dropped:?}");
    ensure!(operator.ids().await? == ["job-0", "job-1"]);
    ensure!(env.client.ready(&dead_queue("other")).await? == 0, "it is still there");
    worker.drain().await
}

async fn without_a_worker_the_broker_lists_the_models(env: &mut TestEnv) -> Result<()> {
    // Dead letters of two models. The third has none, and the fourth queue has no name of a model.
    add_dead_letters(env, letters(2)?).await?;
    let worker = env.worker(&["model.other.engine=echo", "model.empty.engine=echo"]).await?;
    worker.drain().await?;
    let elsewhere = letter("elsewhere", Reason::EngineFailed, "a text")?;
    env.client.publish_to_queue(&dead_queue("other"), &[elsewhere]).await?;
    let foreign = dead_queue("no model");
    env.client.declare_queue(&foreign, FieldTable::default()).await?;
    env.client.publish_to_queue(&foreign, &[letter("foreign", Reason::EngineFailed, "a text")?]).await?;
    let operator = Operator::at(env)?;
    let management = Broker::from_environment()?.management;
    let (_, host) = management.rsplit_once('@').context("a user")?;
    let listed =
        async |url: &str| operator.run_without_model(&["list", "--broker-management-url", url]).await;

    // The user is the URL's, or the one of the broker's URL.
    for url in [&management, &format!("{management}/"), &format!("http://{host}")] {
        let list = listed(url).await?;
        ensure!(list.code == Some(0), "{url}: {list:?}");
        ensure!(
            ["job-0", "job-1", "elsewhere", "  MODEL"].iter().all(|part| list.stdout.contains(part)),
            "{list:?}"
        );
        ensure!(!list.stdout.contains("foreign") && !list.stdout.contains("dead.empty"), "{list:?}");
    }
    for (url, code, says) in [
        (format!("http://nobody:secret@{host}"), 4, "refuses the user nobody (401)"),
        ("http://127.0.0.1:1".to_owned(), 3, "ask the management API at http://127.0.0.1:1"),
        (format!("http://{host}/elsewhere"), 1, "is it the management API of this broker?"),
        (host.to_owned(), 2, "it should look like http://USER:PASSWORD@HOST:15672"),
    ] {
        let failed = listed(&url).await?;
        ensure!(failed.code == Some(code) && failed.stderr.contains(says), "{url}: {failed:?}");
        ensure!(!failed.stderr.contains("secret"), "{failed:?}");
    }
    env.client.purge(&dead_queue("other")).await?;
    env.client.purge(&foreign).await
}

async fn a_connection_is_closed_also_where_there_is_no_queue(env: &mut TestEnv) -> Result<()> {
    let proxy = Proxy::to(&env.url).await?;
    let output = vramq(proxy.url(), &["dlq", "list", "--model", "nobody"]).await?;
    ensure!(output.code == Some(4) && output.stderr.contains("there is no queue"), "{output:?}");
    ensure!((proxy.accepted(), proxy.closed()) == (1, 1), "{proxy:?}");
    Ok(())
}
