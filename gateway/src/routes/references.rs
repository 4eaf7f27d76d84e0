//! References among the inputs of a job: to uploads, to outputs of jobs, and to other servers. No worker gets a reference to something that
//! belongs to another caller.

use std::collections::{BTreeSet, HashMap};

use url::Url;
use vramq_producer::Input;

use super::output_files;
use crate::app::App;
use crate::files::{FileStore, is_id};
use crate::jobs::ResultStore;
use crate::jobs::output_files::OutputId;
use crate::keys::Caller;
use crate::problem::Problem;

/// Rejects references that are wrong in themselves, without looking any of them up. A caller's `file:` reference is wrong, because it would
/// name a file of the worker's machine. So is one into the stores of results, uploads and outputs, because it could name another caller's.
///
/// # Errors
/// One of them is wrong.
pub fn check(app: &App, inputs: &[Input]) -> Result<(), Problem> {
    for input in inputs {
        let Input::Uri(uri) = input else { continue };
        if is_upload(uri) {
            if app.files.is_none() {
                let message = "this gateway takes no uploads (files.folder and files.url are not set)";
                return Err(Problem::invalid(message).about("inputs"));
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

/// Replaces each id of an upload or an output by the reference for workers. The inputs have passed [`check`].
///
/// # Errors
/// The caller has no such upload, or no such output.
pub async fn resolve(app: &App, caller: &Caller, inputs: &mut [Input]) -> Result<(), Problem> {
    let uploads = uploads(app, caller, inputs).await?;
    let mut outputs = output_files::Inputs { app, caller, known: HashMap::new() };
    for input in inputs {
        let Input::Uri(uri) = input else { continue };
        if let Some(reference) = uploads.get(uri.as_str()) {
            uri.clone_from(reference);
        } else if let Some(output) = OutputId::parse(uri) {
            *uri = outputs.uri(&output).await?;
        }
    }
    Ok(())
}

fn is_upload(uri: &str) -> bool {
    uri.starts_with("file-")
}

/// The workers' references of the uploads among a job's inputs, by their ids.
async fn uploads(app: &App, caller: &Caller, inputs: &[Input]) -> Result<HashMap<String, String>, Problem> {
    let ids: BTreeSet<_> = inputs
        .iter()
        .filter_map(|input| match input {
            Input::Uri(uri) if is_upload(uri) => Some(uri.clone()),
            _ => None,
        })
        .collect();
    match &app.files {
        Some(files) => files.references(&caller.name, ids).await,
        None => Ok(HashMap::new()),
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
