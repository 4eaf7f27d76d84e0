//! What a test asks of its virtual host, over the broker's management API: users, queues, connections.

use serde_json::Value;

use super::{DEADLINE, Setup, until};

impl Setup {
    /// Adds a user to the broker, with rights on the vhost: configure, write, read. Its name, and its URL of the vhost.
    pub fn add_user(&mut self, rights: [&str; 3]) -> (String, String) {
        let user = format!("user-{}", uuid::Uuid::new_v4());
        self.users.push(user.clone());
        let created = serde_json::json!({"password": "secret", "tags": ""});
        management(&self.broker.1, "PUT", &format!("/api/users/{user}"), Some(&created));
        self.permit(&user, rights);
        let url = self.amqp_url();
        let (_, host) = url.rsplit_once('@').unwrap_or_else(|| url.split_once("://").expect("a URL"));
        let url = format!("amqp://{user}:secret@{host}");
        (user, url)
    }

    /// Gives a user of [`add_user`](Self::add_user) other rights on the vhost.
    pub fn permit(&self, user: &str, [configure, write, read]: [&str; 3]) {
        let rights = serde_json::json!({"configure": configure, "write": write, "read": read});
        management(&self.broker.1, "PUT", &format!("/api/permissions/{}/{user}", self.vhost), Some(&rights));
    }

    /// Messages in a queue, ready and unacknowledged; `None` if there is no such queue, or no statistics of it yet.
    pub fn messages(&self, queue: &str) -> Option<u64> {
        let listed = self.manage("GET", &format!("/api/queues/{}?disable_stats=false", self.vhost));
        let found = listed.as_array()?.iter().find(|listed| listed["name"] == queue)?;
        found["messages"].as_u64()
    }

    /// The same, of a queue that there is: a new one has no statistics for some seconds.
    pub fn counted(&self, queue: &str) -> u64 {
        until("the broker has counted the queue's messages", || self.messages(queue))
    }

    /// The names of the queues that begin so.
    pub fn queues(&self, prefix: &str) -> Vec<String> {
        let listed = self.manage("GET", &format!("/api/queues/{}", self.vhost));
        let names = listed.as_array().into_iter().flatten().filter_map(|queue| queue["name"].as_str());
        names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
    }

    /// Deletes them.
    pub fn delete_queues(&self, prefix: &str) {
        for name in self.queues(prefix) {
            self.manage("DELETE", &format!("/api/queues/{}/{name}", self.vhost));
        }
    }

    /// How many queues an exchange passes messages on to.
    pub fn bindings(&self, exchange: &str) -> usize {
        let path = format!("/api/exchanges/{}/{exchange}/bindings/source", self.vhost);
        self.manage("GET", &path).as_array().map_or(0, Vec::len)
    }

    /// Closes so many connections of the vhost, whose names end so. The broker lists a new one some seconds late.
    pub fn close_connections(&self, suffix: &str, count: usize) {
        let names = until("the connections are listed", || {
            let listed = self.manage("GET", &format!("/api/vhosts/{}/connections", self.vhost));
            let ends = |it: &&Value| {
                it["client_properties"]["connection_name"].as_str().is_some_and(|name| name.ends_with(suffix))
            };
            let names = listed
                .as_array()?
                .iter()
                .filter(ends)
                .filter_map(|it| it["name"].as_str().map(str::to_owned));
            let names: Vec<_> = names.collect();
            (names.len() == count).then_some(names)
        });
        for name in names {
            let escaped = name.replace(' ', "%20").replace('>', "%3E");
            self.manage("DELETE", &format!("/api/connections/{escaped}"));
        }
    }

    /// Asks the broker's management.
    pub fn manage(&self, method: &str, path: &str) -> Value {
        management(&self.broker.1, method, path, None)
    }
}

/// Sends a request to the management API at `url`. `Null` if the answer is no JSON.
pub(super) fn management(url: &str, method: &str, path: &str, body: Option<&Value>) -> Value {
    let rest = url.strip_prefix("http://").expect("an http:// URL");
    let (credentials, host) = rest.rsplit_once('@').unwrap_or(("guest:guest", rest));
    let basic = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, credentials);
    let request = ureq::request(method, &format!("http://{}{path}", host.trim_end_matches('/')));
    let request = request.timeout(DEADLINE);
    let request = request.set("authorization", &format!("Basic {basic}"));
    let sent = match body {
        Some(body) => request.set("content-type", "application/json").send_string(&body.to_string()),
        None => request.call(),
    };
    let text = sent.map(|response| response.into_string().unwrap_or_default());
    serde_json::from_str(&text.unwrap_or_default()).unwrap_or(Value::Null)
}
