//! `vramq submit`: the command itself, against a real broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::command::{
    Scratch, code, command, interrupt, line, lines, read_npy, stderr, submit, submit_stdin,
};
use crate::common::worker::{self, Received};
use crate::common::{Broker, in_time, until};
use lapin::ExchangeKind;
use lapin::options::{BasicGetOptions, ExchangeDeclareOptions};
use lapin::types::FieldTable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use vramq_producer::Reason;
use vramq_schemas::topology::{WITHDRAWALS_EXCHANGE, jobs_queue};
use vramq_tests::frames::Request;
use vramq_tests::named_pipe::named_pipe;
use vramq_tests::proxy::Proxy;

async fn echo(broker: &Broker) -> tokio::task::JoinHandle<()> {
    worker::work(broker, "m", |received| vec![received.done()]).await
}

#[tokio::test]
async fn texts_from_everywhere_in_every_encoding() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let txt = scratch.file("a.txt", "one\r\n\nthree");
    let jsonl = scratch.file("a.jsonl", "\"one\"\n{\"text\": \"\", \"id\": 7}\n{\"text\": \"three\"}\n");
    let body = scratch.file("b.jsonl", "{\"body\": \"one\"}\n\"\"\n\"three\"\n");
    for encoding in ["json", "bincode", "msgpack"] {
        let plain = [line(0, "one"), line(1, ""), line(2, "three")];
        let base = ["--model", "m", "--job-items", "2", "--encoding", encoding];
        let with = |more: &[&'static str]| [&base[..], more].concat();
        let answered = submit(&broker, &with(&["one", "", "three"])).await;
        code(&answered, 0);
        assert_eq!(lines(&answered.stdout), plain);
        assert!(stderr(&answered).contains("3 items answered"), "{}", stderr(&answered));
        for args in [vec![], vec!["-"]] {
            let answered = submit_stdin(&broker, &with(&args), "one\n\nthree\n").await;
            code(&answered, 0);
            assert_eq!(lines(&answered.stdout), plain);
        }
        let answered = submit(&broker, &[&base[..], &["--file", &txt]].concat()).await;
        assert_eq!(lines(&answered.stdout), plain);
        let answered = submit(&broker, &[&base[..], &["--file", &body, "--field", "body"]].concat()).await;
        assert_eq!(lines(&answered.stdout), plain);
        let answered = submit(&broker, &[&base[..], &["--file", &jsonl, "--with-text", "-q"]].concat()).await;
        code(&answered, 0);
        let [first, second, third] = &lines(&answered.stdout)[..] else { panic!("{answered:?}") };
        assert_eq!(first["text"], "one");
        assert_eq!((&second["id"], &second["text"]), (&7.into(), &"".into()));
        assert_eq!(third.get("id"), None);
        assert_eq!(stderr(&answered), "");
    }
    worker.abort();
}

/// Thousands of texts whose jobs are answered out of order come out in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_the_inputs() {
    const TEXTS: usize = 10_000;
    let broker = Broker::new();
    let held = std::sync::Mutex::new(Vec::new());
    let worker = worker::work(&broker, "m", move |received: &Received| {
        // Eight jobs at a time, the last first, each in two parts.
        let mut held = held.lock().unwrap();
        let middle = received.job.inputs.len() / 2;
        held.push(received.part(middle..received.job.inputs.len()));
        held.push(received.part(0..middle));
        match held.len() == 16 || received.text(0).ends_with("last") {
            true => held.drain(..).rev().collect(),
            false => Vec::new(),
        }
    })
    .await;
    let scratch = Scratch::new();
    let texts = (0..TEXTS).map(|n| format!("text {}{n}", "x".repeat(n % 7))).collect::<Vec<_>>();
    // 10,000 texts in jobs of 10 are 125 times eight jobs.
    let file = scratch.file("in.txt", &texts.join("\n"));
    let (jsonl, npy) = (scratch.path("out.jsonl"), scratch.path("out.npy"));
    for output in [&jsonl, &npy] {
        let args = ["--model", "m", "--file", &file, "--job-items", "10", "-o", output];
        let answered = submit(&broker, &args).await;
        code(&answered, 0);
        assert!(answered.stdout.is_empty());
    }
    let written = lines(&std::fs::read(&jsonl).unwrap());
    assert_eq!(written.len(), TEXTS);
    for (n, (written, text)) in written.iter().zip(&texts).enumerate() {
        assert_eq!(*written, line(n, text));
    }
    let (header, numbers) = read_npy(npy.as_ref());
    assert_eq!(header, "{'descr': '<f4', 'fortran_order': False, 'shape': (10000, 3), }");
    let expected = texts.iter().flat_map(|text| worker::vector(text)).collect::<Vec<_>>();
    assert_eq!(numbers, expected);
    let mut names = scratch.names();
    names.sort();
    assert_eq!(names, ["in.txt", "out.jsonl", "out.npy"]);
    worker.abort();
}

