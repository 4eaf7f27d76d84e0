//! Single requests, right and wrong ones: statuses, the shapes of errors, headers, and the origins of pages.

use serde_json::{Value, json};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::{REQUEST_ID, TRACEPARENT};

use crate::harness::{Answer, ECHO, Setup};
use crate::withdrawals::listen;

#[test]
fn a_wrong_request_gets_an_error_in_its_apis_shape() {
    let setup = Setup::with(&[ECHO]);
    let cases = [
        (json!({"input": "x"}), 400, Value::Null),
        (json!({"model": ECHO}), 400, Value::Null),
        (json!({"model": ECHO, "input": []}), 400, json!("input")),
        (json!({"model": ECHO, "input": [1, 2, 3]}), 400, json!("input")),
        (json!({"model": ECHO, "input": vec!["x"; 2049]}), 400, json!("input")),
        (json!({"model": ECHO, "input": "x", "dimensions": 3}), 400, json!("dimensions")),
        (json!({"model": "no such", "input": "x"}), 400, json!("model")),
        (json!({"model": "nobody-has-this", "input": "x"}), 404, json!("model")),
        // Not an embedding model.
        (json!({"model": ECHO, "input": "x"}), 400, json!("model")),
        (json!({"model": ECHO, "input": null}), 400, json!("input")),
        (json!({"model": ECHO, "input": ["x", null]}), 400, json!("input")),
        (json!({"model": null, "input": "x"}), 400, Value::Null),
        (json!({"model": ECHO, "input": "x", "encoding_format": "int8"}), 400, Value::Null),
        (json!({"model": ECHO, "input": "x", "dimensions": 0}), 400, json!("dimensions")),
        (json!({"model": ECHO, "input": "x", "dimensions": -1}), 400, Value::Null),
        (json!({"model": ECHO, "input": "x", "dimensions": 1e300}), 400, Value::Null),
        (json!({"model": "modèle", "input": "x"}), 400, json!("model")),
        (json!([]), 400, Value::Null),
        // The values of a request, without their names.
        (json!([ECHO, "x", null, null, null]), 400, Value::Null),
        (Value::Null, 400, Value::Null),
    ];
    for (body, status, param) in cases {
        let answer = setup.next().post("/v1/embeddings", &body);
        assert_eq!(answer.status, status, "{answer:?}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["type"], &error["param"]),
            (&json!("invalid_request_error"), &param),
            "{answer:?}"
        );
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    let tei = setup.next().post("/embed", &json!({"inputs": 1}));
    assert_eq!((tei.status, &tei.json()["error_type"]), (422, &json!("validation")));
    for route in ["/rerank", "/predict", "/embed_sparse"] {
        assert_eq!(setup.next().post(route, &json!({})).status, 400);
    }
    let pairs = setup.next().post("/predict", &json!({"inputs": [["a", "b", "c"]]}));
    assert!(pairs.status == 400 && pairs.text.contains("`inputs` must be"), "{pairs:?}");
    for path in ["/v1/dead-letters", "/info?model=a&model=b"] {
        let unclear = setup.next().get(path);
        assert!(unclear.status == 400 && unclear.text.contains("field `model`"), "{unclear:?}");
    }
    assert_eq!(setup.next().get("/v1/embeddings").status, 405);
    assert_eq!(setup.next().get("/v1/nothing").json()["error"]["code"], "not_found");
    let form = setup.next().send("POST", "/v1/embeddings", &[("content-type", "text/plain")], None);
    assert_eq!(form.status, 415);
}

/// Methods that a route has not, paths that mean nothing or lead elsewhere, and ids that no job or file can have.
#[test]
fn unknown_methods_paths_and_ids_are_refused_in_the_shape_of_their_api() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for at in 0..2 {
        let folder = format!("files.folder={}", setup.folder.path().join(format!("files-{at}")).display());
        setup.gateway(&["--set", &folder]);
    }
    setup.wait_for_models(&[ECHO]);
    for (method, path, allowed) in [
        ("GET", "/v1/embeddings", "POST"),
        ("DELETE", "/v1/jobs", "POST"),
        ("GET", "/v1/files", "POST"),
        ("POST", "/v1/jobs/x", "GET,HEAD,PUT,DELETE"),
        ("PATCH", "/v1/files/x", "GET,HEAD,DELETE"),
        ("HEAD", "/embed", "POST"),
    ] {
        let answer = setup.next().send(method, path, &[], None);
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allowed)), "{method} {path}");
        assert_eq!(answer.header("content-type"), Some("application/json"), "{method} {path}");
    }
    let options = setup.next().send("OPTIONS", "/v1/jobs/x", &[("origin", "https://evil.example")], None);
    assert_eq!((options.status, options.header("allow")), (200, Some("GET,HEAD,PUT,DELETE")));
    assert_eq!(options.header("access-control-allow-origin"), None);
    let long = "x".repeat(5000);
    for id in [
        "%2e%2e%2fetc%2fpasswd",
        "..%2f..%2fx",
        "a%2Fb",
        "%00",
        "a%20b",
        "%F0%9F%97%BC",
        "file-%2e%2e%2fx",
        &long,
    ] {
        for path in
            ["/v1/jobs/ID", "/v1/jobs/ID/events", "/v1/files/ID", "/v1/files/ID/content", "/v1/models/ID"]
        {
            let answer = setup.next().get(&path.replace("ID", id));
            assert_eq!(
                (answer.status, answer.header("x-should-retry")),
                (404, None),
                "{path} {id:.40}: {answer:?}"
            );
            assert!(answer.json()["error"]["message"].is_string(), "{path} {id:.40}");
        }
        let put = setup.next().send(
            "PUT",
            &format!("/v1/jobs/{id}"),
            &[],
            Some(&json!({"model": ECHO, "inputs": ["x"]})),
        );
        assert_eq!((put.status, &put.json()["error"]["param"]), (400, &json!("id")), "{id:.40}");
    }
    // No UTF-8.
    let answer = setup.next().get("/v1/jobs/%ff");
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    // A model that is not there has no information.
    let info = setup.next().get("/info?model=nobody-has-this");
    assert_eq!((info.status, &info.json()["error_type"]), (404, &json!("validation")), "{info:?}");
    let twice = setup.next().post("/embed?model=echo&model=echo", &json!({"inputs": "x"}));
    assert_eq!((twice.status, &twice.json()["error_type"]), (400, &json!("validation")), "{twice:?}");
    // Without its body, a HEAD is answered as a GET is.
    for (path, status) in [("/v1/models", 200), ("/v1/jobs/none", 404), ("/livez", 200), ("/", 200)] {
        let head = setup.next().send("HEAD", path, &[], None);
        assert_eq!((head.status, head.text.as_str()), (status, ""), "{path}");
    }
    for gateway in &setup.gateways {
        assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"500\""), 0.0);
    }
}

