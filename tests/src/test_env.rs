//! One test's environment: a virtual host, a client, workers, and the checks at the end that nothing is left.

use std::ffi::OsString;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow, ensure};
use futures_util::FutureExt as _;
use rustix::process::Signal;
use tokio::runtime::Runtime;
use vramq_schemas::topology::dead_queue;

use crate::broker::Broker;
use crate::client::{Client, Mailbox};
use crate::job::Message;
use crate::management::VirtualHost;
use crate::node::Node;
use crate::permissions::{Permissions, documented};
use crate::proxy::Proxy;
use crate::setup::Setup;
use crate::worker::Worker;

/// The model that workers serve unless a test says otherwise.
pub const MODEL: &str = "echo";

/// Where a test's replies go.
pub const REPLIES: &str = "replies";

/// The password of users that tests add to the broker.
pub const PASSWORD: &str = "test";

/// What a test body gets.
#[derive(Debug)]
pub struct TestEnv {
    pub setup: Setup,
    pub vhost: VirtualHost,
    /// The virtual host's AMQP address.
    pub url: String,
    pub client: Arc<Client>,
    workers: Vec<Worker>,
    /// Variables that workers start with.
    environment: Vec<(String, OsString)>,
    /// Kept until the workers have ended.
    proxies: Vec<Arc<Proxy>>,
    /// Texts of log lines above INFO that the test expects.
    announced: Vec<String>,
    /// Queues that may hold messages at the end.
    left: Vec<String>,
    /// Users of the broker that were made for this test.
    users: Vec<String>,
}

/// Runs a test body in an environment of its own, then checks that it left nothing behind.
///
/// # Errors
/// The body's, or what the look back found.
pub fn run(setup: Setup, body: impl AsyncFnOnce(&mut TestEnv) -> Result<()>) -> Result<()> {
    runtime()?.block_on(run_on(&Broker::from_environment()?, setup, body))
}

/// The same on a node that the test has for itself, and may ruin.
///
/// # Errors
/// As for [`run`], and if the node does not start.
pub fn run_on_own_node(
    setup: Setup,
    body: impl AsyncFnOnce(&mut TestEnv, &Node) -> Result<()>,
) -> Result<()> {
    runtime()?.block_on(async {
        let node = Node::start().await?;
        run_on(node.broker(), setup, async |env| body(env, &node).await).await
    })
}

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

