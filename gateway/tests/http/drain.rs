//! A gateway that stops takes no new requests, answers those that wait, and gives the others the ids of their jobs. No job is lost.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::{Value, json};
use vramq_tests::node::Node;

use crate::files::form_begin;
use crate::harness::{Answer, DEADLINE, ECHO, Gateway, MINILM, Program, Setup, gateway_command, until};
use crate::jobs::ended;

/// Requests of each kind that wait when the drain begins.
const WAITING: usize = 4;

/// New requests of each kind that come after it.
const NEW: usize = 10;

#[test]
fn a_drain_answers_what_waits_and_takes_no_more() {
    let mut setup = Setup::with(&[ECHO]);
    setup.workers[0].signal("STOP");
    let url = setup.gateways[0].url.clone();
    let waiting = std::thread::spawn(move || {
        let body = json!({"model": ECHO, "inputs": ["x"]}).to_string();
        let request = ureq::post(&format!("{url}/v1/jobs")).set("prefer", "wait=60");
        request.set("content-type", "application/json").send_string(&body).expect("an answer").into_string()
    });
    until("the job is published", || setup.messages("vramq.jobs.echo").filter(|n| *n > 0));
    setup.gateways[0].program.signal("TERM");
    until("the drain has begun", || setup.gateways[0].program.log().contains("draining").then_some(()));
    setup.workers[0].signal("CONT");
    let answer: Value = serde_json::from_str(&waiting.join().unwrap().unwrap()).unwrap();
    assert_eq!(answer["state"], "done");
    assert_eq!(setup.gateways[0].program.wait(), Some(0));
}

/// As a worker does. Nothing listens at the broker's address.
#[test]
fn a_signal_ends_a_gateway_that_waits_for_the_broker_at_its_start() {
    let folder = tempfile::tempdir().unwrap();
    for signal in ["TERM", "INT"] {
        let mut command = gateway_command();
        command.args(["run", "--listen", "127.0.0.1:0", "--broker-url", "amqp://127.0.0.1:1"]);
        command.args(["--set", "broker.connect_s=600", "--set", "files.folder=off"]);
        let mut program = Program::start(&mut command, signal, folder.path());
        until("it waits for the broker", || {
            program.log().contains("cannot connect to the broker").then_some(())
        });
        program.signal(signal);
        assert_eq!(program.wait(), Some(0), "{}", program.log());
        assert!(program.log().contains("stopped before it served"), "{}", program.log());
    }
}

/// Only its caller withdraws a job. The ids that callers have, by a 503 or a 202, are those of the dead letters.
#[test]
fn jobs_that_outlast_a_drain_run_and_become_dead_letters_with_their_results() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", "http.drain_s=1"]);
    }
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("STOP");
    let accepted = setup.gateways.iter().map(|gateway| {
        let job = json!({"model": ECHO, "inputs": ["accepted"]});
        let path = format!("/v1/jobs/{}", gateway.program.name);
        let answer = gateway.send("PUT", &path, &[], Some(&job));
        assert_eq!(answer.status, 202, "{answer:?}");
        answer.header("x-vramq-job-id").expect("the job's id").to_owned()
    });
    let mut jobs: BTreeSet<_> = accepted.collect();
    let body = json!({"model": ECHO, "input": "x"});
    let waiting: Vec<_> = setup
        .gateways
        .iter()
        .map(|gateway| {
            // The second one may come again.
            let asked = [&[][..], &[("idempotency-key", gateway.program.name.as_str())]];
            asked.map(|headers| waits(&gateway.url, "/v1/embeddings", &body, headers))
        })
        .collect();
    until_published(&setup, ECHO, jobs.len() + 2 * waiting.len());
    for (gateway, waiting) in setup.gateways.iter_mut().zip(waiting) {
        gateway.program.signal("TERM");
        for waiting in waiting {
            let answer = waiting.join().unwrap();
            assert_eq!((answer.status, answer.header("x-should-retry")), (503, Some("false")), "{answer:?}");
            assert!(answer.text.contains("dead letter"), "{answer:?}");
            jobs.insert(answer.header("x-vramq-job-id").expect("the job's id").to_owned());
        }
        assert_eq!(gateway.program.wait(), Some(1));
        assert!(gateway.program.log().contains("workers run the jobs"), "{}", gateway.program.log());
    }
    assert_eq!(jobs.len(), 6, "{jobs:?}");
    until_published(&setup, ECHO, jobs.len());
    setup.workers[0].signal("CONT");
    // An operator finds them at any other gateway.
    setup.gateway(&[]);
    until_unroutable(&setup, &jobs);
    setup.until_counter("dead_lettered", 6);
    assert_eq!((setup.counter("withdrawn"), setup.counter("answered")), (Some(0), Some(0)));
    until("no job is left", || (setup.messages("vramq.jobs.echo") == Some(0)).then_some(()));
}

