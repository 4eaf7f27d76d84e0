//! Results and uploads in an object store, instead of a folder: against a real S3 server.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;
use vramq_tests::object_server::{BUCKET, KEY, ObjectServer};

use crate::files::{an_uploaded_file_is_an_input_of_a_job, upload};
use crate::harness::{ECHO, Gateway, Setup, until};
use crate::jobs::{every_gateway_answers_for_a_job_that_has_ended, set};
use crate::keys::send;
use crate::output_files::outputs_of;
use crate::request_gate::RequestGate;
use crate::withdrawals::send as send_only;

/// The settings of a table for a place in the server's bucket.
fn place(setup: &Setup, server: &ObjectServer, table: &str, prefix: &str) -> Vec<String> {
    place_at(setup, &server.endpoint(), table, prefix)
}

/// The same, with the server behind another endpoint.
fn place_at(setup: &Setup, endpoint: &str, table: &str, prefix: &str) -> Vec<String> {
    let secret = setup.folder.path().join("secret");
    std::fs::write(&secret, KEY).expect("written");
    vec![
        format!("{table}.url=s3://{BUCKET}/{prefix}"),
        format!("{table}.endpoint={endpoint}"),
        format!("{table}.access_key_id={KEY}"),
        format!("{table}.secret_file={}", secret.display()),
    ]
}

#[test]
fn with_an_object_store_every_gateway_answers_for_a_job_that_has_ended() {
    let (setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let settings = place(&setup, &server, "results", "results");
    every_gateway_answers_for_a_job_that_has_ended(setup, &settings);
    let stored = keys(&server);
    assert!(stored.contains(&"results/a/one.json".to_owned()), "{stored:?}");
}

#[test]
fn a_file_that_was_uploaded_into_an_object_store_is_an_input_of_a_job() {
    let (setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let worker = place(&setup, &server, "store.uploads", "uploads");
    let gateway = place(&setup, &server, "files", "uploads");
    an_uploaded_file_is_an_input_of_a_job(setup, &worker, &gateway);
}

/// An object store takes its time for each lookup, and a job may have many inputs.
#[test]
fn uploads_of_a_job_are_looked_up_together_and_each_once() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let gate = RequestGate::to(&server.endpoint(), "GET /jobs/uploads/", false);
    let settings = place_at(&setup, &gate.endpoint(), "files", "uploads");
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    setup.wait_for_models(&[ECHO]);
    let ids: [_; 2] = std::array::from_fn(|_| upload(setup.next(), "", b"x").json()["id"].clone());
    let inputs: Vec<_> = (0..20).map(|at| json!({"uri": ids[at % 2]})).collect();
    // What is wrong in itself is refused without any lookup.
    let own = format!("s3://{BUCKET}/uploads/a/file-0");
    for (wrong, status) in [("/etc/passwd", 400), ("output-1", 400), (own.as_str(), 400), ("file-1", 404)] {
        let with_wrong = [inputs.clone(), vec![json!({"uri": wrong})]].concat();
        let job = json!({"model": ECHO, "inputs": with_wrong});
        assert_eq!(send(setup.next(), "", "POST", "/v1/jobs", Some(&job)).status, status, "{wrong}");
    }
    let unknown = json!({"model": "nobody-has-this", "inputs": inputs});
    assert_eq!(send(setup.next(), "", "POST", "/v1/jobs", Some(&unknown)).status, 404);
    assert_eq!(gate.seen(), 0);
    let job = json!({"model": ECHO, "inputs": inputs});
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| send(setup.next(), "", "POST", "/v1/jobs", Some(&job)));
        // None of them has been answered yet.
        until("both uploads are looked up", || (gate.seen() == 2).then_some(()));
        gate.open();
        asked.join().expect("an answer")
    });
    assert_eq!(answer.json()["outputs"].as_array().map(Vec::len), Some(20), "{answer:?}");
    assert_eq!(gate.seen(), 2);
}

