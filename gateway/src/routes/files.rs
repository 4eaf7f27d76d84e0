//! `/v1/files`: uploads for jobs, and downloads of them and of jobs' outputs.

use axum::Json;
use axum::body::Body;
use axum::extract::multipart::MultipartError;
use axum::extract::{Multipart, Path, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{TryStream, stream};
use serde_json::json;

use super::{Authenticated, called_by, output_files};
use crate::app::App;
use crate::files::{FileStore, FileView};
use crate::jobs::output_files::OutputId;
use crate::problem::Problem;

/// Fields before the file that are skipped: OpenAI's clients send `purpose`.
const FIELDS_MAX: usize = 16;

/// `POST /v1/files`: a form with the field `file`, as OpenAI's clients send it.
pub async fn upload(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    form: Result<Multipart, axum::extract::multipart::MultipartRejection>,
) -> Response {
    let answer = async {
        let _permits = app.admit(&caller)?;
        let form = form.map_err(|e| Problem::invalid(format!("the body is no form with a file: {e}")))?;
        store(files(&app)?, &caller.name, form).await.map(Json)
    };
    called_by(&caller, answer.await)
}

async fn store(files: &FileStore, owner: &str, mut form: Multipart) -> Result<FileView, Problem> {
    let malformed = |e: MultipartError| {
        // A stream that breaks off is a fault of the client, too.
        let status = if e.status().is_server_error() { StatusCode::BAD_REQUEST } else { e.status() };
        Problem::new(status, "multipart", format!("the form is malformed: {e}"))
    };
    for _ in 0..FIELDS_MAX {
        let Some(field) = form.next_field().await.map_err(malformed)? else { break };
        if field.name() != Some("file") {
            continue;
        }
        let name = field.file_name().unwrap_or("file").to_owned();
        let media_type = field.content_type().unwrap_or("application/octet-stream").to_owned();
        let pieces = stream::unfold(field, |mut field| async {
            let piece = field.chunk().await.transpose()?;
            Some((piece, field))
        });
        return files.put(owner, &name, &media_type, pieces).await;
    }
    Err(Problem::invalid("the form has no field `file`").about("file"))
}

/// `GET /v1/files/{id}`.
pub async fn read(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Response {
    let answer = async {
        match OutputId::parse(&id) {
            Some(output) => output_files::view(&app, &caller, &output).await,
            None => files(&app)?.view(&caller.name, &id).await,
        }
    };
    called_by(&caller, answer.await.map(Json))
}

/// `GET /v1/files/{id}/content`: always as a download, so that no browser runs what somebody uploaded.
pub async fn content(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Response {
    let answer = async {
        if let Some(output) = OutputId::parse(&id) {
            return output_files::content(&app, &caller, &output).await;
        }
        let files = files(&app)?;
        let view = files.view(&caller.name, &id).await?;
        let content = files.content(&caller.name, &id).await?;
        Ok(download(content.into_stream(), &view.media_type, view.bytes))
    };
    called_by(&caller, answer.await)
}

/// The response with a file's bytes.
pub fn download<S>(pieces: S, media_type: &str, bytes: u64) -> Response
where
    S: TryStream<Ok = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
{
    let mut response = Body::from_stream(pieces).into_response();
    let headers = response.headers_mut();
    let media_type = media_type.parse().unwrap_or(HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_TYPE, media_type);
    headers.insert(header::CONTENT_LENGTH, bytes.into());
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    response
}

/// `DELETE /v1/files/{id}`.
pub async fn delete(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Response {
    let answer = async {
        if let Some(output) = OutputId::parse(&id) {
            return Err(output_files::delete(&output));
        }
        files(&app)?.delete(&caller.name, &id).await?;
        Ok(Json(json!({"id": id, "object": "file", "deleted": true})))
    };
    called_by(&caller, answer.await)
}

fn files(app: &App) -> Result<&FileStore, Problem> {
    app.files.as_ref().ok_or_else(|| {
        let message = "this gateway takes no uploads: files.folder and files.url are not set";
        Problem::new(StatusCode::NOT_FOUND, "no_files", message)
    })
}
