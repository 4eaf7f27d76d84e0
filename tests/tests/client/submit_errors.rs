//! Errors of `vramq submit`: messages and exit codes; against a real broker.

use crate::common::command::{Scratch, code, command, line, lines, stderr, submit, submit_stdin};
use crate::common::{Broker, bounded, in_time, until, worker};
use lapin::types::FieldTable;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::task::JoinHandle;

/// For so long the command tries to reconnect to a broker that is away.
const RECONNECT_FOR: Duration = Duration::from_secs(60);

/// For so long the broker has to refuse before that ends the command.
const REFUSED_FOR: Duration = Duration::from_secs(10);

async fn echo(broker: &Broker) -> JoinHandle<()> {
    worker::work(broker, "m", |received| vec![received.done()]).await
}

#[tokio::test]
async fn usage_and_input_errors_are_2() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let empty = scratch.file("empty.txt", "");
    let broken = scratch.file("broken.jsonl", "\"a\"\n{\n");
    let missing = scratch.path("missing.txt");
    let nowhere = scratch.path("no/such/folder/out.npy");
    let folder = scratch.path("");
    for (args, said) in [
        (vec!["--model", "m", "--file", &empty], "the input is empty"),
        (vec!["--model", "m", "--file", &missing], "missing.txt"),
        (vec!["--model", "m", "--file", &folder], "it is a folder"),
        (vec!["--model", "m", "--file", &broken], "line 2: not JSON"),
        (vec!["--model", "m", "-o", &nowhere, "x"], "no/such/folder/out.npy"),
        (vec!["--model", "m", "--with-text", "-o", "out.npy", "x"], "--with-text needs JSON lines"),
        (vec!["--model", "m", "--file", &empty, "x"], "cannot be used with"),
        (vec!["--model", "no such", "x"], "cannot name a model"),
        (vec!["--model", "m", "--key", "no such", "x"], "cannot name a model"),
        (vec!["--model", "m", "--params", "[]", "x"], "--params"),
        (vec!["--model", "m", "--timeout", "soon", "x"], "use for example"),
        (vec!["--model", "m", "--batch-hint", "0", "x"], "--batch-hint"),
        (vec!["--model", "m", "--job-items", "0", "x"], "--job-items"),
        (vec!["x"], "--model"),
    ] {
        let refused = submit(&broker, &args).await;
        code(&refused, 2);
        assert!(stderr(&refused).contains(said), "{args:?}: {}", stderr(&refused));
    }
    let empty = submit_stdin(&broker, &["--model", "m"], "").await;
    code(&empty, 2);
    assert_eq!(scratch.names().len(), 2, "{:?}", scratch.names());
    worker.abort();
}

/// A fault in the middle ends the input; what came before it is answered.
#[tokio::test]
async fn a_fault_in_the_middle_of_the_input() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let input = scratch.file("in.jsonl", "\"a\"\n\"b\"\n\"c\"\nnonsense\n\"d\"\n");
    let output = scratch.path("out.jsonl");
    let args = ["--model", "m", "--job-items", "2", "--file", &input, "-o", &output];
    let stopped = submit(&broker, &args).await;
    code(&stopped, 2);
    let said = stderr(&stopped);
    assert!(said.contains("line 4: not JSON") && said.contains("3 items before it are answered"), "{said}");
    assert!(said.contains("out.jsonl.partial"), "{said}");
    let written = std::fs::read(scratch.path("out.jsonl.partial")).unwrap();
    assert_eq!(lines(&written), [line(0, "a"), line(1, "b"), line(2, "c")]);
    worker.abort();
}

#[tokio::test]
async fn the_broker_that_is_not_there_is_3() {
    let url = "amqp://guest:hunter2@127.0.0.1:1/%2f";
    let refused = in_time(command(url, &["--model", "m", "x"]).output()).await.unwrap();
    code(&refused, 3);
    let said = stderr(&refused);
    assert!(said.contains("cannot reach the broker at amqp://127.0.0.1:1/"), "{said}");
    assert!(!said.contains("hunter2"), "{said}");
    let help = in_time(command(url, &["--help"]).output()).await.unwrap();
    code(&help, 0);
    let said = String::from_utf8(help.stdout).unwrap();
    assert!(said.contains("vramq submit --model minilm") && !said.contains("hunter2"), "{said}");
}

/// Of an interrupted run, for example.
#[tokio::test]
async fn a_broker_that_is_not_there_leaves_older_results() {
    let scratch = Scratch::new();
    let older = scratch.file("out.jsonl.partial", "older results\n");
    let output = scratch.path("out.jsonl");
    let url = "amqp://guest:guest@127.0.0.1:1/%2f";
    code(&in_time(command(url, &["--model", "m", "-o", &output, "x"]).output()).await.unwrap(), 3);
    assert_eq!(std::fs::read_to_string(older).unwrap(), "older results\n");
    assert_eq!(scratch.names(), ["out.jsonl.partial"]);
}

/// As in `vramq submit -o >(gzip > out.gz)`.
#[tokio::test]
async fn results_go_into_a_pipe_that_stays_one() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let reader = tokio::task::spawn_blocking({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).unwrap()
    });
    code(&submit(&broker, &["--model", "m", "-o", &pipe, "a", "b"]).await, 0);
    assert_eq!(lines(&in_time(reader).await.unwrap()), [line(0, "a"), line(1, "b")]);
    assert!(!std::fs::metadata(&pipe).unwrap().is_file());
    assert_eq!(scratch.names(), ["pipe"]);
    worker.abort();
}

