//! Gateways with a common store of results answer for each other's unfinished jobs, also after the gateway that took them has died.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vramq_tests::pass_tickets::PassTickets;

use crate::events::{Event, Events, events};
use crate::harness::{ECHO, Gateway, Setup, until};
use crate::jobs::{ended, job, set};
use crate::permissions::user;
use crate::withdrawals::listen;

/// Gateways with a folder for results, each with the least permissions.
struct Shared {
    setup: Setup,
    results: PathBuf,
}

impl Shared {
    fn new(gateways: usize, worker: &[&str]) -> Self {
        let mut setup = Setup::new();
        let [of_worker, of_gateway] = ["worker", "gateway"].map(|role| user(&mut setup, role));
        let results = setup.folder.path().join("results");
        setup.worker_as(
            &of_worker,
            &[ECHO],
            &set(&worker.iter().map(|&it| it.to_owned()).collect::<Vec<_>>()),
        );
        let settings = [format!("results.folder={}", results.display()), "http.drain_s=1".to_owned()];
        for _ in 0..gateways {
            setup.gateway_as(&of_gateway, &set(&settings));
        }
        setup.wait_for_models(&[ECHO]);
        Self { setup, results }
    }

    fn gateway(&self, at: usize) -> &Gateway {
        &self.setup.gateways[at]
    }

    fn kill(&self, at: usize) {
        self.gateway(at).program.signal("KILL");
    }

    /// Jobs that ended at these gateways.
    fn counted(&self, gateways: &[usize], end: &str) -> f64 {
        gateways.iter().map(|at| self.gateway(*at).metric("vramq_gateway_jobs_ended_total", end)).sum()
    }

    /// Nothing is left of unfinished jobs, and no reply was lost on its way.
    fn all_ended(&self) {
        until("no record is left", || (self.records() == 0).then_some(()));
        until("no job is left", || (self.setup.messages("vramq.jobs.echo") == Some(0)).then_some(()));
        assert_eq!(self.setup.messages("vramq.dead.echo").unwrap_or(0), 0);
    }

    /// The worker ran this many jobs, one of which was withdrawn, and none twice. A stopped worker may have read the withdrawn job before
    /// its withdrawal. Then it has run that job as well.
    fn each_ran_once(&self, jobs: u64) {
        let counted = || Some((self.setup.counter("answered")?, self.setup.counter("withdrawn")?));
        until("each job ran once", || {
            counted()
                .is_some_and(|(answered, withdrawn)| answered + withdrawn == jobs && withdrawn <= 1)
                .then_some(())
        });
    }

    fn records(&self) -> usize {
        let Ok(files) = std::fs::read_dir(self.results.join("local")) else { return 0 };
        files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|it| it == "open")).count()
    }
}

/// The connections of a gateway with a store of results: its link, and two of each of its two clients.
const CONNECTIONS: usize = 5;

/// Jobs that are withdrawn one after the other: the order of two steps may be right by chance.
const WITHDRAWN: usize = 20;

/// Cuts all connections of a gateway.
fn cut(setup: &Setup, gateway: &Gateway) {
    let named = format!("vramq-gateway {}", gateway.program.pid());
    let url = setup.amqp_url();
    let path = format!("/api/vhosts/{}/connections", url.rsplit('/').next().unwrap());
    let names = until("its connections are listed", || {
        let listed = setup.manage("GET", &path);
        let own = listed.as_array()?.iter().filter(|connection| {
            let name = connection["client_properties"]["connection_name"].as_str().unwrap_or_default();
            name.strip_prefix(&named).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
        });
        let names: Vec<_> = own.filter_map(|it| it["name"].as_str().map(str::to_owned)).collect();
        (names.len() == CONNECTIONS).then_some(names)
    });
    for name in names {
        let escaped = name.replace(' ', "%20").replace('>', "%3E");
        setup.manage("DELETE", &format!("/api/connections/{escaped}"));
    }
}

fn put(gateway: &Gateway, id: &str, body: &Value, prefer: &str) -> (u16, Value) {
    let answer = gateway.send("PUT", &format!("/v1/jobs/{id}"), &[("prefer", prefer)], Some(body));
    (answer.status, answer.json())
}

