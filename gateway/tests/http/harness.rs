//! The test environment: a virtual host for every test, with gateways and workers as processes.

mod vhost;

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use vramq_tests::node::Node;

use crate::processes::program;
pub use crate::processes::{Program, clean};
use vhost::management;

/// How long a condition may take to come true: far beyond what a loaded machine needs.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// Seconds between the AMQP heartbeats of workers. The broker closes a connection after two silent intervals. Many tests stop a worker for
/// longer than two default intervals on a slow machine.
const AMQP_HEARTBEAT_S: u32 = 60;

/// The name of the real model in tests.
pub const MINILM: &str = "minilm";

/// The model that answers each input with itself.
pub const ECHO: &str = "echo";

/// A vhost with its programs. All end with it.
pub struct Setup {
    /// Where the broker is: over AMQP, without a vhost, and its management's URL.
    broker: (String, String),
    vhost: String,
    /// Users that the test has added to the broker.
    users: Vec<String>,
    pub folder: TempDir,
    /// What gateways take for the folder of this user's state.
    pub state: PathBuf,
    /// What programs find in their environment, besides this process's own.
    pub environment: Vec<(&'static str, String)>,
    pub gateways: Vec<Gateway>,
    pub workers: Vec<Program>,
    turn: AtomicUsize,
    /// Gateways that were started, for the names of their logs.
    launched: usize,
}

/// A running gateway.
pub struct Gateway {
    pub program: Program,
    pub url: String,
}

/// An answer, whatever its status.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub text: String,
}

impl Setup {
    /// A vhost without programs.
    pub fn new() -> Self {
        let url = required("VRAMQ_TEST_AMQP_URL");
        let (server, _) = url.rsplit_once('/').expect("a URL with a vhost");
        Self::at(server.to_owned(), required("VRAMQ_TEST_MANAGEMENT_URL"))
    }

    /// A vhost on a node of the test's own, which the test may break.
    pub fn on(node: &Node) -> Self {
        let broker = node.broker();
        Self::at(broker.url("").trim_end_matches('/').to_owned(), broker.management.clone())
    }

    fn at(server: String, management_url: String) -> Self {
        let vhost = format!("gateway-{}", uuid::Uuid::new_v4());
        management(&management_url, "PUT", &format!("/api/vhosts/{vhost}"), None);
        let folder = tempfile::tempdir().expect("a folder");
        Self {
            broker: (server, management_url),
            vhost,
            users: Vec::new(),
            state: folder.path().join("state"),
            folder,
            environment: Vec::new(),
            gateways: Vec::new(),
            workers: Vec::new(),
            turn: AtomicUsize::new(0),
            launched: 0,
        }
    }

    /// A worker with these models, and two gateways that know of it.
    pub fn with(models: &[&str]) -> Self {
        let mut setup = Self::new();
        setup.worker(models, &[]);
        setup.gateway(&[]);
        setup.gateway(&[]);
        setup.wait_for_models(models);
        setup
    }

    /// The vhost's name.
    pub fn vhost(&self) -> &str {
        &self.vhost
    }

    /// The vhost's URL.
    pub fn amqp_url(&self) -> String {
        format!("{}/{}", self.broker.0, self.vhost)
    }

    /// Starts a worker; does not wait for it.
    pub fn worker(&mut self, models: &[&str], options: &[&str]) {
        self.worker_as(&self.amqp_url(), models, options);
    }

    /// The same as another user of the broker.
    pub fn worker_as(&mut self, amqp_url: &str, models: &[&str], options: &[&str]) {
        let name = format!("worker-{}", self.workers.len());
        let mut command = clean(&program("vramq-worker"));
        let amqp_url = format!("{amqp_url}?heartbeat={AMQP_HEARTBEAT_S}");
        command.args(["run", "--name", &name, "--broker-url", &amqp_url, "--http-listen", "off"]);
        command.args(["--set", "worker.heartbeat_s=1", "--set", "device.cpu.threads=1"]);
        for model in models {
            match *model {
                MINILM => command.args(["--model", &format!("{MINILM}={}", model_folder().display())]),
                other => command.args(["--set", &format!("model.{other}.engine=echo")]),
            };
        }
        command.args(options).envs(self.environment.clone());
        let program = Program::start(&mut command, &name, self.folder.path());
        self.workers.push(program);
    }

    /// Starts a gateway, and waits until it is ready.
    pub fn gateway(&mut self, options: &[&str]) {
        self.gateway_as(&self.amqp_url(), options);
    }

    /// The same as another user of the broker.
    pub fn gateway_as(&mut self, amqp_url: &str, options: &[&str]) {
        let gateway = self.launch(amqp_url, "http", options);
        until("the gateway is ready", || (gateway.get("/readyz").status == 200).then_some(()));
        self.gateways.push(gateway);
    }

    /// Starts a gateway that serves TLS, and is none of those that take turns.
    pub fn tls_gateway(&mut self, options: &[&str]) -> Gateway {
        self.launch(&self.amqp_url(), "https", options)
    }