/// The second signal ends what still moves, such as a request of whose body nothing more comes.
#[test]
fn a_second_signal_ends_the_gateway_while_a_body_comes() {
    let (form, file) = ("multipart/form-data; boundary=b", form_begin("x"));
    let requests = [
        ("/v1/files", form, file.as_str(), "TERM"),
        ("/v1/files", form, file.as_str(), "INT"),
        ("/v1/jobs", "application/json", "{", "TERM"),
        ("/v1/embeddings", "application/json", "{", "INT"),
    ];
    let mut setup = Setup::new();
    for _ in requests {
        let folder = format!("files.folder={}", setup.folder.path().join("files").display());
        setup.gateway(&["--set", "http.drain_s=600", "--set", &folder]);
    }
    for (gateway, (path, media_type, begin, signal)) in setup.gateways.iter_mut().zip(requests) {
        let mut upload = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\nContent-Length: 1000000\r\n\
             Expect: 100-continue\r\n\r\n"
        );
        upload.write_all(head.as_bytes()).unwrap();
        upload.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut asked = [0; "HTTP/1.1 100 Continue\r\n\r\n".len()];
        upload.read_exact(&mut asked).unwrap();
        upload.write_all(begin.as_bytes()).unwrap();
        gateway.program.signal(signal);
        until("the drain has begun", || gateway.program.log().contains("draining").then_some(()));
        gateway.program.signal(signal);
        assert_eq!(gateway.program.wait(), Some(1));
        let mut answer = String::new();
        upload.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("draining"), "{path}: {answer}");
    }
}

/// Waits until the dead letters are those of these jobs: of each the job, and its results.
pub fn until_unroutable(setup: &Setup, jobs: &BTreeSet<String>) {
    let gateway = setup.gateways.last().expect("a gateway");
    let letters = until("the dead letters are there", || {
        let letters = gateway.get("/v1/dead-letters?model=echo").json()["letters"].as_array()?.clone();
        (letters.len() >= 2 * jobs.len()).then_some(letters)
    });
    let found = |results: bool| {
        let mut found: Vec<_> = letters
            .iter()
            .filter(|letter| letter["results"] == results && letter["reason"] == "unroutable")
            .map(|letter| letter["job"].as_str().expect("an id").to_owned())
            .collect();
        found.sort();
        found
    };
    let expected: Vec<_> = jobs.iter().cloned().collect();
    assert_eq!((found(false), found(true)), (expected.clone(), expected), "{letters:?}");
}

/// A request that waits for its answer.
fn waits(url: &str, path: &str, body: &Value, headers: &[(&str, &str)]) -> std::thread::JoinHandle<Answer> {
    let request = ureq::post(&format!("{url}{path}")).timeout(Duration::from_secs(300));
    let request = request.set("prefer", "wait=60").set("content-type", "application/json");
    let request = headers.iter().fold(request, |request, (name, value)| request.set(name, value));
    let body = body.to_string();
    std::thread::spawn(move || Answer::of(request.send_string(&body)))
}

