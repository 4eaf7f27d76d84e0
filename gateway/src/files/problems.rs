//! The errors of requests whose upload cannot be stored or read.

use axum::http::StatusCode;

use crate::folder_store::is_busy;
use crate::problem::Problem;

/// A file cannot be read: there is none, or the place fails.
pub fn missing(id: &str, error: &object_store::Error) -> Problem {
    match error {
        object_store::Error::NotFound { .. } => not_there(id),
        other => failed("read the file", other),
    }
}

/// There is no such file.
pub fn not_there(id: &str) -> Problem {
    Problem::not_found(&format!("file `{id}`"))
}

/// The place fails while it stores something or reads it.
pub fn failed(what: &'static str, error: &object_store::Error) -> Problem {
    if is_busy(error) { silent() } else { broken(what, error) }
}

/// The place does not answer.
pub fn silent() -> Problem {
    Problem::silent_store("the store of uploads does not answer")
}

/// The place fails. The log says how.
pub fn broken(what: &'static str, error: &dyn std::fmt::Display) -> Problem {
    tracing::error!(%error, "{what}");
    Problem::new(StatusCode::BAD_GATEWAY, "store", "the store of uploads fails")
}
