//! References among the inputs of a job: to uploads, to outputs of jobs, and to other servers. No worker gets a reference to something that
//! belongs to another caller.

use std::collections::BTreeSet;
use std::time::Instant;

use axum::http::StatusCode;
use url::Url;
use vramq_producer::Input;
use vramq_schemas::BODY_BYTES_MAX;

use super::output_files;
use crate::app::App;
use crate::body_memory::BodyRoom;
use crate::files::{FileStore, is_id};
use crate::jobs::ResultStore;
use crate::jobs::output_files::OutputId;
use crate::keys::Caller;
use crate::problem::Problem;

/// Why a gateway has no uploads, and what to set.
pub const NO_UPLOADS: &str = "this gateway takes no uploads: set files.folder or files.url in its configuration to a place that workers have, \
     too, as a store: [store.NAME] url = \"file:///…\" in theirs (docs/stores.md, Uploads)";

/// Bytes of uploads that a job takes along: a body's, less room for the rest of it.
const TAKEN_BYTES_MAX: usize = BODY_BYTES_MAX - 64 * 1024;

/// Refuses references that are wrong in themselves, without looking any of them up. A caller's own `file:` references are wrong: they would
/// name the files of a worker's machine. So are those into the places of results, uploads and outputs: of another caller, too.
///
/// # Errors
/// One of them is wrong.
pub fn check(app: &App, inputs: &[Input]) -> Result<(), Problem> {
    for input in inputs {
        let Input::Uri(uri) = input else { continue };
        if is_upload(uri) {
            if app.files.is_none() {
                return Err(Problem::invalid(NO_UPLOADS).about("inputs"));
            }
            if !is_id(uri) {
                return Err(Problem::not_found("such file").about("inputs"));
            }
        } else if OutputId::parse(uri).is_none() && !is_allowed(app, uri) {
            let message = "a `uri` must be the id of an uploaded file (file-…) or of a job's output (output-…), or a reference such as s3://… or https://…";
            return Err(Problem::invalid(message).about("inputs"));
        }
    }
    Ok(())
}

/// Puts the workers' reference in the place of an upload's or output's id; or the upload's bytes, if workers do not have its place. `room` is
/// the request's share of the memory for bodies. For inputs that were [`check`]ed.
///
/// # Errors
/// The caller has no such upload, or no such output; or the bytes are too many for a job.
pub async fn resolve(
    app: &App,
    caller: &Caller,
    inputs: &mut [Input],
    room: &mut BodyRoom,
) -> Result<(), Problem> {
    match &app.files {
        Some(files) if files.is_own() => take_along(app, files, caller, inputs, room).await?,
        Some(files) => {
            let uploads = files.references(&caller.name, uploads(inputs)).await?;
            for input in inputs.iter_mut() {
                if let Input::Uri(uri) = input
                    && let Some(reference) = uploads.get(uri.as_str())
                {
                    uri.clone_from(reference);
                }
            }
        }
        None => {}
    }
    let outputs = output_files::references(app, caller, inputs.iter().filter_map(output).collect()).await?;
    for input in inputs {
        if let Some(reference) = output(input).and_then(|id| outputs.get(&id)) {
            *input = Input::Uri(reference.clone());
        }
    }
    Ok(())
}

/// Puts the bytes of uploads in the place of their ids.
async fn take_along(
    app: &App,
    files: &FileStore,
    caller: &Caller,
    inputs: &mut [Input],
    room: &mut BodyRoom,
) -> Result<(), Problem> {
    let sizes = files.sizes(&caller.name, uploads(inputs)).await?;
    let size = |input: &Input| match input {
        Input::Uri(uri) => sizes.get(uri).copied().unwrap_or(0),
        _ => 0,
    };
    let bytes = inputs.iter().map(size).sum::<u64>();
    if bytes > TAKEN_BYTES_MAX as u64 {
        let message = format!(
            "the uploads of this job have {bytes} bytes, and without files.folder or files.url, set to a place that workers have as a \
             store, a job takes them along: {TAKEN_BYTES_MAX} at most (docs/stores.md, Uploads)"
        );
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message).about("inputs"));
    }
    // The inputs, and what was read or is encoded of them.
    let held = 2 * bytes;
    app.bodies.grow_by(room, usize::try_from(held).unwrap_or(usize::MAX), Instant::now())?;
    let read = files.bytes(&caller.name, sizes.into_keys()).await?;
    for input in inputs {
        if let Input::Uri(uri) = input
            && let Some(bytes) = read.get(uri.as_str())
        {
            *input = Input::Bytes(bytes.to_vec());
        }
    }
    Ok(())
}

fn is_upload(uri: &str) -> bool {
    uri.starts_with("file-")
}

/// The ids of the uploads among a job's inputs.
fn uploads(inputs: &[Input]) -> BTreeSet<String> {
    let id = |input: &Input| match input {
        Input::Uri(uri) if is_upload(uri) => Some(uri.clone()),
        _ => None,
    };
    inputs.iter().filter_map(id).collect()
}

/// The output that an input names, if it names one.
fn output(input: &Input) -> Option<OutputId> {
    match input {
        Input::Uri(uri) => OutputId::parse(uri),
        _ => None,
    }
}

/// Whether a caller's reference to another server may go to workers.
fn is_allowed(app: &App, uri: &str) -> bool {
    Url::parse(uri).is_ok_and(|url| names_another_machine(uri, &url) && !keeps(app, &url))
}

/// Whether a reference is a URL other than of a file. Read as workers read it: the parser drops spaces, tabs and line ends.
fn names_another_machine(uri: &str, url: &Url) -> bool {
    uri.contains("://") && url.scheme() != "file"
}

/// Whether a URL leads into a store of results, uploads or outputs, each of which belongs to one caller.
fn keeps(app: &App, url: &Url) -> bool {
    let (results, files) =
        (app.results.as_ref().map(ResultStore::storage), app.files.as_ref().map(FileStore::storage));
    let is_output = app.outputs.as_ref().is_some_and(|outputs| outputs.covers(url));
    is_output || results.into_iter().chain(files).any(|storage| storage.covers(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_elsewhere(uri: &str) -> bool {
        Url::parse(uri).is_ok_and(|url| names_another_machine(uri, &url))
    }

    #[test]
    fn files_of_a_workers_machine_are_no_references() {
        for uri in ["https://files.example.com/a", "s3://bucket/a", "http://host/file:///a"] {
            assert!(is_elsewhere(uri), "{uri:?}");
        }
        let files =
            ["file:///srv/a", "FILE:///srv/a", " file:///srv/a", "\tfile:///srv/a", "fi\nle:///srv/a"];
        for uri in files.into_iter().chain(["file:/srv/a", "/srv/a", "a", "", "://"]) {
            assert!(!is_elsewhere(uri), "{uri:?}");
        }
    }
}
