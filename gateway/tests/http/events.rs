//! The events of jobs: their order, what they say, and how a client that lost its connection resumes.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Cursor, Lines, Read};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use vramq_tests::pass_tickets::PassTickets;

use crate::harness::{ECHO, Gateway, Setup, until};
use crate::jobs::ended;
use crate::program_model::{self, REVISION, SERVED};

/// Number, name, data.
pub type Event = (u64, String, Value);

/// The events of a job as they come.
pub struct Events(Lines<BufReader<Box<dyn Read + Send + Sync>>>);

impl Events {
    /// Connects; as a client that goes on after an event.
    pub fn of(gateway: &Gateway, id: &str, after: Option<u64>) -> Self {
        let mut request =
            ureq::get(&format!("{}/v1/jobs/{id}/events", gateway.url)).timeout(Duration::from_secs(300));
        if let Some(after) = after {
            request = request.set("last-event-id", &after.to_string());
        }
        let response = request.call().expect("events");
        if after.is_some() && response.status() == 204 {
            return Self::read(std::io::empty());
        }
        assert_eq!(response.content_type(), "text/event-stream");
        Self::read(response.into_reader())
    }

    fn read(bytes: impl Read + Send + Sync + 'static) -> Self {
        let bytes: Box<dyn Read + Send + Sync> = Box::new(bytes);
        Self(BufReader::new(bytes).lines())
    }

    /// The next one that is no estimate of the queue: how many of these come depends on time.
    fn milestone(&mut self) -> Event {
        self.find(|(_, name, _)| name != "progress").expect("another event")
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let mut fields = HashMap::new();
        loop {
            let line = self.0.next()?.expect("a line");
            if let Some((name, value)) = line.split_once(": ") {
                fields.insert(name.to_owned(), value.to_owned());
            } else if line.is_empty() && fields.contains_key("event") {
                let number = fields["id"].parse().expect("a number");
                let data = serde_json::from_str(&fields["data"]).expect("JSON");
                return Some((number, fields["event"].clone(), data));
            }
        }
    }
}

/// The events of a job until its last.
pub fn events(gateway: &Gateway, id: &str, after: Option<u64>) -> Vec<Event> {
    Events::of(gateway, id, after).collect()
}

/// The same as curl gets them.
pub fn by_curl(gateway: &Gateway, id: &str, last_event_id: &str) -> Vec<Event> {
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--fail", "--no-buffer", "--max-time", "300"]);
    // A header without a value is sent with a semicolon.
    let header = if last_event_id.is_empty() {
        "last-event-id;".to_owned()
    } else {
        format!("last-event-id: {last_event_id}")
    };
    let output =
        curl.args(["--header", &header]).arg(format!("{}/v1/jobs/{id}/events", gateway.url)).output();
    let output = output.expect("curl");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Events::read(Cursor::new(output.stdout)).collect()
}

fn names(events: &[Event]) -> Vec<&str> {
    events.iter().map(|(_, name, _)| name.as_str()).collect()
}

/// Clients go on after a number, so later events have larger ones.
fn assert_in_order(events: &[Event]) {
    assert!(events.windows(2).all(|pair| pair[0].0 < pair[1].0), "{events:?}");
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

/// Each pass of the worker needs a ticket, and answers one input, which is large enough for a part of its own.
#[test]
fn a_client_that_lost_its_connection_goes_on_in_the_middle() {
    let mut setup = Setup::new();
    let mut tickets = PassTickets::unannounced().unwrap();
    setup.worker(&[ECHO], &["--set", "model.echo.pass_tokens=1", "--set", &tickets.setting()]);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    for gateway in &setup.gateways {
        let job =
            json!({"model": ECHO, "inputs": vec!["x".repeat(1_100_000); 3], "params": {"progress": true}});
        let id = gateway.post("/v1/jobs", &job).json()["id"].as_str().unwrap().to_owned();
        let mut first = Events::of(gateway, &id, None);
        let mut seen = vec![first.milestone(), first.milestone()];
        tickets.give(1).unwrap();
        seen.push(first.milestone());
        // The connection is lost, and the job goes on.
        drop(first);
        tickets.give(1).unwrap();
        until("the second part is there", || {
            let job = gateway.get(&format!("/v1/jobs/{id}")).json();
            (job["items_done"] == 2).then_some(())
        });
        let mut second = Events::of(gateway, &id, seen.last().map(|(number, ..)| *number));
        seen.push(second.milestone());
        tickets.give(1).unwrap();
        seen.extend(second);
        assert_eq!(names(&seen), ["queued", "started", "part", "part", "done"], "{seen:?}");
        assert_in_order(&seen);
        for (event, items_done) in [(&seen[2], 1), (&seen[3], 2)] {
            assert_eq!(event.2, json!({"id": id, "items": 3, "items_done": items_done}));
        }
        assert_eq!((&seen[4].2["items"], &seen[4].2["worker"]), (&json!(3), &json!("worker-0")));
        // A client that comes later gets the same events, from the one on at which it resumes.
        let all = events(gateway, &id, None);
        let milestones: Vec<_> = all.iter().filter(|(_, name, _)| name != "progress").cloned().collect();
        assert_eq!(milestones, seen);
        for at in 0..all.len() {
            assert_eq!(events(gateway, &id, Some(all[at].0)), all[at + 1..]);
        }
    }
}

/// A program that takes JSON inputs and reports on its items, and who demands a revision of it.
#[test]
fn json_inputs_progress_and_revisions_of_a_program() {
    let mut setup = Setup::new();
    program_model::start(&mut setup);
    setup.gateway(&[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[SERVED]);
    let gateway = setup.next();
    let job = json!({
        "model": SERVED, "inputs": [{"json": {"a": [1]}}, "steps 75"], "params": {"progress": true},
        "model_revision": REVISION,
    });
    let id = gateway.post("/v1/jobs", &job).json()["id"].as_str().expect("an id").to_owned();
    let all = events(gateway, &id, None);
    assert_in_order(&all);
    // Estimates of the queue, the start, reports on the second item in their order, the end.
    let mut milestones = names(&all);
    milestones.retain(|name| *name != "progress");
    assert_eq!(milestones, ["queued", "started", "done"], "{all:?}");
    let started = all.iter().position(|(_, name, _)| name == "started").unwrap();
    let (before, reports) = (&all[..started], &all[started + 1..all.len() - 1]);
    assert!(before.iter().all(|(_, _, data)| data.get("item").is_none()), "{before:?}");
    assert!(!reports.is_empty(), "{all:?}");
    let mut step = None;
    for (_, _, data) in reports {
        let fraction = data["fraction"].as_f64().unwrap_or_else(|| panic!("{data}"));
        let now = (fraction * 75.0).round() as u32;
        assert_eq!((&data["item"], &data["note"]), (&json!(1), &json!(format!("step {now} of 75"))));
        assert!(now < 75 && step.replace(now) < Some(now), "{now} after {step:?}");
    }
    // Of reports in a row the newest is remembered: who goes on in their middle gets that one, and the end.
    let rest = events(gateway, &id, Some(reports[0].0));
    assert_eq!(names(&rest).last(), Some(&"done"));
    assert!(rest.iter().all(|event| all.contains(event) && event.0 > reports[0].0), "{rest:?}");
    let done = ended(gateway, &id);
    assert_eq!(done["state"], "done", "{done}");
    assert_eq!(done["outputs"][0], json!({"json": {"json": {"a": [1]}}}));
    assert_eq!(done["model_revisions"], json!([REVISION]));
}
