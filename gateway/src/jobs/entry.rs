//! One job: its owner, its state, and its events.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::sync::watch;
use vramq_amqp::new_secret;
use vramq_producer::{Answer, Output};
use vramq_schemas::json_budget::JsonSize;
use vramq_schemas::output_name::OutputOwner;

use super::shared_view::SharedView;
use crate::problem::Problem;

/// The most events that are kept for clients that reconnect. A large job has some dozens. Beyond the limit the oldest are dropped.
const EVENTS_MAX: usize = 256;

/// The name of events that only say how far something is.
pub const PROGRESS: &str = "progress";

/// The number of every job's last event, at every gateway, larger than that of any other event. So a client that has seen it has seen the
/// end, whichever gateway sent it.
pub const LAST_EVENT: u64 = 1 << 32;

/// A job and its state. Shared by its task and by all requests that look at it.
#[derive(Debug)]
pub struct Entry {
    /// The id by which the caller, and texts for it, name the job.
    pub id: String,
    pub message_id: String,
    /// The caller that it belongs to.
    pub owner: String,
    pub model: String,
    pub items: usize,
    pub created_ms: u64,
    /// The digest of the request. The same id or idempotency key with another request is an error.
    pub fingerprint: [u8; 32],
    /// The possible owners of the job's outputs in a store, as their names there show. There are several because workers decide whether a
    /// tenant counts.
    pub output_owners: Vec<OutputOwner>,
    /// The secret that a withdrawal shows. Its digest is in the job's header.
    pub secret: String,
    /// The job as JSON, for those that read it now.
    pub view: SharedView,
    state: watch::Sender<State>,
    events: Mutex<Events>,
    withdrawn: watch::Sender<bool>,
}

/// How far a job is.
#[derive(Clone, Debug)]
pub enum State {
    /// On its way to the broker.
    Publishing,
    /// The broker has it.
    Queued,
    /// Its first pass has begun, or some of its items are answered.
    Running {
        items_done: usize,
    },
    Done(Arc<Answer>),
    Failed(Arc<Failure>),
    /// Its caller took it back.
    Withdrawn,
}

/// Why a job has no complete result, and the outputs that it has.
#[derive(Clone, Debug)]
pub struct Failure {
    pub problem: Problem,
    /// One entry for every input, if some are answered; else empty.
    pub outputs: Vec<Option<Output>>,
    /// Whether the broker has confirmed the job.
    pub is_published: bool,
}

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Counts from 1; [`LAST_EVENT`] for the end.
    pub number: u64,
    pub name: &'static str,
    pub data: Value,
}

#[derive(Debug, Default)]
struct Events {
    last: u64,
    kept: VecDeque<Event>,
    /// Another gateway published the job, and numbers its own events.
    are_of_another: bool,
}

impl State {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Publishing => "publishing",
            Self::Queued => "queued",
            Self::Running { .. } => "running",
            Self::Done(_) => "done",
            Self::Failed(_) => "failed",
            Self::Withdrawn => "withdrawn",
        }
    }

    pub fn is_end(&self) -> bool {
        matches!(self, Self::Done(_) | Self::Failed(_) | Self::Withdrawn)
    }

    /// The approximate memory of the job's results, in bytes.
    pub fn bytes(&self) -> usize {
        let of = |output: &Output| match output {
            Output::Embedding(embedding) => 4 * embedding.values.len() + 64,
            Output::Sparse(sparse) => 8 * sparse.len() + 64,
            Output::Json(value) => JsonSize::of(value).memory + 64,
            Output::Bytes { media_type, bytes } => media_type.len() + bytes.len() + 64,
            Output::Uri(uri) => uri.len() + 64,
        };
        match self {
            Self::Done(answer) => answer.outputs.iter().map(of).sum(),
            Self::Failed(failure) => {
                failure.outputs.iter().flatten().map(of).sum::<usize>() + failure.problem.message.len()
            }
            _ => 0,
        }
    }
}

