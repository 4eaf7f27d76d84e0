//! Uploads: stored, referred to by jobs, and removed.

use std::collections::HashMap;

use serde_json::json;

use crate::harness::{Answer, ECHO, Gateway, Setup};
use crate::jobs::set;
use crate::keys::{key_file, send, until_served, with_keys};

/// What comes before the content of an uploaded file: a form whose boundary is `b`, as OpenAI's clients send it.
pub fn form_begin(name: &str) -> String {
    format!(
        "--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nuser_data\r\n\
         --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\nContent-Type: text/html\r\n\r\n"
    )
}

/// What comes after it.
pub const FORM_END: &str = "\r\n--b--\r\n";

pub fn upload(gateway: &Gateway, key: &str, content: &[u8]) -> Answer {
    let body = [form_begin("x.html").as_bytes(), content, FORM_END.as_bytes()].concat();
    let request = ureq::post(&format!("{}/v1/files", gateway.url));
    let request = request.set("authorization", key).set("content-type", "multipart/form-data; boundary=b");
    Answer::of(request.send_bytes(&body))
}

#[test]
fn a_file_is_stored_referred_to_and_removed() {
    let (setup, keys) = with_keys(&[("a", ""), ("b", "")]);
    until_served(&setup, &keys["a"], ECHO);
    for (gateway, other) in [(0, 1), (1, 0)].map(|(at, other)| (&setup.gateways[at], &setup.gateways[other]))
    {
        a_file_is_stored_referred_to_and_removed_at(gateway, other, &keys);
    }
}

/// Both gateways have the folder, so either has the file.
fn a_file_is_stored_referred_to_and_removed_at(
    gateway: &Gateway,
    other: &Gateway,
    keys: &HashMap<String, String>,
) {
    let key = &keys["a"];
    let stored = upload(gateway, key, b"<script>");
    assert_eq!(stored.status, 200, "{stored:?}");
    let file = stored.json();
    assert_eq!(
        (&file["object"], &file["bytes"], &file["filename"]),
        (&json!("file"), &json!(8), &json!("x.html"))
    );
    let id = file["id"].as_str().unwrap();
    let read = send(other, key, "GET", &format!("/v1/files/{id}/content"), None);
    assert_eq!((read.text.as_str(), read.header("content-disposition")), ("<script>", Some("attachment")));
    assert_eq!(read.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(send(other, &keys["b"], "GET", &format!("/v1/files/{id}"), None).status, 404);
    let by_reference = json!({"model": ECHO, "inputs": [{"uri": id}]});
    let job = send(other, key, "POST", "/v1/jobs", Some(&by_reference)).json();
    let uri = job["outputs"][0]["uri"].as_str().unwrap_or_else(|| panic!("{job}"));
    assert_eq!(std::fs::read(uri.strip_prefix("file://").unwrap()).unwrap(), b"<script>");
    assert_eq!(send(other, &keys["b"], "POST", "/v1/jobs", Some(&by_reference)).status, 404);
    for foreign in ["file:///etc/passwd", "FILE:/etc/passwd", "/etc/passwd"] {
        let body = json!({"model": ECHO, "inputs": [{"uri": foreign}]});
        assert_eq!(send(gateway, key, "POST", "/v1/jobs", Some(&body)).status, 400, "{foreign}");
    }
    assert_eq!(upload(gateway, key, &vec![0; 1024 * 1024 + 1]).status, 413);
    // A gateway knows its own jobs.
    let keyed = |input: &str| {
        let (headers, body) = (
            [("authorization", key.as_str()), ("idempotency-key", "k"), ("prefer", "wait=60")],
            json!({"model": ECHO, "inputs": [{"uri": input}]}),
        );
        gateway.send("POST", "/v1/jobs", &headers, Some(&body))
    };
    let first = keyed(id).json();
    let put = || send(gateway, key, "PUT", "/v1/jobs/by-upload", Some(&by_reference));
    let named = put().json();
    assert_eq!((&first["state"], &named["state"]), (&json!("done"), &json!("done")), "{first} {named}");
    assert_eq!(send(other, key, "DELETE", &format!("/v1/files/{id}"), None).json()["deleted"], json!(true));
    assert_eq!(send(gateway, key, "GET", &format!("/v1/files/{id}"), None).status, 404);
    // The answer stands: the upload is needed for a new job alone.
    assert_eq!((keyed(id).json(), put().json()), (first, named));
    assert_eq!(keyed("file-another").status, 422);
    assert_eq!(send(other, key, "POST", "/v1/jobs", Some(&by_reference)).status, 404);
}

#[test]
fn a_key_leaves_room_for_the_uploads_of_others() {
    let mut setup = Setup::new();
    let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
    let folder = setup.folder.path().join("files");
    let (keys_of, files) =
        (format!("http.keys={}", path.display()), format!("files.folder={}", folder.display()));
    let limits = ["files.file_mib_max=1".to_owned(), "files.mib_max_per_key=1".to_owned()];
    for _ in 0..2 {
        setup.gateway(&set(&[&[keys_of.clone(), files.clone()][..], &limits].concat()));
    }
    // One gateway: others count what it has stored from their next sweep on.
    let (gateway, large) = (&setup.gateways[0], vec![0; 700 * 1024]);
    let first = upload(gateway, &keys["a"], &large);
    assert_eq!(first.status, 200, "{first:?}");
    // One byte more than there is room for: the refusal comes when all has been sent. One that comes before that breaks the connection.
    let second = upload(gateway, &keys["a"], &vec![0; 324 * 1024 + 1]);
    assert_eq!((second.status, second.header("x-should-retry")), (507, Some("false")), "{second:?}");
    assert!(second.text.contains("files.mib_max_per_key"), "{second:?}");
    assert_eq!(upload(gateway, &keys["b"], &large).status, 200);
    let id = first.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(send(gateway, &keys["a"], "DELETE", &format!("/v1/files/{id}"), None).status, 200);
    assert_eq!(upload(gateway, &keys["a"], &large).status, 200);
}

/// Without any settings: the gateways of a user have a folder, and jobs take the bytes along, because no worker has it as a store.
#[test]
fn an_upload_goes_with_the_job_by_default() {
    let setup = Setup::with(&[ECHO]);
    let stored = |gateway: &Gateway, content: &[u8]| {
        let stored = upload(gateway, "", content);
        assert_eq!(stored.status, 200, "{stored:?}");
        stored.json()["id"].as_str().unwrap().to_owned()
    };
    let run = |gateway: &Gateway, inputs: &[&str]| {
        let inputs: Vec<_> = inputs.iter().map(|id| json!({"uri": id})).collect();
        send(gateway, "", "POST", "/v1/jobs", Some(&json!({"model": ECHO, "inputs": inputs})))
    };
    let id = stored(setup.next(), b"what was uploaded");
    // The base64 of it, by `printf 'what was uploaded' | base64`.
    let bytes = json!({"bytes": "d2hhdCB3YXMgdXBsb2FkZWQ=", "media_type": "application/octet-stream"});
    for gateway in &setup.gateways {
        let answer = run(gateway, &[&id, &id]);
        assert_eq!(answer.json()["outputs"], json!([bytes, bytes]), "{answer:?}");
    }
    let folder = setup.state.join("vramq/uploads");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&folder).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700, "nobody else looks into it");
    // As large as a job may be, and two that are too large together.
    let large = vec![0; 9 << 20];
    assert_eq!(upload(setup.next(), "", &vec![0; (16 << 20) + 1]).status, 413);
    let ids = [stored(setup.next(), &large), stored(setup.next(), &large)];
    for gateway in &setup.gateways {
        for inputs in [[&*ids[0], &*ids[1]], [&*ids[0], &*ids[0]]] {
            let refused = run(gateway, &inputs);
            assert_eq!(
                (refused.status, &refused.json()["error"]["code"]),
                (413, &json!("too_large")),
                "{refused:?}"
            );
            assert!(refused.text.contains("files.folder"), "{refused:?}");
        }
        assert_eq!(run(gateway, &["file-another"]).status, 404);
    }
    for id in ids.iter().chain([&id]) {
        assert_eq!(send(setup.next(), "", "DELETE", &format!("/v1/files/{id}"), None).status, 200);
    }
    assert_eq!(run(setup.next(), &[&id]).status, 404);
}

