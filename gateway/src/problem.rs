//! The error of a request: status, code, message, and whether the client should try again. One function writes it in the shape of
//! the route's API.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use vramq_producer::{JobError, JobFailed, PublishError, Reason};

/// The OpenAI clients obey it: `false` stops them from sending a 429 or 5xx again.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The job that a request became.
pub const JOB_ID: HeaderName = HeaderName::from_static("x-vramq-job-id");

/// The status, in the log and in metrics, of a request whose client hung up. Only a client that closed no more than its sending side,
/// before the end of its body, receives it. nginx uses the same number.
pub const HUNG_UP: u16 = 499;

/// The longest `Retry-After`. The OpenAI clients ignore longer ones, and try again at once.
const RETRY_AFTER_S_MAX: u64 = 60;

/// When a client may ask a store again that did not answer.
const STORE_PAUSE: Duration = Duration::from_secs(10);

/// What is shown of the name of an unknown model.
const MODEL_CHARS_MAX: usize = 256;

/// The error response of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub status: StatusCode,
    /// For programs, such as `queue_full`.
    pub code: &'static str,
    /// For people: what, where and what to do.
    pub message: String,
    /// The field of the request that it is about.
    pub param: Option<&'static str>,
    pub retry: Retry,
    /// The job that the request became, if it was published.
    pub job: Option<String>,
}

/// What the client should do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Nothing was published, or the error is the client's own: the client's usual retry rules are right.
    Unsaid,
    /// Nothing was published. Retrying makes sense after this time.
    After(Duration),
    /// A repeated request would do the same work again, or fail again.
    No,
}

/// The API whose clients read an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    OpenAi,
    Tei,
}

impl Shape {
    /// The API of a path.
    pub fn of(path: &str) -> Self {
        match path {
            "/" | "/embed" | "/embed_sparse" | "/rerank" | "/predict" | "/info" => Self::Tei,
            _ => Self::OpenAi,
        }
    }
}

