//! Requests that ask for far more memory than they have bytes, and clients that do not take their answers: they cost their own caller.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use serde_json::json;

use crate::harness::{Answer, DEADLINE, ECHO, Gateway, Setup, until};
use crate::hostile::{raw, status_of};
use crate::keys::{key_file, send, until_served};

const MIB: usize = 1 << 20;

/// What a request of 16 MiB may take of a gateway's memory: the body, and its values in a list that doubles.
const REQUEST_KIB_MAX: u64 = 512 * 1024;

/// What is sent of a form that does not end, if the gateway takes it.
const FORM_MIB: usize = 128;

/// What the gateway's memory has grown by at its peak while it answered.
pub fn peak_kib(gateway: &Gateway, request: impl FnOnce()) -> u64 {
    let before = status_of(gateway, "VmHWM:");
    request();
    status_of(gateway, "VmHWM:") - before
}

fn post(path: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json";
    format!("POST {path} HTTP/1.1\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
}

/// Each pair of a query and a text has the query. Here they would be 512 MiB.
#[test]
fn a_query_is_not_repeated_for_more_texts_than_a_job_may_have() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    let body = json!({"query": "q".repeat(MIB / 4), "texts": vec![""; 2048]}).to_string();
    for gateway in &setup.gateways {
        let grown = peak_kib(gateway, || {
            let refused = raw(gateway, &post("/rerank?model=echo", &body));
            assert!(refused.starts_with("HTTP/1.1 413") && refused.contains("fewer texts"), "{refused}");
        });
        assert!(grown < REQUEST_KIB_MAX / 4, "{grown} KiB");
    }
}

/// An object takes a hundred times its text once it is parsed, and is no input.
#[test]
fn objects_that_are_no_inputs_take_no_memory() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    let objects = "{\"\":1},".repeat(2 * MIB);
    let lists = "[\"\"],".repeat(3 * MIB);
    let deep = "[[[[]]]],".repeat(MIB);
    for (path, field, items) in [
        ("/v1/embeddings", "input", &objects),
        ("/embed", "inputs", &objects),
        ("/embed_sparse", "inputs", &objects),
        ("/predict", "inputs", &objects),
        ("/predict", "inputs", &lists),
        ("/predict", "inputs", &deep),
    ] {
        let body = format!("{{\"model\": \"echo\", \"{field}\": [{items}\"\"]}}");
        let gateway = setup.next();
        let grown = peak_kib(gateway, || {
            let refused = raw(gateway, &post(&format!("{path}?model=echo"), &body));
            assert!(refused.starts_with("HTTP/1.1 4"), "{refused}");
        });
        assert!(grown < REQUEST_KIB_MAX, "{path}: {grown} KiB");
    }
}

/// The parser keeps the head of a field until it ends.
#[test]
fn a_form_without_an_end_before_its_file_is_refused() {
    let mut setup = Setup::new();
    let folder = format!("files.folder={}", setup.folder.path().join("files").display());
    for _ in 0..2 {
        setup.gateway(&["--set", &folder]);
    }
    let form = format!(
        "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\n{}\r\n\
         --b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nx\r\n--b--\r\n",
        "x".repeat(MIB)
    );
    for gateway in &setup.gateways {
        let sent = ureq::post(&format!("{}/v1/files", gateway.url))
            .set("content-type", "multipart/form-data; boundary=b")
            .send_string(&form);
        let refused = Answer::of(sent);
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (413, &json!("too_large")),
            "{refused:?}"
        );
        let grown = peak_kib(gateway, || {
            let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
            let head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n\
                        Content-Length: 99999999999\r\n\r\n--b\r\nContent-Disposition: form-data; name=\"";
            stream.write_all(head.as_bytes()).unwrap();
            let piece = vec![b'x'; MIB];
            let sent = (0..FORM_MIB).take_while(|_| stream.write_all(&piece).is_ok()).count();
            assert!(sent < FORM_MIB, "the gateway takes all of it");
        });
        assert!(grown < REQUEST_KIB_MAX / 16, "{grown} KiB");
        assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"500\""), 0.0);
    }
}

