//! Replies that no worker of this project publishes.

use lapin::types::FieldTable;
use serde_json::json;
use vramq_schemas::ReplyHeaders;

use crate::harness::{ECHO, Setup, until};
use crate::withdrawals::listen;

/// Nobody waits for the job, so the log is the only place where an operator can see it.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_cannot_be_read_fails_its_job_and_is_told() {
    let setup = Setup::with(&[ECHO]);
    let listener = listen(&setup, ECHO).await;
    setup.workers[0].signal("STOP");
    let of_one_item = || ReplyHeaders { items: 1, items_total: 1, ..ReplyHeaders::default() }.to_table();
    let replies = [
        (FieldTable::default(), "{}", "header `offset` is absent"),
        (of_one_item(), "nonsense", "invalid reply"),
        // Larger than a vector's numbers can be.
        (
            of_one_item(),
            r#"{"model": "echo", "outputs": [{"embedding": [0.5, 1e39]}]}"#,
            "number out of range",
        ),
        // 0.5 and an infinity.
        (
            of_one_item(),
            r#"{"model": "echo", "outputs": [{"embedding": "AAAAPwAAgH8=", "dtype": "f32"}]}"#,
            "is not finite",
        ),
    ];
    for gateway in &setup.gateways {
        for (headers, body, fault) in &replies {
            let accepted = gateway.post("/v1/jobs", &json!({"model": ECHO, "inputs": ["x"]}));
            assert_eq!(accepted.status, 202, "{accepted:?}");
            let job = listener.published().await;
            listener.reply(&job, headers.clone(), body.as_bytes()).await;
            let path = format!("/v1/jobs/{}", accepted.json()["id"].as_str().unwrap());
            let ended = until("the job has ended", || {
                let read = gateway.get(&path).json();
                (read["state"] != "queued").then_some(read)
            });
            assert_eq!(
                (&ended["state"], &ended["error"]["code"]),
                (&json!("failed"), &json!("invalid_reply"))
            );
            let lines = gateway.lines();
            let told =
                lines.iter().find(|line| line["level"] == "WARN" && line["job"] == ended["message_id"]);
            let told = told.unwrap_or_else(|| panic!("no line of {ended}: {lines:#?}"));
            assert!(told["error"].as_str().unwrap().contains(fault), "{told}");
        }
    }
}
