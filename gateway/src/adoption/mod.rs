//! Unfinished jobs of other gateways. With a common store of results each gateway records its jobs there, and leaves their replies in its
//! queue until the end is stored. So another gateway that is asked for such a job follows it, and consumes the queue if its gateway is gone.

mod attendance;
mod follows;
mod life;
mod queue;
mod records;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::time::timeout;
use vramq_producer::{Client, ConnectError, Options};

use crate::app::App;
use crate::broker::link::Link;
use crate::job_task::{STORED_WITHIN, Task, callers};
use crate::jobs::earlier::Name;
use crate::jobs::record::{KEPT_LEAST, Record};
use crate::jobs::registry::Added;
use crate::jobs::{Entry, State};
use crate::keys::Caller;
use crate::problem::Problem;
use attendance::{Attendance, Verdict};
use follows::Follows;
use queue::AdoptedQueue;

/// When to ask again while it follows as many as it may.
const FULL_RETRY: Duration = Duration::from_secs(10);

/// How long this gateway tries to get the connection to an adopted queue back, before it looks whether the queue is still to be adopted.
const RECONNECT_FOR: Duration = Duration::from_secs(10);

/// What this gateway does for the jobs of others, and they for its own.
#[derive(Debug)]
pub struct Adoption {
    /// Publishes the jobs that are recorded, and holds their replies.
    pub client: Client,
    /// Of clients that adopt a queue.
    options: Options,
    link: Arc<Link>,
    attendance: Mutex<Attendance>,
    adopted: Mutex<HashMap<String, Arc<Adopted>>>,
    follows: Follows,
}

/// A queue that this gateway may have adopted. Locked while it does: a second connection would take half of its replies.
type Adopted = tokio::sync::Mutex<Weak<AdoptedQueue>>;

impl Adoption {
    /// Connects the client for recorded jobs. `options` are those of the gateway's other client; the broker keeps the replies for as long
    /// as results are kept, while no gateway consumes them; but no longer than any job is awaited.
    ///
    /// # Errors
    /// The broker's.
    pub async fn connect(
        mut options: Options,
        link: Arc<Link>,
        keep: Duration,
    ) -> Result<Self, ConnectError> {
        let mut own = options.clone();
        own.hold_replies = true;
        own.reply_queue_expires = options.reply_queue_expires.max(keep.min(KEPT_LEAST));
        options.reconnect_for = Some(RECONNECT_FOR);
        Ok(Self {
            client: Client::connect(own).await?,
            options,
            link,
            attendance: Mutex::default(),
            adopted: Mutex::default(),
            follows: Follows::default(),
        })
    }

    /// The reply queue of a gateway that is gone, adopted. `None`: that gateway is there, or may come back.
    ///
    /// # Errors
    /// The queue is lost, or the broker does not let this gateway consume it.
    async fn adopt(&self, queue: &str) -> Result<Option<Arc<AdoptedQueue>>, NotAdopted> {
        let adopted = self.adopted(queue);
        let mut adopted = adopted.lock().await;
        if let Some(found) = adopted.upgrade().filter(|found| !found.is_left()) {
            return Ok(Some(found));
        }
        match self.look(queue).await {
            Verdict::Wait => return Ok(None),
            Verdict::Lost => return Err(NotAdopted::Lost),
            Verdict::Gone => {}
        }
        let mut options = self.options.clone();
        options.adopt = Some(queue.to_owned());
        // After an error it is not tried again before the queue has once more been without a consumer for so long.
        let client = Client::connect(options).await.inspect_err(|_| self.attendance().forget(queue))?;
        tracing::info!(queue, "its gateway is gone: this one has adopted the reply queue");
        let new = AdoptedQueue::new(client, Arc::clone(&self.link), queue.to_owned());
        *adopted = Arc::downgrade(&new);
        Ok(Some(new))
    }