/// Bodies of one key that do not come leave room for those of others.
#[test]
fn a_key_has_a_share_of_the_memory_for_bodies() {
    let mut setup = Setup::new();
    let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
    let with_keys = format!("http.keys={}", path.display());
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        let limits = ["--set", "http.bodies_mib_max=4", "--set", "http.body_mib_max=1"];
        setup.gateway(&[&["--set", with_keys.as_str()][..], &limits].concat());
    }
    until_served(&setup, &keys["a"], ECHO);
    let job = json!({"model": ECHO, "inputs": ["x"]});
    for gateway in &setup.gateways {
        // Its share is a MiB.
        let mut announced = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
        let head = format!(
            "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: {}\r\nContent-Type: application/json\r\n\
             Content-Length: {MIB}\r\nExpect: 100-continue\r\n\r\n",
            keys["a"]
        );
        announced.write_all(head.as_bytes()).unwrap();
        // The gateway asks for the body once it has room for it.
        expect(&mut announced, "HTTP/1.1 100 Continue");
        let refused = send(gateway, &keys["a"], "POST", "/v1/jobs", Some(&job));
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (429, &json!("too_many_in_flight")),
            "{refused:?}"
        );
        let others = send(gateway, &keys["b"], "POST", "/v1/jobs", Some(&job));
        assert_eq!(others.json()["state"], "done", "{others:?}");
        drop(announced);
        until("the share is free again", || {
            (send(gateway, &keys["a"], "POST", "/v1/jobs", Some(&job)).status == 200).then_some(())
        });
    }
}

/// Asks for the job `large`, and reads no more than the beginning of the answer: from then on it is one of its key's readers.
fn deaf_reader(gateway: &Gateway, key: &str) -> TcpStream {
    let mut deaf = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    let head = format!("GET /v1/jobs/large HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\n\r\n");
    deaf.write_all(head.as_bytes()).unwrap();
    expect(&mut deaf, "HTTP/1.1 200 OK");
    deaf
}

/// Reads what must come next.
fn expect(stream: &mut TcpStream, line: &str) {
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut came = vec![0; line.len()];
    stream.read_exact(&mut came).unwrap();
    assert_eq!(String::from_utf8_lossy(&came), line);
}

/// A result is in memory until it is sent, and counts until then.
#[test]
fn a_key_reads_so_many_results_at_a_time() {
    let mut setup = Setup::new();
    let (path, keys) = key_file(setup.folder.path(), &[("a", "in_flight_max = 1"), ("b", "")]);
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", &format!("http.keys={}", path.display())]);
    }
    until_served(&setup, &keys["a"], ECHO);
    // More than the system's buffers hold.
    let large = json!({"model": ECHO, "inputs": ["x".repeat(12 * MIB)]});
    let small = json!({"model": ECHO, "inputs": ["x"]});
    for gateway in &setup.gateways {
        let done = send(gateway, &keys["a"], "PUT", "/v1/jobs/large", Some(&large));
        assert_eq!(done.json()["state"], "done");
        let deaf = deaf_reader(gateway, &keys["a"]);
        let refused = send(gateway, &keys["a"], "GET", "/v1/jobs/none", None);
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (429, &json!("too_many_in_flight")),
            "{refused:?}"
        );
        // Others read theirs, and jobs are counted by themselves.
        assert_eq!(send(gateway, &keys["b"], "GET", "/v1/jobs/none", None).status, 404);
        let job = send(gateway, &keys["a"], "POST", "/v1/jobs", Some(&small));
        assert_eq!(job.json()["state"], "done", "{job:?}");
        drop(deaf);
        until("its place is free", || {
            (send(gateway, &keys["a"], "GET", "/v1/jobs/none", None).status == 404).then_some(())
        });
    }
}

