//! Gateways with a common folder for results that get the same request at the same moment: one of them publishes the job.

use std::path::PathBuf;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{Answer, ECHO, Gateway, Setup, until};
use crate::jobs::set;

/// Requests for one job that come at the same moment.
const CALLERS: usize = 8;

/// A worker, and a gateway for each of these settings.
fn shared(worker: &[&str], more: &[&[&str]]) -> (Setup, PathBuf) {
    let mut setup = Setup::new();
    let results = setup.folder.path().join("results");
    let worker: Vec<_> = worker.iter().map(|&it| it.to_owned()).collect();
    setup.worker(&[ECHO], &set(&worker));
    for more in more {
        let folder = format!("results.folder={}", results.display());
        let settings: Vec<_> = more.iter().map(|&it| it.to_owned()).chain([folder]).collect();
        setup.gateway(&set(&settings));
    }
    setup.wait_for_models(&[ECHO]);
    (setup, results)
}

fn put(gateway: &Gateway, id: &str) -> Answer {
    let job = json!({"model": ECHO, "inputs": ["one"]});
    gateway.send("PUT", &format!("/v1/jobs/{id}"), &[("prefer", "wait=60")], Some(&job))
}

fn claims(results: &std::path::Path) -> usize {
    let files = std::fs::read_dir(results.join("local")).unwrap();
    files.filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|it| it == "claim")).count()
}

#[test]
fn the_same_request_at_two_gateways_at_the_same_moment_is_one_job() {
    const JOBS: usize = 30;
    let (setup, results) = shared(&[], &[&[], &[]]);
    let all = Barrier::new(CALLERS);
    let answers: Vec<Vec<Answer>> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let (gateway, all) = (&setup.gateways[caller % 2], &all);
                let keyed = |key: &str| {
                    let headers = [("idempotency-key", key), ("prefer", "wait=60")];
                    gateway.send(
                        "POST",
                        "/v1/jobs",
                        &headers,
                        Some(&json!({"model": ECHO, "inputs": ["one"]})),
                    )
                };
                scope.spawn(move || {
                    let ask = |job: usize| {
                        all.wait();
                        let name = format!("job-{job}");
                        if job.is_multiple_of(2) { put(gateway, &name) } else { keyed(&name) }
                    };
                    (0..JOBS).map(ask).collect()
                })
            })
            .collect();
        callers.into_iter().map(|caller| caller.join().unwrap()).collect()
    });
    for of_caller in &answers {
        for (answer, first) in of_caller.iter().zip(&answers[0]) {
            assert_eq!((answer.status, &answer.json()["state"]), (200, &json!("done")), "{answer:?}");
            assert_eq!(answer.json()["message_id"], first.json()["message_id"]);
        }
    }
    let done = setup.gateways.iter().map(|it| it.metric("vramq_gateway_jobs_ended_total", "done"));
    assert_eq!(done.sum::<f64>(), JOBS as f64, "jobs that were published");
    setup.until_counter("answered", JOBS as u64);
    until("no claim is left", || (claims(&results) == 0).then_some(()));
}

/// A gateway dies between its claim on a job and the publish: another one publishes the job when the claim has not been renewed for a time.
#[test]
fn a_claim_of_a_gateway_that_is_gone_delays_the_job_and_no_more() {
    let (setup, results) = shared(&[], &[&[], &["http.request_s=1"]]);
    std::fs::create_dir_all(results.join("local")).unwrap();
    std::fs::write(results.join("local/mine.claim"), "of-a-gateway-that-is-gone").unwrap();
    let start = Instant::now();
    let answer = put(&setup.gateways[1], "mine");
    let retry_s: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (503, &json!("claimed")), "{answer:?}");
    assert_eq!(answer.header("x-should-retry"), Some("true"));
    let waited = start.elapsed().as_secs() + 1;
    assert!((15_u64.saturating_sub(waited)..=15.max(waited)).contains(&retry_s), "{retry_s}");
    until("another name is free", || (put(&setup.gateways[1], "other").status == 200).then_some(()));
    let answer = put(&setup.gateways[0], "mine");
    assert_eq!((answer.status, &answer.json()["state"]), (200, &json!("done")), "{answer:?}");
    assert!(start.elapsed() >= Duration::from_secs(15));
    until("no claim is left", || (claims(&results) == 0).then_some(()));
    assert_eq!(put(&setup.gateways[1], "mine").status, 200);
    setup.until_counter("answered", 2);
}

/// A job that the broker refuses leaves its name free.
#[test]
fn a_refused_job_releases_its_claim() {
    let small = ["broker.queue_length_max=3", "broker.queue_type=classic", "model.echo.slots_max=1"];
    let (setup, results) = shared(&small, &[&[], &[]]);
    setup.workers[0].signal("STOP");
    let job = json!({"model": ECHO, "inputs": ["one"]});
    let async_ = [("prefer", "respond-async")];
    until("the queue is full", || {
        (setup.next().send("POST", "/v1/jobs", &async_, Some(&job)).status == 429).then_some(())
    });
    for gateway in &setup.gateways {
        let refused = put(gateway, "mine");
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &json!("queue_full")));
    }
    until("no claim is left", || (claims(&results) == 0).then_some(()));
    setup.workers[0].signal("CONT");
    until("the queue has room", || (put(&setup.gateways[1], "mine").status == 200).then_some(()));
    assert_eq!(put(&setup.gateways[0], "mine").json()["state"], "done");
}
