//! `/readyz` while a gateway cannot publish jobs.

use crate::harness::{Setup, until};
use crate::jobs::set;

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
