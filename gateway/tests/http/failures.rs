//! Processes that die while callers wait: every request ends with an answer or an honest error, and no job is lost.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use vramq_tests::node::Node;
use vramq_tests::random::Random;

use crate::harness::{Answer, ECHO, MINILM, Setup, until};

/// Requests at once. Each is a thread.
const CALLERS: usize = 200;

/// How a caller's request ended: its status, 0 for a connection that broke, and the code of its error.
type Outcome = (u16, String);

/// Callers whose requests have been answered.
type Answered = AtomicUsize;

/// Sends one job each from many callers, the gateways in turn.
fn storm(setup: &Setup, meanwhile: impl FnOnce(&Answered) + Send) -> Vec<Outcome> {
    let (waiting, answered) = (AtomicUsize::new(0), Answered::new(0));
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|n| {
                let url = format!("{}/v1/embeddings", setup.next().url);
                let (waiting, answered) = (&waiting, &answered);
                scope.spawn(move || {
                    waiting.fetch_add(1, Ordering::Relaxed);
                    let outcome = call(&url, n);
                    answered.fetch_add(1, Ordering::Relaxed);
                    outcome
                })
            })
            .collect();
        until("all callers are on their way", || (waiting.load(Ordering::Relaxed) == CALLERS).then_some(()));
        meanwhile(&answered);
        callers.into_iter().map(|caller| caller.join().expect("a caller")).collect()
    })
}

fn call(url: &str, n: usize) -> Outcome {
    let request = ureq::post(url).timeout(Duration::from_secs(300));
    let text = format!("sentence {n} of a caller that waits");
    let body = json!({"model": MINILM, "input": [text, "and another"]});
    match request.set("content-type", "application/json").send_string(&body.to_string()) {
        Ok(response) => {
            let answer: Value = serde_json::from_reader(response.into_reader()).expect("a whole answer");
            assert_eq!(answer["data"].as_array().expect("a list").len(), 2);
            (200, String::new())
        }
        Err(ureq::Error::Status(status, response)) => {
            let answer: Value = serde_json::from_reader(response.into_reader()).expect("a whole answer");
            (status, answer["error"]["code"].as_str().expect("a code").to_owned())
        }
        Err(ureq::Error::Transport(_)) => (0, String::new()),
    }
}

fn statuses(outcomes: &[Outcome]) -> Vec<u16> {
    outcomes.iter().map(|(status, _)| *status).collect()
}

/// A worker and two gateways on a node of their own.
fn on_own(node: &Node) -> Setup {
    let mut setup = Setup::on(node);
    setup.worker(&[MINILM], &[]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[MINILM]);
    setup
}

fn until_published(setup: &Setup, model: &str, jobs: usize) {
    let queue = format!("vramq.jobs.{model}");
    until("all jobs are published", || setup.messages(&queue).filter(|n| *n == jobs as u64));
}

/// No job of the model is in its queue, or ended as a dead letter.
fn assert_none_is_left(setup: &Setup) {
    until("no job is left", || setup.messages("vramq.jobs.minilm").filter(|n| *n == 0));
    assert_eq!(setup.counted("vramq.dead.minilm"), 0);
}

#[test]
fn a_worker_is_killed_and_every_caller_is_answered() {
    let mut setup = Setup::with(&[MINILM]);
    setup.worker(&[MINILM], &[]);
    for gateway in &setup.gateways {
        until("both workers are there", || {
            let workers = gateway.get("/v1/status").json()["models"][MINILM]["workers"]["consuming"].as_u64();
            (workers == Some(2)).then_some(())
        });
    }
    // Held up, so that it has jobs when it dies.
    setup.workers[0].signal("STOP");
    let outcomes = storm(&setup, |_| {
        until("jobs wait", || setup.messages("vramq.jobs.minilm").filter(|n| *n > 0));
        setup.workers[0].signal("KILL");
    });
    assert_eq!(statuses(&outcomes), [200; CALLERS], "{outcomes:?}");
}

