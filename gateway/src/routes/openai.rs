//! `POST /v1/embeddings` and `GET /v1/models`, as in OpenAI's API.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vramq_producer::{Answer, Output, Params, Reason};

use super::Authenticated;
use super::one_job::Call;
use super::openai_input::{decoding_bytes, text_bytes, texts};
use super::shallow::texts_or_ids;
use crate::app::App;
use crate::broker::fleet::ModelView;
use crate::config::Config;
use crate::jobs::Entry;
use crate::jobs::view::output_bytes;
use crate::off_runtime::off_runtime;
use crate::problem::{JOB_ID, Problem};

/// Says that the numbers in `usage` are not known, because the worker does not count tokens.
const USAGE: HeaderName = HeaderName::from_static("x-vramq-usage");

/// A request for embeddings. Unknown fields are ignored, as by OpenAI's own.
#[derive(Debug, Deserialize)]
pub struct EmbeddingsRequest {
    model: String,
    #[serde(deserialize_with = "texts_or_ids")]
    input: Value,
    encoding_format: Option<EncodingFormat>,
    dimensions: Option<usize>,
    /// One of the model's own prompts; OpenAI's API has none.
    prompt_name: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    #[default]
    Float,
    Base64,
}

#[derive(Serialize)]
struct EmbeddingsAnswer<'a> {
    object: &'static str,
    data: Vec<EmbeddingItem>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct EmbeddingItem {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Numbers(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: u64,
    total_tokens: u64,
}

/// `POST /v1/embeddings`.
pub async fn embeddings(call: Call) -> Response {
    call.answered(embed).await
}

async fn embed(call: Call) -> Result<Response, Problem> {
    let (body, mut call) = call.read::<EmbeddingsRequest>().await?;
    let EmbeddingsRequest { model, input, encoding_format, dimensions, prompt_name } = body;
    let (app, bytes) = (call.app.clone(), decoding_bytes(&input));
    let inputs =
        off_runtime(bytes, move || texts(input, &app.config.limits, app.config.vocabulary.as_deref()));
    let inputs = inputs.await?;
    // The texts of token ids may be longer than the body.
    call.hold(text_bytes(&inputs))?;
    let params = embedding_params(&call.app.config, &model, dimensions, prompt_name)?;
    let (entry, answer) = call.run(model, inputs, params).await.map_err(refused_by_model)?;
    render(entry, answer, encoding_format.unwrap_or_default(), dimensions).await
}

/// The parameters of a job for embeddings.
///
/// # Errors
/// The model's vectors cannot be cut.
pub fn embedding_params(
    config: &Config,
    model: &str,
    dimensions: Option<usize>,
    prompt_name: Option<String>,
) -> Result<Params, Problem> {
    let mut params = Params::default();
    if let Some(dimensions) = dimensions {
        let refused = |message: String| Err(Problem::invalid(message).about("dimensions"));
        if !config.matryoshka.iter().any(|may| may == model) {
            return refused(format!(
                "the vectors of the model `{model}` cannot be cut: leave out `dimensions`"
            ));
        }
        if dimensions == 0 {
            return refused("`dimensions` is 0; it must be at least 1".to_owned());
        }
        params.0.insert("dimensions".to_owned(), dimensions.into());
    }
    if let Some(name) = prompt_name {
        params.0.insert("prompt_name".to_owned(), name.into());
    }
    Ok(params)
}

/// Turns a model's rejection of an input or a parameter into a 400, the status that these APIs use for any wrong request.
pub fn refused_by_model(mut problem: Problem) -> Problem {
    if problem.code == Reason::InvalidInput.as_str() {
        problem.status = StatusCode::BAD_REQUEST;
    }
    problem
}

async fn render(
    entry: Arc<Entry>,
    answer: Arc<Answer>,
    format: EncodingFormat,
    dimensions: Option<usize>,
) -> Result<Response, Problem> {
    let bytes = answer.outputs.iter().map(output_bytes).sum();
    let tokens = answer.tokens;
    let job = entry.message_id.clone();
    let written = off_runtime(bytes, move || {
        let data = vectors(&answer.outputs)?.into_iter().enumerate().map(|(index, vector)| {
            let vector = shorten(vector, dimensions)?;
            let embedding = match format {
                EncodingFormat::Float => Vector::Numbers(vector),
                EncodingFormat::Base64 => Vector::Base64(BASE64.encode(le_bytes(&vector))),
            };
            Ok(EmbeddingItem { object: "embedding", index, embedding })
        });
        let tokens = answer.tokens.unwrap_or(0);
        let answer = EmbeddingsAnswer {
            object: "list",
            data: data.collect::<Result<_, _>>()?,
            model: &entry.model,
            usage: Usage { prompt_tokens: tokens, total_tokens: tokens },
        };
        serde_json::to_vec(&answer)
            .map_err(|e| Problem::invalid(format!("the vectors cannot be written: {e}")))
    });
    let written = written.await.map_err(|problem: Problem| problem.of_job(&job))?;
    let mut response = ([(header::CONTENT_TYPE, "application/json")], written).into_response();
    if tokens.is_none() {
        response.headers_mut().insert(USAGE, HeaderValue::from_static("unknown"));
    }
    name_job(&mut response, &job);
    Ok(response)
}

/// Puts a job's id into the response's headers.
pub fn name_job(response: &mut Response, id: &str) {
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert(JOB_ID, id);
    }
}

