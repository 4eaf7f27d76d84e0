//! `vramq status`: its report of workers and queues, and the view of `--watch`.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use lapin::{BasicProperties, Confirmation};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;
use vramq_schemas::topology::{STATUS_EXCHANGE, dead_queue};
use vramq_tests::frames::Request;
use vramq_tests::job::Message;
use vramq_tests::node::Node;
use vramq_tests::permissions::Permissions;
use vramq_tests::proxy::Proxy;
use vramq_tests::terminal::Terminal;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::worker::{Ended, command, run_to_end, vramq};
use vramq_tests::{on_one_setup, on_own_node};

on_one_setup!(
    the_report_matches_the_broker_and_the_workers,
    nobody_is_there,
    its_connection_is_closed_before_it_ends,
    a_signal_ends_its_wait_for_a_silent_broker,
    a_broker_that_refuses_is_not_one_that_is_away,
    watch_shows_workers_that_come_and_go,
    watch_lists_dead_letters_and_explains_them,
    the_terminal_is_restored,
    foreign_messages_on_the_exchange_do_no_harm,
);
on_own_node!(a_broker_that_goes_and_comes_back);

async fn status(env: &TestEnv, arguments: &[&str]) -> Result<Ended> {
    vramq(&env.url, &[&["status"], arguments].concat()).await
}

/// How a colour of the letters begins, and green.
const COLOUR: &str = "\u{1b}[38;5;";
const GREEN: &str = "\u{1b}[38;5;2m";

/// The column of the table of queues that counts workers, from 0: QUEUE, READY, BULK, UNACKED, SUSPECTS, DEAD, WORKERS.
const WORKERS: usize = 6;

/// The one before it counts dead letters.
const DEAD: usize = 5;

/// Settings of a worker that is heard of soon.
const QUICK: &str = "worker.heartbeat_s=1";

async fn the_report_matches_the_broker_and_the_workers(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[QUICK, "model.echo.slots_max=7", "model.echo.queues=team-a.jobs=2"]).await?;
    env.client
        .publish_all(MODEL, (0..20).map(|n| env.job(&n.to_string(), ["x"])).collect::<Result<_>>()?)
        .await?;
    env.replies().await?.take(20).await?;
    env.client.publish_to_queue(&dead_queue(MODEL), &[env.job("dead", ["x"])?]).await?;
    env.leave(&dead_queue(MODEL));

    // A worker that stands still for a moment is heard less than twice meanwhile, and then has no rates, or is silent.
    let report = until("a report of a worker that has nothing to do any more", async || {
        let output = status(env, &["--json", "--for", "8s", "--model", "nobody"]).await?;
        let report: Value = serde_json::from_str(&output.stdout).unwrap_or_default();
        let heard = &report["workers"][0];
        let is_idle = heard["presence"] == "here" && heard["rates"][MODEL]["jobs_per_s"] == 0.0;
        Ok((output.code == Some(0) && is_idle).then_some(report))
    })
    .await?;
    ensure!(report["workers"].as_array().is_some_and(|workers| workers.len() == 1), "{report:#}");
    let heard = &report["workers"][0];
    ensure!(heard["heartbeat"]["worker"] == worker.name.as_str(), "{report:#}");
    ensure!(heard["heartbeat"]["pid"] == worker.pid, "{report:#}");
    ensure!(heard["heartbeat"]["state"] == "consuming", "{report:#}");
    ensure!(heard["heartbeat"]["models"][0]["slots"] == 7, "{report:#}");
    ensure!(heard["heartbeat"]["models"][0]["counters"]["answered"] == 20, "{report:#}");
    let queue = |key: &str| {
        report["queues"]
            .as_array()
            .and_then(|queues| queues.iter().find(|queue| queue["key"] == key))
            .cloned()
    };
    let echo = queue(MODEL).context("no queue of the model")?;
    ensure!(echo["ready"] == 0 && echo["bulk"] == 0 && echo["dead"] == 1 && echo["suspects"] == 0, "{echo}");
    let further = &echo["further"][0];
    ensure!(further["queue"] == "team-a.jobs" && further["ready"] == 0, "{echo}");
    ensure!(heard["heartbeat"]["models"][0]["queues"][1]["weight"] == 2, "{report:#}");
    // A worker may have several consumers.
    ensure!(echo["workers"] == 1 && echo["consumers"].as_u64() >= Some(1), "{echo}");
    ensure!(queue("nobody").context("no queue that was asked for")?["ready"].is_null(), "{report:#}");
    ensure!(report["broker"].as_str().is_some_and(|broker| !broker.contains("guest")), "{report:#}");

    let output = until("a report that has heard the worker", async || {
        let output = status(env, &["--for", "6s"]).await?;
        Ok((output.code == Some(0)).then_some(output))
    })
    .await?;
    for words in [["echo", "QUEUE", "DEAD"], [worker.name.as_str(), "consuming", "cpu"]] {
        ensure!(words.iter().all(|word| output.stdout.contains(word)), "{}", output.stdout);
    }
    // Looking took nothing, and left nothing behind.
    ensure!(env.client.ready(&dead_queue(MODEL)).await? == 1);
    let queues = env.vhost.queues().await?;
    ensure!(queues.iter().all(|queue| !queue.starts_with("amq.gen")), "{queues:?}");
    Ok(())
}