    fn launch(&mut self, amqp_url: &str, scheme: &str, options: &[&str]) -> Gateway {
        let name = format!("gateway-{}", self.launched);
        self.launched += 1;
        let mut command = gateway_command();
        command.args(["run", "--listen", "127.0.0.1:0", "--broker-url", amqp_url]).args(options);
        command.env("XDG_STATE_HOME", &self.state).envs(self.environment.clone());
        let program = Program::start(&mut command, &name, self.folder.path());
        let address = until("the gateway serves", || {
            let line = program.lines().into_iter().find(|line| line["message"] == "serving")?;
            line["address"].as_str().map(str::to_owned)
        });
        Gateway { program, url: format!("{scheme}://{address}") }
    }

    /// Waits until every gateway knows workers that take jobs of these models.
    pub fn wait_for_models(&self, models: &[&str]) {
        for gateway in &self.gateways {
            for model in models {
                until("the model is served", || {
                    let known =
                        gateway.get("/v1/status").json()["models"][model]["workers"]["consuming"].as_u64();
                    (known? > 0).then_some(())
                });
            }
        }
    }

    /// The gateways take turns.
    pub fn next(&self) -> &Gateway {
        &self.gateways[self.turn.fetch_add(1, Ordering::Relaxed) % self.gateways.len()]
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for program in self.workers.iter().chain(self.gateways.iter().map(|gateway| &gateway.program)) {
                eprintln!("--- {}\n{}", program.name, program.log());
            }
        }
        self.gateways.clear();
        self.workers.clear();
        management(&self.broker.1, "DELETE", &format!("/api/vhosts/{}", self.vhost), None);
        for user in &self.users {
            management(&self.broker.1, "DELETE", &format!("/api/users/{user}"), None);
        }
    }
}

impl Gateway {
    /// The lines of its log, with those of all requests that it has answered. A thread writes the log, so a line may come after the answer.
    pub fn lines(&self) -> Vec<Value> {
        let marker = uuid::Uuid::new_v4().to_string();
        self.send("GET", "/nothing", &[("x-request-id", &marker)], None);
        until("the log has the last request", || {
            let lines = self.program.lines();
            lines.iter().any(|line| line["request_id"] == *marker).then_some(lines)
        })
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], None)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[], Some(body))
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&Value>) -> Answer {
        let mut request = ureq::request(method, &format!("{}{path}", self.url)).timeout(DEADLINE);
        for (name, value) in headers {
            request = request.set(name, value);
        }
        let sent = match body {
            Some(body) => request.set("content-type", "application/json").send_string(&body.to_string()),
            None => request.call(),
        };
        Answer::of(sent)
    }

    /// One of the gateway's figures, summed over the label sets that contain `labels`.
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        let text = self.get("/metrics").text;
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }
}

impl Answer {
    pub fn of(sent: Result<ureq::Response, ureq::Error>) -> Self {
        let response = match sent {
            Ok(response) | Err(ureq::Error::Status(_, response)) => response,
            Err(error) => panic!("no answer: {error}"),
        };
        let status = response.status();
        let names = response.headers_names();
        let header = |name: &String| Some((name.to_ascii_lowercase(), response.header(name)?.to_owned()));
        let headers = names.iter().filter_map(header).collect();
        let mut text = String::new();
        response.into_reader().read_to_string(&mut text).expect("read the answer");
        Self { status, headers, text }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(named, _)| named == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }
}

/// Figures from the workers' heartbeats.
impl Setup {
    /// A figure of the first worker's first model.
    pub fn counter(&self, name: &str) -> Option<u64> {
        self.counter_of("worker-0", name)
    }

    pub fn counter_of(&self, worker: &str, name: &str) -> Option<u64> {
        let status = self.gateways.last()?.get("/v1/status").json();
        let worker = status["workers"].as_array()?.iter().find(|found| found["worker"] == worker)?;
        let model = &worker["models"][0];
        model["counters"][name].as_u64().or_else(|| model[name].as_u64())
    }

    /// Waits until the first worker says so.
    pub fn until_counter(&self, name: &str, value: u64) {
        until(&format!("{name} is {value}"), || (self.counter(name) == Some(value)).then_some(()));
    }
}

/// The gateway as a command.
pub fn gateway_command() -> std::process::Command {
    clean(Path::new(env!("CARGO_BIN_EXE_vramq-gateway")))
}

/// Waits for a condition, looking again every few milliseconds.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(start.elapsed() < DEADLINE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The folder of the real model.
pub fn model_folder() -> PathBuf {
    std::env::var_os("VRAMQ_TEST_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/all-MiniLM-L6-v2"),
        PathBuf::from,
    )
}

/// What a variable of the tests is set to.
pub fn required(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: `make test` sets it; by hand: scripts/with-rabbitmq cargo test -p vramq-gateway")
    })
}
