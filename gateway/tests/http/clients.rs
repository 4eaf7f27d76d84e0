//! Published clients (OpenAI's, Hugging Face's), unchanged, against the gateway.

use serde_json::{Value, json};
use vramq_tests::node::Node;

use crate::files::upload;
use crate::foreign::{Served, node, python};
use crate::harness::{ECHO, Gateway, MINILM, Setup, until};
use crate::jobs::set;
use crate::keys::{key_file, until_served};
use crate::program_model::{self, SERVED};

#[test]
fn openais_client_gets_the_models_vectors() {
    gets_the_models_vectors(Served::python("openai_client.py"));
}

#[test]
fn openais_client_stores_reads_and_removes_a_file() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..2 {
        setup.gateway(&["--set", &folder]);
    }
    for gateway in &setup.gateways {
        python(&["openai_client.py", "upload", &gateway.url, "Grüße 🗼.txt"]);
        node("openai_client.mjs", &["upload", &gateway.url, "Grüße 🗼.txt"]);
    }
}

#[test]
fn hugging_faces_client_gets_the_models_vectors() {
    let setup = Setup::with(&[MINILM]);
    for gateway in &setup.gateways {
        python(&["hub_client.py", &gateway.url]);
    }
}

#[test]
fn openais_client_for_node_gets_the_models_vectors() {
    gets_the_models_vectors(Served::node("openai_client.mjs"));
}

fn gets_the_models_vectors(mut client: Served) {
    let setup = Setup::with(&[MINILM]);
    for gateway in &setup.gateways {
        client.ask(&["embed", &gateway.url, MINILM]);
    }
    // One gateway is enough for what a worker computes for seconds: both do the same.
    client.ask(&["many", &setup.next().url, MINILM]);
}

/// OpenAI's clients, for Python and for Node.js, which both are asked for the same.
fn clients() -> [Served; 2] {
    [Served::python("openai_client.py"), Served::node("openai_client.mjs")]
}

/// The route of what a client is to ask for.
fn route(asked: &str) -> &'static str {
    match asked.split_once(':') {
        Some(("job", _)) => "/v1/jobs",
        Some(("file", _)) => "/v1/files/{id}",
        Some(("upload", _)) => "/v1/files",
        _ => "/v1/embeddings",
    }
}

/// What a client makes of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Made {
    class: String,
    status: u64,
    code: String,
}

impl Made {
    fn of(said: &str) -> Self {
        let read: Value = serde_json::from_str(said).unwrap();
        let text = |name: &str| read[name].as_str().unwrap_or_else(|| panic!("{said}")).to_owned();
        Self { class: text("class"), status: read["status"].as_u64().unwrap(), code: text("code") }
    }
}

/// Both clients make the same of an error: the name of its class differs where there is no class of its own for a status. What Python's
/// makes of it.
fn same([by_python, by_node]: [Made; 2]) -> Made {
    let class = if by_node.class == "APIError" { "APIStatusError" } else { &by_node.class };
    assert_eq!(Made { class: class.to_owned(), ..by_node.clone() }, by_python);
    by_python
}

/// What OpenAI's clients make of an error: its class, the status, and how many requests one has sent. Both make the same of it.
fn error(clients: &mut [Served; 2], gateway: &Gateway, key: &str, asked: &str) -> (String, u64, f64) {
    let labels = format!("route=\"{}\"", route(asked));
    let sent = || gateway.metric("vramq_gateway_requests_total", &labels);
    let key = key.trim_start_matches("Bearer ");
    let [(by_python, requests), (by_node, of_node)] = clients.each_mut().map(|client| {
        let before = sent();
        (Made::of(&client.ask(&["error", &gateway.url, asked, key])), sent() - before)
    });
    assert_eq!(requests, of_node, "requests");
    let Made { class, status, .. } = same([by_python, by_node]);
    (class, status, requests)
}

/// The same of an error that comes of what is done while both clients wait: its code and status, and how many requests the gateway's log
/// has from then on. A gateway that has ended has a log, too.
fn error_of(clients: &mut [Served; 2], gateway: &Gateway, meanwhile: impl FnOnce()) -> (String, u64, usize) {
    let before = requests_in_log(gateway);
    let both = std::thread::scope(|scope| {
        let both =
            clients.each_mut().map(|client| scope.spawn(move || client.ask(&["error", &gateway.url, ECHO])));
        meanwhile();
        both.map(|client| Made::of(&client.join().expect("a client")))
    });
    let Made { code, status, .. } = same(both);
    // A thread writes the log: a line may come after the answer.
    let sent = until("the log has a request of each client", || {
        Some(requests_in_log(gateway) - before).filter(|sent| *sent >= BOTH)
    });
    (code, status, sent)
}

