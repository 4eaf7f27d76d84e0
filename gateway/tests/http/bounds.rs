//! A request for which the gateway has no room gets a 429 that says when to try again. The gateway takes it at that time.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vramq_tests::pass_tickets::PassTickets;

use crate::harness::{Answer, DEADLINE, ECHO, Gateway, Setup, until};

/// The time of a job, of those that get one pass each.
const JOB: Duration = Duration::from_millis(250);

/// Jobs in its queue at the start.
const JOBS: u64 = 120;

/// Jobs of much more than a minute, and fewer than two callers may have in flight.
const JOBS_OF_MINUTES: u64 = 440;

/// Jobs that are answered before the estimate is judged: the rate averages some heartbeats, and during the first one the worker had just
/// started.
const JOBS_BEFORE: u64 = 40;

/// A worker of the echo model and two gateways.
fn setup(worker: &[&str], gateways: &[&str]) -> Setup {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], worker);
    for _ in 0..2 {
        setup.gateway(gateways);
    }
    setup.wait_for_models(&[ECHO]);
    setup
}

fn job() -> Value {
    json!({"model": ECHO, "inputs": ["x"]})
}

/// Asserts a refusal that a client can obey: it names its bound and when to retry.
fn assert_overloaded(answer: &Answer, code: &str) {
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (429, &json!(code)), "{answer:?}");
    assert!((1..=60).contains(&retry_after(answer)) && answer.header("x-should-retry") == Some("true"));
}

fn retry_after(answer: &Answer) -> u64 {
    answer
        .header("retry-after")
        .and_then(|seconds| seconds.parse().ok())
        .unwrap_or_else(|| panic!("{answer:?}"))
}

/// Limits requests in total and per caller. Unfinished jobs count.
#[test]
fn requests_in_flight_are_bounded() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    let most = ["--set", "http.in_flight_max=2"];
    setup.gateway(&most);
    setup.gateway(&most);
    let of_caller = ["--set", "http.in_flight_max_per_key=2"];
    setup.gateway(&of_caller);
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("STOP");
    let codes = ["overloaded", "overloaded", "too_many_in_flight"];
    for (published, (gateway, code)) in (2..).step_by(2).zip(setup.gateways.iter().zip(codes)) {
        for _ in 0..2 {
            assert_eq!(gateway.post("/v1/jobs", &job()).status, 202);
        }
        // The broker counts at intervals.
        until("the broker has counted them", || {
            (setup.messages("vramq.jobs.echo") == Some(published)).then_some(())
        });
        for path in ["/v1/jobs", "/v1/embeddings"] {
            assert_overloaded(&gateway.post(path, &job()), code);
        }
        // Other callers get 429 as well. Requests that need no place are still served.
        assert_eq!((gateway.get("/v1/models").status, gateway.get("/readyz").status), (200, 200));
        assert_eq!(setup.messages("vramq.jobs.echo"), Some(published), "nothing was published");
    }
    setup.workers[0].signal("CONT");
    for gateway in &setup.gateways {
        until("there is room again", || (gateway.post("/v1/jobs", &job()).status != 429).then_some(()));
    }
}

/// How an answer begins.
const ANSWERED: &[u8; 12] = b"HTTP/1.1 200";

