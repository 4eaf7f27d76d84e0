//! The ids of uploads, and the names of their objects in the place that holds them.

use object_store::path::Path;

use crate::keys::is_name;
use crate::problem::Problem;

/// Ids are the gateway's own: no other text becomes part of a path.
pub fn check_id(id: &str) -> Result<(), Problem> {
    if is_id(id) { Ok(()) } else { Err(Problem::not_found("such file")) }
}

/// Whether a text has the form of an upload's id.
pub fn is_id(id: &str) -> bool {
    id.strip_prefix("file-")
        .is_some_and(|rest| rest.len() == 32 && rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Whether something in the place has the name of an upload or of its description.
pub fn is_ours(path: &Path) -> bool {
    match path.as_ref().split_once('/') {
        Some((owner, name)) => is_name(owner) && is_id(name.strip_suffix(".json").unwrap_or(name)),
        None => false,
    }
}

/// Names of callers are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
pub fn content_path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, id])
}

pub fn description_path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}.json")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_that_the_gateway_did_not_write_are_known_by_their_names() {
        let id = format!("file-{}", "0a".repeat(16));
        for ours in [content_path("a", &id), description_path("a.b", &id)] {
            assert!(is_ours(&ours), "{ours}");
        }
        let deeper = format!("a/b/{id}");
        let longer = format!("a/{id}0.json");
        for other in ["a/job.json", "a/file-1", "a", "", &id, &deeper, &longer] {
            assert!(!is_ours(&Path::from(other)), "{other}");
        }
    }
}