#[test]
fn a_gateway_is_killed_and_only_its_own_callers_notice() {
    let setup = Setup::with(&[MINILM]);
    setup.workers[0].signal("STOP");
    let outcomes = storm(&setup, |_| {
        until_published(&setup, MINILM, CALLERS);
        setup.gateways[0].program.signal("KILL");
        setup.workers[0].signal("CONT");
    });
    let (broken, answered): (Vec<_>, Vec<_>) =
        statuses(&outcomes).into_iter().partition(|status| *status == 0);
    assert_eq!((broken.len(), answered), (CALLERS / 2, vec![200; CALLERS / 2]));
    // The jobs of the dead gateway run, too; their replies wait in its queue until that expires.
    assert_none_is_left(&setup);
}

#[tokio::test(flavor = "multi_thread")]
async fn own_node_the_broker_is_killed_and_no_job_is_lost() {
    let node = Node::start().await.unwrap();
    let setup = on_own(&node);
    setup.workers[0].signal("STOP");
    let outcomes = storm(&setup, |_| {
        until_published(&setup, MINILM, CALLERS);
        kill_and_restart(&node);
        setup.workers[0].signal("CONT");
    });
    // The jobs were confirmed, so that they are answered when the broker is back.
    assert_eq!(statuses(&outcomes), [200; CALLERS], "{outcomes:?}");
    assert_none_is_left(&setup);
}

fn kill_and_restart(node: &Node) {
    tokio::task::block_in_place(|| {
        tokio::runtime::Handle::current().block_on(async {
            node.kill().await.unwrap();
            node.restart().await.unwrap();
        });
    });
}

/// At a random moment: some jobs are answered, and the others wait in the queue, have a pass, have their reply on its way, or have not
/// reached the broker.
#[tokio::test(flavor = "multi_thread")]
async fn own_node_the_broker_is_killed_while_a_worker_runs_and_no_job_is_lost() {
    let node = Node::start().await.unwrap();
    let setup = on_own(&node);
    let seed = uuid::Uuid::new_v4().as_u64_pair().0;
    let before = 1 + Random::new(seed).below(CALLERS / 2);
    let mut left = 0;
    let outcomes = storm(&setup, |answered| {
        until("some are answered", || (answered.load(Ordering::Relaxed) >= before).then_some(()));
        left = CALLERS - answered.load(Ordering::Relaxed);
        kill_and_restart(&node);
    });
    println!("seed {seed}: the broker was killed after {before} answers, {left} callers waited");
    assert!(left > 0, "all were answered before, seed {seed}");
    // An answer, or the word that nothing was published.
    let is_honest = |(status, code): &Outcome| match status {
        200 => true,
        503 => matches!(code.as_str(), "broker_unreachable" | "no_workers"),
        _ => false,
    };
    assert!(outcomes.iter().all(is_honest), "seed {seed}: {outcomes:?}");
    let answered = outcomes.iter().filter(|(status, _)| *status == 200).count();
    assert!(answered >= before, "seed {seed}: {outcomes:?}");
    assert_none_is_left(&setup);
    // All of it works again.
    for gateway in &setup.gateways {
        until("it serves", || {
            let answer = gateway.post("/v1/embeddings", &json!({"model": MINILM, "input": "x"}));
            (answer.status == 200).then_some(())
        });
    }
}

