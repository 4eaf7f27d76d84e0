//! `/embed_sparse` as text-embeddings-inference has it: sparse vectors of texts.

use std::sync::Arc;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use vramq_producer::{Answer, Output};

use super::one_job::Call;
use super::openai::{embedding_params, name_job, refused_by_model};
use super::shallow::texts_or_ids;
use super::tei::{choose, figures, texts};
use crate::jobs::view::output_bytes;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// A request for sparse vectors.
#[derive(Debug, Deserialize)]
pub struct EmbedSparseRequest {
    #[serde(deserialize_with = "texts_or_ids")]
    inputs: Value,
    prompt_name: Option<String>,
    /// Parsed only to reject a value of another type. Texts are cut as the model's own files say.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

/// An element that is not zero.
#[derive(Debug, PartialEq, Serialize)]
struct Element {
    index: u32,
    value: f32,
}

/// `POST /embed_sparse`.
pub async fn embed_sparse(call: Call) -> Response {
    call.answered(sparse_vectors).await
}

async fn sparse_vectors(call: Call) -> Result<Response, Problem> {
    let (EmbedSparseRequest { inputs, prompt_name, .. }, call) = call.read().await?;
    let model = choose(&call, |tei| &tei.embed_sparse, "tei.embed_sparse").await?;
    let inputs = texts(inputs, call.app.config.limits.items)?;
    let params = embedding_params(&call.app.config, &model, None, prompt_name)?;
    let (entry, answer) = call.run(model, inputs, params).await.map_err(refused_by_model)?;
    let mut response = render(answer).await?;
    name_job(&mut response, &entry.message_id);
    Ok(response)
}

async fn render(answer: Arc<Answer>) -> Result<Response, Problem> {
    let headers = figures(&answer);
    let bytes = answer.outputs.iter().map(output_bytes).sum();
    let written = off_runtime(bytes, move || {
        let vectors = answer.outputs.iter().map(elements).collect::<Result<Vec<_>, _>>()?;
        serde_json::to_vec(&vectors).map_err(|e| not_served(&format!("the vectors cannot be written: {e}")))
    });
    let mut response = ([(header::CONTENT_TYPE, "application/json")], written.await?).into_response();
    response.headers_mut().extend(headers);
    Ok(response)
}

/// The elements of an output that are not zero, by ascending index.
fn elements(output: &Output) -> Result<Vec<Element>, Problem> {
    let Output::Sparse(sparse) = output else {
        return Err(not_served("the model does not make sparse vectors"));
    };
    let elements = sparse.indices().iter().zip(sparse.values());
    Ok(elements.map(|(index, value)| Element { index: *index, value: *value }).collect())
}

fn not_served(message: &str) -> Problem {
    Problem::new(StatusCode::FAILED_DEPENDENCY, "not_served", message)
}
