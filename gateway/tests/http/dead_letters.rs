//! Operators retry and drop dead letters over HTTP; the tests check the effects at the broker, in the archive and in the log.

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::{Answer, ECHO, Gateway, Setup, until};
use crate::keys::key_file;

pub const DEAD: &str = "vramq.dead.echo";
const JOBS: &str = "vramq.jobs.echo";

/// The rights of an operator's user, as docs/security.md has them: configure, write, read.
const RIGHTS: [&str; 3] = [
    r"^(amq\.gen.*|vramq\.dlq-lock\..+)$",
    r"^(vramq\.(control|retry|dlq-lock\..+)|amq\.(gen.*|default))$",
    r"^(vramq\.(status|dead\..+|dlq-lock\..+)|amq\.gen.*)$",
];

/// A worker, two gateways whose operators may act, one that only shows dead letters, and three of them.
pub struct Operated {
    pub setup: Setup,
    /// The operators' user of the broker.
    user: String,
    /// Holds the log and the archives.
    pub folder: PathBuf,
    pub keys: HashMap<String, String>,
}

impl Operated {
    pub fn new() -> Self {
        Self::with(&[ECHO], &[])
    }

    /// The same, with a worker that has these models, [`ECHO`] among them, and options.
    pub fn with(models: &[&str], options: &[&str]) -> Self {
        let mut setup = Setup::new();
        let (path, keys) = key_file(setup.folder.path(), &[("boss", "operator = true"), ("caller", "")]);
        let (user, url) = setup.add_user(RIGHTS);
        let folder = setup.folder.path().join("operator");
        setup.worker(models, options);
        let keyed = format!("http.keys={}", path.display());
        let acts = [format!("operator.broker_url={url}"), format!("operator.folder={}", folder.display())];
        for _ in 0..2 {
            setup.gateway(&["--set", &keyed, "--set", &acts[0], "--set", &acts[1]]);
        }
        setup.gateway(&["--set", &keyed]);
        let this = Self { setup, user, folder, keys };
        this.until_served();
        let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
        for _ in 0..3 {
            this.send(&this.setup.gateways[0], "boss", "POST", "/v1/jobs", Some(&wrong));
        }
        this.until_holds(DEAD, 3);
        this
    }

    /// Waits until all gateways know the worker.
    pub fn until_served(&self) {
        for gateway in &self.setup.gateways {
            until("the model is served", || {
                let listed = self.send(gateway, "boss", "GET", "/v1/models", None).json();
                (listed["data"][0]["id"] == ECHO).then_some(())
            });
        }
    }

    pub fn until_holds(&self, queue: &str, messages: u64) {
        until(&format!("{queue} has {messages} messages"), || {
            (self.setup.messages(queue) == Some(messages)).then_some(())
        });
    }

    /// Waits until the queue's only group has so many jobs that were retried and failed again.
    pub fn until_retried(&self, jobs: u64) {
        until("they are dead letters again", || (self.look(0)["groups"][0]["retried"] == jobs).then_some(()));
    }

