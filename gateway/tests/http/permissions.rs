//! The least permissions of docs/security.md suffice for a gateway, with its second user for operators, and give it no access to what
//! belongs to others.

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueBindOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::json;
use vramq_schemas::topology::{
    CONTROL_EXCHANGE, DEAD_EXCHANGE, JOBS_EXCHANGE, RETRY_EXCHANGE, dead_queue, jobs_queue,
};
use vramq_tests::permissions::documented;

use crate::harness::{ECHO, Gateway, Setup, until};
use crate::jobs::set;
use crate::keys::{key_file, send, until_served};
use crate::withdrawals::listen;

/// A user with a role's permissions: its URL.
pub fn user(setup: &mut Setup, role: &str) -> String {
    let may = documented(role).unwrap();
    setup.add_user([&may.configure, &may.write, &may.read]).1
}

#[tokio::test(flavor = "multi_thread")]
async fn least_permissions_suffice_for_gateways_and_for_their_operators() {
    let mut setup = Setup::new();
    let [of_worker, of_gateway, of_operator] =
        ["worker", "gateway", "operator"].map(|role| user(&mut setup, role));
    let (path, keys) = key_file(setup.folder.path(), &[("boss", "operator = true")]);
    setup.worker_as(&of_worker, &[ECHO], &[]);
    let settings = [
        format!("http.keys={}", path.display()),
        format!("operator.broker_url={of_operator}"),
        format!("operator.folder={}", setup.folder.path().join("operator").display()),
    ];
    for _ in 0..2 {
        setup.gateway_as(&of_gateway, &set(&settings));
    }
    let boss = keys["boss"].as_str();
    until_served(&setup, boss, ECHO);
    // What waits in the queue is counted, and a job that waits there is withdrawn.
    setup.workers[0].signal("STOP");
    let job = json!({"model": ECHO, "inputs": ["x"]});
    for (at, gateway) in setup.gateways.iter().enumerate() {
        let path = format!("/v1/jobs/waits-{at}");
        let headers = [("authorization", boss)];
        assert_eq!(gateway.send("PUT", &path, &headers, Some(&job)).status, 202);
        let withdrawn = gateway.send("DELETE", &path, &headers, None).json();
        assert_eq!(withdrawn["state"], "withdrawn");
        let status = send(gateway, boss, "GET", "/v1/status", None).json();
        assert!(status["models"][ECHO]["queue"]["ready"].is_u64(), "{status}");
    }
    setup.workers[0].signal("CONT");
    for gateway in &setup.gateways {
        until("the withdrawal is over", || {
            (gateway.metric("vramq_gateway_withdrawals_open", "") == 0.0).then_some(())
        });
        let answer = send(gateway, boss, "POST", "/v1/jobs", Some(&job)).json();
        assert_eq!(answer["outputs"], json!([{"json": "x"}]));
        let wrong = json!({"model": ECHO, "inputs": ["x"], "params": {"colour": "red"}});
        let failed = send(gateway, boss, "POST", "/v1/jobs", Some(&wrong)).json();
        assert_eq!(failed["state"], "failed", "{failed}");
    }
    operators_act(&setup, boss);
    for gateway in &setup.gateways {
        let log = gateway.program.log();
        assert!(!log.contains("ACCESS_REFUSED") && !log.contains("access refused"), "{log}");
    }
    gateways_are_refused(&of_gateway).await;
}

/// The two dead letters are seen by each gateway; one is dropped by one of them, and the other one retried by the other.
fn operators_act(setup: &Setup, boss: &str) {
    let dead = dead_queue(ECHO);
    until("the dead letters are there", || (setup.messages(&dead) == Some(2)).then_some(()));
    for (gateway, (action, left)) in setup.gateways.iter().zip([("drop", 1), ("retry", 1)]) {
        let path = format!("/v1/dead-letters?model={ECHO}");
        let seen = send(gateway, boss, "GET", &path, None);
        assert_eq!(seen.status, 200, "{seen:?}");
        let group = seen.json()["groups"][0].clone();
        let mut selection = json!({"model": ECHO, "group": group["group"], "first": 1});
        let path = format!("/v1/dead-letters/{action}");
        let planned = send(gateway, boss, "POST", &path, Some(&selection));
        assert_eq!(planned.status, 200, "{planned:?} for {group}");
        selection["confirm"] = json!(1);
        let done = send(gateway, boss, "POST", &path, Some(&selection));
        assert_eq!(done.status, 200, "{done:?}");
        // What was retried fails again.
        until("the dead letters that are left", || (setup.messages(&dead) == Some(left)).then_some(()));
    }
}

/// What would make workers believe it, command them, or give it the jobs and dead letters of other users.
async fn gateways_are_refused(url: &str) {
    let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
    let (jobs, dead) = (jobs_queue(ECHO), dead_queue(ECHO));
    for (exchange, key) in
        [(RETRY_EXCHANGE, ECHO), (DEAD_EXCHANGE, ECHO), (CONTROL_EXCHANGE, "all"), ("", &jobs), ("", &dead)]
    {
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
        let outcome =
            channel.basic_publish(exchange.into(), key.into(), options, b"forged", properties).await;
        let outcome = match outcome {
            Ok(confirm) => confirm.await.map(drop),
            Err(error) => Err(error),
        };
        refused(outcome, &format!("publish to {exchange:?} with {key}"));
    }
    let channel = connection.create_channel().await.unwrap();
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    let bound =
        channel.queue_bind(jobs.as_str().into(), JOBS_EXCHANGE.into(), "other".into(), options, none).await;
    refused(bound, "bind a queue of jobs");
}