    fn adopted(&self, queue: &str) -> Arc<Adopted> {
        // Nothing panics while it holds the lock.
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that somebody adopts or looks for at this moment stay.
        adopted.retain(|_, queue| {
            Arc::strong_count(queue) > 1 || queue.try_lock().is_ok_and(|queue| queue.strong_count() > 0)
        });
        Arc::clone(adopted.entry(queue.to_owned()).or_default())
    }

    async fn look(&self, queue: &str) -> Verdict {
        let fresh = self.attendance().fresh(queue, Instant::now());
        if let Some(verdict) = fresh {
            return verdict;
        }
        let depth = self.link.queue(queue).await.ok();
        self.attendance().note(queue, depth, Instant::now())
    }

    fn attendance(&self) -> MutexGuard<'_, Attendance> {
        // Nothing panics while it holds the lock.
        self.attendance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a reply queue was not adopted.
#[derive(Debug, thiserror::Error)]
enum NotAdopted {
    #[error("the reply queue is lost")]
    Lost,
    #[error(transparent)]
    Refused(#[from] ConnectError),
}

/// The unfinished job of this name that the caller gave to another gateway, followed by this one from now on.
///
/// # Errors
/// This gateway follows as many jobs as it may, or as many of this caller's.
pub async fn find(app: &App, caller: &Caller, id: &str) -> Result<Option<Arc<Entry>>, Problem> {
    match record(app, caller, id).await {
        Some(record) => follow(app, caller, record),
        None => Ok(None),
    }
}

/// The same for a request that names the job. Asked before [`earlier::find`](crate::jobs::earlier::find): an end is stored before the
/// record is removed, so that one of the two finds a job that ends meanwhile.
///
/// # Errors
/// As for [`find`]; or the name stands for another request.
pub async fn find_same(
    app: &App,
    caller: &Caller,
    name: &Name,
    fingerprint: [u8; 32],
) -> Result<Option<Arc<Entry>>, Problem> {
    match record(app, caller, &name.id).await {
        Some(record) if record.request_sha256 == fingerprint => follow(app, caller, record),
        Some(_) => Err(Problem::reused(name.what)),
        None => Ok(None),
    }
}

/// If the store cannot be read there is none, as without a store. Nor does one count that is too old: it was left behind.
async fn record(app: &App, caller: &Caller, id: &str) -> Option<Record> {
    let (results, adoption) = app.results.as_ref().zip(app.adoption.as_ref())?;
    match timeout(STORED_WITHIN, results.record(&caller.name, id)).await {
        Ok(Ok(record)) => record.filter(|record| !life::left(adoption, record).is_zero()),
        Ok(Err(error)) => {
            tracing::error!(job = id, %error, "read a job's record");
            None
        }
        Err(_) => {
            let seconds = STORED_WITHIN.as_secs();
            tracing::warn!(job = id, seconds, "the store of results did not answer in time");
            None
        }
    }
}

/// Follows a job from its record on, until its end.
fn follow(app: &App, caller: &Caller, record: Record) -> Result<Option<Arc<Entry>>, Problem> {
    let Some(adoption) = &app.adoption else { return Ok(None) };
    let place = adoption.follows.place(&caller.name).ok_or_else(|| {
        let message = "this gateway follows as many jobs of other gateways as it may";
        Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message, FULL_RETRY)
    })?;
    let Record { id, message_id, model, items, request_sha256, .. } = record.clone();
    let entry = Entry::new(id, message_id, caller.name.clone(), model, items, request_sha256)
        .called_by(&callers(&app.config.broker, caller))
        .taken_elsewhere(record.created_at_ms, record.secret.clone());
    let entry = Arc::new(entry);
    if let Added::Existing(before) = app.jobs.add(&entry, None)? {
        // Asked for twice at the same moment.
        return Ok(Some(before));
    }
    let task = Task { app: app.clone(), entry: Arc::clone(&entry), idempotency_key: None, kept: true };
    entry.happened("queued", task.estimate(), Some(State::Queued));
    tokio::spawn(run(task, record, place));
    Ok(Some(entry))
}

async fn run(task: Task, record: Record, place: follows::Place) {
    task.run(life::life(&task, &record), None).await;
    drop(place);
}
