//! `/v1/jobs`: jobs for any model, with any inputs. A request may wait for the result or ask for it later.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use tokio::time::timeout;
use vramq_producer::{Input, Params, PublishError};
use vramq_schemas::{ITEMS_MAX, MODEL_REVISION_BYTES_MAX};

use super::found_job::{Claimed, FoundJob, RepeatedRequest, find_by_id};
use super::idempotency::idempotency_key;
use super::openai::name_job;
use super::prefer::wait_of;
use super::{Authenticated, references};
use crate::app::{App, Permits};
use crate::body::{self, Parsed};
use crate::byte_budget::ByteBudget;
use crate::drain::Drain;
use crate::files::is_id;
use crate::held_body::UntilSent;
use crate::job_task::{Submission, start, withdraw};
use crate::jobs::earlier::JobName;
use crate::jobs::shared_view::{Unwritten, view};
use crate::jobs::view::failure_of;
use crate::jobs::{Entry, State as JobState};
use crate::keys::{Caller, is_name};
use crate::off_runtime::off_runtime;
use crate::problem::{Problem, Retry, SHOULD_RETRY};
use crate::trace::Trace;

const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The body of a request for a job.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRequest {
    model: String,
    /// Texts, `{"bytes": "<base64>"}`, `{"json": …}`, `{"uri": "…"}`; an uploaded file is `{"uri": "file-…"}`, a
    /// job's output in a store `{"uri": "output-…"}`.
    #[serde(deserialize_with = "super::numbered::inputs")]
    inputs: Vec<Input>,
    #[serde(default)]
    params: Params,
    batch_hint: Option<u32>,
    /// The revision of the model that is to run the job.
    model_revision: Option<String>,
}

impl JobRequest {
    /// # Errors
    /// It has no inputs or too many, its batch hint is 0, or its model revision is too long.
    fn check(&self) -> Result<(), Problem> {
        if self.inputs.is_empty() {
            return Err(Problem::invalid("`inputs` is an empty list").about("inputs"));
        }
        if self.inputs.len() > ITEMS_MAX {
            let error = PublishError::TooManyItems { items: self.inputs.len(), cap: ITEMS_MAX };
            return Err(Problem::unpublished(&error, "", Duration::ZERO).about("inputs"));
        }
        if self.batch_hint == Some(0) {
            return Err(Problem::invalid("`batch_hint` is 0; it must be at least 1").about("batch_hint"));
        }
        let bytes = self.model_revision.as_deref().map_or(0, str::len);
        if bytes > MODEL_REVISION_BYTES_MAX {
            let message =
                format!("`model_revision` has {bytes} bytes; at most {MODEL_REVISION_BYTES_MAX} are allowed");
            return Err(Problem::invalid(message).about("model_revision"));
        }
        Ok(())
    }
}

/// `POST /v1/jobs`.
pub async fn create(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    trace: Trace,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    submit(&app, &caller, None, trace, &headers, body).await
}

/// `PUT /v1/jobs/{id}`: the same twice is one job.
pub async fn put(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    trace: Trace,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    if !is_name(&id) {
        let message = "a job's id has 1 to 64 characters of a-z, A-Z, 0-9, `-`, `_` and `.`";
        return Err(Problem::invalid(message).about("id"));
    }
    // Its results could not be stored: in a common folder they would look like an upload's description.
    if is_id(&id) {
        let message = "`file-` and 32 hexadecimal digits are the id of an upload, and cannot be a job's";
        return Err(Problem::invalid(message).about("id"));
    }
    submit(&app, &caller, Some(id), trace, &headers, body).await
}

async fn submit(
    app: &App,
    caller: &Arc<Caller>,
    id: Option<String>,
    trace: Trace,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let permits = app.admit(caller)?;
    let mut response = admitted(app, caller, id, trace, headers, body, permits.clone()).await?;
    // The request is in flight until its response is sent.
    response.extensions_mut().insert(UntilSent::new(permits));
    Ok(response)
}

