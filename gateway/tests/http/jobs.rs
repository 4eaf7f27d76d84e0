//! Jobs: ids, owners, and repeated requests.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::events::{by_curl, events};
use crate::harness::{ECHO, Gateway, Setup, until};
use crate::keys::{key_file, send, until_served};

/// A job that echo answers with its inputs.
pub fn job() -> Value {
    json!({"model": ECHO, "inputs": ["one", {"bytes": "AAEC"}]})
}

/// A worker, and two gateways with a common folder of results; that folder.
pub fn sharing_results() -> (Setup, PathBuf) {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    let results = setup.folder.path().join("results");
    for _ in 0..2 {
        setup.gateway(&set(&[format!("results.folder={}", results.display())]));
    }
    setup.wait_for_models(&[ECHO]);
    (setup, results)
}

/// Settings as options of a program.
pub fn set(settings: &[String]) -> Vec<&str> {
    settings.iter().flat_map(|setting| ["--set", setting.as_str()]).collect()
}

/// A job, once it has ended.
pub fn ended(gateway: &Gateway, id: &str) -> Value {
    until("the job ends", || {
        let job = gateway.get(&format!("/v1/jobs/{id}")).json();
        matches!(job["state"].as_str(), Some("done" | "failed" | "withdrawn")).then_some(job)
    })
}

#[test]
fn a_model_that_has_only_a_key_of_its_own_is_reached_by_its_name() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &["--set", &format!("model.{ECHO}.key=its-key")]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    for gateway in &setup.gateways {
        let listed = gateway.get("/v1/models").json();
        assert_eq!(listed["data"][0]["id"], ECHO, "{listed}");
        let answer = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=20")], Some(&job()));
        assert_eq!((answer.status, &answer.json()["state"]), (200, &json!("done")), "{answer:?}");
        assert_eq!(setup.messages(&format!("vramq.jobs.{ECHO}")), None, "no queue has its name");
        // The key is not its name: as a model's name it would end as a dead letter.
        let by_key = gateway.post("/v1/jobs", &json!({"model": "its-key", "inputs": ["x"]}));
        assert_eq!(by_key.status, 404, "{by_key:?}");
        let message = by_key.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&format!("is the key of the model `{ECHO}`")), "{message}");
    }
    // While its worker is away, the model is known, and nobody takes its jobs.
    setup.workers[0].signal("TERM");
    assert_eq!(setup.workers[0].wait(), Some(0));
    for gateway in &setup.gateways {
        until("nobody takes its jobs", || (gateway.post("/v1/jobs", &job()).status == 503).then_some(()));
    }
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
    // A client that has seen the last event gets the answer that there are no more.
    let last = all.last().unwrap().0.to_string();
    let over = gateway.send("GET", &format!("/v1/jobs/{id}/events"), &[("last-event-id", &last)], None);
    assert_eq!((over.status, over.text.as_str()), (204, ""));
    // Of another run of the job, or of no number at all: everything.
    assert_eq!(events(gateway, &id, Some(u64::MAX)), all);
    for garbage in ["x", "", "-1", "1.5", "18446744073709551616", "1, 2"] {
        assert_eq!(by_curl(gateway, &id, garbage), all, "{garbage}");
    }
    assert_eq!(by_curl(gateway, &id, &all[0].0.to_string()), rest);
    let elsewhere = setup.gateways[1].get(&format!("/v1/jobs/{id}"));
    assert_eq!(elsewhere.status, 404);
    assert!(elsewhere.json()["error"]["message"].as_str().unwrap().contains("on this gateway"));
}

#[test]
fn with_a_folder_every_gateway_answers_for_a_job_that_has_ended() {
    let setup = Setup::new();
    let folder = setup.folder.path().join("results");
    every_gateway_answers_for_a_job_that_has_ended(setup, &[format!("results.folder={}", folder.display())]);
}

/// The last event that a gateway has of a job: its name, what it says, and its number.
fn last_event(gateway: &Gateway, key: &str, id: &str) -> (String, Value, String) {
    let answer = send(gateway, key, "GET", &format!("/v1/jobs/{id}/events"), None);
    assert_eq!(
        (answer.status, answer.header("content-type")),
        (200, Some("text/event-stream")),
        "{answer:?}"
    );
    let field = |name: &str| {
        let value = answer.text.lines().rev().find_map(|line| line.strip_prefix(name));
        value.unwrap_or_else(|| panic!("no {name:?} in {answer:?}")).to_owned()
    };
    (field("event: "), serde_json::from_str(&field("data: ")).unwrap(), field("id: "))
}