fn keyed(gateway: &Gateway, prefer: &str) -> (u16, Value) {
    let headers = [("idempotency-key", "k"), ("prefer", prefer)];
    let answer = gateway.send("POST", "/v1/jobs", &headers, Some(&job()));
    (answer.status, answer.json())
}

fn delete(gateway: &Gateway, id: &str) -> Value {
    gateway.send("DELETE", &format!("/v1/jobs/{id}"), &[], None).json()["state"].clone()
}

fn outputs() -> Value {
    json!([{"json": "one"}, {"bytes": "AAEC", "media_type": "application/octet-stream"}])
}

fn milestones(events: &[Event]) -> Vec<&str> {
    events.iter().map(|(_, name, _)| name.as_str()).filter(|name| *name != "progress").collect()
}

#[test]
fn another_gateway_follows_a_job_while_its_own_is_there() {
    let shared = Shared::new(2, &[]);
    let (own, other) = (shared.gateway(0), shared.gateway(1));
    shared.setup.workers[0].signal("STOP");
    for id in ["one", "two"] {
        assert_eq!(put(own, id, &job(), "respond-async").0, 202);
    }
    let seen = other.get("/v1/jobs/one");
    assert_eq!((seen.status, &seen.json()["state"]), (200, &json!("queued")), "{seen:?}");
    assert!(!seen.text.contains("secret"), "{seen:?}");
    let again = put(other, "one", &job(), "respond-async");
    assert_eq!((again.0, &again.1["message_id"]), (202, &seen.json()["message_id"]));
    let another = json!({"model": ECHO, "inputs": ["another"]});
    assert_eq!(put(other, "one", &another, "respond-async").0, 422);
    assert_eq!(other.get("/v1/jobs/three").status, 404);
    assert_eq!(delete(other, "two"), "withdrawn");
    shared.setup.workers[0].signal("CONT");
    for gateway in [own, other] {
        assert_eq!(ended(gateway, "one")["outputs"], outputs());
        assert_eq!(milestones(&events(gateway, "one", None)).last(), Some(&"done"));
        assert_eq!(ended(gateway, "two")["state"], "withdrawn");
    }
    // Whichever gateway sent the end, none sends it again.
    for sender in [own, other] {
        let end = events(sender, "one", None).pop().unwrap().0;
        for gateway in [own, other] {
            assert!(events(gateway, "one", Some(end)).is_empty(), "{}", gateway.program.name);
        }
    }
    shared.all_ended();
    shared.each_ran_once(2);
    assert_eq!(shared.counted(&[0, 1], "done"), 1.0);
}

#[test]
fn jobs_of_a_killed_gateway_that_wait_are_answered_by_another() {
    let shared = Shared::new(2, &[]);
    let (own, other) = (shared.gateway(0), shared.gateway(1));
    shared.setup.workers[0].signal("STOP");
    for id in ["read", "again", "followed", "withdrawn"] {
        assert_eq!(put(own, id, &job(), "respond-async").0, 202);
    }
    let first = keyed(own, "respond-async");
    assert_eq!(first.0, 202);
    let seen = Events::of(own, "followed", None).next().unwrap();
    assert_eq!(seen.1, "queued");
    shared.kill(0);
    assert_eq!(other.get("/v1/jobs/read").json()["state"], "queued");
    assert_eq!(delete(other, "withdrawn"), "withdrawn");
    let followed = Events::of(other, "followed", Some(seen.0));
    shared.setup.workers[0].signal("CONT");
    // Each request waits until the gateway is certain that the other one is gone.
    let again = put(other, "again", &job(), "wait=60");
    assert_eq!((again.0, &again.1["state"], &again.1["outputs"]), (200, &json!("done"), &outputs()));
    let second = keyed(other, "wait=60");
    assert_eq!((second.0, &second.1["outputs"]), (200, &outputs()));
    assert_eq!(first.1["id"], second.1["id"]);
    let read = ended(other, "read");
    assert_eq!((&read["state"], &read["outputs"]), (&json!("done"), &outputs()));
    assert_eq!(milestones(&followed.collect::<Vec<_>>()).last(), Some(&"done"));
    assert_eq!(ended(other, "withdrawn")["state"], "withdrawn");
    shared.all_ended();
    shared.each_ran_once(5);
    assert_eq!(shared.counted(&[1], "done"), 4.0);
}

