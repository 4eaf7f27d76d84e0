//! `/v1/files`: uploads for jobs, and downloads of them and of jobs' outputs.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::HttpBody as _;
use axum::extract::multipart::MultipartError;
use axum::extract::{FromRequest as _, Multipart, Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::json;
use tokio::time::timeout;

use super::form::{BEFORE_FILE_BYTES_MAX, BeforeFile};
use super::range::{DownloadRequest, FileFacts, Wanted, download, unsatisfiable};
use super::references::NO_UPLOADS;
use super::{Authenticated, output_files};
use crate::app::{App, draining};
use crate::body::is_cut_off;
use crate::drain::Drain;
use crate::files::{FileStore, FileView, UploadRoom};
use crate::held_body::UntilSent;
use crate::jobs::output_files::OutputId;
use crate::observe::check_origin;
use crate::problem::Problem;

/// How long each field before the file may take.
const FIELD_MAX: Duration = Duration::from_secs(30);

/// The most fields of a form, up to the file. Those before it are skipped: OpenAI's clients send `purpose`.
const FIELDS_MAX: usize = 16;

/// `POST /v1/files`: a form with the field `file`, as OpenAI's clients send it.
pub async fn upload(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    request: Request,
) -> Result<Json<FileView>, Problem> {
    check_origin(&app, request.headers())?;
    let _permits = app.admit(&caller)?;
    let request_bytes = request.body().size_hint().exact();
    let before = Arc::new(BeforeFile::default());
    let form = Multipart::from_request(request.map(|body| before.bound(body)), &()).await;
    let form = form.map_err(|_| {
        let message =
            "the body must be a form (multipart/form-data, with its boundary) with the field `file`";
        Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type", message)
    })?;
    let files = files(&app)?;
    let bytes = files.buffer_bytes(request_bytes);
    let mut drain = app.drain.clone();
    let stored = async {
        let room = app.uploads.room(&caller.name, bytes).await;
        let room = room.map_err(|none| {
            none.problem("other uploads", "http.uploads_mib_max, http.uploads_mib_max_per_key")
        })?;
        // Both are held until the upload is stored or removed, also if its caller hangs up.
        let held = Box::new((room, app.background.begin()));
        let stored = timeout(files.upload_max(), store(files, &caller.name, form, &before, held));
        stored.await.unwrap_or_else(|_| Err(too_slow()))
    };
    tokio::select! {
        stored = stored => stored.map(Json),
        Ok(_) = drain.wait_for(|drain| *drain == Drain::Over) => {
            app.cut_off();
            Err(draining())
        }
    }
}

async fn store(
    files: &FileStore,
    owner: &str,
    mut form: Multipart,
    before: &BeforeFile,
    room: UploadRoom,
) -> Result<FileView, Problem> {
    for _ in 0..FIELDS_MAX {
        // Skips the rest of the field before.
        let field = timeout(FIELD_MAX, form.next_field()).await.map_err(|_| too_slow())?;
        let Some(field) = field.map_err(|e| malformed(&e, before))? else {
            return Err(Problem::invalid("the form has no field `file`").about("file"));
        };
        if field.name() != Some("file") {
            continue;
        }
        before.file_begins();
        let name = field.file_name().unwrap_or("file").to_owned();
        let media_type = field.content_type().unwrap_or("application/octet-stream").to_owned();
        let pieces = stream::unfold(field, |mut field| async move {
            let piece = field.chunk().await.transpose()?;
            Some((piece.map_err(|e| malformed(&e, before)), field))
        });
        return files.put(owner, &name, &media_type, pieces, room).await;
    }
    let message = format!("the field `file` is not among the first {FIELDS_MAX} fields of the form");
    Err(Problem::invalid(message).about("file"))
}

/// Why a form cannot be read.
fn malformed(error: &MultipartError, before: &BeforeFile) -> Problem {
    if before.is_too_long() {
        let message = format!("more than {BEFORE_FILE_BYTES_MAX} bytes come before the field `file`");
        return Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message);
    }
    if is_cut_off(error) {
        return Problem::hung_up();
    }
    // A body that cannot be read is the client's fault as well.
    let status = if error.status().is_server_error() { StatusCode::BAD_REQUEST } else { error.status() };
    Problem::new(status, "multipart", format!("the form is malformed: {}", error.body_text()))
}

/// `GET /v1/files/{id}`.
pub async fn read(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Result<Json<FileView>, Problem> {
    let view = match OutputId::parse(&id) {
        Some(output) => output_files::view(&app, &caller, &output).await,
        None => files(&app)?.view(&caller.name, &id).await,
    };
    view.map(Json)
}

/// `GET /v1/files/{id}/content`: all of it, or the part that the header `Range` names.
pub async fn content(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let permit = app.admit_stream(&caller)?;
    let asked = DownloadRequest { method, headers };
    let mut response = match OutputId::parse(&id) {
        Some(output) => output_files::content(&app, &caller, &output, &asked).await?,
        None => uploaded(files(&app)?, &caller.name, &id, &asked).await?,
    };
    response.extensions_mut().insert(UntilSent::new(permit));
    Ok(response)
}

async fn uploaded(
    files: &FileStore,
    owner: &str,
    id: &str,
    asked: &DownloadRequest,
) -> Result<Response, Problem> {
    let view = files.view(owner, id).await?;
    // The bytes of an id never change.
    let sent = FileFacts { media_type: view.media_type, bytes: view.bytes, etag: format!("\"{}\"", view.id) };
    let part = match asked.of(&sent) {
        Wanted::Whole => None,
        Wanted::Part(part) => Some(part),
        Wanted::Nothing => return Ok(unsatisfiable(&sent)),
    };
    let content = files.content(owner, id, part.clone()).await?;
    Ok(download(content.into_stream(), &sent, part))
}

/// `DELETE /v1/files/{id}`.
pub async fn delete(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
) -> Result<impl IntoResponse, Problem> {
    if let Some(output) = OutputId::parse(&id) {
        return Err(output_files::delete(&output));
    }
    files(&app)?.delete(&caller.name, &id, app.background.begin()).await?;
    Ok(Json(json!({"id": id, "object": "file", "deleted": true})))
}

fn too_slow() -> Problem {
    Problem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", "the form did not come in time")
}

fn files(app: &App) -> Result<&FileStore, Problem> {
    app.files.as_ref().ok_or_else(|| Problem::new(StatusCode::NOT_FOUND, "no_files", NO_UPLOADS))
}
