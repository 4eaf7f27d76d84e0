//! A job as callers read it: one JSON object, the same from memory and from the store of results.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Value, json};
use vramq_producer::{Answer, Output};
use vramq_schemas::json_budget::JsonSize;
use vramq_stores::reference::hex;

use super::entry::{Entry, Failure, State};
use super::output_files::{self, OutputFile};
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// Writes a job in a state as JSON. The results may be many megabytes, so they are written once, without an intermediate value.
///
/// # Errors
/// The results cannot be written as JSON.
pub async fn written(entry: &Entry, state: &State) -> serde_json::Result<Vec<u8>> {
    Ok(written_holding(entry, state, ()).await?.0)
}

/// Like [`written`]. Holds something while it writes, also if the caller is dropped meanwhile, and returns it.
///
/// # Errors
/// As for [`written`].
pub async fn written_holding<T: Send + 'static>(
    entry: &Entry,
    state: &State,
    held: T,
) -> serde_json::Result<(Vec<u8>, T)> {
    let mut view = json!({
        "id": entry.id,
        "object": "job",
        "message_id": entry.message_id,
        "model": entry.model,
        "state": state.as_str(),
        "items": entry.items,
        "items_done": 0,
        "created_at_ms": entry.created_ms,
        "request_sha256": hex(&entry.fingerprint),
    });
    let (owners, id) = (entry.output_owners.clone(), entry.id.clone());
    match state.clone() {
        State::Done(answer) => {
            let bytes = answer.outputs.iter().map(output_bytes).sum();
            off_runtime(bytes, move || {
                view["items_done"] = json!(answer.outputs.len());
                view["tokens"] = json!(answer.tokens);
                view["worker"] = json!(answer.worker);
                view["model_revisions"] = json!(answer.model_revisions);
                view["queued_ms"] = json!(answer.queued_ms);
                view["ran_ms"] = json!(answer.ran_ms);
                let files = output_files::list(&owners, &id, answer.outputs.iter().map(Some));
                Ok((with_outputs(view, files, &answer.outputs)?, held))
            })
            .await
        }
        State::Failed(failure) => {
            let bytes = failure.outputs.iter().flatten().map(output_bytes).sum();
            off_runtime(bytes, move || {
                view["items_done"] = json!(failure.outputs.iter().flatten().count());
                view["error"] = json!({"code": failure.problem.code, "message": failure.problem.message});
                let files = output_files::list(&owners, &id, failure.outputs.iter().map(Option::as_ref));
                Ok((with_outputs(view, files, &failure.outputs)?, held))
            })
            .await
        }
        State::Running { items_done } => {
            view["items_done"] = json!(items_done);
            Ok((serde_json::to_vec(&view)?, held))
        }
        State::Publishing | State::Queued | State::Withdrawn => Ok((serde_json::to_vec(&view)?, held)),
    }
}

/// Whether a job as [`written`] came from a request with this digest. `None` if an older version wrote it without a digest.
pub fn is_of_request(written: &[u8], fingerprint: &[u8; 32]) -> Option<bool> {
    #[derive(Deserialize)]
    struct OfRequest {
        request_sha256: Option<String>,
    }
    let of_request: OfRequest = serde_json::from_slice(written).ok()?;
    Some(of_request.request_sha256? == hex(fingerprint))
}

/// The answer of a job as [`written`]; `None` if the job has no complete result.
fn answer_of(written: &[u8]) -> Option<Answer> {
    #[derive(Deserialize)]
    struct Done {
        outputs: Vec<Output>,
        tokens: Option<u64>,
        model_revisions: Vec<String>,
        worker: String,
        queued_ms: u64,
        ran_ms: u64,
    }
    let Done { outputs, tokens, model_revisions, worker, queued_ms, ran_ms } =
        serde_json::from_slice(written).ok()?;
    Some(Answer { outputs, tokens, model_revisions, worker, queued_ms, ran_ms })
}