/// A gateway without a user for operators shows dead letters if its own user may read them, and says so if it may not.
#[test]
fn a_gateways_own_user_may_read_dead_letters_only_if_it_is_permitted() {
    let mut setup = Setup::new();
    let mut may = documented("gateway").unwrap();
    let (name, of_gateway) = setup.add_user([&may.configure, &may.write, &may.read]);
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway_as(&of_gateway, &[]);
    }
    setup.wait_for_models(&[ECHO]);
    let look = |setup: &Setup| setup.next().get(&format!("/v1/dead-letters?model={ECHO}"));
    let refused = look(&setup);
    assert_eq!((refused.status, refused.text.contains("cannot be read")), (502, true), "{refused:?}");
    // As docs/security.md says.
    may.read = may.read.replacen("(vramq", r"(vramq\.dead\..+|vramq", 1);
    setup.permit(&name, [&may.configure, &may.write, &may.read]);
    until("the dead letters are read", || (look(&setup).status == 200).then_some(()));
}

/// RabbitMQ 4.3 does not tell it then that no queue has the model's name.
#[test]
fn a_gateway_that_may_not_count_jobs_publishes_them_under_their_models_key() {
    let mut setup = Setup::new();
    let may = documented("gateway").unwrap();
    let without = may.write.replace(r"|(jobs|bulk)\..+", "");
    assert_ne!(without, may.write);
    let (_, of_gateway) = setup.add_user([&may.configure, &without, &may.read]);
    setup.worker(&[ECHO], &["--set", &format!("model.{ECHO}.key=its-key")]);
    for _ in 0..2 {
        setup.gateway_as(&of_gateway, &[]);
    }
    setup.wait_for_models(&[ECHO]);
    let job = json!({"model": ECHO, "inputs": ["x"]});
    for gateway in &setup.gateways {
        let answer = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job)).json();
        assert_eq!(answer["outputs"], json!([{"json": "x"}]), "{answer}");
    }
}

/// Jobs of callers that are gone then run, which only the log reports. Everything else works.
#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_may_not_publish_withdrawals_says_so_once() {
    let mut setup = Setup::new();
    let may = documented("gateway").unwrap();
    let without = may.write.replace("|withdrawals", "");
    assert_ne!(without, may.write);
    let (name, of_gateway) = setup.add_user([&may.configure, &without, &may.read]);
    setup.worker(&[ECHO], &[]);
    for _ in 0..2 {
        setup.gateway_as(&of_gateway, &[]);
    }
    setup.wait_for_models(&[ECHO]);
    let mut listener = listen(&setup, ECHO).await;
    let job = json!({"model": ECHO, "inputs": ["x"]});
    // The names by which workers know the jobs.
    let withdraw = |setup: &Setup, id: &str| {
        let withdrawn = setup.gateways.iter().enumerate().map(|(at, gateway)| {
            let path = format!("/v1/jobs/{id}-{at}");
            let accepted = gateway.send("PUT", &path, &[], Some(&job));
            assert_eq!(accepted.status, 202, "{accepted:?}");
            assert_eq!(gateway.send("DELETE", &path, &[], None).json()["state"], "withdrawn");
            accepted.header("x-vramq-job-id").expect("the job's name").to_owned()
        });
        withdrawn.collect::<Vec<_>>()
    };
    let open = |gateway: &Gateway| gateway.metric("vramq_gateway_withdrawals_open", "");
    let told = |gateway: &Gateway| gateway.program.log().matches("withdrawals are off").count();
    setup.workers[0].signal("STOP");
    withdraw(&setup, "first");
    for gateway in &setup.gateways {
        until("the log tells it", || (told(gateway) > 0).then_some(()));
    }
    // The next ones are refused as well.
    withdraw(&setup, "second");
    setup.workers[0].signal("CONT");
    for gateway in &setup.gateways {
        until("the jobs have ended", || (open(gateway) == 0.0).then_some(()));
        let answer = gateway.send("POST", "/v1/jobs", &[("prefer", "wait=60")], Some(&job)).json();
        assert_eq!(answer["outputs"], json!([{"json": "x"}]));
        let log = gateway.program.log();
        assert_eq!((told(gateway), log.contains("lost the gateway's own")), (1, false), "{log}");
    }
    setup.permit(&name, [&may.configure, &may.write, &may.read]);
    setup.workers[0].signal("STOP");
    let permitted = withdraw(&setup, "permitted");
    listener.all_withdrawn(permitted).await;
    setup.workers[0].signal("CONT");
}

fn refused(outcome: lapin::Result<()>, what: &str) {
    let error = outcome.expect_err(what).to_string();
    assert!(error.contains("ACCESS_REFUSED") || error.contains("ACCESS-REFUSED"), "{what}: {error}");
}
