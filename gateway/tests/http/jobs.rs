//! Jobs, their events and files: ids, owners, and repeated requests.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::TENANT;

use crate::harness::{Answer, ECHO, Gateway, Setup, until};
use crate::withdrawals::listen;

fn job() -> Value {
    json!({"model": ECHO, "inputs": ["one", {"bytes": "AAEC"}]})
}

/// Settings as options of a program.
pub fn set(settings: &[String]) -> Vec<&str> {
    settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect()
}

fn ended(gateway: &Gateway, id: &str) -> Value {
    until("the job ends", || {
        let job = gateway.get(&format!("/v1/jobs/{id}")).json();
        matches!(job["state"].as_str(), Some("done" | "failed" | "withdrawn")).then_some(job)
    })
}

/// The events of a job until its last: number, name, data.
fn events(gateway: &Gateway, id: &str, after: Option<u64>) -> Vec<(u64, String, Value)> {
    let mut request =
        ureq::get(&format!("{}/v1/jobs/{id}/events", gateway.url)).timeout(Duration::from_secs(60));
    if let Some(after) = after {
        request = request.set("last-event-id", &after.to_string());
    }
    let response = request.call().expect("events");
    assert_eq!(response.content_type(), "text/event-stream");
    let (mut found, mut fields) = (Vec::new(), HashMap::new());
    for line in BufReader::new(response.into_reader()).lines() {
        let line = line.expect("a line");
        if let Some((name, value)) = line.split_once(": ") {
            fields.insert(name.to_owned(), value.to_owned());
        } else if line.is_empty() && fields.contains_key("event") {
            let number = fields["id"].parse().expect("a number");
            found.push((
                number,
                fields["event"].clone(),
                serde_json::from_str(&fields["data"]).expect("JSON"),
            ));
            fields.clear();
        }
    }
    found
}

#[test]
fn a_job_is_accepted_followed_and_read() {
    let setup = Setup::with(&[ECHO]);
    let gateway = &setup.gateways[0];
    let accepted = gateway.post("/v1/jobs", &job());
    assert!(matches!(accepted.status, 200 | 202), "{accepted:?}");
    let id = accepted.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(accepted.header("location"), Some(format!("/v1/jobs/{id}").as_str()));
    let done = ended(gateway, &id);
    let expected = json!([{"json": "one"}, {"bytes": "AAEC", "media_type": "application/octet-stream"}]);
    assert_eq!(
        (&done["state"], &done["outputs"], &done["items_done"]),
        (&json!("done"), &expected, &json!(2))
    );
    let all = events(gateway, &id, None);
    let names: Vec<_> = all.iter().map(|(_, name, _)| name.as_str()).collect();
    assert_eq!((names[0], names[names.len() - 1]), ("queued", "done"), "{all:?}");
    assert!(all[0].2["queue_depth"].is_u64(), "{all:?}");
    let rest = events(gateway, &id, Some(all[0].0));
    assert_eq!(rest, all[1..]);
    assert_eq!(events(gateway, &id, Some(all.len() as u64)), []);
    let elsewhere = setup.gateways[1].get(&format!("/v1/jobs/{id}"));
    assert_eq!(elsewhere.status, 404);
    assert!(elsewhere.json()["error"]["message"].as_str().unwrap().contains("on this gateway"));
}

