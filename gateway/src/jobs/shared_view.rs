//! The JSON of a job for its callers, within the memory for answers. All that read a finished job at a time share one copy.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::entry::Entry;
use super::view::{json_bytes, written, written_holding};
use crate::byte_budget::{ByteBudget, NoRoom, Room};
use crate::problem::Problem;

/// The copy of a job's JSON that some readers have.
#[derive(Debug, Default)]
pub struct SharedView(Mutex<Weak<View>>);

#[derive(Debug)]
struct View {
    bytes: Vec<u8>,
    _room: Room,
}

/// A reader's hold on the copy, until the last byte of it is sent.
struct Reader(Arc<View>);

impl AsRef<[u8]> for Reader {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// Why a job's JSON cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum Unwritten {
    #[error("there is no room for it")]
    NoRoom(NoRoom),
    #[error("the results cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Unwritten {
    /// The problem of a request that reads the job.
    pub fn problem(self) -> Problem {
        match self {
            Self::NoRoom(none) => no_room(none),
            Self::Json(_) => Problem::invalid(self.to_string()),
        }
    }
}

/// The answers of other requests fill the memory for answers.
pub fn no_room(none: NoRoom) -> Problem {
    none.problem("the answers of other requests", "http.answers_mib_max, http.answers_mib_max_per_key")
}

/// A job as JSON.
///
/// # Errors
/// There was no room for it in time, or it cannot be written.
pub async fn view(entry: &Entry, answers: &ByteBudget) -> Result<Bytes, Unwritten> {
    let state = entry.state();
    if !state.is_end() {
        // It has no results.
        return Ok(written(entry, &state).await?.into());
    }
    // Locked while the copy is made, so that who comes meanwhile makes no other. Both waits together have the time of one.
    let until = Instant::now() + answers.wait_max();
    let locked = timeout_at(until, entry.view.0.lock()).await;
    let mut shared = locked.map_err(|_| Unwritten::NoRoom(NoRoom))?;
    let view = match shared.upgrade() {
        Some(view) => view,
        None => {
            let bytes = json_bytes(&state).await;
            let room = timeout_at(until, answers.room(&entry.owner, bytes)).await;
            let room = room.unwrap_or(Err(NoRoom)).map_err(Unwritten::NoRoom)?;
            let (mut bytes, room) = written_holding(entry, &state, room).await?;
            bytes.shrink_to_fit();
            let view = Arc::new(View { bytes, _room: room });
            *shared = Arc::downgrade(&view);
            view
        }
    };
    Ok(Bytes::from_owner(Reader(view)))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use serde_json::json;
    use vramq_producer::{Answer, Output};

    use super::*;
    use crate::jobs::State;

    #[tokio::test]
    async fn readers_share_one_copy_and_the_last_gives_its_room_back() {
        let text = |text: &str| text.to_owned();
        let entry = Entry::new(text("id"), text("id"), text("a"), text("m"), 1, [0; 32]);
        let answers = ByteBudget::new(1 << 20, 1 << 20);
        let outputs = vec![Output::Json(json!("x".repeat(600_000)))];
        let (model_revisions, worker) = (Vec::new(), String::new());
        let answer = Answer { outputs, tokens: None, model_revisions, worker, queued_ms: 0, ran_ms: 0 };
        entry.happened("done", json!({}), Some(State::Done(Arc::new(answer))));
        let one = view(&entry, &answers).await.unwrap();
        let other = view(&entry, &answers).await.unwrap();
        assert!(one.len() > 600_000 && one.as_ptr() == other.as_ptr());
        // The rest of a copy holds it as a whole.
        let rest = other.slice(other.len() - 1..);
        drop((one, other));
        assert!(answers.room("a", 600_000).now_or_never().is_none());
        drop(rest);
        assert!(answers.room("a", 600_000).now_or_never().is_some());
        assert!(view(&entry, &answers).await.is_ok());
    }
}