async fn run_on(
    broker: &Broker,
    setup: Setup,
    body: impl AsyncFnOnce(&mut TestEnv) -> Result<()>,
) -> Result<()> {
    let mut env = TestEnv::new(broker, setup).await?;
    let result = AssertUnwindSafe(body(&mut env)).catch_unwind().await;
    let well = matches!(result, Ok(Ok(())));
    let looked = env.end(well).await;
    if !well {
        env.show_logs();
    }
    match result {
        Ok(result) => result.and(looked),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

impl TestEnv {
    async fn new(broker: &Broker, setup: Setup) -> Result<Self> {
        let vhost = VirtualHost::create(broker).await?;
        let url = broker.url(&vhost.name);
        let client = Client::connect(&url).await?;
        client.declare_queue(REPLIES, setup.queue.arguments()).await?;
        Ok(Self {
            setup,
            vhost,
            url,
            client: Arc::new(client),
            workers: Vec::new(),
            environment: Vec::new(),
            proxies: Vec::new(),
            announced: Vec::new(),
            left: Vec::new(),
            users: Vec::new(),
        })
    }

    /// Reconnects the test's own client after the broker was lost.
    ///
    /// # Errors
    /// No connection.
    pub async fn reconnect(&mut self) -> Result<()> {
        self.client = Arc::new(Client::connect(&self.url).await?);
        Ok(())
    }

    /// Starts a worker of [`MODEL`] on the echo engine, and waits until it consumes.
    ///
    /// # Errors
    /// It does not get there.
    pub async fn worker(&mut self, settings: &[&str]) -> Result<Worker> {
        let worker = self.spawn_worker(settings)?;
        worker.consuming().await?;
        Ok(worker)
    }

    /// Starts a worker without waiting for it. `settings` are `KEY=VALUE`.
    ///
    /// # Errors
    /// No process.
    pub fn spawn_worker(&mut self, settings: &[&str]) -> Result<Worker> {
        let engine = format!("model.{MODEL}.engine=echo");
        self.spawn_bare_worker(&[&[engine.as_str()], settings].concat())
    }

    /// The same without any model.
    ///
    /// # Errors
    /// No process.
    pub fn spawn_bare_worker(&mut self, settings: &[&str]) -> Result<Worker> {
        self.spawn_named(&format!("worker-{}", self.workers.len()), settings)
    }

    /// The same under a name of the test's choice.
    ///
    /// # Errors
    /// No process.
    pub fn spawn_named(&mut self, name: &str, settings: &[&str]) -> Result<Worker> {
        let queue_type = format!("broker.queue_type={}", self.setup.queue.as_str());
        // Workers of tests that run side by side would fight for the default ports.
        let options: Vec<_> = [&[queue_type.as_str(), "http.listen=127.0.0.1:0"], settings]
            .concat()
            .iter()
            .flat_map(|setting| ["--set".to_owned(), (*setting).to_owned()])
            .collect();
        let worker = Worker::spawn(name, &self.url, &options, &self.environment)?;
        self.workers.push(worker.clone());
        Ok(worker)
    }

    /// Makes a user of the broker with the documented permissions of a role; its name, which no other test has, and its AMQP
    /// address.
    ///
    /// # Errors
    /// No such role, or the management API does not answer.
    pub async fn add_user(&mut self, name: &str, role: &str) -> Result<(String, String)> {
        self.add_user_with(name, &documented(role)?).await
    }

    /// The same with these permissions.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn add_user_with(&mut self, name: &str, may: &Permissions) -> Result<(String, String)> {
        let user = format!("{name}.{}", self.vhost.name);
        self.users.push(user.clone());
        self.permit(&user, may).await?;
        let (_, host) = self.url.split_once('@').context("no user in the broker's address")?;
        Ok((user.clone(), format!("amqp://{user}:{PASSWORD}@{host}")))
    }

    /// Gives a user other permissions.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn permit(&self, user: &str, may: &Permissions) -> Result<()> {
        self.vhost.add_user(user, PASSWORD, may).await
    }

    /// A proxy to the virtual host, which lasts until all workers have ended.
    ///
    /// # Errors
    /// The system has no port.
    pub async fn proxy(&mut self) -> Result<Arc<Proxy>> {
        let proxy = Arc::new(Proxy::to(&self.url).await?);
        self.proxies.push(Arc::clone(&proxy));
        Ok(proxy)
    }

    /// Sets a variable for the workers that start from here on.
    pub fn set_environment(&mut self, name: &str, value: impl Into<OsString>) {
        self.environment.push((name.to_owned(), value.into()));
    }

    /// Announces that lines above INFO with this text are to be expected in a worker's log.
    pub fn announce(&mut self, text: &str) {
        self.announced.push(text.to_owned());
    }

    /// Announces that the test leaves messages in a queue.
    pub fn leave(&mut self, queue: &str) {
        self.left.push(queue.to_owned());
    }

    /// A good job for [`MODEL`], in the encoding of this run, with [`REPLIES`] as its reply queue.
    ///
    /// # Errors
    /// The texts have no form in the encoding.
    pub fn job<T: Into<String>>(&self, id: &str, texts: impl IntoIterator<Item = T>) -> Result<Message> {
        Message::texts(self.setup.encoding, MODEL, id, REPLIES, texts)
    }

    /// # Errors
    /// No such queue.
    pub async fn replies(&self) -> Result<Mailbox> {
        self.client.mailbox(REPLIES).await
    }

    /// # Errors
    /// No such queue.
    pub async fn dead_letters(&self) -> Result<Mailbox> {
        self.client.mailbox(&dead_queue(MODEL)).await
    }

    /// Ends all workers and, if the test went well, checks what it left; then deletes the virtual host.
    async fn end(&mut self, well: bool) -> Result<()> {
        let looked = if well { self.look_back().await } else { Ok(()) };
        for worker in &self.workers {
            worker.signal(Signal::KILL)?;
            worker.exited().await?;
        }
        let _ = self.client.close().await;
        self.vhost.delete().await?;
        for user in &self.users {
            self.vhost.delete_user(user).await?;
        }
        if looked.is_err() {
            self.show_logs();
        }
        looked
    }

    async fn look_back(&self) -> Result<()> {
        for worker in &self.workers {
            if worker.is_running() {
                worker.drain().await?;
            }
            let lines = worker.log.unannounced(&self.announced);
            ensure!(
                lines.is_empty(),
                "worker {} logged what the test did not announce:\n{}",
                worker.name,
                lines.join("\n")
            );
        }
        // What mailboxes did not read goes back to its queue when their connection closes.
        self.client.close().await?;
        let client = Client::connect(&self.url).await?;
        for queue in self.vhost.queues().await? {
            let ready = client.ready(&queue).await?;
            ensure!(ready == 0 || self.left.contains(&queue), "{ready} message(s) are left in `{queue}`");
        }
        client.close().await.context("close the client")?;
        self.vhost.workers_are_disconnected().await?;
        for worker in &self.workers {
            let process = format!("/proc/{}/stat", worker.pid);
            let alive = std::fs::read_to_string(process).is_ok_and(|stat| stat.contains("(vramq-worker)"));
            if alive {
                return Err(anyhow!("worker {} still runs", worker.name));
            }
        }
        Ok(())
    }

    fn show_logs(&self) {
        for worker in &self.workers {
            eprintln!("--- log of {} (process {})\n{}", worker.name, worker.pid, worker.log.text());
        }
    }
}