/// A connection that is one too many is closed at once, and counted.
#[test]
fn connections_are_bounded() {
    let mut setup = Setup::new();
    for _ in 0..2 {
        setup.gateway(&["--set", "http.connections_max=8"]);
    }
    for gateway in &setup.gateways {
        let connect = || TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
        // The one that asks is one, too, until it is closed.
        let held: Vec<_> = (0..7).map(|_| connect()).collect();
        until("they are accepted", || {
            (gateway.metric("vramq_gateway_connections ", "") == 8.0).then_some(())
        });
        let eighth = until("the last place is free", || {
            let mut stream = connect();
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            // Closed or reset: the connection has no place. A connection with a place is answered, and keeps its place.
            let mut answer = [0; ANSWERED.len()];
            let asked = stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n");
            let is_answered = asked.and_then(|()| stream.read_exact(&mut answer)).is_ok();
            (is_answered && answer == *ANSWERED).then_some(stream)
        });
        for _ in 0..3 {
            let mut refused = connect();
            refused.set_read_timeout(Some(DEADLINE)).unwrap();
            let closed = match refused.read(&mut [0]) {
                Ok(bytes) => bytes == 0,
                Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
            };
            assert!(closed, "it has a place");
        }
        drop((held, eighth));
        let refused: u64 = until("there are places again", || {
            let metrics = ureq::get(&format!("{}/metrics", gateway.url)).call().ok()?.into_string().ok()?;
            let counted =
                |line: &str| line.strip_prefix("vramq_gateway_connections_refused_total ")?.parse().ok();
            metrics.lines().find_map(counted)
        });
        assert!(refused >= 3, "{refused}");
    }
}

/// How often a rate is measured: a machine that stands still for some seconds meanwhile spoils a measurement.
const MEASUREMENTS_MAX: usize = 3;

/// Asserts that one of the measurements is right. A measurement is the seconds that answers named, and those that it took; `right_of` gives
/// what answers may name for the latter.
fn assert_told_right(measure: fn() -> (Vec<u64>, f64), right_of: fn(f64) -> RangeInclusive<f64>) {
    let mut misses = Vec::new();
    while misses.len() < MEASUREMENTS_MAX {
        let (told, waited) = measure();
        if told.iter().all(|seconds| right_of(waited).contains(&(*seconds as f64))) {
            return;
        }
        misses.push((told, waited));
    }
    panic!("what the answers said, and how long it took, in seconds: {misses:?}");
}

#[test]
fn a_queue_that_is_too_long_says_when_it_will_be_short_enough() {
    // Whole seconds, rounded up, and at least one.
    assert_told_right(told_and_waited, |waited| waited / 2.0 - 1.0..=2.0 * waited + 1.0);
}

/// Gives each job one pass, at a fixed rate. Returns the seconds that each gateway named in its refusal, and the seconds until a gateway
/// accepted a job.
fn told_and_waited() -> (Vec<u64>, f64) {
    let mut tickets = PassTickets::unannounced().unwrap();
    let worker = ["--set", "model.echo.slots_max=1", "--set", &tickets.setting()];
    let setup = setup(&worker, &["--set", "http.queue_s_max=3"]);
    // Nothing is known of the worker's rate yet, so that all are taken.
    for _ in 0..JOBS {
        assert_eq!(setup.next().post("/v1/jobs", &job()).status, 202);
    }
    let mut measured = (Vec::new(), 0.0);
    while_jobs_are_answered(&setup, &mut tickets, JOB, JOBS_BEFORE, || {
        let refused = |gateway: &Gateway| {
            let answer = gateway.post("/v1/jobs", &job());
            assert_overloaded(&answer, "queue_too_long");
            retry_after(&answer)
        };
        let told = setup.gateways.iter().map(refused).collect();
        let start = Instant::now();
        until("the queue is short enough", || {
            (setup.next().post("/v1/jobs", &job()).status == 202).then_some(())
        });
        measured = (told, start.elapsed().as_secs_f64());
    });
    measured
}

/// The time of a job in the test of a full queue: much more than the second that is said while nothing is known.
const SLOW_JOB: Duration = Duration::from_secs(4);

/// Jobs of that time that are answered before the estimate is judged: the rate is known from the second one on.
const SLOW_JOBS_BEFORE: u64 = 3;

#[test]
fn a_full_queue_says_when_it_takes_the_next_job() {
    // Whole seconds, rounded up.
    assert_told_right(told_of_a_full_queue_and_waited, |waited| waited / 2.0..=2.0 * waited + 1.0);
}

