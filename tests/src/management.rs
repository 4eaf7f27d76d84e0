//! The broker's own view of one virtual host, by its management API.
//!
//! Its counters are published by interval (one second where `scripts/rabbitmq` starts the broker): wait for a value,
//! never read it once.

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::broker::Broker;
use crate::http::{Server, segment};
use crate::permissions::Permissions;
use crate::wait::until;

/// A virtual host of its own for one test.
#[derive(Clone, Debug)]
pub struct VirtualHost {
    pub name: String,
    server: Server,
}

/// A consumer, as the broker sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerView {
    pub queue: String,
    pub prefetch: u64,
}

/// How many messages a queue holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    pub ready: u64,
    pub unacked: u64,
}

impl VirtualHost {
    /// Makes a new one that guest may use.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn create(broker: &Broker) -> Result<Self> {
        let this = Self {
            name: format!("vramq-test-{}", uuid::Uuid::now_v7().simple()),
            server: Server::new(&broker.management)?,
        };
        let rights = json!({"configure": ".*", "write": ".*", "read": ".*"});
        let vhost = format!("/api/vhosts/{}", this.name);
        this.server.request("PUT", &vhost, Some(&json!({}))).await?;
        let permissions = format!("/api/permissions/{}/guest", this.name);
        this.server.request("PUT", &permissions, Some(&rights)).await?;
        Ok(this)
    }

    /// Deletes it, with its queues and connections.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn delete(&self) -> Result<()> {
        self.request("DELETE", "vhosts", "").await.map(drop)
    }

    /// Whether the broker is of this version, as in 4.3, or a later one.
    ///
    /// # Errors
    /// The management API does not answer, or tells no version.
    pub async fn broker_is_at_least(&self, major: u32, minor: u32) -> Result<bool> {
        let overview = self.server.request("GET", "/api/overview", None).await?;
        let version = word(&overview, "/rabbitmq_version")?;
        let mut numbers = version.split('.').map_while(|number| number.parse().ok());
        let known = numbers.next().zip(numbers.next()).with_context(|| format!("{version} is no version"))?;
        Ok(known >= (major, minor))
    }

    /// Those that others may use: not the ones on which workers wait for commands.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn queues(&self) -> Result<Vec<String>> {
        let queues = self.list("queues", "").await?;
        let open = queues.iter().filter(|queue| queue["exclusive"] != true);
        open.map(|queue| word(queue, "/name")).collect()
    }

    /// What a queue holds, by the broker's last count; `None` until it has counted.
    ///
    /// # Errors
    /// No such queue.
    pub async fn depth(&self, queue: &str) -> Result<Option<Depth>> {
        let listed = self.queue(queue).await?;
        let count = |name: &str| listed.get(name).and_then(Value::as_u64);
        Ok(count("messages_ready")
            .zip(count("messages_unacknowledged"))
            .map(|(ready, unacked)| Depth { ready, unacked }))
    }

    /// Waits until each of these queues holds nothing, neither ready nor unacknowledged.
    ///
    /// # Errors
    /// No such queue, or it does not come to that.
    pub async fn until_empty(&self, queues: &[String]) -> Result<()> {
        for queue in queues {
            until(&format!("nothing in {queue}"), async || {
                Ok(self.depth(queue).await?.filter(|depth| *depth == Depth { ready: 0, unacked: 0 }))
            })
            .await?;
        }
        Ok(())
    }

    /// Waits until exactly so many deliveries of a queue are unacknowledged.
    ///
    /// # Errors
    /// No such queue, or it does not come to that.
    pub async fn until_unacked(&self, queue: &str, count: u64) -> Result<()> {
        let what = format!("{count} unacknowledged deliveries of {queue}");
        let held = until(&what, async || Ok(self.depth(queue).await?.filter(|depth| depth.unacked == count)));
        held.await.map(drop)
    }

    /// All fields that the management API has of a queue.
    ///
    /// # Errors
    /// No such queue.
    pub async fn queue(&self, queue: &str) -> Result<Value> {
        self.request("GET", "queues", &format!("/{}", segment(queue))).await
    }

    /// # Errors
    /// No such queue.
    pub async fn delete_queue(&self, queue: &str) -> Result<()> {
        self.request("DELETE", "queues", &format!("/{}", segment(queue))).await.map(drop)
    }

    /// # Errors
    /// No such exchange.
    pub async fn delete_exchange(&self, exchange: &str) -> Result<()> {
        self.request("DELETE", "exchanges", &format!("/{}", segment(exchange))).await.map(drop)
    }

    /// Consumers of queues that others may use, too.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn consumers(&self) -> Result<Vec<ConsumerView>> {
        let consumers = self.list("consumers", "").await?;
        consumers
            .iter()
            .filter(|consumer| consumer["exclusive"] != true)
            .map(|consumer| {
                Ok(ConsumerView {
                    queue: word(consumer, "/queue/name")?,
                    prefetch: number(consumer, "/prefetch_count")?,
                })
            })
            .collect()
    }

    /// How many of them a queue has.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn consumers_of(&self, queue: &str) -> Result<usize> {
        Ok(self.consumers().await?.iter().filter(|consumer| consumer.queue == queue).count())
    }

    /// Deliveries that each channel holds, of those that hold any. The broker has not counted those of a new channel yet.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn unacked_by_channel(&self) -> Result<Vec<u64>> {
        let channels = self.list("vhosts", "/channels").await?;
        let held = channels.iter().filter_map(|channel| channel.get("messages_unacknowledged")?.as_u64());
        Ok(held.filter(|held| *held > 0).collect())
    }

    /// The names of workers' connections, by the broker's name of the connection.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn worker_connections(&self) -> Result<Vec<(String, String)>> {
        let connections = self.list("vhosts", "/connections").await?;
        let workers = connections.iter().filter_map(|connection| {
            let name = word(connection, "/name").ok()?;
            let given = word(connection, "/client_properties/connection_name").ok()?;
            Some((name, given.strip_prefix("vramq-worker ")?.to_owned()))
        });
        Ok(workers.collect())
    }

    /// Waits until no connection of a worker is left. The broker takes a connection off its list a moment after its socket
    /// has closed, so a single request just after a worker's end may still see it.
    ///
    /// # Errors
    /// The management API does not answer; one is left after [`DEADLINE`](crate::wait::DEADLINE).
    pub async fn workers_are_disconnected(&self) -> Result<()> {
        let mut left = Vec::new();
        let gone = until("the workers' connections to close", async || {
            left = self.worker_connections().await?;
            Ok(left.is_empty().then_some(()))
        })
        .await;
        gone.with_context(|| format!("connections are left: {left:?}"))
    }

    /// Makes a user of the broker that has these permissions here, and none elsewhere.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn add_user(&self, user: &str, password: &str, permissions: &Permissions) -> Result<()> {
        self.set_password(user, password).await?;
        let Permissions { configure, write, read } = permissions;
        let rights = json!({"configure": configure, "write": write, "read": read});
        let path = format!("/api/permissions/{}/{}", self.name, segment(user));
        self.server.request("PUT", &path, Some(&rights)).await.map(drop)
    }

    /// Gives a user of the broker another password, and takes its tags.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn set_password(&self, user: &str, password: &str) -> Result<()> {
        self.set_account(user, password, "").await
    }

    /// Gives a user of the broker a password and tags, by which it may use the management API.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn set_account(&self, user: &str, password: &str, tags: &str) -> Result<()> {
        let account = json!({"password": password, "tags": tags});
        self.server.request("PUT", &format!("/api/users/{}", segment(user)), Some(&account)).await.map(drop)
    }

    /// # Errors
    /// No such user.
    pub async fn delete_user(&self, user: &str) -> Result<()> {
        self.server.request("DELETE", &format!("/api/users/{}", segment(user)), None).await.map(drop)
    }

    /// Cuts the connections of a worker, as an operator or a failing network would. Returns how many there were, without those that have
    /// ended but that the broker still lists.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn cut_worker(&self, worker: &str) -> Result<usize> {
        let mut cut = 0;
        for (connection, of) in self.worker_connections().await? {
            if of == worker {
                let path = format!("/api/connections/{}", segment(&connection));
                match self.server.request("DELETE", &path, None).await {
                    Ok(_) => cut += 1,
                    Err(error) if format!("{error:#}").contains(": 404 ") => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(cut)
    }

    /// Lets clients open so many connections, and no more.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn limit_connections(&self, count: usize) -> Result<()> {
        let path = format!("/api/vhost-limits/{}/max-connections", self.name);
        self.server.request("PUT", &path, Some(&json!({"value": count}))).await.map(drop)
    }

    /// Limits the bytes of all queues whose names match, by a policy as docs/rabbitmq.md gives it.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn limit_queue_bytes(&self, pattern: &str, bytes: u64) -> Result<()> {
        let policy =
            json!({"pattern": pattern, "apply-to": "queues", "definition": {"max-length-bytes": bytes}});
        let path = format!("/api/policies/{}/bytes", self.name);
        self.server.request("PUT", &path, Some(&policy)).await.map(drop)
    }

    /// Lets all queues whose names match hold so many messages and refuse more, by a policy.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn limit_queue_length(&self, pattern: &str, messages: u64) -> Result<()> {
        let definition = json!({"max-length": messages, "overflow": "reject-publish"});
        let policy = json!({"pattern": pattern, "apply-to": "queues", "definition": definition});
        self.server.request("PUT", &self.length_policy(), Some(&policy)).await.map(drop)
    }

    /// Removes that policy.
    ///
    /// # Errors
    /// The management API does not answer.
    pub async fn remove_length_limit(&self) -> Result<()> {
        self.server.request("DELETE", &self.length_policy(), None).await.map(drop)
    }

    fn length_policy(&self) -> String {
        format!("/api/policies/{}/length", self.name)
    }

    async fn request(&self, method: &str, kind: &str, rest: &str) -> Result<Value> {
        let path = format!("/api/{kind}/{}{rest}", self.name);
        self.server.request(method, &path, None).await
    }

    async fn list(&self, kind: &str, rest: &str) -> Result<Vec<Value>> {
        match self.request("GET", kind, rest).await? {
            Value::Array(list) => Ok(list),
            other => anyhow::bail!("/api/{kind} answered {other}"),
        }
    }
}

fn word(of: &Value, pointer: &str) -> Result<String> {
    let word = of.pointer(pointer).and_then(Value::as_str);
    Ok(word.with_context(|| format!("no {pointer} in {of}"))?.to_owned())
}

fn number(of: &Value, pointer: &str) -> Result<u64> {
    let number = of.pointer(pointer).and_then(Value::as_u64);
    number.with_context(|| format!("no {pointer} in {of}"))
}
