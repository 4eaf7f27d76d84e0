//! `/embed` and `/info`, as in text-embeddings-inference, for its clients.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use vramq_producer::{Answer, Input};

use super::Authenticated;
use super::one_job::{Admitted, Call, ModelQuery};
use super::openai::{embedding_params, name_job, refused_by_model, shorten, vectors};
use super::shallow::texts_or_ids;
use crate::app::{App, NOBODY_RETRY};
use crate::config::TeiModels;
use crate::jobs::view::output_bytes;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// A request for embeddings.
#[derive(Debug, Deserialize)]
pub struct EmbedRequest {
    #[serde(deserialize_with = "texts_or_ids")]
    inputs: Value,
    normalize: Option<bool>,
    prompt_name: Option<String>,
    dimensions: Option<usize>,
    /// Parsed only to reject a value of another type. Texts are cut as the model's own files say.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

/// `POST /embed`, and `POST /`: clients that are given the URL of a text-embeddings-inference send requests there.
pub async fn embed(call: Call) -> Response {
    call.answered(embeddings).await
}

async fn embeddings(call: Call) -> Result<Response, Problem> {
    let (body, call) = call.read::<EmbedRequest>().await?;
    let EmbedRequest { inputs, normalize, prompt_name, dimensions, .. } = body;
    let model = choose(&call, |tei| &tei.embed, "tei.embed").await?;
    let inputs = texts(inputs, call.app.config.limits.items)?;
    let params = embedding_params(&call.app.config, &model, dimensions, prompt_name)?;
    let (entry, answer) = call.run(model, inputs, params).await.map_err(refused_by_model)?;
    let job = entry.message_id.clone();
    render(answer, dimensions, normalize.unwrap_or(true)).await.map(|mut response| {
        name_job(&mut response, &job);
        response
    })
}

/// The headers in which text-embeddings-inference reports the size and the duration of a request.
pub(super) fn figures(answer: &Answer) -> Vec<(HeaderName, HeaderValue)> {
    [
        ("x-compute-tokens", answer.tokens),
        ("x-queue-time", Some(answer.queued_ms)),
        ("x-inference-time", Some(answer.ran_ms)),
        ("x-total-time", Some(answer.queued_ms.saturating_add(answer.ran_ms))),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((HeaderName::from_static(name), value?.into())))
    .collect()
}

async fn render(
    answer: Arc<Answer>,
    dimensions: Option<usize>,
    normalize: bool,
) -> Result<Response, Problem> {
    let headers = figures(&answer);
    let bytes = answer.outputs.iter().map(output_bytes).sum();
    let written = off_runtime(bytes, move || {
        let vectors = vectors(&answer.outputs)?.into_iter();
        let vectors = vectors.map(|vector| {
            shorten(vector, dimensions).map(|vector| match normalize {
                true => to_unit_length(vector),
                // As the model's own modules make them.
                false => vector,
            })
        });
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        serde_json::to_vec(&vectors).map_err(|e| unprocessable(format!("the vectors cannot be written: {e}")))
    });
    let mut response = ([(header::CONTENT_TYPE, "application/json")], written.await?).into_response();
    response.headers_mut().extend(headers);
    Ok(response)
}

/// Scales a vector to length 1, as TEI does by default. Changes nothing if the model's own modules have done so.
fn to_unit_length(mut vector: Vec<f32>) -> Vec<f32> {
    let squares = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
    // A vector that already has length 1 stays the same to the last bit.
    if squares > 0.0 && (squares - 1.0).abs() > 1e-5 {
        let length = squares.sqrt();
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}

/// A text, or a list of texts, as inputs.
///
/// # Errors
/// There are none, too many, or others than texts.
pub(super) fn texts(inputs: Value, most: usize) -> Result<Vec<Input>, Problem> {
    let list = match inputs {
        Value::String(text) => return Ok(vec![Input::Text(text)]),
        Value::Array(list) => list,
        _ => return Err(unprocessable("`inputs` must be a text or a list of texts")),
    };
    no_more_than(most, list.len(), "inputs")?;
    let text = |item| match item {
        Value::String(text) => Ok(Input::Text(text)),
        _ => Err(unprocessable("`inputs` must hold texts; token ids are not supported")),
    };
    list.into_iter().map(text).collect()
}

/// Checks how many items a request has.
///
/// # Errors
/// None, or too many.
pub(super) fn no_more_than(most: usize, items: usize, field: &str) -> Result<(), Problem> {
    if items == 0 {
        return Err(Problem::new(StatusCode::BAD_REQUEST, "empty", format!("`{field}` cannot be empty")));
    }
    if items > most {
        let message = format!("batch size {items} > maximum allowed batch size {most}");
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "batch_size", message));
    }
    Ok(())
}