#[test]
fn a_job_that_asks_for_progress_gets_started_when_it_starts() {
    let mut setup = Setup::new();
    let held = setup.folder.path().join("held");
    std::fs::write(&held, "").unwrap();
    setup.worker(&[ECHO], &["--set", &format!("worker.drill=pass=hang,while={}", held.display())]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    let gateway = setup.next();
    let asks = json!({"model": ECHO, "inputs": ["one"], "params": {"progress": true}});
    let id = gateway.post("/v1/jobs", &asks).json()["id"].as_str().unwrap().to_owned();
    // Its pass hangs: nothing else has come from the worker.
    let running = until("the job is running", || {
        let job = gateway.get(&format!("/v1/jobs/{id}")).json();
        (job["state"] == "running").then_some(job)
    });
    assert_eq!(running["items_done"], 0);
    std::fs::remove_file(&held).unwrap();
    assert_eq!(ended(gateway, &id)["state"], "done");
    let names: Vec<_> = events(gateway, &id, None).into_iter().map(|(_, name, _)| name).collect();
    let names: Vec<_> = names.iter().map(String::as_str).filter(|name| *name != "progress").collect();
    assert_eq!(names, ["queued", "started", "done"]);
}

#[test]
fn with_a_folder_every_gateway_answers_for_a_job_that_has_ended() {
    let setup = Setup::new();
    let folder = setup.folder.path().join("results");
    every_gateway_answers_for_a_job_that_has_ended(setup, &[format!("results.folder={}", folder.display())]);
}

/// The results are where the settings say.
pub fn every_gateway_answers_for_a_job_that_has_ended(mut setup: Setup, settings: &[String]) {
    let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
    let settings = [settings, &[format!("http.keys={}", path.display())]].concat();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    for gateway in &setup.gateways {
        until("the model is served", || {
            let listed = send(gateway, &keys["a"], "GET", "/v1/models", None).json();
            (listed["data"][0]["id"] == ECHO).then_some(())
        });
    }
    let ran = send(&setup.gateways[0], &keys["a"], "PUT", "/v1/jobs/one", Some(&job())).json();
    let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
    let failed = send(&setup.gateways[0], &keys["a"], "PUT", "/v1/jobs/two", Some(&wrong)).json();
    assert_eq!((&ran["state"], &failed["state"]), (&json!("done"), &json!("failed")));
    let other =
        |key: &str, id: &str| send(&setup.gateways[1], &keys[key], "GET", &format!("/v1/jobs/{id}"), None);
    // A caller that hears of the end finds the same on every gateway.
    assert_eq!((other("a", "one").json(), other("a", "two").json()), (ran.clone(), failed));
    assert_eq!((other("b", "one").status, other("a", "three").status), (404, 404));
    let kept = send(&setup.gateways[1], &keys["a"], "DELETE", "/v1/jobs/one", None);
    assert_eq!((kept.status, &kept.json()["state"]), (200, &json!("done")), "what has ended stays");
    // The same request to any gateway is the same job, and another body a mistake.
    let another = json!({"model": ECHO, "inputs": ["another"]});
    let put = |gateway: &Gateway, body: &Value| send(gateway, &keys["a"], "PUT", "/v1/jobs/one", Some(body));
    let keyed = |gateway: &Gateway, body: &Value| {
        let headers =
            [("authorization", keys["a"].as_str()), ("prefer", "wait=60"), ("idempotency-key", "k")];
        gateway.send("POST", "/v1/jobs", &headers, Some(body))
    };
    let first = keyed(setup.next(), &job());
    assert_eq!((first.status, &first.json()["state"]), (200, &json!("done")), "{first:?}");
    for _ in 0..2 * setup.gateways.len() {
        let (again, same) = (put(setup.next(), &job()), keyed(setup.next(), &job()));
        assert_eq!((again.status, again.json()), (200, ran.clone()));
        assert_eq!(again.header("location"), Some("/v1/jobs/one"));
        assert_eq!((same.status, same.json()), (200, first.json()));
    }
    for gateway in &setup.gateways {
        assert_eq!((put(gateway, &another).status, keyed(gateway, &another).status), (422, 422));
    }
    let counted = |end: &str| {
        let ended = setup.gateways.iter().map(|g| g.metric("vramq_gateway_jobs_ended_total", end));
        ended.sum::<f64>()
    };
    assert_eq!((counted("done"), counted("failed")), (2.0, 1.0), "nothing ran again");
    // The gateway that took them is gone, and does not come back.
    setup.gateways[0].program.signal("KILL");
    assert_eq!(other("a", "one").json(), ran);
    assert_eq!(put(&setup.gateways[1], &job()).json(), ran);
}

#[test]
fn a_failed_job_says_why_and_is_not_to_be_sent_again() {
    let setup = Setup::with(&[ECHO]);
    let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
    let gateway = &setup.gateways[0];
    let waited = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&wrong));
    let failed = waited.json();
    assert_eq!((&failed["state"], &failed["error"]["code"]), (&json!("failed"), &json!("invalid-input")));
    let events = events(gateway, failed["id"].as_str().unwrap(), None);
    assert_eq!(events.last().unwrap().1, "failed");
    until("the dead letter is there", || setup.messages("vramq.dead.echo").filter(|n| *n == 1));
}