impl Entry {
    pub fn new(
        id: String,
        message_id: String,
        owner: String,
        model: String,
        items: usize,
        fingerprint: [u8; 32],
    ) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            id,
            message_id,
            owner,
            model,
            items,
            created_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            fingerprint,
            output_owners: Vec::new(),
            secret: new_secret(),
            view: SharedView::default(),
            state: watch::Sender::new(State::Publishing),
            events: Mutex::default(),
            withdrawn: watch::Sender::new(false),
        }
    }

    /// Sets the callers that workers may see: none, the gateway's user, a tenant of that user.
    #[must_use]
    pub fn called_by(mut self, callers: &[Option<String>]) -> Self {
        let owner =
            |caller: &Option<String>| OutputOwner::new(&self.model, caller.as_deref(), &self.message_id);
        self.output_owners = callers.iter().map(owner).collect();
        self
    }

    /// Makes it the entry of a job that another gateway took. Numbers its events from the clock's seconds on. The other gateway's numbers
    /// are small, so a client that continues after one of them gets all events of this gateway. The end has the same number everywhere.
    #[must_use]
    pub fn taken_elsewhere(self, created_ms: u64, secret: String) -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let events =
            Events { last: now.as_secs().min(LAST_EVENT / 4 * 3), are_of_another: true, ..Events::default() };
        Self { created_ms, secret, events: Mutex::new(events), ..self }
    }

    pub fn is_taken_elsewhere(&self) -> bool {
        self.events().are_of_another
    }

    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// A receiver that changes with each new state and event.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Waits for the job's end.
    pub async fn ended(&self) -> State {
        let mut watched = self.watch();
        // Cannot fail: `self` keeps the sender.
        match watched.wait_for(State::is_end).await {
            Ok(state) => state.clone(),
            Err(_) => State::Withdrawn,
        }
    }

    /// Withdraws the job, unless it has ended.
    pub fn withdraw(&self) {
        self.withdrawn.send_replace(true);
    }

    /// Resolves when the job is withdrawn.
    pub async fn withdrawn(&self) {
        let mut watched = self.withdrawn.subscribe();
        if watched.wait_for(|withdrawn| *withdrawn).await.is_err() {
            // Never reached: `self` keeps the sender.
            std::future::pending::<()>().await;
        }
    }

    /// Records an event and the state that the job is in from now on. Does nothing after the end.
    pub fn happened(&self, name: &'static str, mut data: Value, state: Option<State>) {
        let mut events = self.events();
        if self.state.borrow().is_end() {
            return;
        }
        let is_last = state.as_ref().is_some_and(State::is_end);
        events.last = if is_last { LAST_EVENT } else { events.last + 1 };
        if let Value::Object(fields) = &mut data {
            fields.insert("id".to_owned(), json!(self.id));
        }
        // Keep only the newest of consecutive progress events, which must not push out other events.
        if name == PROGRESS && events.kept.back().is_some_and(|last| last.name == PROGRESS) {
            events.kept.pop_back();
        }
        if events.kept.len() >= EVENTS_MAX {
            events.kept.pop_front();
        }
        let event = Event { number: events.last, name, data };
        events.kept.push_back(event);
        // Under the lock, so that everybody sees events and states in the same order.
        self.state.send_modify(|now| {
            if let Some(state) = state {
                *now = state;
            }
        });
    }

    /// The event number after which a client resumes. 0 if the job has not reached `number`: then the client saw another run of the job.
    pub fn reached(&self, number: u64) -> u64 {
        let events = self.events();
        let before_end = events.kept.iter().rev().find(|event| event.number != LAST_EVENT);
        let is_reached = number == events.last || before_end.is_some_and(|event| number <= event.number);
        if is_reached { number } else { 0 }
    }

    /// The kept events after `number`.
    pub fn events_after(&self, number: u64) -> Vec<Event> {
        self.events().kept.iter().filter(|event| event.number > number).cloned().collect()
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        // Nothing panics while it holds the lock.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        Entry::new("id".to_owned(), "id".to_owned(), "me".to_owned(), "m".to_owned(), 2, [0; 32])
    }

    #[test]
    fn a_json_result_counts_what_it_takes() {
        let bytes = |value: Value| {
            let outputs = vec![Output::Json(value)];
            let (model_revisions, worker) = (Vec::new(), String::new());
            let answer = Answer { outputs, tokens: None, model_revisions, worker, queued_ms: 0, ran_ms: 0 };
            State::Done(Arc::new(answer)).bytes()
        };
        let text = bytes(json!("x".repeat(50_000)));
        assert!((50_000..51_000).contains(&text), "{text}");
        // Each has a map of its own.
        let objects = bytes(json!(vec![json!({"": 0}); 1_000]));
        assert!(objects > 500_000, "{objects}");
    }

    #[test]
    fn events_go_on_after_the_last_that_a_client_saw() {
        let entry = entry();
        entry.happened("queued", json!({}), Some(State::Queued));
        entry.happened("part", json!({"items_done": 1}), Some(State::Running { items_done: 1 }));
        assert_eq!(entry.events_after(0).len(), 2);
        let rest = entry.events_after(1);
        assert_eq!((rest[0].number, rest[0].name, &rest[0].data["id"]), (2, "part", &json!("id")));
        assert_eq!(
            (entry.reached(1), entry.reached(2), entry.reached(3), entry.reached(u64::MAX)),
            (1, 2, 0, 0)
        );
        for number in 0..2 * EVENTS_MAX {
            entry.happened(PROGRESS, json!({"number": number}), None);
        }
        let kept = entry.events_after(0);
        assert_eq!((kept.len(), &kept[2].data["number"]), (3, &json!(2 * EVENTS_MAX - 1)));
        for _ in 0..2 * EVENTS_MAX {
            entry.happened("part", json!({}), None);
        }
        assert_eq!(entry.events_after(0).len(), EVENTS_MAX);
        let last = entry.events_after(0)[EVENTS_MAX - 1].number;
        entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        assert_eq!(entry.events_after(entry.reached(last))[0].number, LAST_EVENT);
        assert_eq!((entry.reached(last + 1), entry.reached(LAST_EVENT)), (0, LAST_EVENT));
    }

    #[test]
    fn a_client_of_another_gateway_gets_all_events_of_this_one() {
        let entry = entry().taken_elsewhere(7, "secret".to_owned());
        assert_eq!((entry.created_ms, entry.secret.as_str()), (7, "secret"));
        entry.happened("queued", json!({}), Some(State::Queued));
        entry.happened("part", json!({}), Some(State::Running { items_done: 1 }));
        let seen = entry.events_after(0);
        // A gateway counts its own events from 1.
        assert_eq!(entry.events_after(entry.reached(1_000)), seen);
        assert_eq!(entry.events_after(entry.reached(seen[0].number)), seen[1..]);
        entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        assert_eq!(entry.events_after(0)[2].number, LAST_EVENT);
        assert!(seen[1].number < LAST_EVENT);
    }

    #[tokio::test]
    async fn nothing_happens_after_the_end() {
        let entry = entry();
        entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        entry.happened("done", json!({}), Some(State::Queued));
        assert_eq!(entry.ended().await.as_str(), "withdrawn");
        assert_eq!(entry.events_after(0).len(), 1);
    }

    #[tokio::test]
    async fn a_withdrawal_is_seen_whenever_it_was_made() {
        let entry = entry();
        entry.withdraw();
        entry.withdrawn().await;
    }
}
