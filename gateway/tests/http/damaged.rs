//! Stored results that are no longer what a gateway has written.

use serde_json::json;

use crate::harness::{ECHO, until};
use crate::jobs::sharing_results;

#[test]
fn a_damaged_result_is_an_honest_error_until_the_job_runs_again() {
    let (setup, results) = sharing_results();
    let [own, other] = &setup.gateways[..] else { panic!("two gateways") };
    let job = json!({"model": ECHO, "inputs": ["x".repeat(100_000)]});
    for (id, left) in [("empty", 0), ("cut", 50_000), ("short", 10)] {
        let put = |gateway: &crate::harness::Gateway| {
            gateway.send("PUT", &format!("/v1/jobs/{id}"), &[("prefer", "wait=60")], Some(&job))
        };
        assert_eq!(put(own).json()["state"], "done");
        // With its record, the job would be followed as one that has not ended.
        let record = results.join(format!("local/{id}.open"));
        until("the job's record is removed", || (!record.exists()).then_some(()));
        let file =
            std::fs::File::options().write(true).open(results.join(format!("local/{id}.json"))).unwrap();
        file.set_len(left).unwrap();
        for path in
            [format!("/v1/jobs/{id}"), format!("/v1/jobs/{id}/events"), format!("/v1/files/output-0-{id}")]
        {
            let answer = other.get(&path);
            let error = &answer.json()["error"];
            assert_eq!((answer.status, &error["code"]), (502, &json!("store")), "{path}: {answer:?}");
            assert!(answer.text.contains("damaged"), "{answer:?}");
            assert_eq!(answer.header("x-should-retry"), Some("false"), "{answer:?}");
        }
        let lines = other.lines();
        let warned = lines.iter().filter(|line| {
            line["job"] == id && line["message"].as_str().is_some_and(|it| it.contains("result is damaged"))
        });
        assert_eq!(warned.count(), 3, "one for each request");
        // The same request runs the job again.
        assert_eq!(put(other).json()["state"], "done");
        assert_eq!(other.get(&format!("/v1/jobs/{id}")).json()["state"], "done");
    }
}