/// It serves, and the answer says what to set.
#[test]
fn a_gateway_that_cannot_have_a_folder_takes_no_uploads() {
    let mut setup = Setup::new();
    std::fs::write(&setup.state, "no folder").unwrap();
    setup.worker(&[ECHO], &[]);
    setup.gateway(&[]);
    setup.gateway(&["--set", "files.folder=off"]);
    setup.wait_for_models(&[ECHO]);
    for (gateway, warnings) in setup.gateways.iter().zip([1, 0]) {
        let refused = upload(gateway, "", b"x");
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (404, &json!("no_files")));
        for key in ["files.folder", "files.url", "[store.NAME]"] {
            assert!(refused.text.contains(key), "{refused:?}");
        }
        // From now on the log has what came before.
        gateway.lines();
        let log = gateway.program.log();
        assert_eq!(log.matches("this gateway takes no uploads").count(), warnings, "{log}");
        let job = json!({"model": ECHO, "inputs": ["x"]});
        assert_eq!(send(gateway, "", "POST", "/v1/jobs", Some(&job)).json()["state"], "done");
    }
}

#[test]
fn a_file_that_was_uploaded_into_a_folder_is_an_input_of_a_job() {
    let setup = Setup::new();
    // Its name needs escapes.
    let folder = setup.folder.path().join("up loads #1");
    let escaped = folder.display().to_string().replace(' ', "%20").replace('#', "%23");
    let worker = [format!("store.uploads.url=file://{escaped}")];
    an_uploaded_file_is_an_input_of_a_job(setup, &worker, &[format!("files.folder={}", folder.display())]);
}

