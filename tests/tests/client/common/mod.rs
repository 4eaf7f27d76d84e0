//! The test environment: a virtual host on a real RabbitMQ for every test, and a consumer that answers as workers do.

pub mod command;
pub mod held;
pub mod http;
pub mod package;
pub mod worker;

use std::time::{Duration, Instant};

use http::Management;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use uuid::Uuid;
use vramq_producer::{Input, Job, Params};
use vramq_schemas::topology::{JOBS_EXCHANGE, default_reply_queue, jobs_queue};

/// How long a condition may take to come true: far beyond what a loaded machine needs.
const DEADLINE: Duration = Duration::from_secs(60);

/// A vhost, deleted with everything in it on drop.
pub struct Broker {
    amqp_url: String,
    management: Management,
    vhost: String,
}

impl Broker {
    pub fn new() -> Self {
        // `RUST_LOG=debug` shows what the client says.
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        let _ = tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init();
        let amqp_url = required("VRAMQ_TEST_AMQP_URL");
        let management = Management::new(&required("VRAMQ_TEST_MANAGEMENT_URL"));
        let vhost = format!("test-{}", Uuid::new_v4());
        management.expect("PUT", &format!("/api/vhosts/{vhost}"), "{}");
        Self { amqp_url, management, vhost }
    }

    /// The vhost's URL, with the credentials of the environment.
    pub fn url(&self) -> String {
        let (server, _) = self.amqp_url.rsplit_once('/').expect("a URL with a vhost");
        format!("{server}/{}", self.vhost)
    }

    /// The vhost's URL for another user.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        let url = self.url();
        let (_, host) = url.rsplit_once('@').expect("a URL with credentials");
        format!("amqp://{user}:{password}@{host}")
    }

    pub async fn connect(&self) -> Connection {
        let properties = ConnectionProperties::default().with_connection_name("test".into());
        Connection::connect(&self.url(), properties).await.expect("connect")
    }

    /// Declares what the worker declares for a model.
    pub async fn declare(&self, channel: &Channel, model: &str, arguments: FieldTable) {
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel
            .exchange_declare(JOBS_EXCHANGE.into(), ExchangeKind::Direct, durable, FieldTable::default())
            .await
            .expect("declare exchange");
        for (queue, arguments) in
            [(jobs_queue(model), arguments), (default_reply_queue(model), FieldTable::default())]
        {
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.into(), durable, arguments).await.expect("declare queue");
        }
        channel
            .queue_bind(
                jobs_queue(model).into(),
                JOBS_EXCHANGE.into(),
                model.into(),
                QueueBindOptions::default(),
                FieldTable::default(),
            )
            .await
            .expect("bind queue");
    }

    /// The names of the vhost's queues that start so.
    pub fn queues(&self, prefix: &str) -> Vec<String> {
        let listed = self.management.expect("GET", &format!("/api/queues/{}", self.vhost), "");
        names(&listed).into_iter().filter(|name| name.starts_with(prefix)).collect()
    }

    /// The broker's internal names of the vhost's connections whose client-given name contains `part`.
    pub fn connections(&self, part: &str) -> Vec<String> {
        let path = format!("/api/vhosts/{}/connections", self.vhost);
        let listed: serde_json::Value =
            serde_json::from_str(&self.management.expect("GET", &path, "")).expect("JSON");
        listed
            .as_array()
            .expect("a list")
            .iter()
            .filter(|connection| {
                connection["client_properties"]["connection_name"]
                    .as_str()
                    .is_some_and(|name| name.contains(part))
            })
            .filter_map(|connection| connection["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// Cuts the connections whose name contains `part`, once they are listed.
    pub async fn cut(&self, part: &str) {
        let cut = until("the connection is listed", || {
            let names = self.connections(part);
            (!names.is_empty()).then_some(names)
        })
        .await;
        for name in cut {
            let escaped = name.replace(' ', "%20").replace('>', "%3E");
            // It may be gone by itself meanwhile.
            self.management.request("DELETE", &format!("/api/connections/{escaped}"), "");
        }
    }

    /// A user who may only consume and have a reply queue.
    pub fn add_user(&self, name: &str, password: &str, write: &str) {
        let body = format!(r#"{{"password": "{password}", "tags": ""}}"#);
        self.management.expect("PUT", &format!("/api/users/{name}"), &body);
        let body = format!(r#"{{"configure": ".*", "write": "{write}", "read": ".*"}}"#);
        let path = format!("/api/permissions/{}/{name}", self.vhost);
        self.management.expect("PUT", &path, &body);
    }

    /// How many channels all connections of a user may have.
    pub fn limit_channels(&self, user: &str, count: usize) {
        let body = format!(r#"{{"value": {count}}}"#);
        self.management.expect("PUT", &format!("/api/user-limits/{user}/max-channels"), &body);
    }

    pub fn remove_user(&self, name: &str) {
        self.management.expect("DELETE", &format!("/api/users/{name}"), "");
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.management.request("DELETE", &format!("/api/vhosts/{}", self.vhost), "");
    }
}

fn required(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: these tests need a real RabbitMQ. Run `make test`, or `scripts/rabbitmq start`.")
    })
}

fn names(listed: &str) -> Vec<String> {
    let listed: Vec<serde_json::Value> = serde_json::from_str(listed).expect("a list");
    listed.iter().filter_map(|entry| entry["name"].as_str().map(str::to_owned)).collect()
}

/// Waits for a condition, looking again every few milliseconds.
pub async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < DEADLINE, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A bound on a whole test's waiting.
pub async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, work).await.expect("in time")
}

pub fn job(model: &str, texts: &[&str]) -> Job {
    Job {
        model: model.to_owned(),
        inputs: texts.iter().map(|text| Input::Text((*text).to_owned())).collect(),
        params: Params::default(),
    }
}

/// A queue that holds `max` jobs and rejects the next.
pub fn bounded(max: i64) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(max));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    arguments
}
