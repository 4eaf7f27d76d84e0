//! Shared by the routes of OpenAI and text-embeddings-inference: publishes one job for a request, and waits for its results.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts as _, Query, Request};
use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use vramq_producer::{Answer, Input, Job, Params};

use super::found_job::{Claimed, FoundJob, RepeatedRequest};
use super::idempotency::idempotency_key;
use super::{Authenticated, answered, wait};
use crate::app::{App, Permits};
use crate::body::{self, Parsed};
use crate::body_memory::BodyRoom;
use crate::held_body::UntilSent;
use crate::job_task::{Submission, start};
use crate::jobs::Entry;
use crate::jobs::claim::Claim;
use crate::jobs::earlier::JobName;
use crate::jobs::view::state_of;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;
use crate::trace::Trace;

/// A request that is to become one job: who calls, and what came.
#[derive(Debug)]
pub struct Call {
    pub app: App,
    pub caller: Arc<Caller>,
    /// The model that the URL names.
    pub model: Option<String>,
    /// See [`route_of`].
    route: String,
    trace: Trace,
    headers: HeaderMap,
    body: Body,
    /// The request's permits, once it is admitted.
    admitted: Arc<OnceLock<Permits>>,
}

/// The model of a request. TEI's clients name none, because a TEI server has only one.
#[derive(Debug, Deserialize)]
pub struct ModelQuery {
    pub(super) model: Option<String>,
}

impl FromRequest<App> for Call {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &App) -> Result<Self, Problem> {
        let (mut parts, body) = request.into_parts();
        let Authenticated(caller) = Authenticated::from_request_parts(&mut parts, app).await?;
        let query = Query::<ModelQuery>::from_request_parts(&mut parts, app).await;
        let Query(ModelQuery { model }) = query.map_err(|e| Problem::invalid(e.to_string()))?;
        let trace = Trace::from_request_parts(&mut parts, app).await?;
        let route = route_of(parts.uri.path()).to_owned();
        let (headers, admitted) = (parts.headers, Arc::default());
        Ok(Self { app: app.clone(), caller, model, route, trace, headers, body, admitted })
    }
}

/// The route of a path. `POST /` is `POST /embed`, so that a request to either is the same request.
fn route_of(path: &str) -> &str {
    if path == "/" { "/embed" } else { path }
}

impl Call {
    /// The response to this call, as `answer` makes it.
    pub async fn answered<F>(self, answer: impl FnOnce(Self) -> F) -> Response
    where
        F: Future<Output = Result<Response, Problem>>,
    {
        let admitted = Arc::clone(&self.admitted);
        let mut response = answer(self).await.into_response();
        if let Some(permits) = admitted.get() {
            // The request is in flight until its response is sent.
            response.extensions_mut().insert(UntilSent::new(permits.clone()));
        }
        response
    }

    /// Admits and reads the request; returns its parsed body as well.
    ///
    /// # Errors
    /// The caller has too many requests in flight, or the headers or the body are wrong.
    pub async fn read<T: DeserializeOwned + Send + 'static>(self) -> Result<(T, Admitted), Problem> {
        let Self { app, caller, model, route, trace, headers, body, admitted } = self;
        let permits = app.admit(&caller)?;
        let permits = admitted.get_or_init(|| permits).clone();
        let idempotency_key = idempotency_key(&headers)?;
        let Parsed { value, digest, room } = body::json(&app, &caller, &headers, body).await?;
        Ok((value, Admitted { app, caller, model, route, trace, digest, room, permits, idempotency_key }))
    }
}

/// A call that was admitted and read.
#[derive(Debug)]
pub struct Admitted {
    pub app: App,
    pub caller: Arc<Caller>,
    /// The model that the URL names.
    pub model: Option<String>,
    /// See [`route_of`].
    route: String,
    trace: Trace,
    digest: [u8; 32],
    room: BodyRoom,
    permits: Permits,
    idempotency_key: Option<String>,
}

impl Admitted {
    /// Grows this request's share of the memory for bodies to `bytes` bytes, for the inputs that were made of its body.
    ///
    /// # Errors
    /// Other bodies have the memory, or all of it is too little.
    pub fn hold(&mut self, bytes: usize) -> Result<(), Problem> {
        self.app.bodies.grow(&mut self.room, bytes, Instant::now())
    }

    /// Publishes the inputs as one job, and waits for its results. The same request as before has the results of its first job, or that job's
    /// failure.
    ///
    /// # Errors
    /// The job cannot be published now, fails, or does not end in time.
    pub async fn run(
        self,
        model: String,
        inputs: Vec<Input>,
        params: Params,
    ) -> Result<(Arc<Entry>, Arc<Answer>), Problem> {
        // The digest covers route and model as well: there the same body asks for something else.
        let asked = format!("{}\n{model}", self.route);
        let fingerprint: [u8; 32] =
            Sha256::new().chain_update(self.digest).chain_update(asked).finalize().into();
        let name = JobName::of(&self.caller, None, self.idempotency_key.as_deref());
        let same = RepeatedRequest {
            app: &self.app,
            caller: &self.caller,
            name: name.as_ref(),
            idempotency_key: self.idempotency_key.as_deref(),
            fingerprint,
        };
        let claimed = match same.find_earlier().await? {
            Some(found) => Claimed::Found(found),
            None => {
                self.app.check_model(&self.caller, &model).await?;
                same.claim().await?
            }
        };
        let claim = match claimed {
            Claimed::Found(FoundJob::Here(entry)) => {
                let Self { app, room, trace, .. } = self;
                // The wait may be long.
                drop((inputs, params, room));
                trace.subject.is_job(&entry.message_id);
                let answer = wait(&app, &entry, true).await?;
                return Ok((entry, answer));
            }
            Claimed::Found(FoundJob::Stored(written)) => {
                let end = off_runtime(written.len(), move || state_of(&written, 0)).await;
                if let (Some(end), Some(JobName { id, message_id, .. })) = (end, &name) {
                    let answer = answered(end, message_id)?;
                    let (id, message_id, owner) = (id.clone(), message_id.clone(), self.caller.name.clone());
                    let entry = Entry::new(id, message_id, owner, model, inputs.len(), fingerprint);
                    return Ok((Arc::new(entry), answer));
                }
                // The stored job cannot be read, so the job runs as without a store.
                None
            }
            Claimed::New(claim) => claim,
        };
        self.publish(Job { model, inputs, params }, fingerprint, name, claim).await
    }

    async fn publish(
        self,
        job: Job,
        fingerprint: [u8; 32],
        name: Option<JobName>,
        claim: Option<Claim>,
    ) -> Result<(Arc<Entry>, Arc<Answer>), Problem> {
        let Self { app, caller, trace, room, permits, idempotency_key, .. } = self;
        let may_come_again = idempotency_key.is_some();
        let submission = Submission {
            caller,
            name,
            kept: false,
            idempotency_key,
            model: job.model,
            inputs: job.inputs,
            params: job.params,
            batch_hint: None,
            model_revision: None,
            fingerprint,
            trace,
            permits,
            body: room,
            claim,
        };
        let entry = start(&app, submission)?;
        let answer = wait(&app, &entry, may_come_again).await?;
        Ok((entry, answer))
    }
}
