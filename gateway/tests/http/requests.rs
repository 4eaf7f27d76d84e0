//! Single requests: shapes, statuses, headers.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::{REQUEST_ID, TRACEPARENT};

use crate::harness::{Answer, ECHO, MINILM, Setup};
use crate::withdrawals::listen;

fn vector(value: &Value) -> Vec<f64> {
    value.as_array().expect("a vector").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn embeddings_are_the_models_whatever_route_they_come_by() {
    let setup = Setup::with(&[MINILM]);
    let texts = json!(["A man is eating food.", "Someone has a meal.", "The stock market fell."]);
    let openai = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": texts}));
    assert_eq!(openai.status, 200, "{openai:?}");
    let openai = openai.json();
    assert_eq!((&openai["object"], &openai["model"]), (&json!("list"), &json!(MINILM)));
    let vectors: Vec<_> =
        openai["data"].as_array().unwrap().iter().map(|item| vector(&item["embedding"])).collect();
    assert_eq!(vectors.len(), 3);
    assert!(vectors.iter().all(|v| v.len() == 384));
    // Sentences of one meaning are closer than others: these are MiniLM's vectors, in order.
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    assert!(dot(&vectors[0], &vectors[1]) > 0.5 && dot(&vectors[0], &vectors[2]) < 0.3);
    for path in ["/embed", "/"] {
        let tei = setup.next().post(path, &json!({"inputs": texts}));
        assert_eq!(tei.status, 200, "{tei:?}");
        let tei: Vec<_> = tei.json().as_array().unwrap().iter().map(vector).collect();
        assert_eq!(tei, vectors, "{path}");
        let refused = setup.next().post(path, &json!({"inputs": []}));
        assert_eq!((refused.status, &refused.json()["error_type"]), (400, &json!("empty")), "{path}");
    }
    let job = setup.next().send(
        "POST",
        "/v1/jobs",
        &[("prefer", "wait=60")],
        Some(&json!({"model": MINILM, "inputs": texts})),
    );
    let job = job.json();
    assert_eq!(job["state"], "done");
    assert_eq!(vector(&job["outputs"][2]["embedding"]), vectors[2]);
    let single = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": texts[0]})).json();
    assert_eq!(vector(&single["data"][0]["embedding"]), vectors[0]);
}

/// The counts are those of Hugging Face's tokenizer, with the tokens that frame a text, and cut as the model's files say:
/// `t = Tokenizer.from_file("models/all-MiniLM-L6-v2/tokenizer.json"); t.no_padding(); t.enable_truncation(256);
/// len(t.encode(text).ids)` with tokenizers 0.22.1 for Python.
#[test]
fn usage_is_the_models_count_of_tokens() {
    let setup = Setup::with(&[MINILM]);
    let counted = [
        ("A man is eating food.".to_owned(), 8),
        ("Überraschung: naïve café".to_owned(), 9),
        ("東京 is 🗼".to_owned(), 6),
        ("unbelievably tokenised ".repeat(3), 23),
        ("word ".repeat(1000), 256),
    ];
    let ask = |input: &Value| {
        let answer = setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
        assert_eq!((answer.status, answer.header("x-vramq-usage")), (200, None), "{answer:?}");
        let usage = answer.json()["usage"].clone();
        assert_eq!(usage["prompt_tokens"], usage["total_tokens"]);
        usage["total_tokens"].as_u64().expect("a count")
    };
    for (text, tokens) in &counted {
        for _ in &setup.gateways {
            assert_eq!(ask(&json!(text)), *tokens, "{text:.40}");
        }
    }
    let (texts, tokens): (Vec<_>, Vec<u64>) = counted.into_iter().unzip();
    assert_eq!(ask(&json!(texts)), tokens.iter().sum::<u64>());
    // As many texts as a request may have, in many passes.
    assert_eq!(ask(&json!(vec!["A man is eating food."; 2048])), 2048 * 8);
    let job = json!({"model": MINILM, "inputs": texts});
    let job = setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job)).json();
    assert_eq!(job["tokens"], json!(tokens.iter().sum::<u64>()));
}

/// A client that sends tokens gets the vectors of their texts, from a gateway that knows the vocabulary; from another one, an error.
#[test]
fn token_ids_are_the_texts_that_they_stand_for() {
    let mut setup = Setup::new();
    setup.worker(&[MINILM], &[]);
    let file = setup.folder.path().join("words.tiktoken");
    // As in OpenAI's vocabularies: blanks belong to the word that follows, and a token may be a part of a character.
    let tokens: [&[u8]; 6] = [b"A man", b" is eating", b" food.", b"caf", b"\xc3", b"\xa9"];
    let lines =
        tokens.iter().enumerate().map(|(at, bytes)| format!("{} {}\n", BASE64.encode(bytes), at + 10));
    let long = "x ".repeat(300_000);
    let lines = lines.collect::<String>() + &format!("{} 20\n", BASE64.encode(&long));
    std::fs::write(&file, lines).unwrap();
    let setting = format!("openai.vocabulary={}", file.display());
    for _ in 0..2 {
        setup.gateway(&["--set", &setting]);
    }
    setup.wait_for_models(&[MINILM]);
    let ask = |input: &Value| setup.next().post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
    let data = |input: Value| {
        let answer = ask(&input);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    };
    for (ids, texts) in [
        (json!([10, 11, 12]), json!(["A man is eating food."])),
        (json!([[10, 11, 12], [13, 14, 15]]), json!(["A man is eating food.", "café"])),
    ] {
        assert_eq!(data(ids), data(texts));
    }
    for wrong in [json!([10, 99]), json!([[10], [9]]), json!([[10], []]), json!([10, -1]), json!([10, "x"])] {
        let refused = ask(&wrong);
        assert_eq!(
            (refused.status, &refused.json()["error"]["param"]),
            (400, &json!("input")),
            "{refused:?}"
        );
    }
    setup.gateway(&[]);
    setup.wait_for_models(&[MINILM]);
    let body = json!({"model": MINILM, "input": [[10, 11, 12]]});
    let refused = setup.gateways[2].post("/v1/embeddings", &body);
    assert!(
        refused.status == 400 && refused.text.contains("check_embedding_ctx_length=False"),
        "{refused:?}"
    );
    // Texts that are decoded take room like those that are sent: of each there may be so much, of both together not.
    setup.gateway(&["--set", &setting, "--set", "http.body_mib_max=1", "--set", "http.bodies_mib_max=1"]);
    setup.wait_for_models(&[MINILM]);
    for (input, status) in [(json!([&long]), 200), (json!([[20]]), 200), (json!([&long, [20]]), 413)] {
        let answer = setup.gateways[3].post("/v1/embeddings", &json!({"model": MINILM, "input": input}));
        assert_eq!(answer.status, status, "{}", answer.text.chars().take(300).collect::<String>());
    }
}