fn requests_in_log(gateway: &Gateway) -> usize {
    gateway.program.lines().iter().filter(|line| line["path"] == route(ECHO)).count()
}

fn expected(class: &str, status: u64, requests: f64) -> (String, u64, f64) {
    (class.to_owned(), status, requests)
}

/// How the names of the gateways' reply queues begin.
const REPLY_QUEUES: &str = "vramq.replies.client.";

/// Requests of both clients, of which each sends one.
const BOTH: usize = 2;

/// Requests of a client that tries again twice.
const TRIED: f64 = 3.0;

#[test]
fn openais_client_does_not_send_again_what_would_fail_again() {
    let mut setup = Setup::new();
    let mut clients = clients();
    // Every pass runs out of memory: a text does not fit even alone.
    setup.worker(&[MINILM], &["--set", "device.cpu.fault=above=1"]);
    setup.worker(&[ECHO], &[]);
    // The model rejects the word `x`.
    program_model::start(&mut setup);
    let (path, keys) = key_file(setup.folder.path(), &[("all", ""), ("some", "models = [\"other\"]")]);
    for _ in 0..2 {
        setup.gateway(&["--set", &format!("http.keys={}", path.display())]);
    }
    for model in [MINILM, ECHO, SERVED] {
        until_served(&setup, &keys["all"], model);
    }
    let (all, some) = (keys["all"].as_str(), keys["some"].as_str());
    for (key, model, outcome) in [
        ("unknown", ECHO, expected("AuthenticationError", 401, 1.0)),
        (some, ECHO, expected("PermissionDeniedError", 403, 1.0)),
        (all, "nobody-has-this", expected("NotFoundError", 404, 1.0)),
        (all, ECHO, expected("BadRequestError", 400, 1.0)),
        (all, MINILM, expected("APIStatusError", 413, 1.0)),
        (all, SERVED, expected("UnprocessableEntityError", 422, 1.0)),
    ] {
        assert_eq!(error(&mut clients, setup.next(), key, model), outcome, "{model}");
    }
    // The dead letters of both clients. The echo model leaves none: its answer was only not a vector.
    for (model, letters) in [(MINILM, 2), (SERVED, 2), (ECHO, 0)] {
        let queue = format!("vramq.dead.{model}");
        until("the dead letters are there", || (setup.messages(&queue) == Some(letters)).then_some(()));
    }
}

#[test]
fn openais_client_sends_again_what_may_succeed() {
    let mut setup = Setup::new();
    let mut clients = clients();
    let small = [
        "--set",
        // Two clients at two gateways publish four jobs while the worker, which holds one or two of them, is stopped. With one more job the
        // queue is full.
        "broker.queue_length_max=3",
        "--set",
        "broker.queue_type=classic",
        "--set",
        "model.echo.slots_max=1",
    ];
    setup.worker(&[ECHO], &small);
    for _ in 0..2 {
        setup.gateway(&["--set", "http.request_s=8"]);
    }
    setup.wait_for_models(&[ECHO]);
    // Published, and no result in time: it is not known whether it would run twice.
    setup.workers[0].signal("STOP");
    for gateway in &setup.gateways {
        assert_eq!(error(&mut clients, gateway, "", ECHO), expected("InternalServerError", 504, 1.0));
    }
    // The queue is full, and nothing is published.
    let accepted = setup.next().post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
    assert!(matches!(accepted.status, 202 | 429), "{accepted:?}");
    for gateway in &setup.gateways {
        assert_eq!(error(&mut clients, gateway, "", ECHO), expected("RateLimitError", 429, TRIED));
    }
    // Nobody takes jobs.
    drop(setup.workers.drain(..));
    for gateway in &setup.gateways {
        let refused = until("nobody consumes", || {
            let refused = gateway.post("/v1/embeddings", &json!({"model": ECHO, "input": "x"}));
            (refused.status == 503 && refused.json()["error"]["code"] == "no_workers").then_some(refused)
        });
        let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&after) && refused.header("x-should-retry") == Some("true"));
        assert_eq!(error(&mut clients, gateway, "", ECHO), expected("InternalServerError", 503, TRIED));
    }
}

