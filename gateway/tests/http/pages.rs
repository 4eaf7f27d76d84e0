//! The page, the description of the API, and the routes for health and metrics.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::foreign::python;
use crate::harness::{ECHO, Setup, until};
use crate::keys::{until_served, with_keys};

#[test]
fn the_description_names_the_routes_that_there_are() {
    let setup = Setup::with(&[ECHO]);
    let described: Value = setup.next().get("/openapi.json").json();
    let source = include_str!("../../src/routes/mod.rs");
    let routes: BTreeSet<_> = source
        .lines()
        .filter_map(|line| line.trim().strip_prefix(".route(\"")?.split('"').next())
        .filter(|path| !matches!(*path, "/page/{file}" | "/docs" | "/openapi.json"))
        .map(|path| path.replace("{*model}", "{model}"))
        .collect();
    let paths: BTreeSet<_> = described["paths"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(paths, routes);
    for (path, operations) in described["paths"].as_object().unwrap() {
        for (method, operation) in operations.as_object().unwrap() {
            let method = method.to_uppercase();
            let asked = path.replace("{id}", "x").replace("{model}", "x");
            let answer = setup.next().send(&method, &asked, &[], None);
            assert_ne!(answer.status, 405, "{method} {path}");
            assert!(answer.status < 500, "{method} {path}: {answer:?}");
            let known = operation["responses"].as_object().unwrap();
            assert!(
                known.contains_key(&answer.status.to_string()),
                "{method} {path}: {} is not described",
                answer.status
            );
        }
    }
}

#[test]
fn the_description_is_as_strict_as_the_gateway() {
    let setup = Setup::with(&[ECHO]);
    let described: Value = setup.next().get("/openapi.json").json();
    let longest = |path: &str, method: &str, name: &str| {
        let parameters = described["paths"][path][method]["parameters"].as_array().unwrap();
        let parameter = parameters.iter().find(|parameter| parameter["name"] == name).unwrap();
        assert_eq!(parameter["schema"]["minLength"], 1, "{name}");
        usize::try_from(parameter["schema"]["maxLength"].as_u64().unwrap()).unwrap()
    };
    let job = json!({"model": ECHO, "inputs": ["x"]});
    let keyed = |bytes: usize| {
        let headers = [("idempotency-key", "k".repeat(bytes)), ("prefer", "wait=60".to_owned())];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        setup.next().send("POST", "/v1/jobs", &headers, Some(&job)).status
    };
    let key = longest("/v1/jobs", "post", "Idempotency-Key");
    assert_eq!((keyed(1), keyed(key), keyed(key + 1)), (200, 200, 400));
    let named = |bytes: usize| {
        let path = format!("/v1/jobs/{}", "i".repeat(bytes));
        setup.next().send("PUT", &path, &[("prefer", "wait=60")], Some(&job)).status
    };
    let id = longest("/v1/jobs/{id}", "put", "id");
    assert_eq!((named(id), named(id + 1)), (200, 400));
    let request = &described["components"]["schemas"]["JobRequest"]["properties"];
    let model = usize::try_from(request["model"]["maxLength"].as_u64().unwrap()).unwrap();
    assert_eq!(request["model"]["minLength"], 1);
    for (bytes, status) in [(0, 400), (model, 404), (model + 1, 400)] {
        let job = json!({"model": "m".repeat(bytes), "inputs": ["x"]});
        assert_eq!(setup.next().post("/v1/jobs", &job).status, status, "{bytes}");
    }
    let revision = usize::try_from(request["model_revision"]["maxLength"].as_u64().unwrap()).unwrap();
    // No model has the name.
    for (bytes, status) in [(revision, 404), (revision + 1, 400)] {
        let job = json!({"model": "m", "inputs": ["x"], "model_revision": "r".repeat(bytes)});
        assert_eq!(setup.next().post("/v1/jobs", &job).status, status, "{bytes}");
    }
    for kind in request["inputs"]["items"]["oneOf"].as_array().unwrap() {
        let Some(fields) = kind["properties"].as_object() else { continue };
        assert_eq!(kind["additionalProperties"], false, "{kind}");
        let mut input: Value = fields.keys().map(|name| (name.clone(), json!("AA=="))).collect();
        input["colour"] = json!("red");
        let refused = setup.next().post("/v1/jobs", &json!({"model": ECHO, "inputs": [input]}));
        assert!(refused.status == 400 && refused.text.contains("colour"), "{kind}: {refused:?}");
    }
}

/// Requests that are made up from the description, valid and invalid ones: so many an operation, others for each gateway.
const EXAMPLES: &str = "12";

#[test]
fn made_up_requests_are_answered_as_the_description_says() {
    let (setup, keys) = with_keys(&[("caller", "operator = true\nin_flight_max = 1000")]);
    // Until they have received a worker's heartbeat, the gateways answer requests for models with 503.
    until_served(&setup, &keys["caller"], ECHO);
    let header = format!("Authorization: {}", keys["caller"]);
    let checks = "status_code_conformance,content_type_conformance,response_headers_conformance,\
                  response_schema_conformance,unsupported_method,ignored_auth";
    for (gateway, seed) in setup.gateways.iter().zip(["1", "2"]) {
        let description = format!("{}/openapi.json", gateway.url);
        let options = ["--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES, "--seed", seed];
        let more = ["--no-shrink", "--continue-on-failure", "--request-timeout", "60", "--checks", checks];
        let what = ["-m", "schemathesis.cli", "run", &description, "--header", &header];
        let said = python(&[&what[..], &options, &more].concat());
        assert!(said.contains("passed"), "{said}");
        let requests = |labels: &str| gateway.metric("vramq_gateway_requests_total", labels);
        assert_eq!(requests("status=\"500\""), 0.0);
        // `/readyz` is asked before there is a connection.
        assert_eq!(requests("status=\"503\""), requests("route=\"/readyz\",status=\"503\""));
    }
}

#[test]
fn the_page_sends_requests_only_to_its_gateway() {
    let setup = Setup::with(&[ECHO]);
    for path in [
        "/",
        "/docs",
        "/page/page.js",
        "/page/common.js",
        "/page/dead.js",
        "/page/chart.js",
        "/page/docs.js",
        "/page/page.css",
    ] {
        let answer = setup.next().get(path);
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.header("content-security-policy").unwrap();
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'") && !policy.contains("unsafe"),
            "{policy}"
        );
        for elsewhere in ["http://", "https://", " style=", " onclick=", "innerHTML"] {
            assert!(!answer.text.contains(elsewhere), "{path} has {elsewhere}");
        }
        assert!(answer.text.len() > 200, "{path}");
    }
    assert_eq!(setup.next().get("/page/../Cargo.toml").status, 404);
}

#[test]
fn the_state_of_the_fleet_can_be_read() {
    let setup = Setup::with(&[ECHO]);
    let status = until("a timeline", || {
        let status = setup.next().get("/v1/status").json();
        (status["workers"][0]["timeline"].as_array()?.len() > 1).then_some(status)
    });
    let worker = &status["workers"][0];
    assert_eq!(
        (&worker["worker"], &worker["state"], &worker["alive"]),
        (&"worker-0".into(), &"consuming".into(), &true.into())
    );
    let sample = &worker["timeline"][0];
    assert!(sample["total"].as_u64() > Some(0) && sample["used"].as_u64() < sample["total"].as_u64());
    // A worker has several consumers.
    assert!(status["models"][ECHO]["queue"]["consumers"].as_u64() >= Some(1));
    let wrong = serde_json::json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
    setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&wrong));
    for gateway in &setup.gateways {
        // Looking twice shows the same: nothing is taken away.
        let letters = until("the dead letter is listed", || {
            let letters = gateway.get("/v1/dead-letters?model=echo").json();
            (letters["total"] == 1 && letters["letters"][0].is_object()).then_some(letters)
        });
        let letter = &letters["letters"][0];
        assert_eq!(letter["reason"], "invalid-input");
        assert!(letter["error"].as_str().unwrap().contains("colour"));
    }
    assert_eq!(setup.next().get("/v1/dead-letters?model=nobody").json()["total"], 0);
    assert!(setup.next().get("/metrics").text.ends_with("# EOF\n"));
}
