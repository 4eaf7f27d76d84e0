//! When a caller hangs up, the gateway withdraws its job.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpStream;
use std::process::Command;

use futures_util::StreamExt as _;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer, ExchangeKind};
use serde_json::{Value, json};
use vramq_amqp::WITHDRAWN_MAX;
use vramq_schemas::fields::as_text;
use vramq_schemas::topology::{JOBS_EXCHANGE, WITHDRAWALS_EXCHANGE};
use vramq_schemas::withdrawal::{self, Withdrawal};
use vramq_schemas::{Encoding, ReplyKind};

use crate::harness::{DEADLINE, ECHO, Gateway, MINILM, Setup, until};
use crate::jobs::sharing_results;

/// The withdrawals and jobs that a worker receives.
pub struct Listener {
    _connection: Connection,
    channel: Channel,
    withdrawals: Consumer,
    jobs: String,
}

pub async fn listen(setup: &Setup, model: &str) -> Listener {
    let connection = Connection::connect(&setup.amqp_url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    let none = FieldTable::default;
    let exchange = WITHDRAWALS_EXCHANGE;
    channel.exchange_declare(exchange.into(), ExchangeKind::Fanout, durable, none()).await.unwrap();
    let own = || QueueDeclareOptions { exclusive: true, ..Default::default() };
    let mut queues = Vec::new();
    for (exchange, key) in [(exchange, ""), (JOBS_EXCHANGE, model)] {
        let queue = channel.queue_declare("".into(), own(), none()).await.unwrap().name().clone();
        let options = QueueBindOptions::default();
        channel.queue_bind(queue.clone(), exchange.into(), key.into(), options, none()).await.unwrap();
        queues.push(queue);
    }
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let withdrawals = channel.basic_consume(queues[0].clone(), "".into(), options, none()).await.unwrap();
    Listener { _connection: connection, channel, withdrawals, jobs: queues[1].to_string() }
}

impl Listener {
    /// The next withdrawal of a job: those of others are repeated meanwhile, and there may be nonsense.
    pub async fn withdrawal(&mut self, job: &str) -> Withdrawal {
        loop {
            match self.next_withdrawal().await {
                Some(withdrawal) if withdrawal.job == job => return withdrawal,
                _ => {}
            }
        }
    }

    /// Waits for the withdrawals of all these jobs, in any order.
    pub async fn all_withdrawn(&mut self, jobs: impl IntoIterator<Item = String>) {
        let mut left = jobs.into_iter().collect::<BTreeSet<_>>();
        while !left.is_empty() {
            if let Some(withdrawal) = self.next_withdrawal().await {
                left.remove(&withdrawal.job);
            }
        }
    }

    async fn next_withdrawal(&mut self) -> Option<Withdrawal> {
        let delivery = tokio::time::timeout(DEADLINE, self.withdrawals.next()).await.expect("in time");
        serde_json::from_slice(&delivery.unwrap().unwrap().data).ok()
    }

    /// Id and digest of the next job that is published.
    pub async fn job(&self) -> (String, String) {
        let properties = self.published().await;
        let headers = properties.headers().clone().unwrap();
        let digest = headers.inner().get(withdrawal::DIGEST).and_then(as_text).expect("a digest");
        (properties.message_id().as_ref().unwrap().to_string(), digest)
    }

    /// The properties of the next job that is published.
    pub async fn published(&self) -> BasicProperties {
        let start = std::time::Instant::now();
        let got = loop {
            let options = BasicGetOptions { no_ack: true };
            if let Some(got) = self.channel.basic_get(self.jobs.as_str().into(), options).await.unwrap() {
                break got;
            }
            assert!(start.elapsed() < DEADLINE, "no job was published");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        };
        got.delivery.properties
    }

    /// Replies to a job with `done`.
    pub async fn reply(&self, to: &BasicProperties, headers: FieldTable, body: &[u8]) {
        let queue = to.reply_to().clone().expect("a reply queue");
        let properties = BasicProperties::default()
            .with_correlation_id(to.correlation_id().clone().expect("a correlation id"))
            .with_type(ReplyKind::Done.as_str().into())
            .with_content_type(Encoding::Json.content_type().into())
            .with_headers(headers);
        let options = BasicPublishOptions::default();
        self.channel.basic_publish("".into(), queue, options, body, properties).await.unwrap();
    }
}

/// Sends a request and does not wait for its answer.
pub fn send(gateway: &Gateway, method: &str, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_hangs_up_withdraws_its_job_until_it_has_ended() {
    let setup = Setup::with(&[MINILM]);
    let mut listener = listen(&setup, MINILM).await;
    setup.workers[0].signal("STOP");
    for gateway in &setup.gateways {
        let request =
            send(gateway, "POST", "/v1/embeddings", &json!({"model": MINILM, "input": "x"}).to_string());
        let (job, digest) = listener.job().await;
        drop(request);
        let withdrawal = listener.withdrawal(&job).await;
        // A digest matches only a secret that the job's publisher knows.
        assert_eq!(withdrawal.digest().to_string(), digest);
        assert_eq!(listener.withdrawal(&job).await, withdrawal, "it is repeated");
        assert_eq!(gateway.metric("vramq_gateway_withdrawals_open", ""), 1.0);
        // The metrics show the request whose client gave up.
        assert_eq!(gateway.metric("vramq_gateway_requests_total", "status=\"499\""), 1.0);
        let lines = gateway.lines();
        let line = lines.iter().find(|line| line["path"] == "/v1/embeddings" && line["status"] == 499);
        let line = line.unwrap_or_else(|| panic!("{lines:?}"));
        assert_eq!((&line["caller"], &line["job"]), (&json!("local"), &json!(job)));
    }
    setup.workers[0].signal("CONT");
    for gateway in &setup.gateways {
        until("the job has ended", || {
            (gateway.metric("vramq_gateway_withdrawals_open", "") == 0.0).then_some(())
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_withdrawn_by_its_caller_or_when_its_time_is_up() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", "http.request_s=5"]);
    }
    setup.wait_for_models(&[ECHO]);
    let mut listener = listen(&setup, ECHO).await;
    setup.workers[0].signal("STOP");
    for gateway in &setup.gateways {
        let accepted = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]})).json();
        let withdrawn =
            gateway.send("DELETE", &format!("/v1/jobs/{}", accepted["id"].as_str().unwrap()), &[], None);
        assert_eq!(withdrawn.json()["state"], "withdrawn");
        let (job, digest) = listener.job().await;
        assert_eq!(listener.withdrawal(&job).await.digest().to_string(), digest);
        let late = gateway.post("/v1/embeddings", &json!({"model": ECHO, "input": "x"}));
        assert_eq!((late.status, late.header("x-should-retry")), (504, Some("false")));
        let (job, digest) = listener.job().await;
        assert_eq!(late.header("x-vramq-job-id"), Some(job.as_str()));
        assert_eq!(listener.withdrawal(&job).await.digest().to_string(), digest);
    }
}