/// Waits for a report with these words, which a broker that is slow completes late.
async fn says_nobody(env: &TestEnv, words: &[&str]) -> Result<()> {
    until("a report that nobody is there", async || {
        let output = status(env, &["--for", "1s", "--model", MODEL]).await?;
        ensure!(output.code == Some(1), "{output:?}");
        Ok(words.iter().all(|words| output.stdout.contains(words)).then_some(()))
    })
    .await
}

async fn nobody_is_there(env: &mut TestEnv) -> Result<()> {
    says_nobody(env, &["no exchange vramq.status", "no queue"]).await?;
    let worker = env.worker(&[QUICK]).await?;
    worker.drain().await?;
    says_nobody(env, &["no worker was heard: none is connected"]).await?;
    // Where there is no broker, it says so at once.
    let mut nowhere = command("vramq")?;
    nowhere.args(["status", "--watch", "--broker-url", "amqp://guest:hunter2@127.0.0.1:1/%2f"]);
    let output = run_to_end(nowhere).await?;
    ensure!(output.code == Some(3) && !output.stderr.contains("hunter2"), "{output:?}");
    // And where there is no terminal, too.
    let output = status(env, &["--watch"]).await?;
    ensure!(output.code == Some(2) && output.stderr.contains("needs a terminal"), "{output:?}");
    Ok(())
}

async fn its_connection_is_closed_before_it_ends(env: &mut TestEnv) -> Result<()> {
    let proxy = Proxy::to(&env.url).await?;
    let output = vramq(proxy.url(), &["status", "--for", "1s"]).await?;
    ensure!(output.code == Some(1), "{output:?}");
    ensure!((proxy.accepted(), proxy.closed()) == (1, 1), "{proxy:?}");
    Ok(())
}

/// It has printed what it knows, and waits until its connection is closed.
async fn a_signal_ends_its_wait_for_a_silent_broker(env: &mut TestEnv) -> Result<()> {
    let proxy = Proxy::to(&env.url).await?;
    proxy.swallow_requests(Request::DeclareQueue);
    let mut command = command("vramq")?;
    command.args(["status", "--model", MODEL, "--for", "1s", "--broker-url", proxy.url()]);
    let mut status = command.stdout(Stdio::piped()).spawn()?;
    let mut printed = BufReader::new(status.stdout.take().context("a process without stdout")?).lines();
    timeout(DEADLINE, printed.next_line()).await.context("it prints nothing")??.context("it ended")?;
    let pid = status.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("no process")?;
    kill_process(pid, Signal::INT)?;
    let ended = timeout(DEADLINE, status.wait()).await.context("it does not end")??;
    ensure!(ended.code() == Some(130), "{ended:?}");
    Ok(())
}

async fn a_broker_that_refuses_is_not_one_that_is_away(env: &mut TestEnv) -> Result<()> {
    let wrong = env.url.replace("guest:guest@", "guest:hunter2@");
    let at_first = vramq(&wrong, &["status"]).await?;
    ensure!(at_first.code == Some(4) && at_first.stderr.contains("refused"), "{at_first:?}");
    ensure!(!at_first.stderr.contains("hunter2"), "{at_first:?}");
    // The login works, but this user may not listen.
    env.worker(&[QUICK]).await?.drain().await?;
    let nothing = Permissions { configure: String::new(), write: String::new(), read: String::new() };
    let (_, url) = env.add_user_with("powerless", &nothing).await?;
    // The refusal ends the listening.
    let refused = vramq(&url, &["status", "--for", "1h"]).await?;
    ensure!(refused.code == Some(4), "{refused:?}");
    ensure!(refused.stderr.contains("error: refused by the broker: "), "{refused:?}");
    ensure!(
        refused.stderr.contains("ACCESS_REFUSED") && !refused.stdout.contains("reconnect"),
        "{refused:?}"
    );
    let json = vramq(&url, &["status", "--json", "--for", "1h"]).await?;
    ensure!(json.code == Some(4), "{json:?}");
    let report: Value = serde_json::from_str(&json.stdout)?;
    let error = report["error"].as_str().context("a report without an error")?;
    ensure!(error.contains("ACCESS_REFUSED"), "{json:?}");
    ensure!(json.stderr.contains("error: refused by the broker: "), "{json:?}");
    Ok(())
}