/// The results are where the settings say.
pub fn every_gateway_answers_for_a_job_that_has_ended(mut setup: Setup, settings: &[String]) {
    let (path, keys) = key_file(setup.folder.path(), &[("a", ""), ("b", "")]);
    let settings = [settings, &[format!("http.keys={}", path.display())]].concat();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    until_served(&setup, &keys["a"], ECHO);
    let ran = send(&setup.gateways[0], &keys["a"], "PUT", "/v1/jobs/one", Some(&job())).json();
    let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
    let failed = send(&setup.gateways[0], &keys["a"], "PUT", "/v1/jobs/two", Some(&wrong)).json();
    assert_eq!((&ran["state"], &failed["state"]), (&json!("done"), &json!("failed")));
    let other =
        |key: &str, id: &str| send(&setup.gateways[1], &keys[key], "GET", &format!("/v1/jobs/{id}"), None);
    // A caller that hears of the end finds the same on every gateway.
    assert_eq!((other("a", "one").json(), other("a", "two").json()), (ran.clone(), failed));
    assert_eq!((other("b", "one").status, other("a", "three").status), (404, 404));
    for id in ["one", "two"] {
        let [here, there] = [0, 1].map(|at| last_event(&setup.gateways[at], &keys["a"], id));
        assert_eq!(here, there, "the end of {id}");
        let path = format!("/v1/jobs/{id}/events");
        let after = |gateway: &Gateway, number: &str| {
            let headers = [("authorization", keys["a"].as_str()), ("last-event-id", number)];
            gateway.send("GET", &path, &headers, None)
        };
        // A browser that a balancer sends to another gateway each time it connects again.
        for gateway in &setup.gateways {
            assert_eq!(after(gateway, &here.2).status, 204, "{}", gateway.program.name);
        }
        assert_eq!(send(&setup.gateways[1], &keys["b"], "GET", &path, None).status, 404);
    }
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
        let again = send(gateway, &keys["a"], "PUT", "/v1/jobs/two", Some(&wrong));
        assert_eq!((again.status, again.header("x-should-retry")), (422, Some("false")));
        assert_eq!(again.json()["error"]["code"], json!("invalid-input"), "{again:?}");
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
    for gateway in &setup.gateways {
        let waited = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&wrong));
        assert_eq!((waited.status, waited.header("x-should-retry")), (422, Some("false")), "{waited:?}");
        let failed = waited.json();
        assert_eq!((&failed["state"], &failed["error"]["code"]), (&json!("failed"), &json!("invalid-input")));
        let events = events(gateway, failed["id"].as_str().unwrap(), None);
        assert_eq!(events.last().unwrap().1, "failed");
        let read = gateway.get(&format!("/v1/jobs/{}", failed["id"].as_str().unwrap()));
        assert_eq!((read.status, read.json()), (200, failed), "who asks for a job gets it");
    }
    until("the dead letters are there", || setup.messages("vramq.dead.echo").filter(|n| *n == 2));
}

/// Also on routes that answer with the results. Another key runs the job again.
#[test]
fn a_repeated_request_gets_the_failure_of_its_job_from_every_gateway() {
    let (setup, _) = sharing_results();
    // The model has no parameters.
    let wrong = json!({"inputs": "x", "raw_scores": true});
    let ask = |gateway: &Gateway, key: &str| {
        let path = format!("/predict?model={ECHO}");
        let answer = gateway.send("POST", &path, &[("idempotency-key", key)], Some(&wrong));
        let [retry, job] =
            ["x-should-retry", "x-vramq-job-id"].map(|name| answer.header(name).map(str::to_owned));
        (answer.status, answer.json(), retry, job)
    };
    let failed = || {
        let failed = setup.gateways.iter().map(|it| it.metric("vramq_gateway_jobs_ended_total", "failed"));
        failed.sum::<f64>()
    };
    let first = ask(&setup.gateways[0], "k");
    assert_eq!((first.0, first.2.as_deref()), (424, Some("false")), "{first:?}");
    for gateway in &setup.gateways {
        assert_eq!(ask(gateway, "k"), first, "{}", gateway.program.name);
    }
    assert_eq!(failed(), 1.0, "it ran again");
    let other = ask(&setup.gateways[1], "another key");
    assert_eq!((other.0, failed()), (424, 2.0), "{other:?}");
    assert_ne!(other.3, first.3);
}