/// Connects, and sends the first half of a request.
fn half(gateway: &Gateway) -> TcpStream {
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    stream.write_all(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    stream
}

/// Sends the rest of it; what comes until the gateway closes the connection.
fn rest(mut stream: TcpStream) -> String {
    let body = json!({"model": ECHO, "inputs": ["new"]}).to_string();
    let rest = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    // An `Err`, here and below: it is closed already.
    let _ = stream.write_all(rest.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn until_published(setup: &Setup, model: &str, jobs: usize) {
    until("the jobs are published", || {
        (setup.messages(&format!("vramq.jobs.{model}")) == Some(jobs as u64)).then_some(())
    });
}

#[test]
fn new_requests_during_a_drain_are_refused_and_those_before_it_get_their_due() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    setup.worker(&[MINILM], &[]);
    for _ in 0..2 {
        // The second signal ends it.
        setup.gateway(&["--set", "http.drain_s=600"]);
    }
    setup.wait_for_models(&[ECHO, MINILM]);
    for worker in &setup.workers {
        worker.signal("STOP");
    }
    let url = setup.gateways[0].url.clone();
    let echoes = json!({"model": ECHO, "inputs": ["x"]});
    let answered: Vec<_> = (0..WAITING).map(|_| waits(&url, "/v1/jobs", &echoes, &[])).collect();
    let embeds = json!({"model": MINILM, "input": "x"});
    let unanswered: Vec<_> = (0..WAITING).map(|_| waits(&url, "/v1/embeddings", &embeds, &[])).collect();
    until_published(&setup, ECHO, WAITING);
    until_published(&setup, MINILM, WAITING);
    // Connections that were made before the drain, and whose requests come after its beginning.
    let halves: Vec<_> = (0..NEW).map(|_| half(&setup.gateways[0])).collect();
    until("the gateway has accepted them", || {
        (setup.gateways[0].metric("vramq_gateway_connections ", "") > (2 * WAITING + NEW) as f64)
            .then_some(())
    });
    setup.gateways[0].program.signal("TERM");
    until("nobody is accepted any more", || {
        TcpStream::connect(url.trim_start_matches("http://")).is_err().then_some(())
    });
    for answer in halves.into_iter().map(rest) {
        let lowercase = answer.to_ascii_lowercase();
        let refused = lowercase.starts_with("http/1.1 503")
            && ["draining", "\r\nretry-after: 1\r\n", "\r\nx-should-retry: true\r\n"]
                .iter()
                .all(|part| lowercase.contains(part));
        assert!(answer.is_empty() || refused, "{answer}");
    }
    for _ in 0..NEW {
        let refused = ureq::post(&format!("{url}/v1/jobs")).send_string(&echoes.to_string());
        assert!(matches!(refused, Err(ureq::Error::Transport(_))), "{refused:?}");
    }
    // The other gateway takes them.
    let elsewhere = waits(&setup.gateways[1].url, "/v1/jobs", &echoes, &[]);
    until_published(&setup, ECHO, WAITING + 1);
    setup.workers[0].signal("CONT");
    for waiting in answered.into_iter().chain([elsewhere]) {
        let answer = waiting.join().unwrap();
        assert_eq!((answer.status, &answer.json()["state"]), (200, &json!("done")), "{answer:?}");
    }
    assert!(unanswered.iter().all(|waiting| !waiting.is_finished()));
    setup.gateways[0].program.signal("TERM");
    let ids: BTreeSet<_> = unanswered
        .into_iter()
        .map(|waiting| {
            let answer = waiting.join().unwrap();
            assert_eq!((answer.status, answer.header("x-should-retry")), (503, Some("false")), "{answer:?}");
            assert_eq!(answer.json()["error"]["code"], "draining");
            answer.header("x-vramq-job-id").expect("the job's id").to_owned()
        })
        .collect();
    assert_eq!((ids.len(), setup.gateways[0].program.wait()), (WAITING, Some(1)));
    until_published(&setup, MINILM, WAITING);
}

/// A broker that blocks publishers confirms nothing: the job may be published later, or never.
#[tokio::test(flavor = "multi_thread")]
async fn own_node_a_job_that_is_not_confirmed_is_not_accepted() {
    let node = Node::start().await.unwrap();
    let mut setup = Setup::on(&node);
    setup.worker(&[ECHO], &[]);
    setup.gateway(&["--set", "http.request_s=1"]);
    setup.gateway(&["--set", "http.drain_s=1"]);
    setup.wait_for_models(&[ECHO]);
    node.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    let body = json!({"model": ECHO, "inputs": ["x"]});
    let assert_unconfirmed = |answer: &Answer| {
        assert_eq!((answer.status, answer.header("x-should-retry")), (503, Some("false")), "{answer:?}");
        assert_eq!(answer.json()["error"]["code"], "unconfirmed");
        assert!(answer.header("x-vramq-job-id").is_some_and(|id| !id.is_empty()), "{answer:?}");
    };
    // The broker has not confirmed it when the time is over.
    let mut count = 0;
    let late = until("the broker blocks", || {
        count += 1;
        let answer = setup.gateways[0].send("PUT", &format!("/v1/jobs/job-{count}"), &[], Some(&body));
        (!matches!(answer.status, 200 | 202)).then_some(answer)
    });
    assert_unconfirmed(&late);
    // Nor when the gateway stops.
    let url = format!("{}/v1/jobs/mine", setup.gateways[1].url);
    let text = body.to_string();
    let waiting = std::thread::spawn(move || {
        let request = ureq::put(&url).timeout(Duration::from_secs(300)).set("prefer", "wait=60");
        Answer::of(request.set("content-type", "application/json").send_string(&text))
    });
    until("the job is being published", || {
        (setup.gateways[1].get("/v1/jobs/mine").json()["state"] == "publishing").then_some(())
    });
    let asked = json!({"model": ECHO, "input": "x"});
    let embedding = waits(&setup.gateways[1].url, "/v1/embeddings", &asked, &[]);
    until("a second job is being published", || {
        (setup.gateways[1].metric("vramq_gateway_jobs_unfinished", "") == 2.0).then_some(())
    });
    setup.gateways[1].program.signal("TERM");
    assert_unconfirmed(&waiting.join().unwrap());
    let embedding = embedding.join().unwrap();
    assert_eq!((embedding.status, embedding.header("x-should-retry")), (503, Some("false")), "{embedding:?}");
    assert!(embedding.text.contains("it may still run"), "{embedding:?}");
    // The first gateway has gone on with its job.
    node.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    assert_eq!(setup.gateways[1].program.wait(), Some(1));
    assert_eq!(ended(&setup.gateways[0], &format!("job-{count}"))["state"], "done");
}
