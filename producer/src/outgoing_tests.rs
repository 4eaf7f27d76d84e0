//! The headers of a job that a client publishes, and work off the runtime.

use futures_util::FutureExt as _;
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

async fn with_headers(options: SubmitOptions) -> Result<FieldTable, PublishError> {
    let inputs = vec![Input::Text("a text".to_owned())];
    let job = Job { model: "minilm".to_owned(), inputs, params: Params::default() };
    EncodedJob::new(job, &options, Encoding::Json, None, None, true).await.map(|job| job.message.headers)
}

/// Workers take whole what a publisher says, so it must not be cut here: two tenants would become one.
#[tokio::test]
async fn long_texts_in_headers_are_whole() {
    let long = "é".repeat(20 * 1024);
    let headers = vec![(TENANT.to_owned(), long.clone())];
    let table = with_headers(SubmitOptions { headers, ..SubmitOptions::default() }).await.unwrap();
    assert_eq!(fields::as_text(&table.inner()[TENANT]).as_deref(), Some(long.as_str()));
}

#[tokio::test]
async fn a_revision_is_refused_that_no_worker_takes() {
    let as_option =
        |revision: String| SubmitOptions { model_revision: Some(revision), ..SubmitOptions::default() };
    let as_header = |revision| SubmitOptions {
        headers: vec![(MODEL_REVISION.to_owned(), revision)],
        ..SubmitOptions::default()
    };
    for options in [as_option("é".repeat(1024)), as_header("é".repeat(1024))] {
        let table = with_headers(options).await.unwrap();
        let revision = fields::as_text(&table.inner()[MODEL_REVISION]);
        assert_eq!(revision.map(|text| text.len()), Some(MODEL_REVISION_BYTES_MAX));
    }
    for options in [as_option("é".repeat(1024) + "x"), as_header("é".repeat(1024) + "x")] {
        let error = with_headers(options).await.unwrap_err();
        assert_eq!(error.to_string(), "option `model_revision`: 2049 bytes, at most 2048 are allowed");
    }
}

#[tokio::test]
async fn headers_are_refused_that_no_worker_takes() {
    let with = |bytes: usize| SubmitOptions {
        headers: vec![("x".to_owned(), "x".repeat(bytes))],
        ..SubmitOptions::default()
    };
    let others = fields::table_bytes(&with_headers(with(0)).await.unwrap());
    assert!(with_headers(with(HEADER_BYTES_MAX - others)).await.is_ok());
    let error = with_headers(with(HEADER_BYTES_MAX - others + 1)).await.unwrap_err();
    assert_eq!(error.to_string(), "option `headers`: they take 122881 bytes, at most 122880 are allowed");
}

/// The verdicts are those of workers, and of the packages for Python and Node.js (`given_ids` in their scenarios).
#[tokio::test]
async fn ids_are_refused_that_no_worker_takes() {
    let with = |id: &str| SubmitOptions { id: Some(id.to_owned()), ..SubmitOptions::default() };
    for right in ["a", &("é".repeat(127) + "x"), "漢字, \0\n😀", "0190c7a8-0000-7000-8000-000000000000"]
    {
        assert!(with_headers(with(right)).await.is_ok(), "{right}");
    }
    for wrong in ["", &"x".repeat(256), &"é".repeat(128), "a\u{fffd}"] {
        let error = with_headers(with(wrong)).await.unwrap_err();
        assert!(matches!(error, PublishError::Option { name: "id", .. }), "{wrong}: {error}");
    }
}

#[test]
fn work_whose_runtime_has_ended_does_not_panic() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let handle = runtime.handle().clone();
    drop(runtime);
    let _entered = handle.enter();
    assert_eq!(off_runtime(BLOCKING_BYTES, || 1).now_or_never(), Some(None));
    assert_eq!(off_runtime(BLOCKING_BYTES - 1, || 1).now_or_never(), Some(Some(1)), "it needs no thread");
}