async fn admitted(
    app: &App,
    caller: &Arc<Caller>,
    id: Option<String>,
    trace: Trace,
    headers: &HeaderMap,
    body: Body,
    permits: Permits,
) -> Result<Response, Problem> {
    // The caller's own id already identifies the job.
    let idempotency_key = if id.is_some() { None } else { idempotency_key(headers)? };
    let wait = wait_of(headers, app.config.limits.request);
    let Parsed { value, digest, mut room } = body::json::<JobRequest>(app, caller, headers, body).await?;
    value.check()?;
    let JobRequest { model, mut inputs, params, batch_hint, model_revision } = value;
    let name = JobName::of(caller, id.as_deref(), idempotency_key.as_deref());
    // Before the inputs are looked up: an upload may be gone since the first request, whose answer stands.
    let same = RepeatedRequest {
        app,
        caller,
        name: name.as_ref(),
        idempotency_key: idempotency_key.as_deref(),
        fingerprint: digest,
    };
    if let Some(found) = same.find_earlier().await? {
        drop((inputs, params, room));
        return found_response(app, found, name.as_ref(), wait, &trace).await;
    }
    // Cheap checks first: there may be 65,536 references to look up.
    references::check(app, &inputs)?;
    app.check_model(caller, &model).await?;
    references::resolve(app, caller, &mut inputs, &mut room).await?;
    let claim = match same.claim().await? {
        Claimed::New(claim) => claim,
        Claimed::Found(found) => {
            drop((inputs, params, room));
            return found_response(app, found, name.as_ref(), wait, &trace).await;
        }
    };
    let submission = Submission {
        caller: Arc::clone(caller),
        name,
        idempotency_key,
        kept: true,
        model,
        inputs,
        params,
        batch_hint,
        model_revision,
        fingerprint: digest,
        trace,
        permits,
        body: room,
        claim,
    };
    let entry = start(app, submission)?;
    follow(app, &entry, wait).await;
    answer(&app.answers, &entry, wait).await
}

/// The response with the job that the same request started before.
async fn found_response(
    app: &App,
    found: FoundJob,
    name: Option<&JobName>,
    wait: Option<Duration>,
    trace: &Trace,
) -> Result<Response, Problem> {
    match found {
        FoundJob::Here(entry) => {
            trace.subject.is_job(&entry.message_id);
            follow(app, &entry, wait).await;
            answer(&app.answers, &entry, wait).await
        }
        FoundJob::Stored(written) => {
            let read = written.clone();
            let failure = off_runtime(read.len(), move || failure_of(&read)).await;
            let response = ended_response(failure.as_ref(), written);
            Ok(match name {
                Some(name) => named(response, &name.id, &name.message_id, wait),
                None => response,
            })
        }
    }
}

/// Waits as [`end_or_confirm`] does, for at most `http.request_s`. The end of a drain ends the wait.
async fn follow(app: &App, entry: &Entry, wait: Option<Duration>) {
    let mut drain = app.drain.clone();
    tokio::select! {
        () = end_or_confirm(entry, wait, app.config.limits.request) => {}
        // A caller can use the id in a 202 to ask for the result elsewhere. An unconfirmed job gets no 202.
        Ok(_) = drain.wait_for(|drain| *drain == Drain::Over) => {
            if matches!(entry.state(), JobState::Publishing) {
                app.cut_off();
            }
        }
    }
}

/// Waits for a job's end for as long as its caller wants, then until the broker has confirmed or refused the job; for at most `most` in all.
async fn end_or_confirm(entry: &Entry, wait: Option<Duration>, most: Duration) {
    let waiting = async {
        if let Some(wait) = wait {
            let _ = timeout(wait, entry.ended()).await;
        }
        let mut watched = entry.watch();
        let _ = watched.wait_for(|state| !matches!(state, JobState::Publishing)).await;
    };
    let _ = timeout(most, waiting).await;
}

/// 200 with the results, 202 before the job's end, or the status of the job's failure. Otherwise the problem that kept the job from being
/// published. A job that the broker has not confirmed gets no 202, because it may never be published.
async fn answer(
    answers: &ByteBudget,
    entry: &Arc<Entry>,
    waited: Option<Duration>,
) -> Result<Response, Problem> {
    let state = entry.state();
    if let JobState::Failed(failure) = &state
        && !failure.is_published
    {
        return Err(failure.problem.clone());
    }
    if matches!(state, JobState::Publishing) {
        return Err(unconfirmed(entry));
    }
    // The job was published, so the request is not to be sent again by itself.
    let unwritten = |e: Unwritten| e.problem().with_retry(Retry::No).of_job(&entry.message_id);
    let written = view(entry, answers).await.map_err(unwritten)?;
    let response = match &state {
        JobState::Failed(failure) => ended_response(Some(&failure.problem), written),
        state if state.is_end() => ended_response(None, written),
        _ => json_response(StatusCode::ACCEPTED, written),
    };
    Ok(named(response, &entry.id, &entry.message_id, waited))
}

/// The response with a finished job. A failed job has the status of its failure, and must not be sent again.
fn ended_response(failure: Option<&Problem>, written: Bytes) -> Response {
    let Some(failure) = failure else { return json_response(StatusCode::OK, written) };
    let mut response = json_response(failure.status, written);
    response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    response
}