#[tokio::test]
async fn failed_jobs_are_listed_and_the_rest_is_written() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| match received.text(0) {
        "bad" => vec![received.part(1..2), received.failed(Reason::OutOfMemory, "does not fit")],
        _ => vec![received.done()],
    })
    .await;
    let scratch = Scratch::new();
    let npy = scratch.path("out.npy");
    let texts = ["--model", "m", "--job-items", "2", "a", "b", "bad", "half", "c"];
    let answered = submit(&broker, &texts).await;
    code(&answered, 1);
    assert_eq!(lines(&answered.stdout), [line(0, "a"), line(1, "b"), line(3, "half"), line(4, "c")]);
    let said = stderr(&answered);
    assert!(said.contains("(items 2 to 3): out-of-memory: does not fit"), "{said}");
    assert!(said.contains("1 job failed, 1 item without an answer"), "{said}");
    let answered = submit(&broker, &[&["-o", &npy], &texts[..]].concat()).await;
    code(&answered, 1);
    let (header, numbers) = read_npy(npy.as_ref());
    assert!(header.contains("'shape': (5, 3)"), "{header}");
    assert_eq!(
        numbers.iter().map(|x| x.is_nan()).collect::<Vec<_>>(),
        [[false; 6].as_slice(), &[true; 3], &[false; 6]].concat()
    );
    worker.abort();
}