/// A gateway whose store of results is silent stops just after it has answered the withdrawal.
#[tokio::test(flavor = "multi_thread")]
async fn a_withdrawal_that_was_answered_is_sent_although_the_gateway_stops() {
    let (setup, results) = sharing_results();
    let pipe = setup.folder.path().join("pipe");
    let mut listener = listen(&setup, ECHO).await;
    setup.workers[0].signal("STOP");
    let job = json!({"model": ECHO, "inputs": ["x"]});
    // One withdrawn at another gateway than its own, and one at its own.
    for (id, at) in [("elsewhere", 1), ("own", 0)] {
        let path = format!("/v1/jobs/{id}");
        let accepted = setup.gateways[0].send("PUT", &path, &[], Some(&job));
        assert_eq!(accepted.status, 202, "{accepted:?}");
        let record = results.join("local").join(format!("{id}.open"));
        until("the job is recorded", || record.exists().then_some(()));
        assert_eq!(setup.gateways[at].get(&path).json()["state"], "queued");
        // Who opens a pipe that nobody writes to waits.
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::fs::rename(&pipe, &record).unwrap();
        let withdrawn = setup.gateways[at].send("DELETE", &path, &[], None);
        setup.gateways[at].program.signal("TERM");
        assert_eq!(withdrawn.json()["state"], "withdrawn", "{withdrawn:?}");
        listener.withdrawal(accepted.header("x-vramq-job-id").expect("the job's name")).await;
    }
}

/// Another gateway has published a job of the same name before the withdrawn one ends.
#[test]
fn the_end_of_a_withdrawn_job_leaves_the_record_of_a_later_one() {
    let (setup, results) = sharing_results();
    setup.workers[0].signal("STOP");
    let gateway = &setup.gateways[0];
    let job = json!({"model": ECHO, "inputs": ["x"]});
    assert_eq!(gateway.send("PUT", "/v1/jobs/again", &[], Some(&job)).status, 202);
    assert_eq!(gateway.send("DELETE", "/v1/jobs/again", &[], None).json()["state"], "withdrawn");
    let path = |id: &str| results.join("local").join(format!("{id}.open"));
    let mut record = until("the record says that the job is withdrawn", || {
        let record: Value = serde_json::from_slice(&std::fs::read(path("again")).ok()?).ok()?;
        (record["withdrawn"] == true).then_some(record)
    });
    record["secret"] = json!("of another run");
    std::fs::write(path("again"), record.to_string()).unwrap();
    setup.workers[0].signal("CONT");
    until("the withdrawn job has ended", || {
        (gateway.metric("vramq_gateway_withdrawals_open", "") == 0.0).then_some(())
    });
    let done = gateway.send("PUT", "/v1/jobs/next", &[("prefer", "wait=60")], Some(&job));
    assert_eq!(done.json()["state"], "done", "{done:?}");
    until("the next job's own record is removed", || (!path("next").exists()).then_some(()));
    assert!(path("again").exists());
}