/// The seconds that each gateway tells whom it refuses, and those from a job that is taken until the next one is.
fn told_of_a_full_queue_and_waited() -> (Vec<u64>, f64) {
    let mut tickets = PassTickets::unannounced().unwrap();
    let small = ["broker.queue_length_max=6", "broker.queue_type=classic", "model.echo.slots_max=1"];
    let settings = small.map(|setting| ["--set", setting]).concat();
    let setup = setup(&[&settings[..], &["--set", &tickets.setting()]].concat(), &[]);
    let status = |gateway: &Gateway| gateway.post("/v1/jobs", &job()).status;
    until("the queue is full", || (status(setup.next()) == 429).then_some(()));
    let mut measured = (Vec::new(), 0.0);
    while_jobs_are_answered(&setup, &mut tickets, SLOW_JOB, SLOW_JOBS_BEFORE, || {
        until("the queue is full again", || (status(setup.next()) == 429).then_some(()));
        // The worker has just taken one.
        until("the next job is taken", || (status(setup.next()) == 202).then_some(()));
        let start = Instant::now();
        let refused = |gateway: &Gateway| {
            let answer = gateway.post("/v1/jobs", &job());
            assert_overloaded(&answer, "queue_full");
            retry_after(&answer)
        };
        let told = setup.gateways.iter().map(refused).collect();
        until("the next job is taken", || (status(setup.next()) == 202).then_some(()));
        measured = (told, start.elapsed().as_secs_f64());
    });
    measured
}

/// A worker that had little to do has shown little of what it can do. One that stands still during the burst shows that it is slow.
#[test]
fn a_burst_after_a_quiet_time_is_taken() {
    let mut refused = Vec::new();
    while refused.len() < MEASUREMENTS_MAX {
        match refused_of_a_burst() {
            None => return,
            Some(job) => refused.push(job),
        }
    }
    panic!("of each burst, the first job that was refused: {refused:?}");
}

/// The first job that is refused of a burst after a quiet time, and why.
fn refused_of_a_burst() -> Option<(usize, Answer)> {
    let setup = setup(&[], &["--set", "http.queue_s_max=1"]);
    let first = setup.next().send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job()));
    assert_eq!(first.json()["state"], "done", "{first:?}");
    for gateway in &setup.gateways {
        until("a heartbeat tells of it", || {
            let models = gateway.get("/v1/status").json()["models"].clone();
            models[ECHO]["workers"]["jobs_per_s"].as_f64().filter(|rate| *rate > 0.0)
        });
    }
    let mut burst = (0..100).map(|at| (at, setup.next().post("/v1/jobs", &job())));
    burst.find(|(_, answer)| !matches!(answer.status, 200 | 202))
}

/// OpenAI's clients obey waits of at most a minute, and retry at once if they are told a longer one.
#[test]
fn a_refusal_says_a_minute_at_most() {
    let mut tickets = PassTickets::unannounced().unwrap();
    let worker = ["--set", "model.echo.slots_max=1", "--set", &tickets.setting()];
    let setup = setup(&worker, &["--set", "http.queue_s_max=1"]);
    for _ in 0..JOBS_OF_MINUTES {
        assert_eq!(setup.next().post("/v1/jobs", &job()).status, 202);
    }
    while_jobs_are_answered(&setup, &mut tickets, JOB, JOBS_BEFORE, || {
        for gateway in &setup.gateways {
            let refused = gateway.post("/v1/jobs", &job());
            assert_overloaded(&refused, "queue_too_long");
            assert_eq!(retry_after(&refused), 60, "{refused:?}");
        }
    });
}

/// Has the worker answer a job in each of these intervals, and does something when so many are answered: then the rate is known.
fn while_jobs_are_answered(
    setup: &Setup,
    tickets: &mut PassTickets,
    interval: Duration,
    jobs: u64,
    then: impl FnOnce(),
) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                // After a standstill the worker must not run all missed passes at once: that would change the rate.
                if tickets.left().unwrap() == 0 {
                    tickets.give(1).unwrap();
                }
                std::thread::sleep(interval);
            }
        });
        // Also ends when an assertion fails.
        let _over = Over(&is_over);
        until("the rate is known", || setup.counter("answered").filter(|answered| *answered >= jobs));
        then();
    });
}

/// Ends the thread that gives tickets.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