/// The line of the screen that starts with this.
fn line<'a>(screen: &'a str, start: &str) -> Option<&'a str> {
    screen.lines().find(|line| line.starts_with(start))
}

fn is(screen: &str, start: &str, word: &str) -> bool {
    line(screen, start).is_some_and(|line| line.split_whitespace().any(|found| found == word))
}

async fn watching(env: &TestEnv, before: &str) -> Result<Terminal> {
    let terminal = Terminal::open(140, 24).await?;
    terminal.type_line(&format!("export VRAMQ_BROKER_URL={} {before}; clear", env.url)).await?;
    terminal.run("vramq", "status --watch").await?;
    terminal.shows("the title", |screen| screen.starts_with("vramq status")).await?;
    Ok(terminal)
}

async fn watch_shows_workers_that_come_and_go(env: &mut TestEnv) -> Result<()> {
    let terminal = watching(env, "").await?;
    terminal.shows("nobody", |screen| screen.contains("no worker was heard")).await?;
    let one = env.worker(&[QUICK]).await?;
    let two = env.worker(&[QUICK]).await?;
    let both = |screen: &str| is(screen, &one.name, "consuming") && is(screen, &two.name, "consuming");
    terminal.shows("two workers", both).await?;
    terminal
        .shows("their count", |screen| screen.lines().next().is_some_and(|line| line.ends_with("workers: 2")))
        .await?;
    terminal
        .shows("that both consume", |screen| {
            line(screen, MODEL).and_then(|line| line.split_whitespace().nth(WORKERS)) == Some("2")
        })
        .await?;

    two.drain().await?;
    terminal
        .shows("one whose last heartbeat says that it is gone", |screen| is(screen, &two.name, "gone"))
        .await?;
    one.signal(Signal::KILL)?;
    one.exited().await?;
    terminal.shows("one that fell silent", |screen| is(screen, &one.name, "silent")).await?;
    terminal.shows("what that means", |screen| screen.contains("it has died or is cut off")).await?;
    terminal
        .shows("that nobody is left", |screen| {
            screen.lines().next().is_some_and(|line| line.ends_with("workers: 0"))
        })
        .await?;
    terminal.shows("only the silent one, after a while", |screen| line(screen, &two.name).is_none()).await?;

    // A smaller window has the same in it, and keys to see the rest.
    terminal.resize(60, 6).await?;
    terminal.shows("that there is more", |screen| screen.contains("lines above")).await?;
    terminal.press("Down").await?;
    terminal.shows("that it scrolled", |screen| screen.contains("1 lines above")).await?;
    terminal.press("q").await?;
    terminal.shows("the prompt", |screen| screen.ends_with('$')).await?;
    ensure!(terminal.is_restored().await?);
    Ok(())
}

async fn watch_lists_dead_letters_and_explains_them(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    env.worker(&[QUICK]).await?;
    let mut replies = env.replies().await?;
    for id in ["first", "second"] {
        env.client.publish(MODEL, env.job(id, ["x"])?.with_body("no job")).await?;
        // One after the other, so that their order is known.
        replies.next().await?;
    }
    env.leave(&dead_queue(MODEL));
    let terminal = watching(env, "").await?;
    let count = |screen: &str| {
        line(screen, MODEL).and_then(|line| line.split_whitespace().nth(DEAD)).map(str::to_owned)
    };
    terminal.shows("two dead letters", |screen| count(screen).as_deref() == Some("2")).await?;
    terminal.press("d").await?;
    let list = terminal.shows("their list", |screen| screen.contains("second")).await?;
    ensure!(list.starts_with("dead letters  2\n"), "{list}");
    ensure!(list.contains("first") && list.contains("malformed"), "{list}");

    terminal.press("Down").await?;
    terminal.press("Enter").await?;
    let letter = terminal.shows("the letter", |screen| screen.contains("Job second, in vramq.dead.")).await?;
    ensure!(letter.contains("\nWhy it ended\n") && letter.contains("\nWhat to do\n"), "{letter}");
    terminal.press("Escape").await?;
    terminal.shows("the list again", |screen| screen.contains("first")).await?;
    terminal.press("Escape").await?;
    terminal.shows("the workers again", |screen| screen.starts_with("vramq status")).await?;
    // Looking took nothing.
    terminal.shows("both letters", |screen| count(screen).as_deref() == Some("2")).await?;
    ensure!(env.client.ready(&dead_queue(MODEL)).await? == 2);
    terminal.press("q").await?;
    terminal.shows("the prompt", |screen| screen.ends_with('$')).await?;
    ensure!(terminal.is_restored().await?);
    Ok(())
}

