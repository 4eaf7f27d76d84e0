//! Published clients (OpenAI's, Hugging Face's), unchanged, against the gateway.

use serde_json::{Value, json};

use crate::foreign::{node, python};
use crate::harness::{ECHO, Gateway, MINILM, Setup, until};

#[test]
fn openais_client_gets_the_models_vectors() {
    let setup = Setup::with(&[MINILM]);
    for gateway in &setup.gateways {
        python(&["openai_client.py", "embed", &gateway.url, MINILM]);
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

/// What OpenAI's clients make of an error: its class, the status, and how many requests one has sent. Both make the same of it.
fn error(gateway: &Gateway, model: &str) -> (String, u64, f64) {
    let sent = || gateway.metric("vramq_gateway_requests_total", "route=\"/v1/embeddings\"");
    let outcome = |said: &str, before: f64| {
        let read: Value = serde_json::from_str(said).unwrap();
        (read["class"].as_str().unwrap().to_owned(), read["status"].as_u64().unwrap(), sent() - before)
    };
    let before = sent();
    let by_python = outcome(&python(&["openai_client.py", "error", &gateway.url, model]), before);
    let before = sent();
    let by_node = outcome(&node("openai_client.mjs", &["error", &gateway.url, model]), before);
    // The classes of the two have other names where there is no class of its own for a status.
    assert_eq!((by_node.1, by_node.2), (by_python.1, by_python.2), "{}", by_node.0);
    let general = ["APIError", "APIStatusError"];
    assert!(by_node.0 == by_python.0 || general.contains(&by_node.0.as_str()), "{}", by_node.0);
    by_python
}

fn expected(class: &str, status: u64, requests: f64) -> (String, u64, f64) {
    (class.to_owned(), status, requests)
}

#[test]
fn openais_client_sends_again_only_what_may_succeed() {
    let mut setup = Setup::new();
    // Every pass runs out of memory: a text does not fit even alone.
    setup.worker(&[MINILM], &["--set", "device.cpu.fault=above=1"]);
    let small = [
        "--set",
        "broker.queue_length_max=1",
        "--set",
        "broker.queue_type=classic",
        "--set",
        "model.echo.slots_max=1",
    ];
    setup.worker(&[ECHO], &small);
    setup.gateway(&[]);
    setup.gateway(&["--set", "http.request_s=2"]);
    setup.wait_for_models(&[MINILM, ECHO]);
    let gateway = &setup.gateways[0];
    assert_eq!(error(gateway, "nobody-has-this"), expected("NotFoundError", 404, 1.0));
    assert_eq!(error(gateway, ECHO), expected("BadRequestError", 400, 1.0));
    assert_eq!(error(gateway, MINILM), expected("APIStatusError", 413, 1.0));
    until("the dead letters are there", || setup.messages("vramq.dead.minilm").filter(|n| *n == 2));
    // Published, and no result in time.
    setup.workers[1].signal("STOP");
    assert_eq!(error(&setup.gateways[1], ECHO), expected("InternalServerError", 504, 1.0));
    // The queue is full: nothing is published, and the client tries three times.
    let accepted = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
    assert!(matches!(accepted.status, 202 | 429), "{accepted:?}");
    assert_eq!(error(gateway, ECHO), expected("RateLimitError", 429, 3.0));
    // Nobody takes jobs. The gateway that waits two seconds, because it may not know that yet and wait for a result.
    drop(setup.workers.drain(..));
    let gateway = &setup.gateways[1];
    until("nobody consumes", || {
        let refused = gateway.post("/v1/embeddings", &json!({"model": MINILM, "input": "x"}));
        (refused.status == 503 && refused.json()["error"]["code"] == "no_workers").then_some(())
    });
    let refused = gateway.post("/v1/embeddings", &json!({"model": MINILM, "input": "x"}));
    let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&after) && refused.header("x-should-retry") == Some("true"));
}
