//! Adopts the reply queues of gateways that are gone. Gateways with a common store of results acknowledge the replies to a job only after
//! they have stored its end. So another gateway can consume the queue of one that is gone.

mod attendance;
mod follow_permits;
mod queue;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use vramq_producer::{Client, ConnectError, Options};

use crate::broker::link::Link;
use crate::jobs::record::KEPT_LEAST;
use attendance::{Attendance, Presence};
pub use follow_permits::FollowPermit;
use follow_permits::FollowPermits;
pub use queue::AdoptedQueue;

/// How long this gateway tries to reconnect to an adopted queue. Then it checks whether the queue still has to be adopted.
const RECONNECT_FOR: Duration = Duration::from_secs(10);

/// Publishes this gateway's recorded jobs, whose reply queue other gateways may adopt, and adopts the reply queues of other gateways.
#[derive(Debug)]
pub struct Adoption {
    /// Publishes the jobs that are recorded, and holds their replies.
    pub client: Client,
    /// The options of clients that adopt a queue.
    options: Options,
    link: Arc<Link>,
    attendance: Mutex<Attendance>,
    adopted: Mutex<HashMap<String, Arc<Adopted>>>,
    permits: FollowPermits,
}

/// A queue that this gateway may have adopted. Locked while it does: a second connection would take half of its replies.
type Adopted = tokio::sync::Mutex<Weak<AdoptedQueue>>;

impl Adoption {
    /// Connects the client for recorded jobs. `options` are those of the gateway's other client; while no gateway consumes the replies,
    /// the broker keeps them for as long as results are kept, but no longer than any job is awaited.
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
            permits: FollowPermits::default(),
        })
    }

    /// Adopts the reply queue of a gateway that is gone. `None`: that gateway is connected, or may come back.
    ///
    /// # Errors
    /// The queue is lost, or the broker does not let this gateway consume it.
    pub async fn adopt(&self, queue: &str) -> Result<Option<Arc<AdoptedQueue>>, NotAdopted> {
        let adopted = self.adopted(queue);
        let mut adopted = adopted.lock().await;
        if let Some(found) = adopted.upgrade().filter(|found| !found.is_left()) {
            return Ok(Some(found));
        }
        match self.look(queue).await {
            Presence::Wait => return Ok(None),
            Presence::Lost => return Err(NotAdopted::Lost),
            Presence::Gone => {}
        }
        let mut options = self.options.clone();
        options.adopt = Some(queue.to_owned());
        // After an error, the queue must again be without a consumer for the whole time before the next attempt.
        let client = Client::connect(options).await.inspect_err(|_| self.forget(queue))?;
        tracing::info!(queue, "adopted the reply queue of a gateway that is gone");
        let new = AdoptedQueue::new(client, Arc::clone(&self.link), queue.to_owned());
        *adopted = Arc::downgrade(&new);
        Ok(Some(new))
    }

    fn adopted(&self, queue: &str) -> Arc<Adopted> {
        // Nothing panics while it holds the lock.
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        // Keep entries that another task is adopting or looking up now.
        adopted.retain(|_, queue| {
            Arc::strong_count(queue) > 1 || queue.try_lock().is_ok_and(|queue| queue.strong_count() > 0)
        });
        Arc::clone(adopted.entry(queue.to_owned()).or_default())
    }

    async fn look(&self, queue: &str) -> Presence {
        let fresh = self.attendance().fresh(queue, Instant::now());
        if let Some(presence) = fresh {
            return presence;
        }
        let depth = self.link.queue(queue).await.ok();
        self.attendance().note(queue, depth, Instant::now())
    }

    /// Forgets the counts of a queue, because another gateway has consumed it since.
    pub fn forget(&self, queue: &str) {
        self.attendance().forget(queue);
    }

    /// Takes a permit to follow one job of this caller.
    ///
    /// # Errors
    /// About how long it takes until one is free: all are taken, or all that the caller may have.
    pub fn permit(&self, caller: &str) -> Result<FollowPermit, Duration> {
        self.permits.permit(caller, Instant::now())
    }

    fn attendance(&self) -> MutexGuard<'_, Attendance> {
        // Nothing panics while it holds the lock.
        self.attendance.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a reply queue was not adopted.
#[derive(Debug, thiserror::Error)]
pub enum NotAdopted {
    #[error("the reply queue is lost")]
    Lost,
    #[error(transparent)]
    Refused(#[from] ConnectError),
}