#[tokio::test]
async fn a_broker_that_refuses_the_jobs_is_4() {
    let broker = Broker::new();
    let unroutable = submit(&broker, &["--model", "nobody", "x"]).await;
    code(&unroutable, 4);
    let said = stderr(&unroutable);
    assert!(said.contains("no queue for model `nobody`: is a worker for it configured?"), "{said}");
    // No worker has declared the exchange, so the broker closes the channel: the command ends, and does not reconnect.
    assert!(!said.contains("session lost"), "{said}");

    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "small", bounded(2)).await;
    let elsewhere = submit(&broker, &["--model", "small", "--key", "other", "x"]).await;
    code(&elsewhere, 4);
    let said = stderr(&elsewhere);
    assert!(said.contains("no queue for model `small` with key `other`:"), "{said}");
    let args = ["--model", "small", "--job-items", "1", "--no-wait", "--jobs", "1", "a", "b", "c", "d"];
    let full = submit(&broker, &args).await;
    code(&full, 4);
    let said = stderr(&full);
    assert!(said.contains("the queue of model `small` is full; try again later"), "{said}");
    assert!(said.contains("2 items published"), "{said}");
    assert_eq!(String::from_utf8_lossy(&full.stdout).lines().count(), 2);
}

/// As with `tail -f log | vramq submit`: more lines may never come.
#[tokio::test]
async fn an_error_ends_the_command_while_it_waits_for_lines() {
    let broker = Broker::new();
    let args = ["--model", "nobody", "--job-items", "1"];
    let mut child = command(&broker.url(), &args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"a line\n").await.unwrap();
    let refused = in_time(child.wait_with_output()).await.unwrap();
    code(&refused, 4);
    assert!(stderr(&refused).contains("no queue for model `nobody`"), "{}", stderr(&refused));
    drop(stdin);
}

#[tokio::test]
async fn a_broker_that_refuses_the_user_is_4() {
    let url = Broker::new().url().replacen("guest:guest", "guest:wrong", 1);
    let refused = in_time(command(&url, &["--model", "m", "x"]).output()).await.unwrap();
    code(&refused, 4);
    let said = stderr(&refused);
    assert!(said.contains("refuses") && !said.contains("wrong"), "{said}");
}

#[tokio::test]
async fn a_timeout_fails_its_job() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| match received.text(0) {
        "a" => vec![received.done()],
        _ => Vec::new(),
    })
    .await;
    let args = ["--model", "m", "--job-items", "1", "--timeout", "10s", "a", "b"];
    let answered = submit(&broker, &args).await;
    code(&answered, 1);
    assert_eq!(lines(&answered.stdout), [line(0, "a")]);
    assert!(
        stderr(&answered).contains("(items 1 to 1): no complete reply within 10s"),
        "{}",
        stderr(&answered)
    );
    worker.abort();
}

/// While it waits for results, its user gets another password, or is removed, and the connections break. The broker does not let it back, and
/// it does not try for as long as if the broker were away. It does try for some seconds: a refusal may pass.
#[tokio::test]
async fn a_login_that_is_refused_later_is_4_before_the_minute_is_over() {
    for remove in [false, true] {
        let broker = Broker::new();
        let worker = worker::work(&broker, "m", |_| Vec::new()).await;
        let user = format!("late-{}", uuid::Uuid::new_v4());
        broker.add_user(&user, "before", ".*");
        let mut command = command(&broker.url_as(&user, "before"), &["--model", "m", "x"]);
        let submitting = command.kill_on_drop(true).spawn().unwrap();
        until("the job is published", || (broker.connections("vramq submit").len() == 2).then_some(())).await;
        let start = Instant::now();
        if remove {
            // Its connections end with it.
            broker.remove_user(&user);
        } else {
            broker.add_user(&user, "after", ".*");
            broker.cut("vramq submit").await;
        }
        let ended = in_time(submitting.wait_with_output()).await.unwrap();
        code(&ended, 4);
        let said = stderr(&ended);
        assert!(said.contains("refuses: ACCESS_REFUSED") && said.contains("1 not"), "{said}");
        let took = start.elapsed();
        assert!((REFUSED_FOR..RECONNECT_FOR).contains(&took), "{took:?}");
        if !remove {
            broker.remove_user(&user);
        }
        worker.abort();
    }
}

/// Its user is gone for a moment, as on a broker that has lost its state. The job is answered.
#[tokio::test]
async fn a_login_that_is_refused_for_a_moment_ends_nothing() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let user = format!("brief-{}", uuid::Uuid::new_v4());
    broker.add_user(&user, "same", ".*");
    let mut command = command(&broker.url_as(&user, "same"), &["--model", "m", "x"]);
    let mut submitting = command.kill_on_drop(true).spawn().unwrap();
    until("the job is published", || (broker.connections("vramq submit").len() == 2).then_some(())).await;
    broker.remove_user(&user);
    let mut said = BufReader::new(submitting.stderr.take().unwrap()).lines();
    let refused = async {
        while let Some(line) = said.next_line().await.unwrap() {
            if line.contains("cannot reconnect") && line.contains("ACCESS_REFUSED") {
                return;
            }
        }
        panic!("it was not refused");
    };
    in_time(refused).await;
    broker.add_user(&user, "same", ".*");
    let worker = echo(&broker).await;
    let ended = in_time(submitting.wait_with_output()).await.unwrap();
    code(&ended, 0);
    assert_eq!(lines(&ended.stdout), [line(0, "x")]);
    broker.remove_user(&user);
    worker.abort();
}