/// Gateways keep what is uploaded where their settings say, and workers that have the place as a store give its bytes to the model.
pub fn an_uploaded_file_is_an_input_of_a_job(mut setup: Setup, worker: &[String], gateway: &[String]) {
    setup.worker(&[ECHO], &set(worker));
    for _ in 0..2 {
        setup.gateway(&set(gateway));
    }
    setup.wait_for_models(&[ECHO]);
    let stored = upload(setup.next(), "", b"what was uploaded");
    assert_eq!(stored.status, 200, "{stored:?}");
    let id = stored.json()["id"].clone();
    let job = json!({"model": ECHO, "inputs": ["inline", {"uri": id}]});
    let answer = send(setup.next(), "", "POST", "/v1/jobs", Some(&job)).json();
    // The base64 of what was uploaded, by `printf 'what was uploaded' | base64`.
    let bytes = json!({"bytes": "d2hhdCB3YXMgdXBsb2FkZWQ=", "media_type": "application/octet-stream"});
    assert_eq!(answer["outputs"], json!([{"json": "inline"}, bytes]), "{answer}");
    // Every gateway gives it back, and removes it.
    let (file, content) =
        (format!("/v1/files/{}", id.as_str().unwrap()), |path: &str| format!("{path}/content"));
    parts_are_sent(&setup, "", &content(&file), "what was uploaded");
    assert_eq!(send(setup.next(), "", "DELETE", &file, None).json()["deleted"], json!(true));
    assert_eq!(send(setup.next(), "", "GET", &content(&file), None).status, 404);
}

/// Every gateway sends a file of text, and parts of it to clients that go on with a download.
pub fn parts_are_sent(setup: &Setup, key: &str, path: &str, whole: &str) {
    let ask = |method: &str, headers: &[(&str, &str)]| {
        let headers = [&[("authorization", key)][..], headers].concat();
        setup.next().send(method, path, &headers, None)
    };
    let (bytes, first) = (whole.len(), ask("GET", &[]));
    assert_eq!(
        (first.status, first.text.as_str(), first.header("accept-ranges")),
        (200, whole, Some("bytes"))
    );
    let etag = first.header("etag").expect("a validator");
    for (range, part) in [
        // Not `0-0`: s3rver takes that for the whole object.
        ("bytes=0-1", 0..2),
        ("bytes=2-5", 2..6),
        ("bytes=3-", 3..bytes),
        ("bytes=-4", bytes - 4..bytes),
        ("bytes=0-99999999999999999999", 0..bytes),
    ] {
        for _ in &setup.gateways {
            let answer = ask("GET", &[("range", range), ("if-range", etag)]);
            assert_eq!((answer.status, answer.text.as_str()), (206, &whole[part.clone()]), "{range}");
            let (length, content) =
                (part.len().to_string(), format!("bytes {}-{}/{bytes}", part.start, part.end - 1));
            for (name, value) in [
                ("content-range", Some(content.as_str())),
                ("content-length", Some(length.as_str())),
                ("etag", Some(etag)),
                ("repr-digest", first.header("repr-digest")),
                ("content-disposition", Some("attachment")),
            ] {
                assert_eq!(answer.header(name), value, "{range}: {name}");
            }
        }
    }
    for range in ["bytes=999999-", "bytes=-0"] {
        let refused = ask("GET", &[("range", range)]);
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (416, &json!("range")), "{range}");
        assert_eq!(refused.header("content-range"), Some(format!("bytes */{bytes}").as_str()));
    }
    let other = "\"other\"";
    for headers in [
        &[("range", "bytes=5-2")][..],
        &[("range", "lines=1-2")],
        &[("range", "bytes=0-1,3-4")],
        &[("range", "bytes=0-1"), ("if-range", other)],
    ] {
        let answer = ask("GET", headers);
        assert_eq!((answer.status, answer.text.as_str()), (200, whole), "{headers:?}");
        assert_eq!(answer.header("content-range"), None, "{headers:?}");
    }
    let head = ask("HEAD", &[("range", "bytes=0-1")]);
    assert_eq!((head.status, head.text.as_str()), (200, ""));
    assert_eq!(head.header("content-length"), Some(bytes.to_string().as_str()));
}

#[test]
fn a_place_that_cannot_store_an_upload_is_named_in_the_log() {
    let mut setup = Setup::new();
    let folder = setup.folder.path().join("files");
    setup.gateway(&["--set", &format!("files.folder={}", folder.display())]);
    // In the place of the caller's folder.
    std::fs::write(folder.join("local"), "").unwrap();
    let gateway = &setup.gateways[0];
    let refused = upload(gateway, "", b"x");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (502, &json!("store")), "{refused:?}");
    let lines = gateway.lines();
    let told = lines.iter().find(|line| line["level"] == "ERROR").expect("an ERROR");
    assert_eq!(told["message"], "the place of uploads cannot store the file", "{told}");
    assert_eq!(told["place"], json!(folder), "{told}");
}
