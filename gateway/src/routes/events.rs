//! `GET /v1/jobs/{id}/events`: the events of a job, as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use futures_util::Stream;
use tokio::sync::watch;

use super::jobs::find;
use super::{Authenticated, called_by};
use crate::app::{App, Drain};
use crate::jobs::entry;
use crate::jobs::{Entry, State as JobState};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Proxies cut connections that say nothing for a minute.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Goes on after the event that the header `Last-Event-ID` names; ends after the job's last. Browsers then connect again, and the 204
/// tells them that there is no more.
pub async fn events(
    State(app): State<App>,
    Authenticated(caller): Authenticated,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    let last = headers.get(LAST_EVENT_ID).and_then(|id| id.to_str().ok()?.parse().ok()).unwrap_or(0);
    let answer = find(&app, &caller, &id).map(|entry| {
        let last = entry.reached(last);
        if last > 0 && entry.state().is_end() && entry.events_after(last).is_empty() {
            return StatusCode::NO_CONTENT.into_response();
        }
        let reader = Reader {
            watched: entry.watch(),
            entry,
            last,
            waiting: VecDeque::new(),
            drain: app.drain.clone(),
        };
        Sse::new(reader.stream()).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
    });
    called_by(&caller, answer)
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
        futures_util::stream::unfold(self, |mut reader| async {
            let event = reader.next().await?;
            let written =
                Event::default().id(event.number.to_string()).event(event.name).data(event.data.to_string());
            Some((Ok(written), reader))
        })
    }

    /// `None` after the last.
    async fn next(&mut self) -> Option<entry::Event> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                self.last = event.number;
                return Some(event);
            }
            // Seen first, so that nothing that happens meanwhile is missed.
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
