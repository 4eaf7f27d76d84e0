//! A job whose caller is gone gets no pass, no results and no dead letter, wherever it is at that moment. Half of the jobs are
//! withdrawn by a client that hangs up at one gateway, the other half by a DELETE at the other one.

use std::net::TcpStream;
use std::path::PathBuf;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::{self, Withdrawal};
use vramq_tests::node::Node;

use crate::drain::until_unroutable;
use crate::harness::{ECHO, Gateway, Setup, until};
use crate::withdrawals::{listen, send};

/// Two gateways, and a worker of the echo model that stops at a failpoint while a file is there.
struct Held {
    setup: Setup,
    file: PathBuf,
}

impl Held {
    fn at(failpoint: &str, settings: &[&str]) -> Self {
        Self::on(Setup::new(), failpoint, settings)
    }

    fn on(mut setup: Setup, failpoint: &str, settings: &[&str]) -> Self {
        let file = setup.folder.path().join("held");
        std::fs::write(&file, "").unwrap();
        let failpoint = format!("worker.drill={failpoint},while={}", file.display());
        let settings: Vec<_> =
            settings.iter().copied().chain([failpoint.as_str()]).flat_map(|set| ["--set", set]).collect();
        setup.worker(&[ECHO], &settings);
        setup.gateway(&[]);
        setup.gateway(&[]);
        setup.wait_for_models(&[ECHO]);
        Self { setup, file }
    }

    fn release(&self) {
        std::fs::remove_file(&self.file).unwrap();
    }

    /// Sends a job to the first gateway whose client will hang up.
    fn will_hang_up(&self, inputs: &[&str]) -> TcpStream {
        let body = json!({"model": ECHO, "input": inputs}).to_string();
        send(&self.setup.gateways[0], "POST", "/v1/embeddings", &body)
    }

    /// Sends a job to the second gateway.
    fn put(&self, id: &str, inputs: &[&str]) {
        let job = json!({"model": ECHO, "inputs": inputs});
        let accepted = self.setup.gateways[1].send("PUT", &format!("/v1/jobs/{id}"), &[], Some(&job));
        assert_eq!(accepted.status, 202, "{accepted:?}");
    }

    /// Sends a job that runs, and one that is in the next pass, to the second gateway.
    fn put_running_and_next(&self) {
        self.put("runs", &["x"]);
        self.setup.until_counter("in_hand", 1);
        self.put("next", &["x"]);
        self.setup.until_counter("in_hand", 2);
    }

    /// Withdraws a job of the second gateway that is in no pass, so that it ends at once.
    fn delete_waiting(&self, id: &str) {
        self.delete(id);
        self.setup.until_counter("withdrawn", 1);
    }

    fn delete(&self, id: &str) {
        let withdrawn = self.setup.gateways[1].send("DELETE", &format!("/v1/jobs/{id}"), &[], None);
        assert_eq!(withdrawn.json()["state"], "withdrawn", "{withdrawn:?}");
    }

    fn state(&self, id: &str) -> Value {
        self.setup.gateways[1].get(&format!("/v1/jobs/{id}")).json()["state"].clone()
    }

    /// Each gateway has this many withdrawn jobs that have not ended.
    fn until_open(&self, jobs: f64) {
        for gateway in &self.setup.gateways {
            until("withdrawn jobs that have not ended", || {
                (gateway.metric("vramq_gateway_withdrawals_open", "") == jobs).then_some(())
            });
        }
    }