/// A job that has an id needs no idempotency key, and is not taken for another one because of it.
#[test]
fn a_put_is_the_job_of_its_id_whatever_its_idempotency_key_is() {
    let setup = Setup::with(&[ECHO]);
    for gateway in &setup.gateways {
        let put = |id: &str, headers: &[(&str, &str)]| {
            gateway.send("PUT", &format!("/v1/jobs/{id}"), headers, Some(&job())).json()
        };
        for id in ["one", "two"] {
            let done = put(id, &[("idempotency-key", "k"), ("prefer", "wait=60")]);
            assert_eq!((&done["id"], &done["state"]), (&json!(id), &json!("done")), "{done}");
            assert_eq!(gateway.get(&format!("/v1/jobs/{id}")).json(), done);
        }
    }
}

/// However short the wait is: a job with a 202 is in the queue, and one that the broker refuses gets no 202.
#[test]
fn a_job_that_was_not_published_is_never_accepted() {
    let mut setup = Setup::new();
    let small = ["broker.queue_length_max=3", "broker.queue_type=classic", "model.echo.slots_max=1"];
    setup.worker(&[ECHO], &set(&small.map(str::to_owned)));
    for _ in 0..2 {
        setup.gateway(&[]);
    }
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("STOP");
    let ask = |gateway: &Gateway, prefer: &str| {
        gateway.send("POST", "/v1/jobs", &[("prefer", prefer)], Some(&job()))
    };
    let first = ask(setup.next(), "wait=0");
    assert_eq!((first.status, &first.json()["state"]), (202, &json!("queued")), "{first:?}");
    until("the queue is full", || (ask(setup.next(), "respond-async").status == 429).then_some(()));
    for prefer in ["wait=0", "wait=1", "wait=abc", "wait=-1", "wait=99999999999999999999"] {
        for gateway in &setup.gateways {
            let refused = ask(gateway, prefer);
            assert_eq!(
                (refused.status, &refused.json()["error"]["code"]),
                (429, &json!("queue_full")),
                "{prefer}"
            );
            let after: u64 = refused.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=60).contains(&after) && refused.header("x-should-retry") == Some("true"));
        }
    }
}

#[test]
fn the_same_twice_is_one_job() {
    let setup = Setup::with(&[ECHO]);
    for gateway in &setup.gateways {
        the_same_twice_is_one_job_of(gateway);
    }
}

fn the_same_twice_is_one_job_of(gateway: &Gateway) {
    let put = |id: &str, body: &Value| gateway.send("PUT", &format!("/v1/jobs/{id}"), &[], Some(body));
    assert!(matches!(put("mine-1", &job()).status, 200 | 202));
    ended(gateway, "mine-1");
    let again = put("mine-1", &job());
    assert_eq!((again.status, &again.json()["state"]), (200, &json!("done")));
    assert_eq!(put("mine-1", &json!({"model": ECHO, "inputs": ["another"]})).status, 422);
    let of_upload = format!("file-{}", "0a".repeat(16));
    for no_name in ["no%20name", of_upload.as_str()] {
        assert_eq!(put(no_name, &job()).status, 400, "{no_name}");
    }
    let keyed = |body: &Value| {
        gateway.send("POST", "/v1/jobs", &[("idempotency-key", "k"), ("prefer", "wait=60")], Some(body))
    };
    // What has ended stays: as it is, and for the same request alone.
    let kept = gateway.send("DELETE", "/v1/jobs/mine-1", &[], None);
    assert_eq!((kept.status, &kept.json()["state"]), (200, &json!("done")));
    assert_eq!(put("mine-1", &json!({"model": ECHO, "inputs": ["one", "two"]})).status, 422);
    let (first, second) = (keyed(&job()).json(), keyed(&job()).json());
    assert_eq!((&first["id"], &first["outputs"]), (&second["id"], &second["outputs"]));
    let other = keyed(&json!({"model": ECHO, "inputs": ["another"]}));
    assert_eq!((other.status, other.header("x-should-retry")), (422, Some("false")));
    assert_eq!(gateway.metric("vramq_gateway_jobs_ended_total", "done"), 2.0);
}