impl Problem {
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None, retry: Retry::Unsaid, job: None }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// The client hung up while it sent its request. Only one that closed no more than its sending side reads this.
    pub fn hung_up() -> Self {
        let status = StatusCode::from_u16(HUNG_UP).unwrap_or(StatusCode::BAD_REQUEST);
        Self::new(status, "hung_up", "the connection ended before the request's body")
    }

    pub fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {what}"))
    }

    /// An id or idempotency key (`what`) was used before for another body, route or model.
    pub fn reused(what: &str) -> Self {
        let message = format!("this {what} was already used for another request");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "reused", message).with_retry(Retry::No)
    }

    /// Another gateway is publishing the job. This request published nothing.
    pub fn claimed(job: &str, after: Duration) -> Self {
        let message = format!(
            "another gateway is publishing the job `{job}` and has not recorded it yet: send the same request again, which finds the \
             job, or publishes it if that gateway is gone"
        );
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, "claimed", message, after)
    }

    /// Nothing was published. The request may succeed later.
    pub fn busy(status: StatusCode, code: &'static str, message: impl Into<String>, after: Duration) -> Self {
        Self::new(status, code, message).with_retry(Retry::After(after))
    }

    /// A store does not answer. Nothing was published.
    pub fn silent_store(message: &'static str) -> Self {
        Self::busy(StatusCode::SERVICE_UNAVAILABLE, "store", message, STORE_PAUSE)
    }

    #[must_use]
    pub fn about(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }

    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    #[must_use]
    pub fn of_job(mut self, id: &str) -> Self {
        self.job = Some(id.to_owned());
        self
    }

    /// A job that did not reach its queue, or for which that is unknown.
    pub fn unpublished(error: &PublishError, job: &str, retry_after: Duration) -> Self {
        let message = error.to_string();
        match error {
            PublishError::QueueFull { .. } => {
                Self::busy(StatusCode::TOO_MANY_REQUESTS, "queue_full", message, retry_after)
            }
            PublishError::Unroutable { model, .. } => Self::unknown_model(model),
            PublishError::Model(_) => Self::invalid(message).about("model"),
            PublishError::TooLarge { .. } | PublishError::TooManyItems { .. } => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
            }
            PublishError::NoInputs | PublishError::Option { .. } | PublishError::Encode(_) => {
                Self::invalid(message)
            }
            PublishError::DuplicateId { .. } => {
                Self::new(StatusCode::CONFLICT, "in_flight", message).with_retry(Retry::No)
            }
            // The job may be in the queue.
            PublishError::Timeout { .. } | PublishError::Disconnected(_) | PublishError::Closed => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "broker_lost", message)
                    .with_retry(Retry::No)
                    .of_job(job)
            }
            PublishError::Refused { .. } | PublishError::NoReplyQueue => {
                tracing::error!(%error, "the broker refuses jobs of this gateway: check the permissions of its user (docs/security.md)");
                Self::new(
                    StatusCode::BAD_GATEWAY,
                    "broker_refused",
                    "the broker refuses jobs of this gateway",
                )
                .with_retry(Retry::No)
            }
        }
    }

    /// A published job without a result. A job that ended as a dead letter must not be sent again.
    pub fn unanswered(error: &JobError) -> Self {
        let problem = match error {
            JobError::Failed(JobFailed { reason, error, .. }) => {
                let status = match reason {
                    Reason::TooLarge | Reason::OutOfMemory => StatusCode::PAYLOAD_TOO_LARGE,
                    _ => StatusCode::UNPROCESSABLE_ENTITY,
                };
                Self::new(status, reason.as_str(), error.clone())
            }
            JobError::InvalidReply(_) => {
                Self::new(StatusCode::BAD_GATEWAY, "invalid_reply", error.to_string())
            }
            JobError::Timeout { .. } => Self::timeout("no result in time"),
            JobError::Disconnected(_) | JobError::Closed | JobError::ReplyQueueLost => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "broker_lost", error.to_string())
            }
        };
        problem.with_retry(Retry::No)
    }

    /// Why a job has no result, by the code and the message of [`unanswered`](Self::unanswered).
    pub fn of_code(code: &str, message: String) -> Self {
        let other = (code == Reason::Other.as_str()).then_some(Reason::Other);
        if let Some(reason) = code.parse::<Reason>().ok().or(other) {
            return Self::unanswered(&JobError::Failed(JobFailed {
                reason,
                error: message,
                outputs: Vec::new(),
            }));
        }
        let (status, code) = match code {
            "timeout" => return Self::timeout(&message),
            "invalid_reply" => (StatusCode::BAD_GATEWAY, "invalid_reply"),
            _ => (StatusCode::SERVICE_UNAVAILABLE, "broker_lost"),
        };
        Self::new(status, code, message).with_retry(Retry::No)
    }

    pub fn timeout(message: &str) -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message).with_retry(Retry::No)
    }

    pub fn unknown_model(model: &str) -> Self {
        // A path may be much longer than names are.
        let shown: String = model.chars().take(MODEL_CHARS_MAX).collect();
        let message = format!("the model `{shown}` does not exist: no worker has declared a queue for it");
        Self::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
    }

    /// Nothing says whether jobs of the model have a queue.
    pub fn not_served(model: &str) -> Self {
        let shown: String = model.chars().take(MODEL_CHARS_MAX).collect();
        let message = format!("no worker serves the model `{shown}` at the moment");
        Self::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
    }

    /// The request names a routing key instead of the model whose jobs are published under it.
    pub fn key_of_a_model(key: &str, model: &str) -> Self {
        let message = format!("`{key}` is the key of the model `{model}`: name the model");
        Self::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
    }

    /// The error response in the shape of the client's API.
    pub fn render(&self, shape: Shape) -> Response {
        let mut response = (self.status, Json(self.body(shape))).into_response();
        let headers = response.headers_mut();
        match self.retry {
            // The OpenAI clients send a conflict again by themselves, which changes nothing about it.
            Retry::Unsaid if self.status == StatusCode::CONFLICT => {
                drop(headers.insert(SHOULD_RETRY, HeaderValue::from_static("false")));
            }
            Retry::Unsaid => {}
            Retry::After(wait) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s(wait)));
                headers.insert(SHOULD_RETRY, HeaderValue::from_static("true"));
            }
            Retry::No => drop(headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"))),
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(job) = self.job.as_ref().and_then(|job| HeaderValue::from_str(job).ok()) {
            headers.insert(JOB_ID, job);
        }
        response
    }

    fn body(&self, shape: Shape) -> Value {
        match shape {
            Shape::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
                "job_id": self.job,
            }}),
            Shape::Tei => json!({"error": self.message, "error_type": self.tei_type()}),
        }
    }

    /// OpenAI's word for the kind of error.
    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// text-embeddings-inference's word for it.
    fn tei_type(&self) -> &'static str {
        match self.status.as_u16() {
            429 => "overloaded",
            503 => "unhealthy",
            401 | 403 => "unauthorized",
            424 | 500.. => "backend",
            _ if self.code == "empty" => "empty",
            _ => "validation",
        }
    }
}

