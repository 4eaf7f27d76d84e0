//! Results and uploads in an object store, instead of a folder: against a real S3 server.

use serde_json::json;
use vramq_tests::object_server::{BUCKET, KEY, ObjectServer};

use crate::harness::{ECHO, Setup};
use crate::jobs::{
    an_uploaded_file_is_an_input_of_a_job, every_gateway_answers_for_a_job_that_has_ended, send, upload,
};

/// The settings of a table for a place in the server's bucket.
fn place(setup: &Setup, server: &ObjectServer, table: &str, prefix: &str) -> Vec<String> {
    let secret = setup.folder.path().join("secret");
    std::fs::write(&secret, KEY).expect("written");
    vec![
        format!("{table}.url=s3://{BUCKET}/{prefix}"),
        format!("{table}.endpoint={}", server.endpoint()),
        format!("{table}.access_key_id={KEY}"),
        format!("{table}.secret_file={}", secret.display()),
    ]
}

#[test]
fn with_an_object_store_every_gateway_answers_for_a_job_that_has_ended() {
    let (setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let settings = place(&setup, &server, "results", "results");
    every_gateway_answers_for_a_job_that_has_ended(setup, &settings);
    let listed = ureq::get(&format!("{}/{BUCKET}?list-type=2", server.endpoint())).call().expect("a list");
    let listed = listed.into_string().expect("a text");
    assert!(listed.contains("<Key>results/a/one.json</Key>"), "{listed}");
}

#[test]
fn a_file_that_was_uploaded_into_an_object_store_is_an_input_of_a_job() {
    let (setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let worker = place(&setup, &server, "store.uploads", "uploads");
    let gateway = place(&setup, &server, "files", "uploads");
    an_uploaded_file_is_an_input_of_a_job(setup, &worker, &gateway);
}

/// The names of results are known: a caller must not have a worker read another's.
#[test]
fn callers_cannot_name_what_the_gateway_stores() {
    let (mut setup, server) = (Setup::new(), ObjectServer::start().expect("an S3 server"));
    let settings =
        [place(&setup, &server, "results", "kept/results"), place(&setup, &server, "files", "uploads")]
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
        // The worker has no store, so that the model gets the reference.
        ("kept/other", 200),
    ] {
        let job = json!({"model": ECHO, "inputs": [{"uri": format!("s3://{BUCKET}/{key}")}]});
        assert_eq!(send(setup.next(), "", "POST", "/v1/jobs", Some(&job)).status, status, "{key}");
    }
}