/// The gateway goes on publishing the job. Whether the broker will have it is unknown.
fn unconfirmed(entry: &Entry) -> Problem {
    let message = format!(
        "the broker has not confirmed the job `{}` yet; it may still run, and GET /v1/jobs/{} says what became of it",
        entry.id, entry.id
    );
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unconfirmed", message)
        .with_retry(Retry::No)
        .of_job(&entry.message_id)
}

/// The response with the headers that name its job.
fn named(mut response: Response, id: &str, message_id: &str, waited: Option<Duration>) -> Response {
    // Names of ASCII letters, digits, `-`, `_` and `.`.
    if let Ok(location) = format!("/v1/jobs/{id}").parse() {
        response.headers_mut().insert(header::LOCATION, location);
    }
    if let Some(Ok(applied)) = waited.map(|wait| format!("wait={}", wait.as_secs()).parse()) {
        response.headers_mut().insert(PREFERENCE_APPLIED, applied);
    }
    name_job(&mut response, message_id);
    response
}

/// `GET /v1/jobs/{id}`: the state, and the results when there are some.
pub async fn read(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let reader = app.admit_reader(&caller)?;
    let written = written_of(&app, find_by_id(&app, &caller, &id).await?).await?;
    Ok(read_response(written, reader))
}

/// `DELETE /v1/jobs/{id}`: withdraws the job, wherever it is. A finished job stays as it is.
pub async fn delete(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Result<Response, Problem> {
    let reader = match app.admit_reader(&caller) {
        // A job in this gateway's memory needs no reader's permit, so a caller without one left can still withdraw it.
        Err(_) if app.jobs.find(&caller.name, &id).is_some() => None,
        admitted => Some(admitted?),
    };
    let found = find_by_id(&app, &caller, &id).await?;
    if let FoundJob::Here(entry) = &found {
        withdraw(&app, entry);
        // The job's task reacts at once.
        entry.ended().await;
    }
    let reader = reader.map_or_else(|| app.admit_reader(&caller), Ok)?;
    Ok(read_response(written_of(&app, found).await?, reader))
}

/// The response with a job. The reader's permit is held until the response is sent.
fn read_response(written: Bytes, reader: Permits) -> Response {
    let mut response = json_response(StatusCode::OK, written);
    response.extensions_mut().insert(UntilSent::new(reader));
    response
}

async fn written_of(app: &App, found: FoundJob) -> Result<Bytes, Problem> {
    match found {
        FoundJob::Here(entry) => view(&entry, &app.answers).await.map_err(Unwritten::problem),
        FoundJob::Stored(written) => Ok(written),
    }
}

fn json_response(status: StatusCode, written: Bytes) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], written).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Much longer than the test may take.
    const HOUR: Duration = Duration::from_secs(3600);

    fn entry() -> Arc<Entry> {
        let (id, message_id) = ("mine".to_owned(), "message-1".to_owned());
        Arc::new(Entry::new(id, message_id, "me".to_owned(), "m".to_owned(), 1, [0; 32]))
    }

    #[tokio::test]
    async fn the_wait_for_the_end_and_the_one_for_the_confirm_have_one_time_together() {
        let (entry, short) = (entry(), Duration::from_millis(1));
        for (wait, most) in [(None, short), (Some(short), short), (Some(HOUR), short)] {
            let waiting = end_or_confirm(&entry, wait, most);
            timeout(HOUR / 60, waiting).await.unwrap_or_else(|_| panic!("{wait:?}"));
        }
        // The broker has the job, so its caller waits for no more than it wants.
        entry.happened("queued", serde_json::json!({}), Some(JobState::Queued));
        timeout(HOUR / 60, end_or_confirm(&entry, Some(short), HOUR)).await.expect("its wait is over");
    }

    #[tokio::test]
    async fn a_job_that_the_broker_has_not_confirmed_is_not_accepted() {
        let entry = entry();
        let answers = ByteBudget::new(1 << 20, 1 << 20);
        let problem = answer(&answers, &entry, None).await.unwrap_err();
        assert_eq!((problem.status.as_u16(), problem.code, problem.retry), (503, "unconfirmed", Retry::No));
        assert_eq!(problem.job.as_deref(), Some("message-1"));
        assert!(problem.message.contains("/v1/jobs/mine"), "{}", problem.message);
        entry.happened("queued", serde_json::json!({}), Some(JobState::Queued));
        assert_eq!(answer(&answers, &entry, None).await.unwrap().status(), StatusCode::ACCEPTED);
        entry.happened("withdrawn", serde_json::json!({}), Some(JobState::Withdrawn));
        assert_eq!(answer(&answers, &entry, None).await.unwrap().status(), StatusCode::OK);
    }
}
