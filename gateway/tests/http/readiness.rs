//! What a gateway knows when it is ready, and `/readyz` while it cannot publish jobs.

use serde_json::json;

use crate::harness::{ECHO, Setup, until};
use crate::jobs::set;

/// As after each rolling restart: clients ask for the models as soon as the gateway says that it is ready.
#[test]
fn a_gateway_that_is_ready_knows_the_models_of_workers() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    let one_text = json!({"inputs": "x"});
    for path in ["/v1/models", "/v1/models/echo", "/info?model=echo", "/info", "/embed"] {
        setup.gateway(&[]);
        let gateway = setup.gateways.last().unwrap();
        match path {
            "/embed" => {
                // The model is found. Its outputs are no vectors.
                let refused = gateway.post(path, &one_text);
                assert_eq!(refused.status, 400, "{refused:?}");
            }
            "/v1/models" => assert_eq!(gateway.get(path).json()["data"][0]["id"], ECHO),
            _ => {
                let found = gateway.get(path);
                assert_eq!(found.status, 200, "{path}: {found:?}");
            }
        }
    }
}

/// Nobody waits for workers for ever. The model has a queue, so that it exists.
#[test]
fn a_gateway_without_workers_says_that_nobody_serves_a_model() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    setup.workers[0].signal("TERM");
    assert_eq!(setup.workers[0].wait(), Some(0));
    setup.gateway(&[]);
    let gateway = setup.gateways.last().unwrap();
    assert_eq!(gateway.get("/v1/models").json()["data"], json!([]));
    for path in ["/v1/models/echo", "/info?model=echo"] {
        let missing = gateway.get(path);
        assert_eq!(missing.status, 404, "{path}");
        assert!(missing.text.contains("no worker serves the model `echo` at the moment"), "{missing:?}");
    }
}

/// The broker lets a gateway's user not take replies any more, so that its clients open no session. Its own connection is still there.
#[test]
fn a_gateway_without_sessions_for_its_jobs_is_not_ready() {
    let mut setup = Setup::new();
    let (user, url) = setup.add_user([".*", ".*", ".*"]);
    let results = format!("results.folder={}", setup.folder.path().join("results").display());
    setup.gateway_as(&url, &[]);
    setup.gateway_as(&url, &set(&[results]));
    setup.permit(&user, [".*", ".*", "^vramq\\.(jobs|heartbeats)"]);
    // The second gateway has a client for recorded jobs as well.
    setup.close_connections(" (jobs)", 3);
    for gateway in &setup.gateways {
        until("it is not ready", || {
            let answer = gateway.get("/readyz");
            (answer.status == 503 && answer.text == "no connection to the broker for jobs\n").then_some(())
        });
        assert_eq!(gateway.metric("vramq_gateway_broker_connected", ""), 0.0);
        assert_eq!(gateway.get("/livez").status, 200);
    }
    setup.permit(&user, [".*", ".*", ".*"]);
    for gateway in &setup.gateways {
        until("it is ready again", || (gateway.get("/readyz").status == 200).then_some(()));
    }
}