/// A model that has prompts: `document` and `query`.
fn prompted() -> String {
    format!("prompted={}/../inference/tests/fixtures/tiny-mean-normalize-v6-f16", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn dimensions_and_prompts_reach_the_model() {
    let mut setup = Setup::new();
    setup.worker(&[], &["--model", &prompted()]);
    for _ in 0..2 {
        setup.gateway(&["--set", "model.prompted.matryoshka=true"]);
    }
    setup.wait_for_models(&["prompted"]);
    let ask = |path: &str, body: Value| setup.next().post(path, &body);
    let openai = |more: Value| {
        let mut body = json!({"model": "prompted", "input": "the cat sat on the mat"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask("/v1/embeddings", body)
    };
    let whole = vector(&openai(json!({})).json()["data"][0]["embedding"]);
    let cut = vector(&openai(json!({"dimensions": 4})).json()["data"][0]["embedding"]);
    let length = whole[..4].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(cut.len(), 4);
    assert!(cut.iter().zip(&whole).all(|(cut, x)| (cut - x / length).abs() < 1e-5), "{cut:?} of {whole:?}");
    let tei = ask("/embed", json!({"inputs": "the cat sat on the mat", "dimensions": 4}));
    let tei = vector(&tei.json()[0]);
    assert!(
        tei.len() == 4 && tei.iter().zip(&cut).all(|(a, b)| (a - b).abs() < 1e-5),
        "{tei:?}, not {cut:?}"
    );
    // They are the job's parameters: what the model does not know, it says.
    for (path, body, what) in [
        (
            "/v1/embeddings",
            json!({"model": "prompted", "input": "x", "prompt_name": "poem"}),
            "this model has `document`, `query`",
        ),
        ("/embed", json!({"inputs": "x", "prompt_name": "poem"}), "this model has `document`, `query`"),
        (
            "/embed",
            json!({"inputs": "x", "dimensions": 100_000}),
            "params.dimensions is 100000; this model has",
        ),
    ] {
        let refused = ask(path, body);
        assert!(refused.status == 400 && refused.text.contains(what), "{refused:?}");
        assert_eq!(refused.header("x-should-retry"), Some("false"));
    }
    assert_eq!(openai(json!({"prompt_name": "query"})).status, 200);
    assert_eq!(openai(json!({"dimensions": 0})).status, 400);
}

#[test]
fn models_are_those_that_workers_serve() {
    let setup = Setup::with(&[ECHO, MINILM]);
    let listed = setup.next().get("/v1/models").json();
    let ids: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(ids, [ECHO, MINILM]);
    assert_eq!(setup.next().get("/v1/models/echo").json()["object"], "model");
    assert_eq!(setup.next().get("/v1/models/nobody/has-this").status, 404);
    // With two models, a request must name one.
    let several = setup.next().post("/embed", &json!({"inputs": "x"}));
    assert_eq!(several.status, 422, "{several:?}");
    assert!(several.json()["error"].as_str().unwrap().contains("tei.embed"));
    let chosen = setup.next().post("/embed?model=minilm", &json!({"inputs": "x"}));
    assert_eq!(chosen.json()[0].as_array().unwrap().len(), 384);
    assert_eq!(setup.next().get("/info?model=minilm").json()["model_id"], MINILM);
}

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
    assert_eq!(setup.next().get("/v1/embeddings").status, 405);
    assert_eq!(setup.next().get("/v1/nothing").json()["error"]["code"], "not_found");
    let form = setup.next().send("POST", "/v1/embeddings", &[("content-type", "text/plain")], None);
    assert_eq!(form.status, 415);
}

/// Methods that a route has not, paths that mean nothing or lead elsewhere, and ids that no job or file can have.
#[test]
fn what_there_is_not_is_refused_in_the_same_shape() {
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
    // Nobody is told of a model that is not there.
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
    for wrong in [
        "",
        "null",
        "{}",
        "\u{feff}{}",
        twice,
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
    let lines = setup.gateways[0].program.lines();
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
    // These gateways take no files.
    for own in ["http://localhost:3000", "http://127.0.0.1:8080", "http://[::1]:8080"] {
        assert_eq!(form(own), json!("no_files"), "{own}");
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
        // `POST /` is the same route.
        for same in ["/embed?model=echo", "/?model=echo"] {
            assert_eq!(ask(same).status, first.status, "{same}");
        }
        assert_eq!(ask("/?model=echo-2").status, 422);
    }
}
