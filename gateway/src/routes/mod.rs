//! The routes, and the code that handlers share.

mod dead_letters;
mod events;
mod files;
mod form;
mod found_job;
mod health;
mod idempotency;
mod jobs;
mod numbered;
mod one_job;
mod openai;
mod openai_input;
mod output_files;
mod page;
mod prefer;
mod range;
mod references;
mod scores;
mod sequences;
mod shallow;
mod sparse;
mod tei;

use std::any::Any;
use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use vramq_spans::Spans;

use crate::app::App;
use crate::drain::Drain;
use crate::job_task::withdraw;
use crate::jobs::{Entry, State};
use crate::keys::Caller;
use crate::observe::{Observer, observe};
use crate::problem::{Problem, Retry};
use crate::trace::Trace;

/// Response headers that pages of other origins may read.
const EXPOSED: [&str; 11] = [
    "accept-ranges",
    "content-range",
    "etag",
    "location",
    "preference-applied",
    "repr-digest",
    "retry-after",
    "x-request-id",
    "x-should-retry",
    "x-vramq-job-id",
    "x-vramq-usage",
];

/// All routes. `page/openapi.json` describes them; a test compares the two. Each request becomes a span, if there are `spans`.
pub fn router(app: App, spans: Option<Arc<Spans>>) -> Router {
    Router::new()
        .route("/v1/embeddings", post(openai::embeddings))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*model}", get(openai::model))
        .route("/embed", post(tei::embed))
        .route("/embed_sparse", post(sparse::embed_sparse))
        .route("/rerank", post(scores::rerank))
        .route("/predict", post(scores::predict))
        .route("/info", get(tei::info))
        .route("/v1/jobs", post(jobs::create))
        .route("/v1/jobs/{id}", get(jobs::read).put(jobs::put).delete(jobs::delete))
        .route("/v1/jobs/{id}/events", get(events::events))
        .route("/v1/files", post(files::upload).layer(DefaultBodyLimit::disable()))
        .route("/v1/files/{id}", get(files::read).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/status", get(page::status))
        .route("/v1/dead-letters", get(dead_letters::read))
        .route("/v1/dead-letters/retry", post(dead_letters::retry))
        .route("/v1/dead-letters/drop", post(dead_letters::drop))
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz))
        .route("/health", get(health::readyz))
        .route("/metrics", get(health::metrics))
        .route("/", get(page::index).post(tei::embed))
        .route("/page/{file}", get(page::file))
        .route("/docs", get(page::docs))
        .route("/openapi.json", get(page::openapi))
        .fallback(|| async { Problem::not_found("such route; GET /docs lists them") })
        .method_not_allowed_fallback(|| async {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method",
                "this route has other methods; GET /docs lists them",
            )
        })
        .layer(cors(&app.config.http.cors_origins))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(Observer { app: app.clone(), spans }, observe))
        .with_state(app)
}

/// A handler that panics is a bug, and fails only its own request.
fn panicked(_: Box<dyn Any + Send + 'static>) -> Response {
    tracing::error!("a request's handler panicked: the request was answered with 500. Please report it");
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "bug", "a fault of this gateway")
        .with_retry(Retry::No)
        .into_response()
}

fn cors(origins: &[String]) -> CorsLayer {
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    if origins.is_empty() {
        return CorsLayer::new();
    }
    CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
        // Clients send their own headers, such as `x-stainless-os`. Any may come, because the gateway uses no cookies.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED.map(HeaderName::from_static))
}

/// The caller, by its key: `Authorization: Bearer KEY`, or `X-API-Key: KEY`.
#[derive(Debug)]
pub struct Authenticated(pub Arc<Caller>);

impl FromRequestParts<App> for Authenticated {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let text = |name: HeaderName| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
        });
        let key = bearer.or_else(|| text(HeaderName::from_static("x-api-key")));
        let caller = app.keys.caller(key).ok_or_else(|| {
            let message = if key.is_some() {
                "this key is not known"
            } else {
                "a key is needed: Authorization: Bearer KEY"
            };
            Problem::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
        })?;
        if let Some(trace) = parts.extensions.get::<Trace>() {
            trace.subject.is_of(&caller.name);
        }
        Ok(Self(caller))
    }
}

/// The request's ids.
impl FromRequestParts<App> for Trace {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, Problem> {
        let trace = parts.extensions.get::<Self>().cloned();
        trace.ok_or_else(|| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "bug", "a request without an id"))
    }
}

/// Withdraws the job of a request that is dropped before its end, because its caller hung up.
struct WithdrawOnDrop<'a> {
    app: &'a App,
    entry: &'a Arc<Entry>,
    armed: bool,
}

impl Drop for WithdrawOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            withdraw(self.app, self.entry);
        }
    }
}

/// Waits for a job's end on behalf of a connected caller. If the caller hangs up, the job is withdrawn unless the caller can ask for it
/// again.
///
/// # Errors
/// The job failed or did not end in time, or the gateway ends first.
pub async fn wait(
    app: &App,
    entry: &Arc<Entry>,
    may_come_again: bool,
) -> Result<Arc<vramq_producer::Answer>, Problem> {
    let mut guard = WithdrawOnDrop { app, entry, armed: !may_come_again };
    let mut drain = app.drain.clone();
    let state = tokio::select! {
        state = entry.ended() => state,
        () = tokio::time::sleep(app.config.limits.request) => {
            let message = match guard.armed {
                true => "no result in time; the job was withdrawn",
                false => "no result in time; the job goes on: the same request with the same Idempotency-Key waits for it",
            };
            return Err(Problem::timeout(message).of_job(&entry.message_id));
        }
        Ok(_) = drain.wait_for(|drain| *drain == Drain::Over) => {
            app.cut_off();
            // Only its caller may withdraw the job, and this caller has not hung up.
            guard.armed = false;
            return Err(stopping(app, entry, may_come_again));
        }
    };
    guard.armed = false;
    answered(state, &entry.message_id)
}

/// What the end of a job is to the caller of a route that answers with the results.
///
/// # Errors
/// The job failed, or was withdrawn.
fn answered(end: State, message_id: &str) -> Result<Arc<vramq_producer::Answer>, Problem> {
    match end {
        State::Done(answer) => Ok(answer),
        State::Failed(failure) => Err(failure.problem.clone()),
        _ => Err(Problem::new(StatusCode::CONFLICT, "withdrawn", "the job was withdrawn")
            .with_retry(Retry::No)
            .of_job(message_id)),
    }
}

/// The gateway ends before the job does. The message says what becomes of the job.
fn stopping(app: &App, entry: &Entry, may_come_again: bool) -> Problem {
    let message = if matches!(entry.state(), State::Publishing) {
        "this gateway is stopping, and the broker has not confirmed the job: it may still run"
    } else if may_come_again && app.adoption.is_some() {
        // The job is recorded, so another gateway takes it on.
        "this gateway is stopping; the job goes on: the same request with the same Idempotency-Key waits for it at another"
    } else {
        "this gateway is stopping; the job was not withdrawn: workers run it, and as nobody takes its results, they become a dead letter \
         with the job's id"
    };
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "draining", message)
        .with_retry(Retry::No)
        .of_job(&entry.message_id)
}
