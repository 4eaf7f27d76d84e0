//! What OpenAI's and text-embeddings-inference's routes have in common: a request becomes one job, and waits for its results.

use std::sync::Arc;

use axum::body::Body;
use axum::http::HeaderMap;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;
use vramq_producer::{Answer, Input, Params};

use super::openai::idempotency_key;
use super::wait;
use crate::app::{App, Permits};
use crate::body::{self, Parsed};
use crate::jobs::{Entry, Submission, start};
use crate::keys::Caller;
use crate::observe::Trace;
use crate::problem::Problem;

/// A request that was admitted and read.
#[derive(Debug)]
pub struct Request {
    digest: [u8; 32],
    room: OwnedSemaphorePermit,
    permits: Permits,
    idempotency_key: Option<String>,
}

impl Request {
    /// Admits and reads a request; returns its parsed body as well.
    ///
    /// # Errors
    /// The caller has too many requests in flight, or the headers or the body are wrong.
    pub async fn read<T: DeserializeOwned + Send + 'static>(
        app: &App,
        caller: &Arc<Caller>,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<(T, Self), Problem> {
        let permits = app.admit(caller)?;
        let idempotency_key = idempotency_key(headers)?;
        let Parsed { value, digest, room } = body::json(app, headers, body).await?;
        Ok((value, Self { digest, room, permits, idempotency_key }))
    }

    /// Publishes the inputs as one job, and waits for its results.
    ///
    /// # Errors
    /// The job cannot be published now, fails, or does not end in time.
    pub async fn run(
        self,
        app: &App,
        caller: &Arc<Caller>,
        trace: Trace,
        model: String,
        inputs: Vec<Input>,
        params: Params,
    ) -> Result<(Arc<Entry>, Arc<Answer>), Problem> {
        if !app.jobs.holds(&caller.name, None, self.idempotency_key.as_deref()) {
            app.check_model(caller, &model).await?;
        }
        let may_come_again = self.idempotency_key.is_some();
        let submission = Submission {
            caller: Arc::clone(caller),
            id: None,
            kept: false,
            idempotency_key: self.idempotency_key,
            model,
            inputs,
            params,
            batch_hint: None,
            model_revision: None,
            fingerprint: self.digest,
            trace,
            permits: self.permits,
            body: self.room,
        };
        let entry = start(app, submission)?;
        let answer = wait(app, &entry, may_come_again).await?;
        Ok((entry, answer))
    }
}