/// Before the first worker there is neither the exchange of heartbeats nor a queue of jobs. Callers may name models that nobody serves. An
/// operator can do nothing about either, so nothing is logged.
#[test]
fn a_model_without_a_queue_logs_no_error() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    for gateway in &setup.gateways {
        let refused = gateway.post("/v1/embeddings", &json!({"model": "nobody-has-this", "input": "x"}));
        assert_eq!(refused.status, 404, "{refused:?}");
        let lines = gateway.lines();
        assert!(lines.iter().any(|line| line["level"] == "INFO"), "the log has no levels: {lines:?}");
        let alarming: Vec<_> =
            lines.iter().filter(|line| line["level"] == "WARN" || line["level"] == "ERROR").collect();
        assert!(alarming.is_empty(), "{alarming:?}");
    }
}

#[test]
fn bodies_that_are_no_plain_json_are_named() {
    let setup = Setup::with(&[ECHO]);
    let body = json!({"model": ECHO, "inputs": ["x"]}).to_string();
    let send = |headers: &[(&str, &str)], body: &str| {
        let request = ureq::post(&format!("{}/v1/jobs", setup.next().url));
        let request = headers.iter().fold(request, |request, (name, value)| request.set(name, value));
        let answer = Answer::of(request.send_string(body));
        (answer.status, answer.json()["error"]["code"].clone())
    };
    let json_type = ("content-type", "application/json");
    assert_eq!(send(&[json_type, ("content-encoding", "gzip")], &body), (415, json!("content_encoding")));
    assert_eq!(
        send(&[("content-type", "application/x-www-form-urlencoded")], &body),
        (415, json!("content_type"))
    );
    let twice = r#"{"model": "echo", "model": "other", "inputs": ["x"]}"#;
    let long = json!({"model": "echo", "inputs": ["x"], "model_revision": "x".repeat(2049)}).to_string();
    for wrong in [
        "",
        "null",
        "{}",
        "\u{feff}{}",
        twice,
        &long,
        r#"{"model": "echo", "inputs": null}"#,
        r#"{"model": "echo", "inputs": [null]}"#,
        r#"{"model": "echo", "inputs": []}"#,
        r#"{"model": "echo", "inputs": [{}]}"#,
        r#"{"model": "echo", "inputs": [{"bytes": "no base64!"}]}"#,
        r#"{"model": "echo", "inputs": ["\ud800"]}"#,
        r#"{"model": "echo", "inputs": ["x"], "batch_hint": 0}"#,
        r#"{"model": "echo", "inputs": ["x"], "batch_hint": 4294967296}"#,
        r#"{"model": "echo", "inputs": ["x"], "params": {"a": 1e999}}"#,
        r#"{"model": "echo", "inputs": ["x"], "colour": "red"}"#,
    ] {
        assert_eq!(send(&[json_type], wrong), (400, json!("invalid_request")), "{wrong}");
    }
    // Odd, and meant.
    for fine in [r#"{"model": "echo", "inputs": [""]}"#, r#"{"model": "echo", "inputs": ["\u0000 🗼"]}"#] {
        let (status, code) =
            send(&[("content-type", "Application/JSON; charset=utf-8"), ("prefer", "wait=60")], fine);
        assert_eq!((status, code), (200, Value::Null), "{fine}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_and_its_job_have_the_same_ids() {
    let setup = Setup::with(&[ECHO]);
    let listener = listen(&setup, ECHO).await;
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let headers = [("x-request-id", "my-request"), ("traceparent", parent), ("prefer", "wait=60")];
    let job = json!({"model": ECHO, "inputs": ["x"]});
    let answer = setup.next().send("POST", "/v1/jobs", &headers, Some(&job));
    assert_eq!(answer.header("x-request-id"), Some("my-request"));
    assert_eq!(answer.header("traceparent"), Some(parent));
    let id = answer.json()["message_id"].as_str().unwrap().to_owned();
    assert_eq!(answer.header("x-vramq-job-id"), Some(id.as_str()));
    let lines = setup.gateways[0].lines();
    let line = lines.iter().find(|line| line["request_id"] == "my-request").expect("an access log line");
    assert_eq!((&line["status"], &line["job"], &line["caller"]), (&json!(200), &json!(id), &json!("local")));
    let published = listener.published().await;
    assert_eq!(published.message_id().as_ref().map(|it| it.as_str()), Some(id.as_str()));
    let headers = published.headers().clone().unwrap();
    let text = |name: &str| headers.inner().get(name).and_then(as_text);
    assert_eq!(
        (text(REQUEST_ID).as_deref(), text(TRACEPARENT).as_deref()),
        (Some("my-request"), Some(parent))
    );
}

#[test]
fn another_sites_page_cannot_use_a_gateway_of_this_machine() {
    let setup = Setup::with(&[ECHO]);
    let rebound = setup.next().send("GET", "/v1/models", &[("host", "evil.example")], None);
    assert_eq!(rebound.status, 403);
    let foreign = setup.next().send("GET", "/v1/models", &[("origin", "https://evil.example")], None);
    assert_eq!(foreign.header("access-control-allow-origin"), None);
    // A form needs no permission of the browser.
    let form = |origin: &str| {
        let request = ureq::post(&format!("{}/v1/files", setup.next().url)).set("origin", origin);
        let answer =
            Answer::of(request.set("content-type", "multipart/form-data; boundary=b").send_string("--b--"));
        answer.json()["error"]["code"].clone()
    };
    for other in [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example:8080",
    ] {
        assert_eq!(form(other), json!("origin"), "{other}");
    }
    // The form has no file.
    for own in ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:8080"] {
        assert_eq!(form(own), json!("invalid_request"), "{own}");
    }
}

#[test]
fn a_page_of_a_named_origin_may_use_every_client_there_is() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.cors_origins=https://app.example"]);
    }
    let asked =
        "authorization, content-type, idempotency-key, prefer, traceparent, x-api-key, x-stainless-os";
    let preflight = |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", asked),
        ];
        setup.next().send("OPTIONS", "/v1/embeddings", &headers, None)
    };
    let named = preflight("https://app.example");
    assert_eq!(named.header("access-control-allow-origin"), Some("https://app.example"));
    let allowed = named.header("access-control-allow-headers").unwrap_or_default();
    for header in asked.split(", ") {
        assert!(allowed.split(',').any(|allowed| allowed.trim() == header), "{header} is not in `{allowed}`");
    }
    assert_eq!(preflight("https://evil.example").header("access-control-allow-origin"), None);
    // Errors are read by pages, too.
    for (path, status) in [("/v1/models", 200), ("/v1/models/nobody-has-this", 404), ("/v1/embeddings", 405)]
    {
        let answer = setup.next().send("GET", path, &[("origin", "https://app.example")], None);
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), Some("https://app.example"), "{path}");
        assert_eq!(answer.header("content-type"), Some("application/json"), "{path}");
        let exposed = answer.header("access-control-expose-headers").unwrap_or_default();
        for header in
            ["content-range", "location", "retry-after", "x-request-id", "x-should-retry", "x-vramq-job-id"]
        {
            let is_exposed = exposed.split(',').any(|exposed| exposed.trim() == header);
            assert!(is_exposed, "{header} is not in `{exposed}`");
        }
    }
}

#[test]
fn an_idempotency_key_stands_for_one_request_to_one_route_and_model() {
    const OTHER: &str = "echo-2";
    let mut setup = Setup::new();
    setup.worker(&[ECHO, OTHER], &[]);
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    setup.wait_for_models(&[ECHO, OTHER]);
    for gateway in &setup.gateways {
        let ask = |path: &str| {
            gateway.send("POST", path, &[("idempotency-key", "k")], Some(&json!({"inputs": ["x"]})))
        };
        let first = ask("/embed?model=echo");
        let other = ask("/embed?model=echo-2");
        assert_ne!(first.status, 422, "{first:?}");
        assert_eq!(other.status, 422, "{other:?}");
        assert!(other.text.contains("already used for another request"), "{other:?}");
        // `POST /` is the same route.
        for same in ["/embed?model=echo", "/?model=echo"] {
            assert_eq!(ask(same).status, first.status, "{same}");
        }
        assert_eq!(ask("/?model=echo-2").status, 422);
    }
}