/// Each pass of the worker needs a ticket, and answers one input, which is large enough for a part of its own.
fn in_parts() -> (Shared, PassTickets, Value) {
    let tickets = PassTickets::unannounced().unwrap();
    let shared = Shared::new(3, &["model.echo.pass_tokens=1", &tickets.setting()]);
    let inputs: Vec<_> = ["x", "y", "z"].map(|letter| letter.repeat(1_100_000)).into();
    (shared, tickets, json!({"model": ECHO, "inputs": inputs}))
}

fn until_items_done(gateway: &Gateway, id: &str, items: u64) {
    until(&format!("{items} items are done"), || {
        let job = gateway.get(&format!("/v1/jobs/{id}")).json();
        (job["items_done"] == items).then_some(())
    });
}

fn assert_has_all(done: &Value, job: &Value) {
    let texts: Vec<_> = done["outputs"].as_array().unwrap().iter().map(|output| &output["json"]).collect();
    let expected: Vec<_> = job["inputs"].as_array().unwrap().iter().collect();
    assert!(texts == expected, "{} outputs in {}", texts.len(), done["state"]);
}

#[test]
fn between_two_parts_one_gateway_after_the_other_is_killed() {
    let (shared, mut tickets, job) = in_parts();
    assert_eq!(put(shared.gateway(0), "long", &job, "respond-async").0, 202);
    let mut seen = Events::of(shared.gateway(0), "long", None);
    tickets.give(1).unwrap();
    let part = seen.find(|(_, name, _)| name == "part").unwrap();
    shared.kill(0);
    // The second part comes while nobody consumes.
    tickets.give(1).unwrap();
    until_items_done(shared.gateway(1), "long", 2);
    let mut resumed = Events::of(shared.gateway(1), "long", Some(part.0));
    // One event reports all parts that come together.
    let part = resumed.find(|(_, name, data)| name == "part" && data["items_done"] == 2).unwrap();
    shared.kill(1);
    tickets.give(1).unwrap();
    let rest: Vec<_> = Events::of(shared.gateway(2), "long", Some(part.0)).collect();
    assert_eq!(milestones(&rest).last(), Some(&"done"));
    assert_has_all(&ended(shared.gateway(2), "long"), &job);
    shared.all_ended();
    shared.setup.until_counter("answered", 1);
    shared.setup.until_counter("passes", 3);
}

#[test]
fn a_gateway_that_comes_back_gets_its_replies_back() {
    let (shared, mut tickets, job) = in_parts();
    let (own, other) = (shared.gateway(0), shared.gateway(1));
    assert_eq!(put(own, "long", &job, "respond-async").0, 202);
    tickets.give(1).unwrap();
    until_items_done(own, "long", 1);
    // Stopped for longer than others wait, but alive.
    own.program.signal("STOP");
    cut(&shared.setup, own);
    until_items_done(other, "long", 1);
    own.program.signal("CONT");
    until("the other one leaves the queue", || {
        other.program.log().contains("another gateway consumes the adopted reply queue").then_some(())
    });
    tickets.give(2).unwrap();
    for gateway in [own, other] {
        assert_has_all(&ended(gateway, "long"), &job);
    }
    shared.all_ended();
    assert_eq!(shared.counted(&[0, 1], "done"), 1.0);
    assert_eq!(shared.counted(&[0, 1], "failed"), 0.0);
}

#[test]
fn jobs_that_outlast_a_drain_are_answered_by_another() {
    let mut shared = Shared::new(2, &[]);
    shared.setup.workers[0].signal("STOP");
    assert_eq!(put(shared.gateway(0), "late", &job(), "respond-async").0, 202);
    shared.gateway(0).program.signal("TERM");
    assert_eq!(shared.setup.gateways[0].program.wait(), Some(0));
    shared.setup.workers[0].signal("CONT");
    let late = ended(shared.gateway(1), "late");
    assert_eq!((&late["state"], &late["outputs"]), (&json!("done"), &outputs()));
    shared.all_ended();
}

