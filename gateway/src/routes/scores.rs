//! `/rerank` and `/predict`, as in text-embeddings-inference: scores of pairs of texts, and labels of texts.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vramq_producer::{Answer, Input, Output, Params, Reason};
use vramq_schemas::BODY_BYTES_MAX;

use super::one_job::Call;
use super::openai::name_job;
use super::sequences::{PredictInputs, Sequence};
use super::tei::{choose, no_more_than};
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// Texts to be scored for a query.
#[derive(Debug, Deserialize)]
pub struct RerankRequest {
    query: String,
    texts: Vec<String>,
    #[serde(default)]
    raw_scores: bool,
    #[serde(default)]
    return_text: bool,
    /// Parsed only to reject a value of another type. Texts are cut as the model's own files say.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

/// The score of one text, best first.
#[derive(Debug, PartialEq, Serialize)]
struct Rank {
    index: usize,
    score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// Texts, or pairs of texts, to be labelled.
#[derive(Debug, Deserialize)]
pub struct PredictRequest {
    inputs: PredictInputs,
    #[serde(default)]
    raw_scores: bool,
    /// Parsed only to reject a value of another type. Texts are cut as the model's own files say.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

/// `POST /rerank`.
pub async fn rerank(call: Call) -> Response {
    call.answered(ranks).await
}

async fn ranks(call: Call) -> Result<Response, Problem> {
    let (asked, mut call) = call.read::<RerankRequest>().await?;
    let RerankRequest { query, texts, raw_scores, return_text, .. } = asked;
    let model = choose(&call, |tei| &tei.rerank, "tei.rerank").await?;
    no_more_than(call.app.config.limits.items, texts.len(), "texts")?;
    let bytes = pairs_bytes(&query, &texts)?;
    call.hold(bytes)?;
    let (inputs, texts) = off_runtime(bytes, move || {
        let pairs: Vec<_> = texts.iter().map(|document| pair(&query, document)).collect();
        // The wait may be long.
        (pairs, return_text.then_some(texts))
    })
    .await;
    let answered = call.run(model, inputs, params(raw_scores)).await;
    let (entry, answer) = answered.map_err(|problem| refused_by_model(problem, "a re-ranker"))?;
    let mut texts = texts.unwrap_or_default().into_iter();
    let mut ranks = scores(&answer)
        .enumerate()
        .map(|(index, score)| Ok(Rank { index, score: score?, text: texts.next() }))
        .collect::<Result<Vec<_>, Problem>>()?;
    ranks.sort_by(|a, b| b.score.total_cmp(&a.score));
    Ok(named(Json(ranks), &entry.message_id))
}

/// `POST /predict`.
pub async fn predict(call: Call) -> Response {
    call.answered(predictions).await
}

async fn predictions(call: Call) -> Result<Response, Problem> {
    let (asked, call) = call.read::<PredictRequest>().await?;
    let model = choose(&call, |tei| &tei.predict, "tei.predict").await?;
    let (inputs, is_batch) = match asked.inputs {
        PredictInputs::One(sequence) => (vec![input(sequence)], false),
        PredictInputs::Batch(list) => (list.into_iter().map(input).collect(), true),
    };
    no_more_than(call.app.config.limits.items, inputs.len(), "inputs")?;
    let answered = call.run(model, inputs, params(asked.raw_scores)).await;
    let (entry, answer) = answered.map_err(|problem| refused_by_model(problem, "a classifier"))?;
    let mut predictions = answer.outputs.iter().map(labels).collect::<Result<Vec<_>, _>>()?;
    let body = if is_batch { Value::Array(predictions) } else { predictions.pop().unwrap_or_default() };
    Ok(named(Json(body), &entry.message_id))
}

fn input(Sequence(first, second): Sequence) -> Input {
    match second {
        None => Input::Text(first),
        Some(second) => pair(&first, &second),
    }
}

/// The input that rerankers and classifiers take for two texts.
fn pair(query: &str, document: &str) -> Input {
    Input::Json(json!({"query": query, "document": document}).into())
}

/// The bytes of all pairs of the query with a text. Every pair repeats the query, so a large query with many texts takes far more than the
/// request.
///
/// # Errors
/// More than a job may have.
fn pairs_bytes(query: &str, texts: &[String]) -> Result<usize, Problem> {
    let of_texts: usize = texts.iter().map(String::len).sum();
    let bytes = query.len().saturating_mul(texts.len()).saturating_add(of_texts);
    if bytes > BODY_BYTES_MAX {
        let message = format!(
            "`query`, once for each text, and `texts` take {bytes} bytes, at most {BODY_BYTES_MAX} are allowed: send \
             fewer texts at a time"
        );
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
    }
    Ok(bytes)
}

fn params(raw_scores: bool) -> Params {
    let mut params = Params::default();
    if raw_scores {
        params.0.insert("raw_scores".to_owned(), true.into());
    }
    params
}

/// The score of each output of a model with one label.
fn scores(answer: &Answer) -> impl Iterator<Item = Result<f64, Problem>> {
    let score = |output: &Output| match output {
        Output::Json(value) => value["score"].as_f64(),
        _ => None,
    };
    answer.outputs.iter().map(move |output| score(output).ok_or_else(|| not_served("a re-ranker")))
}

/// The labels of an output, best first.
fn labels(output: &Output) -> Result<Value, Problem> {
    match output {
        Output::Json(value) if value["labels"].is_array() => Ok(value["labels"].clone()),
        _ => Err(not_served("a classifier")),
    }
}

/// Explains a rejection by the model. A model of another kind accepts no pairs, or not these parameters; the gateway cannot tell that from
/// a wrong input for a model of the right kind, so it quotes the model.
fn refused_by_model(mut problem: Problem, what: &str) -> Problem {
    if problem.code == Reason::InvalidInput.as_str() {
        problem.status = StatusCode::FAILED_DEPENDENCY;
        problem.message = format!("the model is not {what}, or refuses an input: {}", problem.message);
    }
    problem
}

fn not_served(what: &str) -> Problem {
    let message = format!("the model is not {what}");
    Problem::new(StatusCode::FAILED_DEPENDENCY, "not_served", message)
}

fn named(body: impl IntoResponse, job: &str) -> Response {
    let mut response = body.into_response();
    name_job(&mut response, job);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_counts_once_for_each_text() {
        let texts = |count| vec!["ab".to_owned(); count];
        assert_eq!(pairs_bytes("query", &texts(3)).unwrap(), 21);
        let query = "q".repeat(BODY_BYTES_MAX / 4);
        assert!(pairs_bytes(&query, &texts(3)).is_ok());
        assert_eq!(pairs_bytes(&query, &texts(4)).unwrap_err().status, 413);
    }
}