#[test]
fn the_same_twice_is_one_job() {
    let setup = Setup::with(&[ECHO]);
    let gateway = &setup.gateways[0];
    let put = |id: &str, body: &Value| gateway.send("PUT", &format!("/v1/jobs/{id}"), &[], Some(body));
    assert!(matches!(put("mine-1", &job()).status, 200 | 202));
    ended(gateway, "mine-1");
    let again = put("mine-1", &job());
    assert_eq!((again.status, &again.json()["state"]), (200, &json!("done")));
    assert_eq!(put("mine-1", &json!({"model": ECHO, "inputs": ["another"]})).status, 422);
    assert_eq!(put("no%20name", &job()).status, 400);
    let keyed = |body: &Value| {
        gateway.send("POST", "/v1/jobs", &[("idempotency-key", "k"), ("prefer", "wait=60")], Some(body))
    };
    let (first, second) = (keyed(&job()).json(), keyed(&job()).json());
    assert_eq!((&first["id"], &first["outputs"]), (&second["id"], &second["outputs"]));
    let other = keyed(&json!({"model": ECHO, "inputs": ["another"]}));
    assert_eq!((other.status, other.header("x-should-retry")), (422, Some("false")));
    assert_eq!(gateway.metric("vramq_gateway_jobs_ended_total", "done"), 2.0);
}

/// Writes a file of keys: each with its name and the other lines of its entry. What callers send, by name.
pub fn key_file(folder: &Path, keys: &[(&str, &str)]) -> (PathBuf, HashMap<String, String>) {
    let mut secrets = HashMap::new();
    let mut file = String::new();
    for (name, rest) in keys {
        let (key, entry) = vramq_gateway::keys::new_key(name);
        secrets.insert((*name).to_owned(), format!("Bearer {key}"));
        file.push_str(&format!("{entry}{rest}\n"));
    }
    let path = folder.join("keys.toml");
    std::fs::write(&path, file).unwrap();
    (path, secrets)
}

pub fn with_keys(keys: &[(&str, &str)]) -> (Setup, HashMap<String, String>) {
    let mut setup = Setup::new();
    let (path, secrets) = key_file(setup.folder.path(), keys);
    let folder = setup.folder.path().join("files");
    let (keys, files) =
        (format!("http.keys={}", path.display()), format!("files.folder={}", folder.display()));
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", &keys, "--set", &files, "--set", "files.file_mib_max=1"]);
    }
    (setup, secrets)
}

pub fn send(gateway: &Gateway, key: &str, method: &str, path: &str, body: Option<&Value>) -> Answer {
    gateway.send(method, path, &[("authorization", key), ("prefer", "wait=60")], body)
}

#[test]
fn a_key_gives_access_to_its_callers_jobs_only() {
    let (setup, keys) = with_keys(&[("a", ""), ("b", "models = [\"other\"]"), ("boss", "operator = true")]);
    let gateway = &setup.gateways[0];
    until("the model is served", || {
        let listed = send(gateway, &keys["a"], "GET", "/v1/models", None);
        (listed.json()["data"][0]["id"] == ECHO).then_some(())
    });
    for wrong in ["", "Bearer", "Bearer nothing", "Basic abc", &keys["a"][..20]] {
        let refused = send(gateway, wrong, "GET", "/v1/models", None);
        assert_eq!((refused.status, refused.header("www-authenticate")), (401, Some("Bearer")), "{wrong}");
    }
    let mine = send(gateway, &keys["a"], "PUT", "/v1/jobs/one", Some(&job()));
    assert_eq!(mine.json()["state"], "done", "{mine:?}");
    assert_eq!(send(gateway, &keys["b"], "GET", "/v1/jobs/one", None).status, 404);
    assert_eq!(send(gateway, &keys["b"], "DELETE", "/v1/jobs/one", None).status, 404);
    assert_eq!(send(gateway, &keys["b"], "PUT", "/v1/jobs/one", Some(&job())).status, 403);
    assert_eq!(send(gateway, &keys["b"], "GET", "/v1/models", None).json()["data"], json!([]));
    for (caller, status) in [("a", 403), ("boss", 200)] {
        let letters = send(gateway, &keys[caller], "GET", "/v1/dead-letters?model=echo", None);
        assert_eq!(letters.status, status, "{letters:?}");
    }
    assert_eq!(send(gateway, &keys["a"], "GET", "/v1/status", None).json()["workers"], json!([]));
    let log = setup.gateways[0].program.log();
    assert!(!log.contains(keys["a"].trim_start_matches("Bearer ")), "a key was logged");
    // A key that is taken out of the file ends within seconds; a file with a fault changes nothing.
    let path = setup.folder.path().join("keys.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, "[[key]]\nname = 1").unwrap();
    until("the fault is reported", || {
        gateway.program.log().contains("the keys stay as they were").then_some(())
    });
    assert_eq!(send(gateway, &keys["a"], "GET", "/v1/models", None).status, 200);
    let start = text.find("[[key]]\nname = \"boss\"").unwrap();
    std::fs::write(&path, &text[start..]).unwrap();
    until("the key is out", || {
        (send(gateway, &keys["a"], "GET", "/v1/models", None).status == 401).then_some(())
    });
    assert_eq!(send(gateway, &keys["boss"], "GET", "/v1/models", None).status, 200);
}

#[test]
fn a_caller_has_no_more_than_its_share() {
    let (setup, keys) = with_keys(&[("slow", "requests_per_minute = 2"), ("one", "in_flight_max = 1")]);
    let gateway = &setup.gateways[0];
    until("the model is served", || {
        let listed = send(gateway, &keys["one"], "GET", "/v1/models", None);
        (listed.json()["data"][0]["id"] == ECHO).then_some(())
    });
    let answers: Vec<_> =
        (0..3).map(|_| send(gateway, &keys["slow"], "POST", "/v1/jobs", Some(&json!({})))).collect();
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [400, 400, 429]);
    let after: u64 = answers[2].header("retry-after").unwrap().parse().unwrap();
    assert!((25..=30).contains(&after), "{after}");
    // A job of the only place that there is, on a worker that does nothing.
    setup.workers[0].signal("STOP");
    let held = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
    assert_eq!(held.status, 202, "{held:?}");
    let second = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
    assert_eq!((second.status, &second.json()["error"]["code"]), (429, &json!("too_many_in_flight")));
    setup.workers[0].signal("CONT");
    until("the place is free", || {
        let third = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
        (third.status != 429).then_some(())
    });
}