/// The end of a job as [`written`]; `None` of one that has not ended, or was created before `created_ms`.
pub fn state_of(written: &[u8], created_ms: u64) -> Option<State> {
    #[derive(Deserialize)]
    struct Ended {
        message_id: String,
        created_at_ms: u64,
        state: String,
        error: Option<Error>,
        outputs: Option<Vec<Option<Output>>>,
    }
    #[derive(Deserialize)]
    struct Error {
        code: String,
        message: String,
    }
    let Ended { message_id, created_at_ms, state, error, outputs } = serde_json::from_slice(written).ok()?;
    if created_at_ms < created_ms {
        return None;
    }
    match state.as_str() {
        "done" => answer_of(written).map(|answer| State::Done(Arc::new(answer))),
        "failed" => {
            let Error { code, message } = error?;
            let problem = Problem::of_code(&code, message).of_job(&message_id);
            let outputs = outputs.unwrap_or_default();
            Some(State::Failed(Arc::new(Failure { problem, outputs, is_published: true })))
        }
        "withdrawn" => Some(State::Withdrawn),
        _ => None,
    }
}

/// Why a job as [`written`] has no result; `None` of one that did not fail.
pub fn failure_of(written: &[u8]) -> Option<Problem> {
    #[derive(Deserialize)]
    struct Failed {
        error: Error,
    }
    #[derive(Deserialize)]
    struct Error {
        code: String,
        message: String,
    }
    let Failed { error: Error { code, message } } = serde_json::from_slice(written).ok()?;
    Some(Problem::of_code(&code, message))
}

/// The name and data of the last event of a job as [`written`]; `None` if the job has not ended.
pub fn end_of(written: &[u8]) -> Option<(&'static str, Value)> {
    #[derive(Deserialize)]
    struct Ended {
        id: String,
        state: String,
        items: Value,
        #[serde(default)]
        worker: Value,
        #[serde(default)]
        tokens: Value,
        #[serde(default)]
        queued_ms: Value,
        #[serde(default)]
        ran_ms: Value,
        #[serde(default)]
        error: Value,
    }
    let Ended { id, state, items, worker, tokens, queued_ms, ran_ms, error } =
        serde_json::from_slice(written).ok()?;
    match state.as_str() {
        "done" => {
            let data = json!({
                "id": id, "items": items, "worker": worker, "tokens": tokens, "queued_ms": queued_ms, "ran_ms": ran_ms,
            });
            Some(("done", data))
        }
        "failed" => Some(("failed", json!({"id": id, "reason": error["code"], "error": error["message"]}))),
        "withdrawn" => Some(("withdrawn", json!({"id": id}))),
        _ => None,
    }
}

/// The references to the own outputs, in a store, of a job as [`written`]. By index, as they were at the job's end.
pub fn stored_uris(written: &[u8]) -> Vec<Option<String>> {
    #[derive(Default, Deserialize)]
    struct Ended {
        #[serde(default)]
        output_files: Vec<OutputFile>,
        #[serde(default)]
        outputs: Vec<Option<Stored>>,
    }
    #[derive(Deserialize)]
    struct Stored {
        uri: Option<String>,
    }
    let Ended { output_files, mut outputs } = serde_json::from_slice(written).unwrap_or_default();
    let mut uris = vec![None; outputs.len()];
    for at in output_files.iter().map(|file| file.index as usize) {
        if let (Some(uri), Some(Some(output))) = (uris.get_mut(at), outputs.get_mut(at)) {
            *uri = output.uri.take();
        }
    }
    uris
}

/// The view's fields, those of its outputs that are files, and `outputs`.
fn with_outputs(
    mut view: Value,
    files: Vec<OutputFile>,
    outputs: &impl serde::Serialize,
) -> serde_json::Result<Vec<u8>> {
    if !files.is_empty() {
        view["output_files"] = serde_json::to_value(files)?;
    }
    let mut written = serde_json::to_vec(&view)?;
    // An object that has fields: its last byte is the brace.
    written.pop();
    written.extend_from_slice(b",\"outputs\":");
    serde_json::to_writer(&mut written, outputs)?;
    written.push(b'}');
    Ok(written)
}

