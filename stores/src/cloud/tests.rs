//! Tests of object stores: their options, and what each answer of a server means.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::mpsc;

use super::*;

fn options() -> CloudOptions {
    CloudOptions { is_anonymous: true, timeout: PATIENT, ..CloudOptions::default() }
}

fn opened(url: &str, options: &CloudOptions) -> Result<CloudStore, InvalidOption> {
    CloudStore::open(&url.parse().unwrap(), options)
}

/// What `get` returns when the server sends these answers, one per connection; and the first line of each request.
fn answered(answers: &[&str], timeout: Duration) -> (Result<Vec<u8>, Fault>, Vec<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let answers: Vec<_> = answers.iter().map(|&answer| answer.to_owned()).collect();
    let (told, requests) = mpsc::channel();
    std::thread::spawn(move || {
        // Connections without an answer stay open until the test ends.
        let mut silent = Vec::new();
        for answer in answers {
            let (stream, _) = listener.accept().unwrap();
            let mut stream = BufReader::new(stream);
            let (mut request, mut line) = (String::new(), String::new());
            stream.read_line(&mut request).unwrap();
            while stream.read_line(&mut line).unwrap() > 2 {
                line.clear();
            }
            // `Err` means that the test has ended.
            let _ = told.send(request.trim_end().to_owned());
            match answer.as_str() {
                "" => silent.push(stream),
                answer => stream.get_mut().write_all(answer.as_bytes()).unwrap(),
            }
        }
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let options = CloudOptions { endpoint: Some(endpoint.parse().unwrap()), timeout, ..options() };
    let store = opened("s3://bucket/in", &options).unwrap();
    let reference = Reference::parse("s3://bucket/in/a%20b").unwrap();
    let got = runtime.block_on(async {
        let read = move || {
            let (mut body, length) = store.get(&reference)?;
            let mut bytes = Vec::new();
            let read = body.read_to_end(&mut bytes);
            read.map_err(|error| Fault::Unavailable(format!("read: {error}")))?;
            assert_eq!(bytes.len() as u64, length);
            Ok(bytes)
        };
        tokio::task::spawn_blocking(read).await.unwrap()
    });
    (got, requests.try_iter().collect())
}

fn head(status: &str, more: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\n{more}\r\n"
    )
}

const PATIENT: Duration = Duration::from_secs(20);

#[test]
fn an_object_is_read_and_a_fault_that_passes_is_tried_again() {
    let object = head("200 OK", "Content-Length: 4\r\n") + "test";
    let busy = head("503 Slow Down", "Content-Length: 0\r\n");
    let (got, requests) = answered(&[&busy, &object], PATIENT);
    assert_eq!(got.as_deref(), Ok(&b"test"[..]));
    assert_eq!(requests, vec!["GET /bucket/in/a%20b HTTP/1.1"; 2]);
}

#[test]
fn a_request_that_can_never_succeed_is_sent_once() {
    let redirect =
        head("307 Temporary Redirect", "Location: http://127.0.0.1:1/secret\r\nContent-Length: 0\r\n");
    for (answer, expected) in [
        (redirect, "the store answers s3://bucket/in/a%20b with a redirect (307)"),
        (head("400 Bad Request", "Content-Length: 0\r\n"), "with 400"),
        (head("403 Forbidden", "Content-Length: 0\r\n"), "denies access to s3://bucket/in/a%20b"),
    ] {
        let (got, requests) = answered(&[&answer, &answer], PATIENT);
        let fault = got.unwrap_err();
        assert!(matches!(&fault, Fault::Denied(what) if what.contains(expected)), "{fault:?}");
        assert_eq!(requests.len(), 1, "{requests:?}");
    }
    let (got, _) = answered(&[&head("404 Not Found", "Content-Length: 0\r\n")], PATIENT);
    assert_eq!(got, Err(Fault::Missing("the store has no s3://bucket/in/a%20b".to_owned())));
}

#[test]
fn a_store_that_rejects_the_credentials_is_unavailable() {
    let body = "<Error><Code>ExpiredToken</Code></Error>";
    let expired = head("400 Bad Request", &format!("Content-Length: {}\r\n", body.len())) + body;
    for (answer, expected) in
        [(expired, "ExpiredToken"), (head("401 Unauthorized", "Content-Length: 0\r\n"), "status 401")]
    {
        let (got, requests) = answered(&[&answer, &answer], PATIENT);
        assert!(matches!(&got, Err(Fault::Unavailable(what)) if what.contains(expected)), "{got:?}");
        assert_eq!(requests.len(), 1, "{requests:?}");
    }
}

#[test]
fn a_store_that_does_not_answer_in_time_is_unavailable() {
    let (got, _) = answered(&["", "", ""], Duration::from_secs(1));
    assert!(matches!(&got, Err(Fault::Unavailable(_))), "{got:?}");
    let begun = head("200 OK", "Content-Length: 9\r\n") + "test";
    let (got, _) = answered(&[&begun, "", ""], Duration::from_secs(1));
    assert!(matches!(&got, Err(Fault::Unavailable(_))), "{got:?}");
}

#[test]
fn options_that_do_not_belong_together_are_named() {
    let with = |set: &dyn Fn(&mut CloudOptions)| {
        let mut options = options();
        set(&mut options);
        options
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.path().join(name), text).unwrap();
        Some(folder.path().join(name))
    };
    let (empty, key, text) = (file("empty", "\n"), file("key", "hunter2\n"), file("text", "{\"hunter2\""));
    for (url, options, expected) in [
        ("s3:///prefix", options(), "url"),
        ("s3://bucket:80/prefix", options(), "url"),
        ("s3://bucket/a//b", options(), "url"),
        ("s3://bucket", with(&|o| o.account = Some("a".into())), "account"),
        ("gs://bucket", with(&|o| o.region = Some("r".into())), "region"),
        ("az://bucket", with(&|o| o.access_key_id = Some("k".into())), "anonymous"),
        ("s3://bucket", with(&|o| o.endpoint = "ftp://h".parse().ok()), "endpoint"),
        ("s3://bucket", with(&|o| (o.is_anonymous, o.secret_file) = (false, key.clone())), "secret_file"),
        (
            "s3://bucket",
            with(&|o| (o.is_anonymous, o.access_key_id) = (false, Some("k".into()))),
            "access_key_id",
        ),
        ("gs://bucket", with(&|o| (o.is_anonymous, o.secret_file) = (false, text.clone())), "url"),
        ("az://c", with(&|o| (o.is_anonymous, o.secret_file) = (false, empty.clone())), "secret_file"),
        (
            "az://c",
            with(&|o| (o.is_anonymous, o.secret_file) = (false, Some("/nowhere".into()))),
            "secret_file",
        ),
    ] {
        let invalid = opened(url, &options).expect_err(url);
        assert_eq!(invalid.key, expected, "{url}: {invalid}");
        assert!(!invalid.to_string().contains("hunter2"), "{invalid}");
    }
    let key =
        with(&|o| (o.is_anonymous, o.access_key_id, o.secret_file) = (false, Some("id".into()), key.clone()));
    let store = opened("s3://bucket/prefix/", &key).unwrap();
    assert_eq!(format!("{store:?}"), "CloudStore { url: \"s3://bucket/prefix/\", .. }");
    assert!(opened("gs://bucket", &options()).is_ok());
    assert!(opened("az://c", &with(&|o| o.account = Some("account".into()))).is_ok());
}

#[test]
fn stores_overlap_where_one_is_in_the_other() {
    let store = |url: &str| opened(url, &options()).unwrap();
    let jobs = store("s3://bucket/jobs");
    for other in ["s3://bucket", "s3://bucket/", "s3://bucket/jobs/", "s3://bucket/jobs/in"] {
        assert!(jobs.overlaps(&store(other)) && store(other).overlaps(&jobs), "{other}");
    }
    for other in ["s3://bucket/jobsx", "s3://bucket/in", "s3://other/jobs", "gs://bucket/jobs"] {
        assert!(!jobs.overlaps(&store(other)) && !store(other).overlaps(&jobs), "{other}");
    }
    let elsewhere = CloudOptions { endpoint: "http://minio:9000".parse().ok(), ..options() };
    assert!(!jobs.overlaps(&opened("s3://bucket/jobs", &elsewhere).unwrap()));
}