/// The stored end is gone after `results.keep_s`, while the job may still be in its queue.
#[test]
fn a_withdrawn_job_stays_withdrawn_when_its_stored_end_has_expired() {
    const KEEP: Duration = Duration::from_secs(2);
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    let results = setup.folder.path().join("results");
    let settings =
        [format!("results.folder={}", results.display()), format!("results.keep_s={}", KEEP.as_secs())];
    for _ in 0..2 {
        setup.gateway(&set(&settings));
    }
    setup.wait_for_models(&[ECHO]);
    let [own, other] = &setup.gateways[..] else { panic!("two gateways") };
    setup.workers[0].signal("STOP");
    for (id, at) in [("here", own), ("there", other)] {
        assert_eq!(put(own, id, &job(), "respond-async").0, 202);
        assert_eq!(delete(at, id), "withdrawn");
    }
    let since = Instant::now();
    until("the ends have expired", || (since.elapsed() > 2 * KEEP).then_some(()));
    for (id, gateways) in [("here", &[own, other][..]), ("there", &[other])] {
        for gateway in gateways {
            let seen = gateway.get(&format!("/v1/jobs/{id}"));
            assert_eq!((seen.status, &seen.json()["state"]), (200, &json!("withdrawn")), "{id}: {seen:?}");
            let again = put(gateway, id, &job(), "respond-async");
            assert_eq!((again.0, &again.1["state"]), (200, &json!("withdrawn")), "{id}");
        }
    }
    setup.workers[0].signal("CONT");
    until("no job is left", || (setup.messages("vramq.jobs.echo") == Some(0)).then_some(()));
}

/// The end of an earlier run stays in the store if the job is asked for again while the store does not answer.
#[test]
fn the_end_of_an_earlier_run_hides_no_job_that_runs() {
    let shared = Shared::new(2, &[]);
    let (own, other) = (shared.gateway(0), shared.gateway(1));
    shared.setup.workers[0].signal("STOP");
    let ids = ["read", "followed", "again", "withdrawn", "left"];
    for id in ids {
        assert_eq!(put(own, id, &job(), "respond-async").0, 202);
        let folder = shared.results.join("local");
        let record = std::fs::read(folder.join(format!("{id}.open"))).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        let digest = record["request_sha256"].as_array().unwrap().iter();
        let digest: String = digest.map(|byte| format!("{:02x}", byte.as_u64().unwrap())).collect();
        // A record that its gateway has left behind is of the run that has ended.
        let before = u64::from(id != "left");
        let end = json!({
            "id": id, "object": "job", "message_id": record["message_id"], "model": ECHO, "state": "failed", "items": 2,
            "items_done": 0, "created_at_ms": record["created_at_ms"].as_u64().unwrap() - before, "request_sha256": digest,
            "error": {"code": "engine-failed", "message": "why"}, "outputs": [],
        });
        std::fs::write(folder.join(format!("{id}.json")), end.to_string()).unwrap();
    }
    assert_eq!(other.get("/v1/jobs/read").json()["state"], "queued");
    assert_eq!(Events::of(other, "followed", None).next().unwrap().1, "queued");
    assert_eq!(put(other, "again", &job(), "respond-async").0, 202);
    assert_eq!(delete(other, "withdrawn"), "withdrawn");
    assert_eq!(other.get("/v1/jobs/left").json()["state"], "failed");
    shared.setup.workers[0].signal("CONT");
    for gateway in [own, other] {
        for id in ["read", "followed", "again"] {
            assert_eq!(ended(gateway, id)["state"], "done", "{id}");
        }
        assert_eq!(ended(gateway, "withdrawn")["state"], "withdrawn");
    }
    shared.all_ended();
    shared.each_ran_once(ids.len() as u64);
}

/// Otherwise the job could end, and its gateway remove the record, before the other gateway writes it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_at_another_gateway_is_in_the_record_before_workers_hear_of_it() {
    let shared = Shared::new(2, &[]);
    let mut listener = listen(&shared.setup, ECHO).await;
    shared.setup.workers[0].signal("STOP");
    for at in 0..WITHDRAWN {
        let id = format!("withdrawn-{at}");
        assert_eq!(put(shared.gateway(0), &id, &job(), "respond-async").0, 202);
        let (message, _) = listener.job().await;
        assert_eq!(delete(shared.gateway(1), &id), "withdrawn");
        listener.withdrawal(&message).await;
        let record = std::fs::read(shared.results.join(format!("local/{id}.open"))).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!(record["withdrawn"], json!(true), "{id}");
    }
    shared.setup.workers[0].signal("CONT");
    shared.all_ended();
}