    pub fn send(
        &self,
        gateway: &Gateway,
        key: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Answer {
        let headers = [("authorization", self.keys[key].as_str()), ("prefer", "wait=60")];
        gateway.send(method, path, &headers, body)
    }

    fn look(&self, gateway: usize) -> Value {
        let path = format!("/v1/dead-letters?model={ECHO}");
        let answer = self.send(&self.setup.gateways[gateway], "boss", "GET", &path, None);
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    fn act(&self, gateway: usize, action: &str, selection: &Value) -> Answer {
        let path = format!("/v1/dead-letters/{action}");
        self.send(&self.setup.gateways[gateway], "boss", "POST", &path, Some(selection))
    }

    /// The lines of all archives.
    pub fn archived(&self) -> Vec<Value> {
        let files = std::fs::read_dir(&self.folder).expect("the operator's folder").flatten();
        let archives = files.filter(|file| file.file_name().to_string_lossy().starts_with("vramq-dropped-"));
        let text: String = archives.map(|file| std::fs::read_to_string(file.path()).unwrap()).collect();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn log(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.folder.join("actions.jsonl")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn group(of: &Value) -> String {
    assert_eq!(of["groups"].as_array().map(Vec::len), Some(1), "{of}");
    of["groups"][0]["group"].as_str().unwrap().to_owned()
}

#[test]
fn dead_letters_are_grouped_explained_and_shown_to_operators_alone() {
    let operated = Operated::new();
    for gateway in 0..3 {
        let shown = operated.look(gateway);
        assert_eq!((&shown["total"], &shown["groups"][0]["letters"]), (&json!(3), &json!(3)), "{shown}");
        assert!(group(&shown).starts_with("invalid-input/echo/"), "{shown}");
        let letter = &shown["letters"][0];
        assert!(letter["error"].as_str().unwrap().contains("colour"), "{letter}");
        let headings: Vec<_> =
            letter["explanation"].as_array().unwrap().iter().map(|part| part["heading"].clone()).collect();
        assert!(headings.contains(&json!("Why it ended")) && headings.contains(&json!("What to do")));
        assert_eq!(shown["read_only"].is_string(), gateway == 2, "{shown}");
    }
    let all = json!({"model": ECHO, "group": group(&operated.look(0)), "confirm": 3});
    let refused = operated.act(2, "retry", &all);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (403, &json!("read_only")));
    for path in ["/v1/dead-letters/retry", "/v1/dead-letters/drop"] {
        let refused = operated.send(&operated.setup.gateways[0], "caller", "POST", path, Some(&all));
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (403, &json!("operators_only")));
    }
    operated.until_holds(DEAD, 3);
    assert_eq!(operated.log().len(), 0);
}

/// A reader holds the letters until the broker has put them back. One of the gateways reads without the operators' lock.
#[test]
fn readers_at_the_same_moment_see_all_dead_letters() {
    let operated = Operated::new();
    let (gateway, key) = (&operated.setup.gateways[2], operated.keys["boss"].as_str());
    let path = format!("/v1/dead-letters?model={ECHO}");
    let look = || {
        let answer = gateway.send("GET", &path, &[("authorization", key)], None);
        assert_eq!(answer.status, 200, "{answer:?}");
        let shown = answer.json();
        (shown["total"].clone(), shown["letters"].as_array().unwrap().len())
    };
    let seen: Vec<_> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4).map(|_| scope.spawn(|| [(); 5].map(|()| look()))).collect();
        readers.into_iter().flat_map(|reader| reader.join().unwrap()).collect()
    });
    assert!(seen.iter().all(|seen| *seen == (json!(3), 3)), "{seen:?}");
}