/// The whole seconds of a `Retry-After`: at least 1, at most [`RETRY_AFTER_S_MAX`].
fn retry_after_s(wait: Duration) -> u64 {
    wait.as_secs_f64().ceil().clamp(1.0, RETRY_AFTER_S_MAX as f64) as u64
}

/// Handlers return problems, and [`observe`](crate::observe) rewrites them because it knows the path. Clients never see this response.
impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use vramq_producer::ConnectError;

    use super::*;

    fn failed(reason: Reason) -> Problem {
        Problem::unanswered(&JobError::Failed(JobFailed {
            reason,
            error: "why".to_owned(),
            outputs: Vec::new(),
        }))
    }

    #[test]
    fn a_dead_letter_is_never_to_be_sent_again() {
        for reason in Reason::ALL.into_iter().chain([Reason::Other]) {
            let problem = failed(reason);
            assert_eq!(problem.retry, Retry::No, "{reason}");
            let expected = if matches!(reason, Reason::TooLarge | Reason::OutOfMemory) { 413 } else { 422 };
            assert_eq!(problem.status, expected, "{reason}");
            let headers = problem.render(Shape::OpenAi).headers().clone();
            assert_eq!(headers[SHOULD_RETRY], "false");
        }
    }

    #[test]
    fn only_what_was_not_published_is_to_be_sent_again() {
        let after = Duration::from_millis(2_100);
        let queue_full = PublishError::QueueFull { model: "m".to_owned(), key: "m".to_owned() };
        let full = Problem::unpublished(&queue_full, "a/job", after);
        let headers = full.render(Shape::OpenAi).headers().clone();
        assert!(!headers.contains_key(JOB_ID));
        assert_eq!((full.status.as_u16(), &headers[header::RETRY_AFTER]), (429, &HeaderValue::from(3)));
        for error in [
            PublishError::Timeout { after },
            PublishError::Disconnected(ConnectError::Unreachable {
                broker: "there".to_owned(),
                error: "gone".to_owned(),
            }),
            PublishError::Closed,
        ] {
            // It may be in the queue: its id tells what became of it.
            let lost = Problem::unpublished(&error, "a/job", after);
            assert_eq!((lost.status.as_u16(), lost.retry), (503, Retry::No));
            assert_eq!(lost.body(Shape::OpenAi)["error"]["job_id"], "a/job");
            for shape in [Shape::OpenAi, Shape::Tei] {
                assert_eq!(lost.render(shape).headers()[JOB_ID], "a/job");
            }
        }
        assert_eq!(Problem::timeout("late").retry, Retry::No);
    }

    #[test]
    fn a_conflict_is_sent_again_only_if_time_ends_it() {
        let conflict = Problem::new(StatusCode::CONFLICT, "c", "no");
        let should_retry = |problem: &Problem| problem.render(Shape::OpenAi).headers()[SHOULD_RETRY].clone();
        assert_eq!(should_retry(&conflict), "false");
        assert_eq!(should_retry(&conflict.with_retry(Retry::After(Duration::ZERO))), "true");
        assert!(!Problem::invalid("no").render(Shape::OpenAi).headers().contains_key(SHOULD_RETRY));
    }

    #[test]
    fn waits_are_whole_seconds_that_clients_obey() {
        for (ms, s) in [(0, 1), (1, 1), (1_001, 2), (59_500, 60), (3_600_000, 60)] {
            assert_eq!(retry_after_s(Duration::from_millis(ms)), s);
        }
    }

    #[test]
    fn each_api_gets_its_own_shape() {
        let problem = Problem::invalid("no").about("input");
        let error = problem.body(Shape::OpenAi);
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert_eq!(error["error"]["param"], "input");
        assert_eq!(problem.body(Shape::Tei), json!({"error": "no", "error_type": "validation"}));
        for (path, shape) in [("/embed", Shape::Tei), ("/", Shape::Tei), ("/v1/embeddings", Shape::OpenAi)] {
            assert_eq!(Shape::of(path), shape, "{path}");
        }
    }
}