/// The approximate bytes of a job in a state as JSON, which [`written`] makes.
pub async fn json_bytes(state: &State) -> usize {
    let of = |output: &Output| match output {
        Output::Json(value) => JsonSize::of(value).text,
        // As base64.
        Output::Bytes { media_type, bytes } => media_type.len() + bytes.len().div_ceil(3) * 4,
        Output::Uri(uri) => uri.len(),
        Output::Embedding(_) | Output::Sparse(_) => output_bytes(output),
    };
    let count: Box<dyn FnOnce() -> usize + Send> = match state.clone() {
        State::Done(answer) => Box::new(move || answer.outputs.iter().map(of).sum()),
        State::Failed(failure) => Box::new(move || failure.outputs.iter().flatten().map(of).sum()),
        _ => return 0,
    };
    // A JSON output has to be read as a whole, and its size is not known before.
    off_runtime(usize::MAX, count).await
}

/// The approximate bytes of an output as JSON.
pub fn output_bytes(output: &Output) -> usize {
    match output {
        Output::Embedding(embedding) => 12 * embedding.values.len(),
        // An index, a value, two commas.
        Output::Sparse(sparse) => 20 * sparse.len(),
        Output::Bytes { bytes, .. } => bytes.len(),
        Output::Json(_) | Output::Uri(_) => 256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::stored::StoredRun;

    #[test]
    fn outputs_follow_the_other_fields() {
        let written = with_outputs(json!({"id": "x"}), Vec::new(), &[1, 2]).unwrap();
        assert_eq!(written, br#"{"id":"x","outputs":[1,2]}"#);
    }

    #[tokio::test]
    async fn an_answer_is_read_as_it_was_written() {
        let text = |text: &str| text.to_owned();
        let answer = Answer {
            // The long ones are doubles that a parser easily takes for their neighbours.
            outputs: vec![
                Output::Json(json!({"a": [1, 2.5, 0.942_450_283_777_050_3, 2.225_073_858_507_201e-308]})),
                Output::Uri(text("s3://b/c")),
            ],
            tokens: Some(7),
            model_revisions: vec![text("r")],
            worker: text("w"),
            queued_ms: 1,
            ran_ms: 2,
        };
        let entry = Entry::new(text("id"), text("id"), text("a"), text("m"), 2, [7; 32]);
        let written = written(&entry, &State::Done(Arc::new(answer.clone()))).await.unwrap();
        assert_eq!(answer_of(&written), Some(answer));
        assert!(!StoredRun::of(&written).unwrap().yields_to(u64::MAX));
        assert_eq!(StoredRun::of(&written[..written.len() - 1]), None);
    }

    #[tokio::test]
    async fn a_stored_job_lists_the_references_to_its_own_outputs_and_no_others() {
        let text = |text: &str| text.to_owned();
        let entry = Entry::new(text("job"), text("a/job"), text("a"), text("m"), 3, [7; 32]);
        let entry = entry.called_by(&[Some(text("gateway"))]);
        let own = format!("s3://b/{}#sha256={}", entry.output_owners[0].name(2), "0".repeat(64));
        let outputs = [Some(Output::Json(json!(1))), None, Some(Output::Uri(own.clone()))];
        let outputs = [&outputs[..], &[Some(Output::Uri(own.clone()))]].concat();
        let problem = Problem::timeout("late");
        let failed = State::Failed(Arc::new(Failure { problem, outputs, is_published: true }));
        let written = written(&entry, &failed).await.unwrap();
        assert_eq!(stored_uris(&written), [None, None, Some(own), None]);
        assert_eq!((stored_uris(b"{}"), stored_uris(b"")), (Vec::new(), Vec::new()));
    }

    #[tokio::test]
    async fn an_end_is_read_as_it_was_written() {
        use vramq_producer::{JobError, JobFailed, Reason};
        let text = |text: &str| text.to_owned();
        let outputs = vec![Some(Output::Json(json!(1))), None];
        let failed = |reason| JobFailed { reason, error: text("why"), outputs: Vec::new() }.into();
        let errors = [
            failed(Reason::InvalidInput),
            failed(Reason::OutOfMemory),
            failed(Reason::Other),
            JobError::InvalidReply(text("why")),
            JobError::ReplyQueueLost,
        ];
        let problems = errors.iter().map(|error| Problem::unanswered(error).of_job("message"));
        let late = Problem::timeout("no result in time").of_job("message");
        for problem in problems.chain([late]) {
            let entry = Entry::new(text("id"), text("message"), text("a"), text("m"), 2, [7; 32]);
            let failure = Failure { problem, outputs: outputs.clone(), is_published: true };
            let written = written(&entry, &State::Failed(Arc::new(failure.clone()))).await.unwrap();
            let Some(State::Failed(read)) = state_of(&written, entry.created_ms) else {
                panic!("{written:?}")
            };
            assert_eq!((&read.problem, &read.outputs), (&failure.problem, &failure.outputs));
            // The name stands for a younger run of the job.
            assert!(state_of(&written, entry.created_ms + 1).is_none());
            let run = StoredRun::of(&written).unwrap();
            assert!(run.yields_to(entry.created_ms + 1) && !run.yields_to(entry.created_ms));
        }
        let entry = Entry::new(text("id"), text("message"), text("a"), text("m"), 2, [7; 32]);
        for (state, has_ended) in [(State::Withdrawn, true), (State::Queued, false)] {
            let written = written(&entry, &state).await.unwrap();
            assert_eq!(state_of(&written, 0).map(|state| state.as_str()), has_ended.then_some("withdrawn"));
        }
    }

    #[tokio::test]
    async fn the_end_of_a_job_is_told_from_what_is_stored() {
        let text = |text: &str| text.to_owned();
        let answer = Answer {
            outputs: vec![Output::Json(json!(1))],
            tokens: None,
            model_revisions: Vec::new(),
            worker: text("w"),
            queued_ms: 1,
            ran_ms: 2,
        };
        let problem = Problem::invalid("why");
        let failure = Failure { problem, outputs: Vec::new(), is_published: true };
        for (state, expected) in [
            (
                State::Done(Arc::new(answer)),
                Some((
                    "done",
                    json!({"id": "id", "items": 1, "worker": "w", "tokens": null, "queued_ms": 1, "ran_ms": 2}),
                )),
            ),
            (
                State::Failed(Arc::new(failure)),
                Some(("failed", json!({"id": "id", "reason": "invalid_request", "error": "why"}))),
            ),
            (State::Withdrawn, Some(("withdrawn", json!({"id": "id"})))),
            (State::Queued, None),
        ] {
            let entry = Entry::new(text("id"), text("id"), text("a"), text("m"), 1, [7; 32]);
            assert_eq!(end_of(&written(&entry, &state).await.unwrap()), expected);
        }
        assert_eq!(end_of(b"{}"), None);
    }

    #[tokio::test]
    async fn a_job_names_the_request_that_it_came_from() {
        let text = |text: &str| text.to_owned();
        let entry = Entry::new(text("id"), text("id"), text("a"), text("m"), 1, [7; 32]);
        let written = written(&entry, &State::Withdrawn).await.unwrap();
        assert_eq!(is_of_request(&written, &[7; 32]), Some(true));
        assert_eq!(is_of_request(&written, &[8; 32]), Some(false));
        assert_eq!(answer_of(&written), None);
        assert_eq!((is_of_request(b"{\"id\":1}", &[7; 32]), is_of_request(b"", &[7; 32])), (None, None));
    }
}