/// What may run is not sent again: each client sends one request.
#[tokio::test(flavor = "multi_thread")]
async fn own_node_openais_client_does_not_send_again_what_may_run() {
    let broker = Node::start().await.unwrap();
    let mut setup = Setup::on(&broker);
    let mut clients = clients();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", "http.request_s=5", "--set", "http.drain_s=1"]);
    }
    setup.gateway(&["--set", "http.drain_s=1"]);
    setup.gateway(&["--set", "http.drain_s=1"]);
    setup.wait_for_models(&[ECHO]);
    broker.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    let blocked = |gateway: &Gateway| {
        let refused = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
        (refused.status == 503 && refused.json()["error"]["code"] == "unconfirmed").then_some(())
    };
    for gateway in &setup.gateways[..2] {
        until("the broker blocks", || blocked(gateway));
        assert_eq!(
            error(&mut clients, gateway, "", &format!("job:{ECHO}")),
            expected("InternalServerError", 503, 1.0)
        );
    }
    broker.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    for gateway in &setup.gateways[..2] {
        until("all jobs have run", || {
            (gateway.metric("vramq_gateway_jobs_unfinished", "") == 0.0).then_some(())
        });
    }
    setup.workers[0].signal("STOP");
    let gateways = &setup.gateways[2..];
    let of_replies = || setup.queues(REPLY_QUEUES).len();
    let sessions = of_replies();
    let mut published = 0;
    let mut both_wait = || {
        published += BOTH as u64;
        until("both jobs wait", || setup.messages("vramq.jobs.echo").filter(|n| *n == published));
    };
    for gateway in gateways {
        let outcome = error_of(&mut clients, gateway, || {
            both_wait();
            // What came in them, and would come, is lost.
            setup.delete_queues(REPLY_QUEUES);
        });
        assert_eq!(outcome, ("broker_lost".to_owned(), 503, BOTH));
        // The other gateways have lost theirs, too. One that is long without a session refuses what may be sent again.
        until("the reply queues are back", || (of_replies() == sessions).then_some(()));
    }
    for gateway in gateways {
        let outcome = error_of(&mut clients, gateway, || {
            both_wait();
            gateway.program.signal("TERM");
        });
        assert_eq!(outcome, ("draining".to_owned(), 503, BOTH));
    }
    for gateway in &mut setup.gateways[2..] {
        gateway.program.wait();
        // All of both rounds, also what a line that came late would tell of.
        assert_eq!(requests_in_log(gateway), 2 * BOTH);
    }
    setup.workers[0].signal("CONT");
}

/// What a client does about files, and about a broker that refuses.
#[test]
fn openais_client_sends_an_upload_again_only_if_the_store_fails() {
    let mut setup = Setup::new();
    let mut clients = clients();
    setup.worker(&[ECHO], &[]);
    let outputs = format!("outputs.folder={}", setup.folder.path().join("outputs").display());
    let folders = [0, 1].map(|at| setup.folder.path().join(format!("files-{at}")));
    for folder in &folders {
        let folder = format!("files.folder={}", folder.display());
        setup.gateway(&set(&[
            folder,
            outputs.clone(),
            "files.mib_max=1".into(),
            "files.file_mib_max=1".into(),
        ]));
    }
    // It may write to all exchanges but that of jobs.
    let (_, of_refused) = setup.add_user([".*", r"^(?!vramq\.jobs$)", ".*"]);
    setup.gateway_as(&of_refused, &[]);
    setup.gateway_as(&of_refused, &[]);
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("STOP");
    for (gateway, folder) in setup.gateways.iter().zip(&folders) {
        let job = json!({"model": ECHO, "inputs": ["x"]});
        assert_eq!(gateway.send("PUT", "/v1/jobs/waits", &[], Some(&job)).status, 202);
        for (asked, outcome) in [
            ("file:output-0-waits", expected("ConflictError", 409, 1.0)),
            ("typed:echo", expected("APIStatusError", 415, 1.0)),
            ("upload:1048577", expected("APIStatusError", 413, 1.0)),
        ] {
            assert_eq!(error(&mut clients, gateway, "", asked), outcome, "{asked}");
        }
        assert_eq!(upload(gateway, "", &vec![0; 700 << 10]).status, 200);
        assert_eq!(
            error(&mut clients, gateway, "", "upload:700000"),
            expected("InternalServerError", 507, 1.0)
        );
        // What is in the way of the caller's folder.
        std::fs::remove_dir_all(folder.join("local")).unwrap();
        std::fs::write(folder.join("local"), "no folder").unwrap();
        assert_eq!(error(&mut clients, gateway, "", "upload:1"), expected("InternalServerError", 502, TRIED));
    }
    for gateway in &setup.gateways[2..] {
        assert_eq!(error(&mut clients, gateway, "", ECHO), expected("InternalServerError", 502, 1.0));
        assert_eq!(
            gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]})).json()["error"]["code"],
            "broker_refused"
        );
    }
}
