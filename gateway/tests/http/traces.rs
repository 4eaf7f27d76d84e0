//! Requests as spans at a collector, and the spans of their jobs below them.

use serde_json::json;
use vramq_tests::span_collector::{Collected, SpanCollector};

use crate::harness::{Answer, ECHO, Setup};

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CLIENTS_SPAN: &str = "00f067aa0ba902b7";

/// A worker and a gateway that send their spans to a collector.
async fn traced() -> (Setup, SpanCollector) {
    let collector = SpanCollector::start().await.unwrap();
    let mut setup = Setup::new();
    setup.environment = vec![
        ("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint.clone()),
        ("OTEL_BSP_SCHEDULE_DELAY", "100".to_owned()),
    ];
    setup.worker(&[ECHO], &[]);
    setup.gateway(&[]);
    setup.wait_for_models(&[ECHO]);
    (setup, collector)
}

fn send(setup: &Setup, id: &str, headers: &[(&str, &str)]) -> Answer {
    let headers = [&[("x-request-id", id), ("prefer", "wait=60")], headers].concat();
    setup.next().send("POST", "/v1/jobs", &headers, Some(&json!({"model": ECHO, "inputs": ["x"]})))
}

fn text(span: &Collected, name: &str) -> Option<String> {
    span.attribute(name).map(|value| format!("{value:?}"))
}

async fn span_of_request(collector: &SpanCollector, id: &str) -> Collected {
    let expected = format!("StringValue({id:?})");
    let is_it = |it: &Collected| text(it, "vramq.request_id").is_some_and(|id| id == expected);
    collector.span("the request's span", is_it).await.unwrap()
}

async fn span_of_job(collector: &SpanCollector, request: &Collected) -> Collected {
    collector.span("the job's span", |it| it.parent() == request.id()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_the_parent_of_its_job_and_a_child_of_its_clients_span() {
    let (setup, collector) = traced().await;
    let parent = format!("00-{TRACE_ID}-{CLIENTS_SPAN}-01");
    let answer = send(&setup, "traced", &[("traceparent", &parent), ("tracestate", "a=b")]);
    assert_eq!(answer.status, 200);
    let request = span_of_request(&collector, "traced").await;
    assert_eq!((request.service.0.as_str(), request.span.name.as_str()), ("vramq-gateway", "POST /v1/jobs"));
    assert_eq!((request.trace_id().as_str(), request.parent().as_str()), (TRACE_ID, CLIENTS_SPAN));
    assert_eq!(request.span.trace_state, "a=b");
    // The kind of a server.
    assert_eq!(request.span.kind, 2);
    for (name, value) in [
        ("http.request.method", "StringValue(\"POST\")".to_owned()),
        ("http.route", "StringValue(\"/v1/jobs\")".to_owned()),
        ("url.path", "StringValue(\"/v1/jobs\")".to_owned()),
        ("http.response.status_code", "IntValue(200)".to_owned()),
        ("vramq.job", format!("StringValue({:?})", answer.header("x-vramq-job-id").unwrap())),
        ("vramq.caller", "StringValue(\"local\")".to_owned()),
    ] {
        assert_eq!(text(&request, name), Some(value), "{name}");
    }
    let told = format!("00-{TRACE_ID}-{}-01", request.id());
    assert_eq!(answer.header("traceparent"), Some(told.as_str()));
    let job = span_of_job(&collector, &request).await;
    assert_eq!((job.service.0.as_str(), job.trace_id().as_str()), ("vramq-worker", TRACE_ID));
    assert_eq!(job.span.trace_state, "a=b");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_trace_begins_one_and_a_sampler_may_leave_it_out() {
    let (mut setup, collector) = traced().await;
    assert_eq!(send(&setup, "first", &[]).status, 200);
    let request = span_of_request(&collector, "first").await;
    assert!(request.parent().is_empty(), "{request:?}");
    assert_eq!(span_of_job(&collector, &request).await.trace_id(), request.trace_id());
    // The client has decided: neither gateway nor worker sends spans of this one.
    let parent = format!("00-{TRACE_ID}-{CLIENTS_SPAN}-00");
    assert_eq!(send(&setup, "unsampled", &[("traceparent", &parent)]).status, 200);
    // A refusal is a request as well, and no error of the gateway's.
    let wrong = setup.next().send("GET", "/v1/jobs/none", &[("x-request-id", "wrong")], None);
    assert_eq!(wrong.status, 404);
    let wrong = span_of_request(&collector, "wrong").await;
    assert_eq!(wrong.span.name, "GET /v1/jobs/{id}");
    assert_eq!((text(&wrong, "error.type"), wrong.span.status.map_or(0, |status| status.code)), (None, 0));
    // The last ones are sent before the programs end.
    assert_eq!(send(&setup, "last", &[]).status, 200);
    for program in [&mut setup.gateways[0].program, &mut setup.workers[0]] {
        program.signal("TERM");
        assert_eq!(program.wait(), Some(0));
    }
    let last = span_of_request(&collector, "last").await;
    span_of_job(&collector, &last).await;
    let all = collector.all();
    assert!(all.iter().all(|it| it.trace_id() != TRACE_ID), "{all:?}");
    let probes = ["/livez", "/readyz", "/metrics"];
    assert!(all.iter().all(|it| probes.iter().all(|probe| !it.span.name.ends_with(probe))), "{all:?}");
}
