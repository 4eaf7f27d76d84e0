//! `/v1/dead-letters`: dead letters, grouped and explained. Operators retry them, or drop them into an archive.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};

use super::Authenticated;
use crate::app::App;
use crate::body;
use crate::broker::dead_letters::Letters;
use crate::broker::link::LettersUnread;
use crate::keys::Caller;
use crate::operator::{Action, ActionRequest, Operator, Report, others_look};
use crate::problem::Problem;

/// Which model's dead letters.
#[derive(Debug, Deserialize)]
pub struct LettersQuery {
    model: String,
}

/// Dead letters, and why they cannot be acted on here, if so.
#[derive(Debug, Serialize)]
struct LettersView {
    #[serde(flatten)]
    letters: Letters,
    read_only: Option<String>,
}

/// `GET /v1/dead-letters?model=NAME`: counted in groups; the oldest with their explanation, without their bodies.
pub async fn read(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    query: Result<Query<LettersQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Problem> {
    let Query(query) = query.map_err(|e| Problem::invalid(e.to_string()))?;
    look(&app, &caller, &query.model).await.map(Json)
}

async fn look(app: &App, caller: &Caller, model: &str) -> Result<LettersView, Problem> {
    check_operator(caller)?;
    vramq_schemas::topology::check_model_name(model)
        .map_err(|e| Problem::invalid(e.to_string()).about("model"))?;
    check_model(caller, model)?;
    let letters = match &app.operator {
        Some(operator) => operator.look(model).await?,
        None => app.link.dead_letters(model).await.map_err(|unread| match unread {
            LettersUnread::Busy => others_look(),
            LettersUnread::Failed(error) => {
                let message = format!("the dead letters cannot be read: {error}");
                Problem::new(StatusCode::BAD_GATEWAY, "broker", message)
            }
        })?,
    };
    Ok(LettersView { letters, read_only: operator(app).err().map(|problem| problem.message) })
}

/// `POST /v1/dead-letters/retry`: jobs go to their queue again, results to their reply queue.
pub async fn retry(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    headers: HeaderMap,
    body: Body,
) -> Result<impl IntoResponse, Problem> {
    act(&app, &caller, Action::Retry, &headers, body).await.map(Json)
}

/// `POST /v1/dead-letters/drop`: into an archive, and out of their queue.
pub async fn drop(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    headers: HeaderMap,
    body: Body,
) -> Result<impl IntoResponse, Problem> {
    act(&app, &caller, Action::Drop, &headers, body).await.map(Json)
}

async fn act(
    app: &App,
    caller: &Arc<Caller>,
    action: Action,
    headers: &HeaderMap,
    body: Body,
) -> Result<Report, Problem> {
    check_operator(caller)?;
    let operator = operator(app)?;
    let _permits = app.admit(caller)?;
    let request = body::json::<ActionRequest>(app, caller, headers, body).await?.value;
    check_model(caller, &request.model)?;
    operator.act(action, request, &caller.name, app.drain.clone()).await
}

fn check_model(caller: &Caller, model: &str) -> Result<(), Problem> {
    if caller.may_use(model) {
        return Ok(());
    }
    let message = format!("`{}` may not use the model `{model}`", caller.name);
    Err(Problem::new(StatusCode::FORBIDDEN, "model_not_allowed", message).about("model"))
}

fn check_operator(caller: &Caller) -> Result<(), Problem> {
    if caller.operator {
        return Ok(());
    }
    let message = "dead letters are for operators: this key is none";
    Err(Problem::new(StatusCode::FORBIDDEN, "operators_only", message))
}

/// Who acts on dead letters.
///
/// # Errors
/// Nobody does: this gateway only shows them.
fn operator(app: &App) -> Result<&Arc<Operator>, Problem> {
    app.operator.as_ref().ok_or_else(|| {
        let message = "this gateway shows dead letters and changes nothing: operator.broker_url is not set; `vramq dlq` retries \
                       and archives them";
        Problem::new(StatusCode::FORBIDDEN, "read_only", message)
    })
}