pub fn upload(gateway: &Gateway, key: &str, content: &[u8]) -> Answer {
    let mut body = b"--b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nuser_data\r\n".to_vec();
    body.extend_from_slice(
        b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x.html\"\r\nContent-Type: text/html\r\n\r\n",
    );
    body.extend_from_slice(content);
    body.extend_from_slice(b"\r\n--b--\r\n");
    let request = ureq::post(&format!("{}/v1/files", gateway.url));
    let request = request.set("authorization", key).set("content-type", "multipart/form-data; boundary=b");
    Answer::of(request.send_bytes(&body))
}

#[test]
fn a_file_is_stored_referred_to_and_removed() {
    let (setup, keys) = with_keys(&[("a", ""), ("b", "")]);
    let gateway = &setup.gateways[0];
    let key = &keys["a"];
    let stored = upload(gateway, key, b"<script>");
    assert_eq!(stored.status, 200, "{stored:?}");
    let file = stored.json();
    assert_eq!(
        (&file["object"], &file["bytes"], &file["filename"]),
        (&json!("file"), &json!(8), &json!("x.html"))
    );
    let id = file["id"].as_str().unwrap();
    // Both gateways have the folder, so either has the file.
    let read = send(&setup.gateways[1], key, "GET", &format!("/v1/files/{id}/content"), None);
    assert_eq!((read.text.as_str(), read.header("content-disposition")), ("<script>", Some("attachment")));
    assert_eq!(read.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(send(gateway, &keys["b"], "GET", &format!("/v1/files/{id}"), None).status, 404);
    until("the model is served", || {
        let listed = send(gateway, key, "GET", "/v1/models", None);
        (listed.json()["data"][0]["id"] == ECHO).then_some(())
    });
    let by_reference = json!({"model": ECHO, "inputs": [{"uri": id}]});
    let job = send(gateway, key, "POST", "/v1/jobs", Some(&by_reference)).json();
    let uri = job["outputs"][0]["uri"].as_str().unwrap_or_else(|| panic!("{job}"));
    assert_eq!(std::fs::read(uri.strip_prefix("file://").unwrap()).unwrap(), b"<script>");
    assert_eq!(send(gateway, &keys["b"], "POST", "/v1/jobs", Some(&by_reference)).status, 404);
    for foreign in ["file:///etc/passwd", "FILE:/etc/passwd", "/etc/passwd"] {
        let body = json!({"model": ECHO, "inputs": [{"uri": foreign}]});
        assert_eq!(send(gateway, key, "POST", "/v1/jobs", Some(&body)).status, 400, "{foreign}");
    }
    assert_eq!(upload(gateway, key, &vec![0; 1024 * 1024 + 1]).status, 413);
    assert_eq!(send(gateway, key, "DELETE", &format!("/v1/files/{id}"), None).json()["deleted"], json!(true));
    assert_eq!(send(gateway, key, "GET", &format!("/v1/files/{id}"), None).status, 404);
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
    assert_eq!(send(setup.next(), "", "GET", &content(&file), None).text, "what was uploaded");
    assert_eq!(send(setup.next(), "", "DELETE", &file, None).json()["deleted"], json!(true));
    assert_eq!(send(setup.next(), "", "GET", &content(&file), None).status, 404);
}

/// A program that takes JSON inputs and reports on its items, and who demands a revision of it.
#[test]
fn json_inputs_progress_and_revisions_of_a_program() {
    let mut setup = Setup::new();
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let python = std::env::var("VRAMQ_TEST_PYTHON").expect("VRAMQ_TEST_PYTHON; `make test` sets it");
    // The interpreter itself: a program's path is absolute.
    let asked =
        Command::new(python).args(["-c", "import sys; print(sys.executable)"]).output().expect("Python");
    let interpreter = String::from_utf8(asked.stdout).expect("a path").trim().to_owned();
    let weights = setup.folder.path().join("weights");
    std::fs::write(&weights, "").expect("written");
    let paths = ["python", "inference/tests/models"].map(|path| repository.join(path).display().to_string());
    let config = format!(
        "[model.served]\nengine = \"process\"\ncommand = [{interpreter:?}, \"served.py\"]\nfolder = {:?}\n\
         vram = {{ mib_per_unit = 1 }}\n\
         env = {{ PYTHONPATH = {:?}, FOLDER = {:?}, REVISION = \"second\" }}\n",
        repository.join("tests/models"),
        paths.join(":"),
        setup.folder.path(),
    );
    let path = setup.folder.path().join("worker.toml");
    std::fs::write(&path, config).expect("written");
    setup.worker(&[], &["--config", path.to_str().expect("UTF-8")]);
    setup.gateway(&[]);
    setup.wait_for_models(&["served"]);
    let gateway = &setup.gateways[0];
    let job = json!({
        "model": "served", "inputs": [{"json": {"a": [1]}}, "steps 75"], "params": {"progress": true},
        "model_revision": "second",
    });
    let id = gateway.post("/v1/jobs", &job).json()["id"].as_str().expect("an id").to_owned();
    let all = events(gateway, &id, None);
    let reports: Vec<_> =
        all.iter().filter(|(_, name, data)| name == "progress" && data["item"] == 1).collect();
    assert!(!reports.is_empty(), "{all:?}");
    for (_, _, data) in reports {
        assert!(data["fraction"].as_f64().is_some_and(|fraction| (0.0..=1.0).contains(&fraction)), "{data}");
        assert!(data["note"].as_str().is_some_and(|note| note.ends_with(" of 75")), "{data}");
    }
    let done = ended(gateway, &id);
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["outputs"][0], json!({"json": {"json": {"a": [1]}}}));
    assert_eq!(done["model_revisions"], json!(["second"]));
}