/// Withdrawn jobs that are still in their queue keep nobody from sending others, unless they are as many as their caller may have in flight.
#[test]
fn a_caller_that_withdraws_what_it_sends_does_not_fill_the_queue() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway(&["--set", "http.in_flight_max_per_key=2"]);
    }
    setup.wait_for_models(&[ECHO]);
    let job = json!({"model": ECHO, "inputs": ["x"]});
    // In the second round all places of the first are free again.
    for round in 0..2 {
        setup.workers[0].signal("STOP");
        for gateway in &setup.gateways {
            let path = |n: usize| format!("/v1/jobs/{}-{round}-{n}", gateway.program.name);
            let put = |n: usize| gateway.send("PUT", &path(n), &[], Some(&job));
            // Two that count apart, and two that are in flight until they have ended.
            for n in 0..4 {
                let accepted = put(n);
                assert_eq!(accepted.status, 202, "{accepted:?}");
                assert_eq!(gateway.send("DELETE", &path(n), &[], None).json()["state"], "withdrawn");
            }
            let refused = put(4);
            assert_eq!(
                (refused.status, &refused.json()["error"]["code"]),
                (429, &json!("too_many_in_flight")),
                "{refused:?}"
            );
        }
        setup.workers[0].signal("CONT");
        for gateway in &setup.gateways {
            until("they have ended", || {
                (gateway.metric("vramq_gateway_withdrawals_open", "") == 0.0).then_some(())
            });
        }
    }
}

/// Withdrawn jobs beyond those whose withdrawals are repeated.
const BEYOND: usize = 32;

/// Callers that withdraw jobs at the same time.
const CALLERS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn withdrawals_beyond_those_that_are_repeated_are_sent_once_and_counted() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    // One caller has all of them.
    let most = format!("http.in_flight_max_per_key={}", WITHDRAWN_MAX + BEYOND);
    // Those whose withdrawals are not repeated are in flight until they have ended. Each of CALLERS has at most two others in flight: the
    // response of the one before may count for a moment longer.
    let in_all = format!("http.in_flight_max={}", BEYOND + 2 * CALLERS);
    for _ in 0..2 {
        setup.gateway(&["--set", &most, "--set", &in_all]);
    }
    setup.wait_for_models(&[ECHO]);
    let mut listener = listen(&setup, ECHO).await;
    setup.workers[0].signal("STOP");
    let [gateway, other] = [0, 1].map(|at| &setup.gateways[at]);
    let job = &json!({"model": ECHO, "inputs": ["x"]});
    let withdraw = |n: usize| {
        let path = format!("/v1/jobs/job-{n}");
        let accepted = gateway.send("PUT", &path, &[], Some(job));
        assert_eq!(accepted.status, 202, "{accepted:?}");
        assert_eq!(gateway.send("DELETE", &path, &[], None).json()["state"], "withdrawn");
        // The name by which workers know the job.
        accepted.header("x-vramq-job-id").expect("the job's name").to_owned()
    };
    let withdrawn: Vec<_> = std::thread::scope(|scope| {
        let of_caller = |caller: usize| (caller..WITHDRAWN_MAX + BEYOND).step_by(CALLERS).map(withdraw);
        let callers: Vec<_> =
            (0..CALLERS).map(|caller| scope.spawn(move || of_caller(caller).collect::<Vec<_>>())).collect();
        callers.into_iter().flat_map(|caller| caller.join().expect("withdrawn")).collect()
    });
    let refused = (0..=2 * CALLERS).find_map(|n| {
        let answer = gateway.send("PUT", &format!("/v1/jobs/more-{n}"), &[], Some(job));
        (answer.status == 429).then(|| answer.json()["error"]["code"].clone())
    });
    assert_eq!(refused, Some(json!("overloaded")), "those beyond keep their places");
    listener.all_withdrawn(withdrawn).await;
    let count =
        |gateway: &Gateway, name: &str| gateway.metric(&format!("vramq_gateway_withdrawals_{name}"), "");
    assert_eq!(
        (count(gateway, "open"), count(gateway, "sent_once_total")),
        (WITHDRAWN_MAX as f64, BEYOND as f64)
    );
    until("the log says so", || {
        gateway.program.log().contains("too many withdrawn jobs have not ended").then_some(())
    });
    for name in ["not_sent_total", "open", "sent_once_total"] {
        assert_eq!(count(other, name), 0.0, "{name}");
    }
    assert_eq!(count(gateway, "not_sent_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_may_be_asked_for_again_outlives_its_request() {
    let setup = Setup::with(&[ECHO]);
    setup.workers[0].signal("STOP");
    let gateway = &setup.gateways[0];
    let body = json!({"model": ECHO, "inputs": ["x"]}).to_string();
    let mut stream = TcpStream::connect(gateway.url.trim_start_matches("http://")).unwrap();
    write!(
        stream,
        "PUT /v1/jobs/mine HTTP/1.1\r\nHost: localhost\r\nPrefer: wait=60\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    until("the job is queued", || (gateway.get("/v1/jobs/mine").json()["state"] == "queued").then_some(()));
    drop(stream);
    setup.workers[0].signal("CONT");
    until("the job is done", || (gateway.get("/v1/jobs/mine").json()["state"] == "done").then_some(()));
    assert_eq!(gateway.metric("vramq_gateway_jobs_withdrawn", ""), 0.0);
}