/// The outputs as vectors.
///
/// # Errors
/// The model gives something else.
pub fn vectors(outputs: &[Output]) -> Result<Vec<Vec<f32>>, Problem> {
    let vector = |output: &Output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        _ => Err(Problem::invalid("this model gives no embeddings; use POST /v1/jobs").about("model")),
    };
    outputs.iter().map(vector).collect()
}

/// The first `dimensions` elements, scaled to length 1 again, for models trained for that. The encoder has done so already; a program as a
/// model may not have.
pub fn shorten(mut vector: Vec<f32>, dimensions: Option<usize>) -> Result<Vec<f32>, Problem> {
    let Some(dimensions) = dimensions.filter(|dimensions| *dimensions != vector.len()) else {
        return Ok(vector);
    };
    if dimensions > vector.len() {
        let message = format!("`dimensions` is {dimensions}; the model has 1 to {}", vector.len());
        return Err(Problem::invalid(message).about("dimensions"));
    }
    vector.truncate(dimensions);
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(vector)
}

fn le_bytes(vector: &[f32]) -> Vec<u8> {
    vector.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// `GET /v1/models`: those that workers serve now, and the caller may use.
pub async fn models(State(app): State<App>, Authenticated(caller): Authenticated) -> impl IntoResponse {
    app.link.workers_are_known().await;
    let models = app.link.fleet().models(Instant::now());
    let models =
        models.iter().filter(|(name, _)| caller.may_use(name)).map(|(name, view)| model_object(name, view));
    Json(json!({"object": "list", "data": models.collect::<Vec<_>>()}))
}

/// `GET /v1/models/{model}`.
pub async fn model(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(name): Path<String>,
) -> Result<impl IntoResponse, Problem> {
    let found = app.served(&caller, &name).await;
    found.map(|view| Json(model_object(&name, &view))).ok_or_else(|| Problem::not_served(&name))
}

fn model_object(name: &str, view: &ModelView) -> Value {
    json!({"id": name, "object": "model", "created": view.since_s, "owned_by": "vramq"})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_are_null_are_left_out() {
        let read = |body: Value| serde_json::from_value::<EmbeddingsRequest>(body);
        let nulls =
            json!({"model": "m", "input": "x", "encoding_format": null, "dimensions": null, "user": null});
        let request = read(nulls).unwrap();
        assert_eq!((request.encoding_format, request.dimensions), (None, None));
        for (field, value) in [
            ("encoding_format", json!("int8")),
            ("dimensions", json!(-1)),
            ("dimensions", json!(1.5)),
            ("dimensions", json!(1e300)),
            ("model", json!(null)),
        ] {
            let mut body = json!({"model": "m", "input": "x"});
            body[field] = value;
            assert!(read(body.clone()).is_err(), "{body}");
        }
        let twice = r#"{"model": "m", "model": "n", "input": "x"}"#;
        assert!(serde_json::from_str::<EmbeddingsRequest>(twice).is_err());
    }

    #[test]
    fn a_shorter_vector_has_length_one() {
        assert_eq!(shorten(vec![3.0, 4.0, 12.0], Some(2)).unwrap(), [0.6, 0.8]);
        assert_eq!(shorten(vec![3.0, 4.0], None).unwrap(), [3.0, 4.0]);
        assert_eq!(shorten(vec![0.0, 4.0], Some(1)).unwrap(), [0.0]);
        assert_eq!(shorten(vec![3.0, 4.0], Some(3)).unwrap_err().status, 400);
        assert_eq!(shorten(vec![3.0, 4.0], Some(2)).unwrap(), [3.0, 4.0], "the model has cut it");
    }
}