/// Workers share passes by what these jobs say (`vramq_caller_jobs_total` in the test of callers).
#[tokio::test(flavor = "multi_thread")]
async fn a_keys_jobs_name_the_gateways_user_and_the_keys_tenant() {
    let (setup, keys) = with_keys(&[("a", "tenant = \"acme\""), ("b", "tenant = \"zeta\""), ("c", "")]);
    until("the model is served", || {
        let listed = |gateway| send(gateway, &keys["a"], "GET", "/v1/models", None).json();
        setup.gateways.iter().all(|gateway| listed(gateway)["data"][0]["id"] == ECHO).then_some(())
    });
    let listener = listen(&setup, ECHO).await;
    for (turn, (key, tenant)) in
        [("a", Some("acme")), ("b", Some("zeta")), ("c", None)].into_iter().enumerate()
    {
        for gateway in &setup.gateways {
            let path = format!("/v1/jobs/{turn}-{}", gateway.program.pid());
            let accepted = send(gateway, &keys[key], "PUT", &path, Some(&job()));
            assert_eq!(accepted.json()["state"], "done", "{accepted:?}");
            let properties = listener.published().await;
            assert_eq!(properties.user_id().as_ref().map(|user| user.as_str()), Some("guest"));
            let headers = properties.headers().clone().unwrap();
            assert_eq!(headers.inner().get(TENANT).and_then(as_text).as_deref(), tenant);
        }
    }
}