/// The broker does not answer who counts that queue, and all else goes on.
#[tokio::test(flavor = "multi_thread")]
async fn own_node_a_queue_that_does_not_answer_delays_only_its_own_model() {
    let node = Node::start().await.unwrap();
    let mut setup = Setup::on(&node);
    let classic = ["--set", "broker.queue_type=classic"];
    setup.worker(&[ECHO, "other"], &classic);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO, "other"]);
    // It has counted no queue yet: a count is used for a second.
    setup.gateway(&[]);
    let queue = ["vramq.jobs.echo".to_owned()];
    node.suspend(setup.vhost(), &queue).await.unwrap();
    let ask = |setup: &Setup, model: &str| {
        let body = json!({"model": model, "inputs": ["x"]});
        setup.gateways[1].send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&body))
    };
    let silent = ask(&setup, ECHO);
    assert_eq!(silent.json()["error"]["code"], "broker_unreachable", "{silent:?}");
    // More callers than the gateway has counts at a time.
    let (answered, late) = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(|| ask(&setup, ECHO))).collect();
        let (mut answered, mut late) = (0, 0);
        while !callers.iter().any(|caller| caller.is_finished()) {
            let other = ask(&setup, "other");
            // A slow machine may not count one of them in time either.
            let is_late = other.status == 503 && other.json()["error"]["code"] == "broker_unreachable";
            assert!(other.status == 200 || is_late, "{other:?}");
            (answered, late) = (answered + usize::from(!is_late), late + usize::from(is_late));
        }
        (answered, late)
    });
    assert!(
        answered > 4 * late,
        "beside those that waited {answered} for another model were answered, {late} not"
    );
    // The heartbeats of a worker that comes now are heard.
    setup.worker(&["late"], &classic);
    setup.wait_for_models(&["late"]);
    node.resume(setup.vhost(), &queue).await.unwrap();
    until("the queue's own model is served again", || (ask(&setup, ECHO).status == 200).then_some(()));
}

/// Long enough for a slow gateway to publish a job, and shorter than what the clients ask it to wait.
const PATIENCE_S: u64 = 10;

#[test]
fn a_retry_with_its_idempotency_key_gets_the_result_of_the_first_one() {
    let mut setup = Setup::with(&[ECHO]);
    // A gateway knows its own jobs: who tries again comes to the same one.
    let urls: Vec<_> = setup.gateways.iter().map(|gateway| format!("{}/v1/jobs", gateway.url)).collect();
    let send = |n: usize, timeout: u64, wait: &str| {
        let request =
            ureq::post(&urls[n % urls.len()]).timeout(Duration::from_secs(timeout)).set("prefer", wait);
        let request = request.set("idempotency-key", &format!("order-{n}"));
        let body = json!({"model": ECHO, "inputs": [format!("text {n}")]});
        request.set("content-type", "application/json").send_string(&body.to_string()).map_err(Box::new)
    };
    setup.workers[0].signal("STOP");
    // Clients time out and hang up. Their jobs go on, because clients can ask for them again.
    std::thread::scope(|scope| {
        for n in 0..20 {
            let send = &send;
            scope.spawn(move || {
                let refused = send(n, PATIENCE_S, "wait=60").expect_err("the client has no patience");
                assert!(matches!(*refused, ureq::Error::Transport(_)), "{refused}");
            });
        }
    });
    until_published(&setup, ECHO, 20);
    setup.workers[0].signal("KILL");
    setup.worker(&[ECHO], &[]);
    // Without a worker the gateways refuse a retry as well, with 503: it may be sent again.
    until("the second worker is there", || setup.counter_of("worker-1", "slots").filter(|n| *n > 0));
    let ids: std::collections::BTreeSet<_> = (0..20)
        .map(|n| {
            let first = Answer::of(send(n, 120, "wait=60").map_err(|error| *error)).json();
            let second = Answer::of(send(n, 120, "wait=60").map_err(|error| *error)).json();
            assert_eq!(first["outputs"], json!([{"json": format!("text {n}")}]), "{first}");
            assert_eq!((&first["id"], &first["outputs"]), (&second["id"], &second["outputs"]));
            first["id"].to_string()
        })
        .collect();
    assert_eq!(ids.len(), 20);
    for gateway in &setup.gateways {
        assert_eq!(gateway.metric("vramq_gateway_jobs_ended_total", "done"), 10.0);
    }
    until("no job is left", || setup.messages("vramq.jobs.echo").filter(|n| *n == 0));
}
