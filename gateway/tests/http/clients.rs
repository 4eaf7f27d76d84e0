//! Published clients (OpenAI's, Hugging Face's), unchanged, against the gateway.

use serde_json::{Value, json};

use crate::foreign::{node, python};
use crate::harness::{ECHO, Gateway, MINILM, Setup, until};
use crate::keys::{key_file, until_served};
use crate::program_model::{self, SERVED};

#[test]
fn openais_client_gets_the_models_vectors() {
    let setup = Setup::with(&[MINILM]);
    for gateway in &setup.gateways {
        python(&["openai_client.py", "embed", &gateway.url, MINILM]);
    }
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
    let setup = Setup::with(&[MINILM]);
    for gateway in &setup.gateways {
        node("openai_client.mjs", &["embed", &gateway.url, MINILM]);
    }
}

/// What OpenAI's clients report of an error: its class, the status, and how many requests a client sent. Both clients must agree.
fn error(gateway: &Gateway, key: &str, model: &str) -> (String, u64, f64) {
    let sent = || gateway.metric("vramq_gateway_requests_total", "route=\"/v1/embeddings\"");
    let key = key.trim_start_matches("Bearer ");
    let outcome = |said: &str, before: f64| {
        let read: Value = serde_json::from_str(said).unwrap();
        (read["class"].as_str().unwrap().to_owned(), read["status"].as_u64().unwrap(), sent() - before)
    };
    let before = sent();
    let by_python = outcome(&python(&["openai_client.py", "error", &gateway.url, model, key]), before);
    let before = sent();
    let by_node = outcome(&node("openai_client.mjs", &["error", &gateway.url, model, key]), before);
    // The classes of the two have other names where there is no class of its own for a status.
    assert_eq!((by_node.1, by_node.2), (by_python.1, by_python.2), "{}", by_node.0);
    let general = ["APIError", "APIStatusError"];
    assert!(by_node.0 == by_python.0 || general.contains(&by_node.0.as_str()), "{}", by_node.0);
    by_python
}

fn expected(class: &str, status: u64, requests: f64) -> (String, u64, f64) {
    (class.to_owned(), status, requests)
}

/// Requests of a client that tries again twice.
const TRIED: f64 = 3.0;

#[test]
fn openais_client_does_not_send_again_what_would_fail_again() {
    let mut setup = Setup::new();
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
        assert_eq!(error(setup.next(), key, model), outcome, "{model}");
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
        assert_eq!(error(gateway, "", ECHO), expected("InternalServerError", 504, 1.0));
    }
    // The queue is full, and nothing is published.
    let accepted = setup.next().post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
    assert!(matches!(accepted.status, 202 | 429), "{accepted:?}");
    for gateway in &setup.gateways {
        assert_eq!(error(gateway, "", ECHO), expected("RateLimitError", 429, TRIED));
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
        assert_eq!(error(gateway, "", ECHO), expected("InternalServerError", 503, TRIED));
    }
}