/// The process of `vramq` that watches this virtual host.
async fn watcher(env: &TestEnv) -> Result<Pid> {
    until("the process that watches", async || {
        for process in std::fs::read_dir("/proc")?.flatten() {
            let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let read = |file: &str| std::fs::read(process.path().join(file)).unwrap_or_default();
            let has =
                |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
            if has(&read("cmdline"), "status\0--watch") && has(&read("environ"), &env.url) {
                return Ok(Pid::from_raw(pid));
            }
        }
        Ok(None)
    })
    .await
}

async fn the_terminal_is_restored(env: &mut TestEnv) -> Result<()> {
    env.worker(&[QUICK]).await?;
    // However it ends: by key, by signal, and with the exit code that scripts know.
    for (how, code) in [("q", "0"), ("C-c", "130"), ("Escape", "0"), ("TERM", "143"), ("INT", "130")] {
        let terminal = watching(env, "").await?;
        ensure!(!terminal.is_restored().await?, "it does not take the terminal over");
        match how {
            "TERM" => kill_process(watcher(env).await?, Signal::TERM)?,
            "INT" => kill_process(watcher(env).await?, Signal::INT)?,
            key => terminal.press(key).await?,
        }
        terminal.shows("the prompt", |screen| screen.ends_with('$')).await?;
        ensure!(terminal.is_restored().await?, "after {how}");
        terminal.type_line("echo code $?").await?;
        terminal.shows("the exit code", |screen| screen.contains(&format!("\ncode {code}\n"))).await?;
    }
    let worker_is_shown = |screen: &str| screen.contains("consuming");
    let terminal = watching(env, "").await?;
    terminal.shows("the worker", worker_is_shown).await?;
    ensure!(terminal.coloured().await?.contains(GREEN), "the worker is not green");
    let terminal = watching(env, "NO_COLOR=1").await?;
    terminal.shows("the worker", worker_is_shown).await?;
    let shown = terminal.coloured().await?;
    ensure!(!shown.contains(COLOUR), "{shown:?}");
    Ok(())
}

async fn foreign_messages_on_the_exchange_do_no_harm(env: &mut TestEnv) -> Result<()> {
    env.worker(&[QUICK]).await?;
    let terminal = watching(env, "").await?;
    terminal.shows("the worker", |screen| screen.contains("consuming")).await?;
    let evil = serde_json::json!({
        "worker": "evil\u{1b}[2J\u{1b}]0;title\u{7}\r\n", "state": "beyond", "interval_ms": u64::MAX, "version": "\u{202e}",
        "models": [{"model": "\u{1b}c", "key": "\u{1b}c", "in_hand": u64::MAX}],
    });
    for body in [evil.to_string().as_str(), "nonsense", "[]"] {
        let message = Message {
            properties: BasicProperties::default(),
            body: body.as_bytes().to_vec(),
            as_worker: false,
        };
        let confirmation = env.client.publish_to(STATUS_EXCHANGE, "", message).await?;
        ensure!(matches!(confirmation, Confirmation::Ack(None)), "{confirmation:?}");
    }
    let screen = terminal.shows("the stranger", |screen| screen.contains("evil\\u{1b}[2J")).await?;
    ensure!(is(&screen, "evil", "unknown") && screen.starts_with("vramq status"), "{screen}");
    terminal
        .shows("that some were no heartbeats", |screen| screen.contains("2 messages on vramq.status"))
        .await?;
    terminal.press("q").await?;
    Ok(())
}

async fn a_broker_that_goes_and_comes_back(env: &mut TestEnv, node: &Node) -> Result<()> {
    env.announce("session lost");
    env.announce("no session yet");
    env.worker(&[QUICK]).await?;
    let terminal = watching(env, "").await?;
    terminal.shows("the worker", |screen| screen.contains("consuming")).await?;
    node.kill().await?;
    let lost = terminal
        .shows("that the broker is gone", |screen| screen.contains("no connection to the broker"))
        .await?;
    ensure!(lost.contains("consuming"), "what was known is still to be seen:\n{lost}");
    node.restart().await?;
    terminal
        .shows("the worker, again", |screen| {
            !screen.contains("no connection")
                && is(screen, "worker-0", "consuming")
                && screen.contains("workers: 1")
        })
        .await?;
    terminal.press("q").await?;
    env.reconnect().await?;
    Ok(())
}
