//! The headers of a job that a client publishes.

use lapin::types::{AMQPValue, FieldArray};
use vramq_schemas::Params;
use vramq_schemas::headers::{REQUEST_ID, TENANT};

use super::*;

#[path = "../../schemas/tests/common/golden_headers.rs"]
mod golden_headers;

/// With all that a publisher may say of its job.
#[tokio::test]
async fn a_job_has_the_frozen_headers() {
    let frozen = golden_headers::golden(golden_headers::PUBLISHED);
    let text = |name: &str| frozen[name].as_str().unwrap().to_owned();
    let options = SubmitOptions {
        batch_hint: Some(32),
        model_revision: Some(text(MODEL_REVISION)),
        traceparent: Some(text(TRACEPARENT)),
        tracestate: Some(text(TRACESTATE)),
        headers: [TENANT, REQUEST_ID, DIGEST].map(|name| (name.to_owned(), text(name))).to_vec(),
        ..SubmitOptions::default()
    };
    let inputs = vec![Input::Text("a text".to_owned())];
    let job = Job { model: "minilm".to_owned(), inputs, params: Params::default() };
    let job = EncodedJob::new(job, &options, Encoding::Json, None, None, true).await.unwrap();
    assert_eq!(golden_headers::to_json(&job.message.headers), frozen);
}