#[test]
fn an_output_in_an_object_store_is_downloaded_by_its_key_from_every_gateway() {
    let (setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let worker = place(&setup, &server, "store.out", "out/deep");
    let gateway = place(&setup, &server, "outputs", "out/deep");
    outputs_of(setup, &worker, &gateway);
    assert_eq!(keys(&server).len(), 4, "nothing was removed");
}

/// The keys of the bucket's objects.
fn keys(server: &ObjectServer) -> Vec<String> {
    let listed = ureq::get(&format!("{}/{BUCKET}?list-type=2", server.endpoint())).call().expect("a list");
    let listed = listed.into_string().expect("a text");
    let keys = listed.split("<Key>").skip(1).filter_map(|rest| rest.split("</Key>").next());
    keys.map(str::to_owned).collect()
}

/// Uploads a file of two parts, and hangs up while the gate holds the second one.
fn hang_up_at_the_end(gateway: &Gateway, gate: &RequestGate, server: &ObjectServer, content: &[u8]) {
    let form =
        ["--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n", "\r\n--b--\r\n"];
    let length = form[0].len() + content.len() + form[1].len();
    let mut caller = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    write!(
        caller,
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n\
         content-length: {length}\r\n\r\n{}",
        form[0]
    )
    .unwrap();
    caller.write_all(content).unwrap();
    caller.write_all(form[1].as_bytes()).unwrap();
    until("the upload ends", || (gate.seen() > 0).then_some(()));
    assert_eq!(server.unfinished_uploads().unwrap(), 1);
    hang_up(gateway, caller);
}

fn hang_up(gateway: &Gateway, caller: TcpStream) {
    drop(caller);
    // The connection that asks is one, too.
    until("the gateway knows that its caller is gone", || {
        (gateway.metric("vramq_gateway_connections", "") == 1.0).then_some(())
    });
}

/// Stops a gateway that works for a caller who has hung up. The gate lets the work go on as soon as the gateway waits for it.
fn stop_during_work(gateway: &mut Gateway, gate: &RequestGate) {
    gateway.program.signal("TERM");
    until("the gateway waits for its work", || {
        gateway.program.log().contains("waiting for work that goes on without its request").then_some(())
    });
    gate.open();
    assert_eq!(gateway.program.wait(), Some(0));
}

/// The first part of an upload is sent as soon as it is there, the rest when the upload ends.
const SECOND_PART: &str = "partNumber=2";

#[test]
fn nothing_stays_of_an_upload_whose_caller_hangs_up_at_its_end() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let gate = RequestGate::to(&server.endpoint(), SECOND_PART, false);
    let settings = place_at(&setup, &gate.endpoint(), "files", "uploads");
    setup.gateway(&set(&settings));
    let (gateway, content) = (&setup.gateways[0], vec![7; 6 << 20]);
    hang_up_at_the_end(gateway, &gate, &server, &content);
    gate.open();
    until("nothing is left", || {
        (server.unfinished_uploads().unwrap() == 0 && keys(&server).is_empty()).then_some(())
    });
    let stored = upload(gateway, "", &content);
    assert_eq!((stored.status, server.unfinished_uploads().unwrap(), keys(&server).len()), (200, 0, 2));
}

#[test]
fn a_gateway_that_stops_removes_an_upload_whose_caller_hung_up() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let gate = RequestGate::to(&server.endpoint(), SECOND_PART, false);
    let settings = place_at(&setup, &gate.endpoint(), "files", "uploads");
    setup.gateway(&set(&settings));
    hang_up_at_the_end(&setup.gateways[0], &gate, &server, &vec![7; 6 << 20]);
    stop_during_work(&mut setup.gateways[0], &gate);
    assert_eq!((server.unfinished_uploads().unwrap(), keys(&server).len()), (0, 0));
}

#[test]
fn a_gateway_that_stops_stores_a_withdrawal_whose_caller_hung_up() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let gate = RequestGate::to(&server.endpoint(), "PUT /jobs/results/local/mine.json", false);
    let settings = place_at(&setup, &gate.endpoint(), "results", "results");
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("STOP");
    let job = json!({"model": ECHO, "inputs": ["x"]});
    let accepted = setup.gateways[0].send("PUT", "/v1/jobs/mine", &[], Some(&job));
    assert_eq!(accepted.status, 202, "{accepted:?}");
    let caller = send_only(&setup.gateways[0], "DELETE", "/v1/jobs/mine", "");
    until("the withdrawal is being stored", || (gate.seen() > 0).then_some(()));
    hang_up(&setup.gateways[0], caller);
    stop_during_work(&mut setup.gateways[0], &gate);
    assert_eq!(setup.gateways[1].get("/v1/jobs/mine").json()["state"], "withdrawn");
}

#[test]
fn old_objects_are_removed_with_few_requests() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let gate = RequestGate::to(&server.endpoint(), "?delete", true);
    let put = |key: &str| {
        let sent = ureq::put(&format!("{}/{BUCKET}/{key}", server.endpoint())).send_bytes(b"{}");
        assert_eq!(sent.expect("stored").status(), 200);
    };
    for number in 0..20 {
        put(&format!("results/a/job-{number}.json"));
    }
    put("results/a/theirs.txt");
    let stored = Instant::now();
    until("all of it is old", || (stored.elapsed() > Duration::from_secs(2)).then_some(()));
    let mut settings = place_at(&setup, &gate.endpoint(), "results", "results");
    settings.push("results.keep_s=1".to_owned());
    setup.gateway(&set(&settings));
    until("what is old is removed", || (keys(&server) == ["results/a/theirs.txt"]).then_some(()));
    assert_eq!(gate.seen(), 1);
}

/// Names of results are guessable, so no caller may have a worker read another's.
#[test]
fn callers_cannot_name_what_the_gateway_stores() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let settings = [
        place(&setup, &server, "results", "kept/results"),
        place(&setup, &server, "files", "uploads"),
        place(&setup, &server, "outputs", "out"),
    ]
    .concat();
    setup.worker(&[ECHO], &[]);
    let options: Vec<_> = settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect();
    setup.gateway(&options);
    setup.gateway(&options);
    setup.wait_for_models(&[ECHO]);
    // More than a part of an upload to an object store.
    let stored = upload(setup.next(), "", &vec![7; 6 << 20]);
    assert_eq!((stored.status, &stored.json()["bytes"]), (200, &json!(6 << 20)), "{stored:?}");
    for (key, status) in [
        ("kept/results/a/one.json", 400),
        ("kept/other/../%72esults/a/one.json", 400),
        ("uploads/a/file-0", 400),
        ("out/name-0", 400),
        // The worker has no store, so that the model gets the reference.
        ("kept/other", 200),
    ] {
        let job = json!({"model": ECHO, "inputs": [{"uri": format!("s3://{BUCKET}/{key}")}]});
        assert_eq!(send(setup.next(), "", "POST", "/v1/jobs", Some(&job)).status, status, "{key}");
    }
}