/// The model of the query, of the configuration, or the only one that the caller may use.
pub(super) async fn choose(
    call: &Admitted,
    configured: fn(&TeiModels) -> &Option<String>,
    key: &str,
) -> Result<String, Problem> {
    model_of(&call.app, &call.caller, call.model.clone(), configured, key).await
}

async fn model_of(
    app: &App,
    caller: &Caller,
    asked: Option<String>,
    configured: fn(&TeiModels) -> &Option<String>,
    key: &str,
) -> Result<String, Problem> {
    if let Some(model) = asked.or_else(|| configured(&app.config.tei).clone()) {
        return Ok(model);
    }
    app.link.workers_are_known().await;
    let models = app.link.fleet().models(Instant::now());
    let mut usable = models.into_keys().filter(|name| caller.may_use(name));
    match (usable.next(), usable.next()) {
        (Some(model), None) => Ok(model),
        (None, _) => {
            let message = "no worker serves a model";
            Err(Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "no_workers", message, NOBODY_RETRY))
        }
        (Some(first), Some(second)) => Err(several(&first, &second, usable.next().is_some(), key)),
    }
}

/// Nobody has said which of these models, or of more.
fn several(first: &str, second: &str, are_more: bool, key: &str) -> Problem {
    let more = if are_more { ", …" } else { "" };
    unprocessable(format!(
        "there are several models ({first}, {second}{more}): set {key} in the gateway's configuration, or add \
         ?model=NAME to the URL"
    ))
}

/// `GET /info`. Fields that workers do not report are null.
pub async fn info(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    query: Result<Query<ModelQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Problem> {
    let Query(query) = query.map_err(|e| Problem::invalid(e.to_string()))?;
    let limits = &app.config.limits;
    let is_named = query.model.is_some();
    let model = model_of(&app, &caller, query.model, |tei| &tei.embed, "tei.embed").await?;
    // The configured one may have no worker at the moment.
    if is_named && app.served(&caller, &model).await.is_none() {
        return Err(Problem::not_served(&model));
    }
    Ok(Json(json!({
        "model_id": model,
        "model_sha": null,
        "model_dtype": null,
        "model_type": {"embedding": {"pooling": null}},
        "max_concurrent_requests": limits.in_flight_per_key,
        "max_input_length": null,
        "max_batch_tokens": null,
        "max_batch_requests": null,
        "max_client_batch_size": limits.items,
        "auto_truncate": true,
        "tokenization_workers": null,
        "version": env!("CARGO_PKG_VERSION"),
        "sha": null,
        "docker_label": null,
    })))
}

fn unprocessable(message: impl Into<String>) -> Problem {
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "validation", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_of_unit_length_stays_as_it_is() {
        let unit = vec![0.6f32, 0.8];
        assert_eq!(to_unit_length(unit.clone()), unit);
        assert_eq!(to_unit_length(vec![3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(to_unit_length(vec![0.0]), [0.0]);
    }

    #[test]
    fn an_ellipsis_stands_for_further_models_only() {
        assert!(several("a", "b", false, "tei.embed").message.contains("(a, b):"));
        assert!(several("a", "b", true, "tei.embed").message.contains("(a, b, …):"));
    }

    #[test]
    fn inputs_are_texts() {
        assert_eq!(texts(json!("a"), 1).unwrap().len(), 1);
        assert_eq!(texts(json!([]), 1).unwrap_err().status, 400);
        assert_eq!(texts(json!(["a", "b"]), 1).unwrap_err().status, 413);
        assert_eq!(texts(json!([[1]]), 1).unwrap_err().status, 422);
    }
}
