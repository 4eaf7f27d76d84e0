//! A job as callers read it: one JSON object, the same from memory and from the store of results.

use serde_json::json;
use vramq_producer::Output;

use super::entry::{Entry, State};
use crate::body::off_runtime;

/// A job in a state, as JSON. The results are written once and straight: they may be many megabytes.
///
/// # Errors
/// The results have no form in JSON.
pub async fn written(entry: &Entry, state: &State) -> serde_json::Result<Vec<u8>> {
    let mut view = json!({
        "id": entry.id,
        "object": "job",
        "message_id": entry.message_id,
        "model": entry.model,
        "state": state.as_str(),
        "items": entry.items,
        "items_done": 0,
        "created_at_ms": entry.created_ms,
    });
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
                with_outputs(&view, &answer.outputs)
            })
            .await
        }
        State::Failed(failure) => {
            let bytes = failure.outputs.iter().flatten().map(output_bytes).sum();
            off_runtime(bytes, move || {
                view["items_done"] = json!(failure.outputs.iter().flatten().count());
                view["error"] = json!({"code": failure.problem.code, "message": failure.problem.message});
                with_outputs(&view, &failure.outputs)
            })
            .await
        }
        State::Running { items_done } => {
            view["items_done"] = json!(items_done);
            serde_json::to_vec(&view)
        }
        State::Publishing | State::Queued | State::Withdrawn => serde_json::to_vec(&view),
    }
}

/// The view's fields, and `outputs`.
fn with_outputs(view: &serde_json::Value, outputs: &impl serde::Serialize) -> serde_json::Result<Vec<u8>> {
    let mut written = serde_json::to_vec(view)?;
    // An object that has fields: its last byte is the brace.
    written.pop();
    written.extend_from_slice(b",\"outputs\":");
    serde_json::to_writer(&mut written, outputs)?;
    written.push(b'}');
    Ok(written)
}

/// About what an output takes when it is written.
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

    #[test]
    fn outputs_follow_the_other_fields() {
        let written = with_outputs(&json!({"id": "x"}), &[1, 2]).unwrap();
        assert_eq!(written, br#"{"id":"x","outputs":[1,2]}"#);
    }
}