#[test]
fn a_retry_puts_jobs_into_their_queue_after_the_plan_was_confirmed() {
    let mut operated = Operated::new();
    // Nobody takes the jobs, so that they are there to be counted.
    operated.setup.workers.clear();
    let group = group(&operated.look(1));
    let select = |more: Value| {
        let mut selection = json!({"model": ECHO, "group": group});
        selection.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        selection
    };
    let plan = operated.act(1, "retry", &select(json!({})));
    let expected = (json!(3), json!(3), json!(0), json!(null));
    let planned = plan.json();
    let seen = ["letters", "jobs", "retried", "done"].map(|name| planned[name].clone());
    assert_eq!((plan.status, seen.into()), (200, expected), "{planned}");
    let changed = operated.act(0, "retry", &select(json!({"confirm": 2})));
    assert_eq!((changed.status, &changed.json()["error"]["code"]), (409, &json!("plan_changed")));
    assert_eq!(operated.log().len(), 0, "only what is done is logged");
    operated.until_holds(DEAD, 3);
    // It is the operators' user that acts: without its right to publish nothing moves, whatever the gateway's own may.
    operated.setup.permit(&operated.user, [RIGHTS[0], r"^vramq\.dlq-lock\..+$", RIGHTS[2]]);
    let refused = operated.act(0, "retry", &select(json!({"confirm": 3})));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (502, &json!("broker_refused")));
    operated.until_holds(DEAD, 3);
    assert_eq!(operated.setup.counted(JOBS), 0);
    operated.setup.permit(&operated.user, RIGHTS);
    let first = operated.act(0, "retry", &select(json!({"first": 1, "confirm": 1})));
    assert_eq!((first.status, &first.json()["done"]["moved"]), (200, &json!(1)), "{first:?}");
    operated.until_holds(DEAD, 2);
    operated.until_holds(JOBS, 1);
    let rest = operated.act(1, "retry", &select(json!({"confirm": 2})));
    assert_eq!((rest.status, &rest.json()["done"]["moved"]), (200, &json!(2)), "{rest:?}");
    operated.until_holds(DEAD, 0);
    operated.until_holds(JOBS, 3);
    let ends: Vec<_> = operated.log().into_iter().filter(|line| line["phase"] == "end").collect();
    assert_eq!(ends.len(), 3, "{ends:?}");
    for (line, (done, failed)) in ends.iter().zip([(0, true), (1, false), (2, false)]) {
        assert_eq!((&line["command"], &line["count"]), (&json!("retry"), &json!(done)), "{line}");
        assert!(line["who"].as_str().unwrap().starts_with("boss@"), "{line}");
        assert_eq!(line["error"].is_string(), failed, "{line}");
    }
    // They run again, and fail again: now they are known as retried.
    operated.setup.worker(&[ECHO], &[]);
    operated.until_retried(3);
}

#[test]
fn a_drop_archives_letters_before_they_leave_the_queue() {
    let operated = Operated::new();
    let shown = operated.look(0);
    let one = shown["letters"][1]["fingerprint"].as_str().unwrap().to_owned();
    let nothing = operated.act(0, "drop", &json!({"model": ECHO, "confirm": 3}));
    assert_eq!((nothing.status, &nothing.json()["error"]["param"]), (400, &json!("fingerprints")));
    let dropped = operated.act(0, "drop", &json!({"model": ECHO, "fingerprints": [one], "confirm": 1}));
    let said = dropped.json();
    assert_eq!((dropped.status, &said["done"]["moved"]), (200, &json!(1)), "{said}");
    operated.until_holds(DEAD, 2);
    let archive = std::fs::read_to_string(said["done"]["archive"].as_str().unwrap()).unwrap();
    let line: Value = serde_json::from_str(archive.trim_end()).unwrap();
    assert_eq!((&line["fingerprint"], &line["queue"]), (&json!(one), &json!(DEAD)));
    assert!(
        operated.look(1)["letters"].as_array().unwrap().iter().all(|letter| letter["fingerprint"] != one)
    );
    let gone = operated.act(1, "drop", &json!({"model": ECHO, "fingerprints": [one]})).json();
    assert_eq!((&gone["letters"], &gone["missing"]), (&json!(0), &json!([one])), "{gone}");
    let rest = json!({"model": ECHO, "group": group(&shown), "confirm": 2});
    let dropped = operated.act(1, "drop", &rest);
    assert_eq!((dropped.status, &dropped.json()["done"]["moved"]), (200, &json!(2)), "{dropped:?}");
    operated.until_holds(DEAD, 0);
    let mut archived: Vec<_> = operated.archived().iter().map(|line| line["fingerprint"].clone()).collect();
    let mut were: Vec<_> =
        shown["letters"].as_array().unwrap().iter().map(|letter| letter["fingerprint"].clone()).collect();
    archived.sort_by_key(Value::to_string);
    were.sort_by_key(Value::to_string);
    assert_eq!(archived, were);
    let phases: Vec<_> = operated.log().iter().map(|line| line["phase"].clone()).collect();
    assert_eq!(phases, ["begin", "end", "begin", "end"]);
    assert_eq!(operated.act(0, "drop", &json!({"model": "nobody", "group": "a/nobody/1"})).status, 404);
}
