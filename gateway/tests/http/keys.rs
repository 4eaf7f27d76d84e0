//! API keys: what each key gives access to, its share, and the file with the keys.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vramq_gateway::keys::Keys;
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::TENANT;

use crate::harness::{Answer, ECHO, Gateway, Setup, gateway_command, until};
use crate::jobs::{job, set};
use crate::withdrawals::listen;

/// Writes a file of keys, each given by its name and the other lines of its entry. Returns the key of each name, as callers send it.
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

/// Waits until every gateway serves a model to a caller.
pub fn until_served(setup: &Setup, key: &str, model: &str) {
    for gateway in &setup.gateways {
        until("the model is served", || {
            let listed = send(gateway, key, "GET", "/v1/models", None).json();
            listed["data"].as_array()?.iter().any(|served| served["id"] == model).then_some(())
        });
    }
}

#[test]
fn a_key_gives_access_to_its_callers_jobs_only() {
    let (setup, keys) = with_keys(&[("a", ""), ("b", "models = [\"other\"]"), ("boss", "operator = true")]);
    let gateway = &setup.gateways[0];
    until_served(&setup, &keys["a"], ECHO);
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
    // Probes have no key.
    for path in ["/livez", "/readyz", "/health", "/metrics"] {
        assert_eq!(gateway.get(path).status, 200, "{path}");
    }
    let log = setup.gateways[0].program.log();
    assert!(!log.contains(keys["a"].trim_start_matches("Bearer ")), "a key was logged");
    // A key that is taken out of the file ends within seconds; a file with a fault changes nothing.
    let path = setup.folder.path().join("keys.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, "[[key]]\nname = 1").unwrap();
    until("the fault is reported", || {
        gateway.program.log().contains("the gateway keeps the API keys that it has").then_some(())
    });
    assert_eq!(send(gateway, &keys["a"], "GET", "/v1/models", None).status, 200);
    let start = text.find("[[key]]\nname = \"boss\"").unwrap();
    std::fs::write(&path, &text[start..]).unwrap();
    until("the key is out", || {
        (send(gateway, &keys["a"], "GET", "/v1/models", None).status == 401).then_some(())
    });
    assert_eq!(send(gateway, &keys["boss"], "GET", "/v1/models", None).status, 200);
}

/// At the start, and when the last key is taken out.
#[test]
fn a_file_without_keys_is_told() {
    let mut setup = Setup::new();
    let (file, keys) = key_file(setup.folder.path(), &[]);
    setup.gateway(&["--set", &format!("http.keys={}", file.display())]);
    assert!(keys.is_empty());
    let gateway = &setup.gateways[0];
    let told = || gateway.program.log().matches("the file of API keys has no key").count();
    until("the log tells it", || (told() == 1).then_some(()));
    assert_eq!(gateway.get("/v1/models").status, 401);
    let (_, keys) = key_file(setup.folder.path(), &[("a", "")]);
    until("the key is there", || {
        (send(gateway, &keys["a"], "GET", "/v1/models", None).status == 200).then_some(())
    });
    key_file(setup.folder.path(), &[]);
    until("the log tells it again", || (told() == 2).then_some(()));
}

/// As by `new-key team-a >> keys.toml`.
#[test]
fn the_file_of_keys_gets_no_key() {
    let made = gateway_command().args(["new-key", "team-a"]).output().unwrap();
    let said = String::from_utf8(made.stderr).unwrap();
    let key = said.split_whitespace().next_back().unwrap();
    assert!(key.starts_with("vramq-"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    std::fs::write(&file, &made.stdout).unwrap();
    assert!(!String::from_utf8(made.stdout).unwrap().contains(key));
    let keys = Keys::open(Some(&file)).unwrap();
    assert_eq!(keys.caller(Some(key)).unwrap().name, "team-a");
}

#[test]
fn a_caller_has_no_more_than_its_share() {
    let (setup, keys) = with_keys(&[
        ("slow", "requests_per_minute = 2"),
        ("one", "in_flight_max = 1\nrequests_per_minute = 3"),
    ]);
    let gateway = &setup.gateways[0];
    until_served(&setup, &keys["one"], ECHO);
    let began = std::time::Instant::now();
    let answers: Vec<_> =
        (0..3).map(|_| send(gateway, &keys["slow"], "POST", "/v1/jobs", Some(&json!({})))).collect();
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [400, 400, 429]);
    let after: u64 = answers[2].header("retry-after").unwrap().parse().unwrap();
    // Half a minute per request, less the time that the requests took.
    let least = 29_u64.saturating_sub(began.elapsed().as_secs());
    assert!((least..=30).contains(&after), "{after}, not {least} to 30");
    // A job takes the only place, on a worker that does nothing.
    setup.workers[0].signal("STOP");
    let held = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
    assert_eq!(held.status, 202, "{held:?}");
    // These are more than it may make in a minute, and do not count.
    for _ in 0..5 {
        let second = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
        assert_eq!((second.status, &second.json()["error"]["code"]), (429, &json!("too_many_in_flight")));
    }
    setup.workers[0].signal("CONT");
    until("the place is free", || {
        let third = gateway.send("POST", "/v1/jobs", &[("authorization", &keys["one"])], Some(&job()));
        (third.status != 429).then_some(())
    });
}

/// Other gateways know only stored results, so one key's results must not take the whole store.
#[test]
fn a_key_leaves_room_for_the_stored_results_of_others() {
    let mut setup = Setup::new();
    let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
    let settings = [
        format!("http.keys={}", path.display()),
        format!("results.folder={}", setup.folder.path().join("results").display()),
        "results.folder_mib_max_per_key=1".to_owned(),
    ];
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    until_served(&setup, &keys["a"], ECHO);
    let large = json!({"model": ECHO, "inputs": ["x".repeat(700 * 1024)]});
    for (key, id, is_stored) in [("a", "first", true), ("a", "second", false), ("b", "first", true)] {
        let path = format!("/v1/jobs/{id}");
        let done = send(&setup.gateways[0], &keys[key], "PUT", &path, Some(&large));
        assert_eq!(done.json()["state"], "done", "{key} {id}");
        // The record of a job is removed a moment after its end is stored, so a gateway that is asked at once may still find it.
        let read = until("the other gateway knows that it has ended", || {
            let read = send(&setup.gateways[1], &keys[key], "GET", &path, None);
            (read.status == 404 || read.json()["state"] == "done").then_some(read)
        });
        assert_eq!(read.status, if is_stored { 200 } else { 404 }, "{key} {id}");
        assert_eq!(send(&setup.gateways[0], &keys[key], "GET", &path, None).status, 200, "{key} {id}");
    }
    let told = || setup.gateways[0].program.log().matches("results.folder_mib_max_per_key").count();
    until("the log tells it", || (told() > 0).then_some(()));
    assert_eq!(told(), 1);
}

/// Two callers may come upon the same idempotency key, and one may learn the id of the other's job.
#[test]
fn an_idempotency_key_is_its_callers_alone() {
    let (setup, keys) = with_keys(&[("a", ""), ("b", "")]);
    until_served(&setup, &keys["a"], ECHO);
    for gateway in &setup.gateways {
        let ask = |key: &str, text: &str| {
            let headers =
                [("authorization", keys[key].as_str()), ("idempotency-key", "k"), ("prefer", "wait=60")];
            gateway.send("POST", "/v1/jobs", &headers, Some(&json!({"model": ECHO, "inputs": [text]})))
        };
        let (mine, theirs) = (ask("a", "mine").json(), ask("b", "theirs").json());
        assert_eq!(mine["outputs"], json!([{"json": "mine"}]), "{mine}");
        assert_eq!(theirs["outputs"], json!([{"json": "theirs"}]), "{theirs}");
        assert_eq!(ask("a", "theirs").status, 422);
        let path = format!("/v1/jobs/{}", mine["id"].as_str().unwrap());
        for (method, path) in
            [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/events"))]
        {
            assert_eq!(send(gateway, &keys["b"], method, &path, None).status, 404, "{method} {path}");
        }
    }
}

/// Workers share passes by what these jobs say (`vramq_caller_jobs_total` in the test of callers).
#[tokio::test(flavor = "multi_thread")]
async fn a_keys_jobs_name_the_gateways_user_and_the_keys_tenant() {
    let (setup, keys) =
        with_keys(&[("a", "tenant = \"acme\"\npriority = 7"), ("b", "tenant = \"zeta\""), ("c", "")]);
    until_served(&setup, &keys["a"], ECHO);
    let listener = listen(&setup, ECHO).await;
    for (turn, (key, tenant, priority)) in
        [("a", Some("acme"), Some(7)), ("b", Some("zeta"), None), ("c", None, None)].into_iter().enumerate()
    {
        for gateway in &setup.gateways {
            let path = format!("/v1/jobs/{turn}-{}", gateway.program.pid());
            let accepted = send(gateway, &keys[key], "PUT", &path, Some(&job()));
            assert_eq!(accepted.json()["state"], "done", "{accepted:?}");
            let properties = listener.published().await;
            assert_eq!(*properties.priority(), priority, "{key}");
            assert_eq!(properties.user_id().as_ref().map(|user| user.as_str()), Some("guest"));
            let headers = properties.headers().clone().unwrap();
            assert_eq!(headers.inner().get(TENANT).and_then(as_text).as_deref(), tenant);
        }
    }
}