#[tokio::test]
async fn no_wait_prints_ids_and_asks_for_no_reply() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let args = ["--model", "m", "--no-wait", "--job-items", "1", "--batch-hint", "4", "--dtype", "f16"];
    let published = submit(&broker, &[&args[..], &["--params", r#"{"x": 1}"#, "a", "b"]].concat()).await;
    code(&published, 0);
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
    let ids = String::from_utf8(published.stdout).unwrap();
    assert_eq!(ids.lines().count(), 2, "{ids}");
    for (printed, text) in ids.lines().zip(["a", "b"]) {
        let got = channel.basic_get(jobs_queue("m").into(), BasicGetOptions { no_ack: true });
        let received = worker::receive(&got.await.unwrap().expect("a job").delivery);
        assert_eq!((received.id(), received.text(0)), (printed, text));
        assert_eq!(received.properties.reply_to(), &None);
        assert_eq!(received.headers.batch_hint, Some(4));
        assert_eq!(
            serde_json::Value::from(received.job.params.0),
            serde_json::json!({"x": 1, "dtype": "f16"})
        );
    }
}

#[tokio::test]
async fn an_interrupt_is_130_and_leaves_nothing() {
    let broker = Broker::new();
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let worker = worker::work(&broker, "m", move |received| {
        counted.fetch_add(1, Ordering::Relaxed);
        match received.text(0) {
            "answered" => vec![received.done()],
            _ => Vec::new(),
        }
    })
    .await;
    let scratch = Scratch::new();
    for (run, name) in [(1, "out.npy"), (2, "out.jsonl")] {
        let output = scratch.path(name);
        let args = ["--model", "m", "--job-items", "1", "-o", &output, "answered", "lost", "lost"];
        let child = command(&broker.url(), &args).spawn().unwrap();
        let partial = format!("{output}.partial");
        until("all jobs are taken, and the first answer is written", || {
            let written =
                std::fs::read(&partial).is_ok_and(|bytes| name == "out.npy" || bytes.ends_with(b"\n"));
            (taken.load(Ordering::Relaxed) == 3 * run && written).then_some(())
        })
        .await;
        let interrupted = interrupt(child).await;
        code(&interrupted, 130);
        let said = stderr(&interrupted);
        assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
        if name == "out.npy" {
            assert!(said.contains("interrupted: no answer to "), "{said}");
            assert_eq!(scratch.names(), Vec::<String>::new());
        } else {
            assert!(said.contains("interrupted: no answer to 2 jobs"), "{said}");
            // The test's worker has no exchange for withdrawals.
            assert!(said.contains("0 of 2 jobs withdrawn"), "{said}");
            assert_eq!(lines(&std::fs::read(&partial).unwrap()), [line(0, "answered")]);
            assert_eq!(scratch.names(), ["out.jsonl.partial"]);
        }
    }
    worker.abort();
}

/// The broker accepts the connection, and says nothing.
#[tokio::test]
async fn an_interrupt_while_it_connects_ends_the_command() {
    let broker = Broker::new();
    let proxy = Proxy::to(&broker.url()).await.unwrap();
    proxy.stall();
    let child = command(proxy.url(), &["--model", "m", "text"]).spawn().unwrap();
    until("a connection", || (proxy.accepted() > 0).then_some(())).await;
    code(&interrupt(child).await, 130);
}

/// The broker does not say that it has deleted the reply queue, and closing waits for that.
#[tokio::test]
async fn an_interrupt_while_the_client_closes_ends_the_command() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let proxy = Proxy::to(&broker.url()).await.unwrap();
    proxy.swallow_requests(Request::DeleteQueue);
    let scratch = Scratch::new();
    let output = scratch.path("out.jsonl");
    let child = command(proxy.url(), &["--model", "m", "-o", &output, "text"]).spawn().unwrap();
    until("the complete output", || std::fs::exists(&output).unwrap().then_some(())).await;
    let ended = interrupt(child).await;
    code(&ended, 130);
    assert!(stderr(&ended).contains("1 items answered"), "{}", stderr(&ended));
    worker.abort();
}

/// Nobody opens the named pipe that the results go to.
#[tokio::test]
async fn an_interrupt_while_its_pipe_has_no_reader_ends_the_command() {
    let broker = Broker::new();
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe");
    named_pipe(pipe.as_ref()).unwrap();
    let child = command(&broker.url(), &["--model", "m", "-o", &pipe, "text"]).spawn().unwrap();
    until("a client", || (!broker.queues("vramq.replies.client.").is_empty()).then_some(())).await;
    // Its queue may stay: it is deleted only if the client was connected by now.
    code(&interrupt(child).await, 130);
    assert_eq!(scratch.names(), ["pipe"]);
}

/// The reader of the pipe does not read. The command cannot act on signals while it writes.
#[tokio::test]
async fn a_second_interrupt_ends_a_command_whose_reader_stands_still() {
    let broker = Broker::new();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe");
    named_pipe(pipe.as_ref()).unwrap();
    let reader = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
    let input = scratch.file("in.txt", &"x".repeat(200_000));
    let args = ["--model", "m", "--with-text", "--file", &input, "-o", &pipe];
    let mut child = command(&broker.url(), &args).spawn().unwrap();
    until("a full pipe", || is_full(&reader).then_some(())).await;
    let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    let ended = until("its end", || {
        // It may have ended since the last look.
        let _ = kill_process(pid, Signal::INT);
        child.try_wait().unwrap()
    })
    .await;
    assert_eq!(ended.code(), Some(130));
    worker.abort();
}

fn is_full(pipe: &std::fs::File) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::OUT)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 0
}

/// `vramq submit … | head -1`.
#[tokio::test]
async fn a_closed_pipe_is_no_panic() {
    let broker = Broker::new();
    // Workers declare it. Without it the command warns that the jobs in flight cannot be withdrawn.
    let channel = broker.connect().await.create_channel().await.unwrap();
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let (name, kind) = (WITHDRAWALS_EXCHANGE.into(), ExchangeKind::Fanout);
    channel.exchange_declare(name, kind, durable, FieldTable::default()).await.unwrap();
    let worker = echo(&broker).await;
    let scratch = Scratch::new();
    let input = scratch.file("in.txt", &"some text\n".repeat(20_000));
    let args = ["--model", "m", "--file", &input, "-q"];
    let mut child = command(&broker.url(), &args).spawn().unwrap();
    let mut first = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    in_time(stdout.read_line(&mut first)).await.unwrap();
    drop(stdout);
    let ended = in_time(child.wait_with_output()).await.unwrap();
    code(&ended, 141);
    assert_eq!(stderr(&ended), "");
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
    worker.abort();
}