    /// The worker has acknowledged the withdrawn jobs and all others; the broker has no dead letter.
    fn ended(&self, withdrawn: u64, answered: u64) {
        self.until_open(0.0);
        self.setup.until_counter("withdrawn", withdrawn);
        self.setup.until_counter("answered", answered);
        self.setup.until_counter("in_hand", 0);
        for queue in ["vramq.jobs.echo", "vramq.bulk.echo", "vramq.dead.echo"] {
            until("the queue is empty", || (self.setup.messages(queue) == Some(0)).then_some(()));
        }
        let told = || self.setup.workers[0].log().matches("the caller withdrew the job").count() as u64;
        until("the log tells it", || (told() == withdrawn).then_some(()));
        let log = self.setup.workers[0].log();
        assert!(!log.contains("job dead-lettered"), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn in_the_queue() {
    // With one slot, the other jobs are not delivered before it is free.
    let held = Held::at("pass=hang", &["model.echo.slots_max=1"]);
    let mut listener = listen(&held.setup, ECHO).await;
    held.put("runs", &["x"]);
    held.setup.until_counter("in_hand", 1);
    listener.job().await;
    let client = held.will_hang_up(&["gone"]);
    let (gone, _) = listener.job().await;
    held.put("withdrawn", &["x"]);
    let (withdrawn, _) = listener.job().await;
    drop(client);
    listener.withdrawal(&gone).await;
    held.delete("withdrawn");
    listener.withdrawal(&withdrawn).await;
    // Gateways repeat it every 5 s: when the second comes, the worker has had the first.
    listener.withdrawal(&withdrawn).await;
    assert_eq!(held.setup.counter("in_hand"), Some(1));
    held.release();
    held.ended(2, 1);
    assert_eq!(held.setup.counter("passes"), Some(1));
    assert_eq!((held.state("runs"), held.state("withdrawn")), (json!("done"), json!("withdrawn")));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_is_read() {
    let held = Held::at("decode=hang", &[]);
    let mut listener = listen(&held.setup, ECHO).await;
    // Larger ones are read on other threads, where the failpoint holds up nobody.
    let large = "x".repeat(40_000);
    let client = held.will_hang_up(&[&large]);
    let (gone, _) = listener.job().await;
    held.put("withdrawn", &[&large]);
    let (withdrawn, _) = listener.job().await;
    held.setup.until_counter("in_hand", 2);
    drop(client);
    listener.withdrawal(&gone).await;
    held.delete("withdrawn");
    listener.withdrawal(&withdrawn).await;
    // Gateways repeat it every 5 s: when the second comes, the worker has had the first.
    listener.withdrawal(&withdrawn).await;
    held.release();
    held.ended(2, 0);
    assert_eq!(held.setup.counter("passes"), Some(0));
}

#[test]
fn while_it_waits_for_a_pass_or_for_the_device() {
    // Every item fills a pass, and full passes are made ahead.
    let held = Held::at("pass=hang", &["model.echo.pass_tokens=1"]);
    // The second is in a pass that the device has not begun: it holds up to one.
    held.put_running_and_next();
    let client = held.will_hang_up(&["gone"]);
    held.put("waits", &["x"]);
    held.setup.until_counter("waiting", 2);
    drop(client);
    held.delete("next");
    held.delete("waits");
    // Jobs without a pass end at once: they do not even wait for the running pass.
    until("two have ended", || (held.setup.counter("withdrawn") >= Some(2)).then_some(()));
    held.release();
    held.ended(3, 1);
    assert_eq!((held.setup.counter("passes"), held.setup.counter("items")), (Some(1), Some(1)));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_runs() {
    let held = Held::at("pass=hang", &[]);
    let mut listener = listen(&held.setup, ECHO).await;
    let client = held.will_hang_up(&["gone"]);
    let (gone, _) = listener.job().await;
    held.setup.until_counter("in_hand", 1);
    held.put("next", &["x"]);
    held.setup.until_counter("in_hand", 2);
    held.put("later", &["x"]);
    held.setup.until_counter("waiting", 2);
    drop(client);
    listener.withdrawal(&gone).await;
    // When the later withdrawal took effect, so has the first one.
    held.delete_waiting("later");
    assert_eq!(held.setup.counter("in_hand"), Some(2), "a pass that runs is not interrupted");
    held.release();
    held.ended(2, 1);
    assert_eq!(held.setup.counter("items"), Some(2));
}

/// Who hangs up while the gateway stops has withdrawn the job. Who waits until it has stopped has not: only its caller may.
#[tokio::test(flavor = "multi_thread")]
async fn when_its_gateway_stops() {
    let mut held = Held::at("pass=hang", &[]);
    let mut listener = listen(&held.setup, ECHO).await;
    let _runs = held.will_hang_up(&["runs"]);
    let (runs, _) = listener.job().await;
    held.setup.until_counter("in_hand", 1);
    let _next = held.will_hang_up(&["next"]);
    let (next, _) = listener.job().await;
    held.setup.until_counter("in_hand", 2);
    let client = held.will_hang_up(&["gone"]);
    let (gone, _) = listener.job().await;
    held.setup.until_counter("waiting", 2);
    held.put("later", &["x"]);
    held.setup.until_counter("waiting", 3);
    let stopping = &mut held.setup.gateways[0].program;
    stopping.signal("TERM");
    until("the drain has begun", || stopping.log().contains("draining").then_some(()));
    drop(client);
    listener.withdrawal(&gone).await;
    // The second signal ends it.
    stopping.signal("TERM");
    assert_eq!(stopping.wait(), Some(1));
    held.setup.until_counter("withdrawn", 1);
    held.release();
    held.setup.until_counter("dead_lettered", 2);
    held.setup.until_counter("in_hand", 0);
    assert_eq!((held.setup.counter("withdrawn"), held.setup.counter("answered")), (Some(1), Some(1)));
    // The worker may count a job before the gateway has its reply.
    until("the gateway has the reply", || (held.state("later") == "done").then_some(()));
    until_unroutable(&held.setup, &[runs, next].into());
}

#[tokio::test(flavor = "multi_thread")]
async fn between_two_parts_of_a_client_that_hangs_up() {
    let held = Held::at("pass=hang,skip=1", &["model.echo.pass_tokens=4"]);
    let mut listener = listen(&held.setup, ECHO).await;
    let large = "x".repeat(400_000);
    let client = held.will_hang_up(&vec![large.as_str(); 16]);
    let (gone, _) = listener.job().await;
    // The first pass has ended, and its items are a part.
    held.setup.until_counter("items", 4);
    held.put("later", &["x"]);
    held.setup.until_counter("waiting", 2);
    drop(client);
    listener.withdrawal(&gone).await;
    held.delete_waiting("later");
    held.release();
    held.ended(2, 0);
    assert_eq!(held.setup.counter("items"), Some(8), "of 16, in the first pass and in the one that ran");
}

#[test]
fn between_two_parts() {
    // Passes of four items, of which one makes a part; then the worker stops.
    let held = Held::at("pass=hang,skip=1", &["model.echo.pass_tokens=4"]);
    let large = "x".repeat(400_000);
    held.put("withdrawn", &vec![large.as_str(); 16]);
    until("the first part is there", || (held.state("withdrawn") == "running").then_some(()));
    held.put("later", &["x"]);
    held.setup.until_counter("waiting", 2);
    held.delete("withdrawn");
    held.delete_waiting("later");
    held.release();
    held.ended(2, 0);
    assert_eq!(held.setup.counter("items"), Some(8), "of 16, in the first pass and in the one that ran");
}

#[tokio::test(flavor = "multi_thread")]
async fn own_node_before_it_is_confirmed() {
    let node = Node::start().await.unwrap();
    let held = Held::on(Setup::on(&node), "pass=hang", &[]);
    held.put_running_and_next();
    // The broker takes no publishes: neither the jobs nor the withdrawals.
    node.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    let job = json!({"model": ECHO, "inputs": ["x"]}).to_string();
    let embeds = json!({"model": ECHO, "input": "x"}).to_string();
    let unfinished = |gateway: &Gateway| gateway.metric("vramq_gateway_jobs_unfinished", "");
    for (at, gateway) in held.setup.gateways.iter().enumerate() {
        // The second one has the job that runs, and the next.
        let others = if at == 1 { 2.0 } else { 0.0 };
        // It waits for its answer, which says that the job was published.
        let _request = send(gateway, "PUT", "/v1/jobs/unconfirmed", &job);
        until("the job is being published", || {
            (gateway.get("/v1/jobs/unconfirmed").json()["state"] == "publishing").then_some(())
        });
        assert_eq!(gateway.send("DELETE", "/v1/jobs/unconfirmed", &[], None).json()["state"], "withdrawn");
        let client = send(gateway, "POST", "/v1/embeddings", &embeds);
        until("the client's job is on its way", || (unfinished(gateway) == others + 1.0).then_some(()));
        drop(client);
        until("it is withdrawn", || (unfinished(gateway) == others).then_some(()));
    }
    held.until_open(2.0);
    node.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    held.until_open(0.0);
    held.release();
    held.ended(4, 2);
    assert_eq!(held.setup.counter("items"), Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_by_its_caller() {
    let held = Held::at("pass=hang", &[]);
    let mut listener = listen(&held.setup, ECHO).await;
    held.put("mine", &["x"]);
    held.setup.until_counter("in_hand", 1);
    let id = held.setup.gateways[1].get("/v1/jobs/mine").json()["message_id"].as_str().unwrap().to_owned();
    // The other gateway does not know the job.
    assert_eq!(held.setup.gateways[0].send("DELETE", "/v1/jobs/mine", &[], None).status, 404);
    // Who may publish withdrawals and knows the job's id does not know its secret.
    let connection =
        Connection::connect(&held.setup.amqp_url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let forged = Withdrawal { job: id.clone(), secret: "0".repeat(64) };
    let bodies = [b"{".to_vec(), vec![b'x'; 1 << 20], serde_json::to_vec(&forged).unwrap()];
    for body in bodies {
        let properties = BasicProperties::default().with_type(withdrawal::TYPE.into());
        let options = BasicPublishOptions::default();
        let exchange = WITHDRAWALS_EXCHANGE.into();
        channel.basic_publish(exchange, "".into(), options, &body, properties).await.unwrap();
    }
    assert_eq!(listener.withdrawal(&id).await, forged);
    // When a later withdrawal took effect, the worker has seen these.
    held.put("next", &["x"]);
    held.setup.until_counter("in_hand", 2);
    held.put("withdrawn", &["x"]);
    held.setup.until_counter("waiting", 2);
    held.delete_waiting("withdrawn");
    held.release();
    held.ended(1, 2);
    assert_eq!(held.state("mine"), "done");
}

#[test]
fn without_operators_commands() {
    let held = Held::at("pass=hang", &["worker.control=false"]);
    held.put_running_and_next();
    held.put("withdrawn", &["x"]);
    held.setup.until_counter("waiting", 2);
    held.delete_waiting("withdrawn");
    held.release();
    held.ended(1, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_another_worker_after_the_first_one_died() {
    let mut held = Held::at("pass=hang", &[]);
    let mut listener = listen(&held.setup, ECHO).await;
    held.put("withdrawn", &["x"]);
    held.setup.until_counter("in_hand", 1);
    held.setup.worker(&[ECHO], &[]);
    until("the second worker is there", || held.setup.counter_of("worker-1", "slots").filter(|n| *n > 0));
    // A worker may consume jobs before it hears withdrawals: both workers, and the listener.
    until("all hear", || (held.setup.bindings(WITHDRAWALS_EXCHANGE) == 3).then_some(()));
    let id =
        held.setup.gateways[1].get("/v1/jobs/withdrawn").json()["message_id"].as_str().unwrap().to_owned();
    // The one that has the job hears nothing any more; the other one does, and gets the job.
    held.setup.workers[0].signal("STOP");
    held.delete("withdrawn");
    listener.withdrawal(&id).await;
    held.setup.workers[0].signal("KILL");
    held.until_open(0.0);
    until("it ended there", || (held.setup.counter_of("worker-1", "withdrawn") == Some(1)).then_some(()));
    assert_eq!(held.setup.counter_of("worker-1", "passes"), Some(0));
    until("the queue is empty", || (held.setup.messages("vramq.jobs.echo") == Some(0)).then_some(()));
    assert_eq!(held.setup.counted("vramq.dead.echo"), 0);
}