/// A stored result is in memory for whoever asks for it, whatever part of it the answer needs.
#[test]
fn a_key_reads_so_many_stored_results_at_a_time() {
    let mut setup = Setup::new();
    let (path, keys) = key_file(setup.folder.path(), &[("a", "in_flight_max = 1"), ("b", "")]);
    let results = format!("results.folder={}", setup.folder.path().join("results").display());
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", &format!("http.keys={}", path.display()), "--set", &results]);
    }
    until_served(&setup, &keys["a"], ECHO);
    let large = json!({"model": ECHO, "inputs": ["x".repeat(12 * MIB)]});
    let [first, second] = &setup.gateways[..] else { panic!("two gateways") };
    let done = send(first, &keys["a"], "PUT", "/v1/jobs/large", Some(&large));
    assert_eq!(done.json()["state"], "done");
    // This gateway has it from the store.
    let deaf = deaf_reader(second, &keys["a"]);
    let input = json!({"model": ECHO, "inputs": [{"uri": "output-0-large"}]});
    for (method, path, body) in [
        ("GET", "/v1/jobs/large/events", None),
        ("GET", "/v1/files/output-0-large", None),
        ("GET", "/v1/files/output-0-large/content", None),
        ("DELETE", "/v1/jobs/large", None),
        ("POST", "/v1/jobs", Some(&input)),
    ] {
        let refused = send(second, &keys["a"], method, path, body);
        assert_eq!(
            (refused.status, &refused.json()["error"]["code"]),
            (429, &json!("too_many_in_flight")),
            "{method} {path}: {refused:?}"
        );
    }
    assert_eq!(send(second, &keys["b"], "GET", "/v1/jobs/none/events", None).status, 404);
    drop(deaf);
    let events = until("its place is free", || {
        let answer = send(second, &keys["a"], "GET", "/v1/jobs/large/events", None);
        (answer.status != 429).then_some(answer)
    });
    assert!(events.text.contains("event: done"), "{events:?}");
    // Nobody reads any more.
    for _ in 0..2 {
        assert_eq!(send(second, &keys["a"], "GET", "/v1/files/output-0-large", None).status, 404);
    }
}

/// A text takes its bytes, not a multiple of them. A caller whose result was dropped for those of others is told so.
#[test]
fn results_are_kept_while_they_fit() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", "results.mib_max=1"]);
    }
    setup.wait_for_models(&[ECHO]);
    for gateway in &setup.gateways {
        let put = |id: &str, bytes: usize| {
            let job = json!({"model": ECHO, "inputs": ["x".repeat(bytes)]});
            let done = gateway.send("PUT", &format!("/v1/jobs/{id}"), &[("prefer", "wait=60")], Some(&job));
            assert_eq!(done.json()["state"], "done", "{id}");
        };
        let kept = || gateway.metric("vramq_gateway_results_bytes", "");
        put("first", 400_000);
        until("it counts", || (kept() > 400_000.0).then_some(()));
        assert_eq!(gateway.get("/v1/jobs/first").status, 200);
        put("second", 800_000);
        let gone = until("the first has gone", || {
            let answer = gateway.get("/v1/jobs/first");
            (answer.status == 404).then_some(answer)
        });
        assert!(gone.text.contains("results.mib_max"), "{gone:?}");
        assert_eq!(gateway.get("/v1/jobs/second").status, 200);
    }
}

/// Clients of [`a_connection_whose_client_reads_no_answers_is_closed`].
const DEAF: usize = 20;

/// Requests that each of them sends at once: for 20 MiB and more, which no buffer of the system holds.
const REQUESTS: usize = 250;

/// They ask and read nothing, also without a key. The time that a request's head may take does not end them: it does not run while an
/// answer waits.
#[test]
fn a_connection_whose_client_reads_no_answers_is_closed() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.send_timeout_s=2"]);
    }
    let requests = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(REQUESTS);
    let address = |gateway: &Gateway| gateway.url.trim_start_matches("http://").to_owned();
    let deaf: Vec<_> = setup
        .gateways
        .iter()
        .flat_map(|gateway| (0..DEAF).map(move |_| address(gateway)))
        .map(|address| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(requests.as_bytes()).unwrap();
            stream
        })
        .collect();
    for gateway in &setup.gateways {
        until("they are closed", || (gateway.metric("vramq_gateway_connections ", "") == 1.0).then_some(()));
    }
    drop(deaf);
}
