//! `GET /v1/jobs/{id}/events`: the events of a job, as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::sync::watch;

use super::Authenticated;
use super::found_job::{FoundJob, find_admitted, unknown};
use crate::app::App;
use crate::drain::Drain;
use crate::held_body::UntilSent;
use crate::jobs::entry::{self, LAST_EVENT};
use crate::jobs::view::end_of;
use crate::jobs::{Entry, State as JobState};
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Proxies cut connections that say nothing for a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Resumes after the event that the header `Last-Event-ID` names, and ends after the job's last event. Browsers then reconnect, and the 204
/// tells them that there is no more.
pub async fn events(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let permit = app.admit_stream(&caller)?;
    let last = headers.get(LAST_EVENT_ID).and_then(|id| id.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
    let mut response = match find_admitted(&app, &caller, &id).await? {
        (FoundJob::Here(entry), _) => followed(&app, entry, last),
        (FoundJob::Stored(job), _reader) => stored_end(job, last).await.ok_or_else(|| unknown(&app, &id))?,
    };
    response.extensions_mut().insert(UntilSent::new(permit));
    Ok(response)
}

fn followed(app: &App, entry: Arc<Entry>, last: u64) -> Response {
    if has_seen_end(&entry, last) {
        return StatusCode::NO_CONTENT.into_response();
    }
    let last = entry.reached(last);
    let watched = entry.watch();
    let reader = Reader { watched, entry, last, waiting: VecDeque::new(), drain: app.drain.clone() };
    Sse::new(reader.stream()).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

/// Whether the client resumes after the job's end. While the job runs, the end that the client has seen was that of an earlier run.
fn has_seen_end(entry: &Entry, last: u64) -> bool {
    last == LAST_EVENT && entry.state().is_end()
}

/// The stored end of a job that another gateway published.
async fn stored_end(job: Bytes, last: u64) -> Option<Response> {
    let (name, data) = off_runtime(job.len(), move || end_of(&job)).await?;
    if last == LAST_EVENT {
        return Some(StatusCode::NO_CONTENT.into_response());
    }
    let end = written(&entry::Event { number: LAST_EVENT, name, data });
    Some(Sse::new(stream::iter([Ok::<_, Infallible>(end)])).into_response())
}

fn written(event: &entry::Event) -> Event {
    Event::default().id(event.number.to_string()).event(event.name).data(event.data.to_string())
}

struct Reader {
    entry: Arc<Entry>,
    watched: watch::Receiver<JobState>,
    last: u64,
    waiting: VecDeque<entry::Event>,
    drain: watch::Receiver<Drain>,
}

impl Reader {
    fn stream(self) -> impl Stream<Item = Result<Event, Infallible>> + use<> {
        stream::unfold(self, |mut reader| async {
            let event = reader.next().await?;
            Some((Ok(written(&event)), reader))
        })
    }

    /// The next event; `None` after the last.
    async fn next(&mut self) -> Option<entry::Event> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                self.last = event.number;
                return Some(event);
            }
            // Read the state before the events, so that no later event is missed.
            let ended = self.watched.borrow_and_update().is_end();
            self.waiting = self.entry.events_after(self.last).into();
            if !self.waiting.is_empty() {
                continue;
            }
            if ended {
                return None;
            }
            tokio::select! {
                changed = self.watched.changed() => changed.ok()?,
                _ = self.drain.wait_for(|drain| *drain == Drain::Over) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_client_has_seen_the_end_here_or_at_another_gateway() {
        let name = |text: &str| text.to_owned();
        let entry = Entry::new(name("id"), name("id"), name("me"), name("m"), 1, [0; 32]);
        entry.happened("queued", json!({}), Some(JobState::Queued));
        // The end in the store is that of another run: this one goes on.
        for unfinished in [0, 1, LAST_EVENT] {
            assert!(!has_seen_end(&entry, unfinished), "{unfinished}");
        }
        entry.happened("withdrawn", json!({}), Some(JobState::Withdrawn));
        for (last, is_end) in [(0, false), (1, false), (2, false), (LAST_EVENT, true), (u64::MAX, false)] {
            assert_eq!(has_seen_end(&entry, last), is_end, "{last}");
        }
    }
}
