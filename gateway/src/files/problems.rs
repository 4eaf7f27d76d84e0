//! The errors of requests whose upload cannot be stored or read.

use axum::http::StatusCode;

use crate::folder_store::is_busy;
use crate::problem::Problem;
use crate::storage::Place;

/// A file cannot be read: there is none, or the place fails.
pub fn missing(place: &Place, id: &str, error: &object_store::Error) -> Problem {
    match error {
        object_store::Error::NotFound { .. } => not_there(id),
        other => failed(place, "read the file", other),
    }
}

/// There is no such file.
pub fn not_there(id: &str) -> Problem {
    Problem::not_found(&format!("file `{id}`"))
}

/// The place fails while it does something (`what`).
pub fn failed(place: &Place, what: &'static str, error: &object_store::Error) -> Problem {
    if is_busy(error) { silent() } else { broken(place, what, error) }
}

/// The place does not answer.
pub fn silent() -> Problem {
    Problem::silent_store("the store of uploads does not answer")
}

/// The place fails. The log says how.
pub fn broken(place: &Place, what: &'static str, error: &dyn std::fmt::Display) -> Problem {
    tracing::error!(%place, %error, "the place of uploads cannot {what}");
    Problem::new(StatusCode::BAD_GATEWAY, "store", "the store of uploads fails")
}
