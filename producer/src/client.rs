//! The client: publishes jobs, awaits replies.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};
use vramq_schemas::{Encoding, Job};

use crate::actor::{Actor, Shared};
use crate::error::{ConnectError, PublishError};
use crate::key_limits::KeyLimits;
use crate::options::{Options, SubmitOptions};
use crate::outgoing::{EncodedJob, Outgoing};
use crate::pending::{Deadline, Pending};
use crate::registry::{Receivers, Registration, Registry};
use crate::session::Connector;

/// A connection to the broker for publishing jobs and awaiting their results. Cheap to clone; all clones share one
/// reply queue and one bound on jobs in flight. Needs a tokio runtime.
///
/// It reconnects by itself. Jobs that were not confirmed are published again under the same id, and awaited jobs go on waiting. Awaited
/// jobs that were confirmed fail with [`JobError::ReplyQueueLost`](crate::JobError::ReplyQueueLost) if the reply queue is gone by then.
/// [`Client::close`] deletes the reply queue, and so does dropping the last clone and the last [`Pending`].
#[derive(Clone, Debug)]
pub struct Client(Arc<Handle>);

/// Invariant: dropping this ends the actor, because it holds the only sender of `close`.
#[derive(Debug)]
struct Handle {
    encoding: Encoding,
    /// Whether it withdraws jobs whose callers give up on them.
    withdraws: bool,
    /// Named by each job.
    user_id: Option<ShortString>,
    timeout: Option<Duration>,
    reply_queue: Option<ShortString>,
    registry: Arc<Registry>,
    shared: Arc<Shared>,
    jobs_in_flight: Arc<Semaphore>,
    key_limits: KeyLimits,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    close: watch::Sender<bool>,
    actor: Mutex<Option<JoinHandle<()>>>,
}

/// Counts since the client connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Replies to jobs that are not in flight: late and repeated replies, and those to jobs whose caller dropped them.
    pub stray_replies: u64,
    /// Items that had been answered before.
    pub duplicate_items: u64,
    /// Sessions that were opened after a lost one.
    pub reconnects: u64,
    /// Jobs that this client has withdrawn, because their callers gave up on them. Some of them may have run.
    pub withdrawn: u64,
}

impl Client {
    /// Connects, with one attempt; a URL converts into [`Options`].
    ///
    /// # Errors
    /// [`ConnectError`], without the URL's credentials. If the connection is lost later, the client waits and
    /// reconnects; that is not an error.
    pub async fn connect(options: impl Into<Options>) -> Result<Self, ConnectError> {
        let options = options.into();
        let reconnect_for = options.reconnect_for;
        let (encoding, jobs_in_flight, timeout) = (options.encoding, options.jobs_in_flight, options.timeout);
        let user_id = options.user_id()?;
        let mut connector = Connector::new(options)?;
        let session = connector.open().await.map_err(|not_opened| not_opened.error)?;
        let registry = Arc::new(Registry::default());
        let shared = Arc::new(Shared::default());
        let (outgoing, jobs) = mpsc::unbounded_channel();
        let (close, closed) = watch::channel(false);
        let (reply_queue, withdraws) = (connector.reply_queue().cloned(), !connector.holds());
        let actor =
            Actor::new(connector, Arc::clone(&registry), Arc::clone(&shared), reconnect_for, jobs, closed);
        Ok(Self(Arc::new(Handle {
            encoding,
            withdraws,
            user_id,
            timeout,
            reply_queue,
            registry,
            shared,
            jobs_in_flight: Arc::new(Semaphore::new(jobs_in_flight.clamp(1, Semaphore::MAX_PERMITS))),
            key_limits: KeyLimits::default(),
            outgoing,
            close,
            actor: Mutex::new(Some(tokio::spawn(actor.run(session)))),
        })))
    }

    /// Publishes a job whose result is to be awaited; resolves when the broker has confirmed it. Run several at a
    /// time: one after the other gives about 1/15 of the rate. Waits while too many jobs are in flight.
    ///
    /// Cancel safety: dropping the future withdraws the job, which may or may not be published by then.
    ///
    /// # Errors
    /// [`PublishError`]; [`is_retryable`](PublishError::is_retryable) says whether trying again makes sense.
    pub async fn submit(&self, job: Job, options: SubmitOptions) -> Result<Pending, PublishError> {
        let handle = &self.0;
        let reply_to = handle.reply_queue.as_ref().ok_or(PublishError::NoReplyQueue)?;
        let deadline = handle.deadline(&options)?;
        let (registration, receivers) = handle.send(job, options, Some(reply_to), deadline).await?;
        Ok(Pending { registration, receivers, deadline, client: handle.clone() })
    }

    /// Publishes a job whose replies go to the model's default reply queue, and returns its id when the broker has
    /// confirmed it.
    ///
    /// # Errors
    /// As [`Client::submit`].
    pub async fn publish(&self, job: Job, options: SubmitOptions) -> Result<String, PublishError> {
        let deadline = self.0.deadline(&options)?;
        let (registration, _) = self.0.send(job, options, None, deadline).await?;
        Ok(registration.id().to_owned())
    }

    /// Awaits a job with `items` inputs that another client has published, for `within` at most. This client must have
    /// [adopted](Options::adopt) that client's reply queue.
    ///
    /// # Errors
    /// The client is closed, or awaits the job already.
    pub async fn await_published(
        &self,
        id: &str,
        items: usize,
        within: Duration,
    ) -> Result<Pending, PublishError> {
        let handle = &self.0;
        let permit = Arc::clone(&handle.jobs_in_flight).acquire_owned().await;
        let permit = permit.map_err(|_| PublishError::Closed)?;
        let registered = handle.registry.register(id, items, permit, true, None);
        let (registration, receivers) =
            registered.ok_or_else(|| PublishError::DuplicateId { id: id.to_owned() })?;
        // If the client ends from here on, it fails this job as well.
        if let Some(end) = handle.shared.end.get() {
            return Err(end.clone());
        }
        handle.registry.mark_confirmed(id, registration.number());
        handle.registry.held.requeue_strays(id);
        let deadline = Instant::now().checked_add(within).map(|at| Deadline { at, after: within });
        Ok(Pending { registration, receivers, deadline, client: handle.clone() })
    }

    /// The queue that replies come to, if there is one.
    pub fn reply_queue(&self) -> Option<&str> {
        self.0.reply_queue.as_ref().map(ShortString::as_str)
    }

    /// How long the client has been without a session, in which case it neither publishes jobs nor takes replies. `None` while it has one.
    /// The time also grows after the client has ended.
    pub fn disconnected_for(&self) -> Option<Duration> {
        self.0.shared.disconnected_at().map(|at| at.elapsed())
    }

    /// Why the client has given up, if the broker refused to let it reconnect. Its jobs have failed as `Disconnected`.
    pub fn refusal(&self) -> Option<&ConnectError> {
        self.0.shared.refusal.get()
    }

    pub fn stats(&self) -> Stats {
        let handle = &self.0;
        Stats {
            stray_replies: handle.registry.stray_replies.load(Ordering::Relaxed),
            duplicate_items: handle.registry.duplicate_items.load(Ordering::Relaxed),
            reconnects: handle.shared.reconnects.load(Ordering::Relaxed),
            withdrawn: handle.registry.withdrawn.load(Ordering::Relaxed),
        }
    }

    /// Withdraws the jobs in flight, which fail with `Closed` here, deletes the reply queue, and closes the connection. Takes a few seconds
    /// at most: about one to wait for the ends of these jobs. Jobs that are answered meanwhile have their results. Without a connection no
    /// job is withdrawn. A client that [holds replies](Options::hold_replies) withdraws nothing, and while jobs are in flight it keeps the
    /// reply queue for others.
    pub async fn close(&self) {
        self.0.close.send_replace(true);
        let actor = self.0.actor.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(actor) = actor
            && let Err(error) = actor.await
        {
            tracing::error!(%error, "the client's task panicked");
        }
    }
}

impl Handle {
    /// Registers and publishes a job, and waits for its confirm.
    async fn send(
        &self,
        job: Job,
        options: SubmitOptions,
        reply_to: Option<&ShortString>,
        deadline: Option<Deadline>,
    ) -> Result<(Registration, Receivers), PublishError> {
        let sending = self.send_without_deadline(job, options, reply_to);
        match deadline {
            None => sending.await,
            Some(Deadline { at, after }) => {
                timeout_at(at, sending).await.unwrap_or(Err(PublishError::Timeout { after }))
            }
        }
    }

    async fn send_without_deadline(
        &self,
        job: Job,
        options: SubmitOptions,
        reply_to: Option<&ShortString>,
    ) -> Result<(Registration, Receivers), PublishError> {
        // Before the permit: a queue that does not answer then costs at most `KEY_JOBS_MAX` permits of the client.
        let place = self.key_limits.place(options.key_of(&job)).await;
        let permit = Arc::clone(&self.jobs_in_flight).acquire_owned().await;
        let permit = permit.map_err(|_| PublishError::Closed)?;
        let withdraws = self.withdraws && reply_to.is_some();
        let model = job.model.clone();
        let EncodedJob { id, items, message, withdrawal } =
            EncodedJob::new(job, &options, self.encoding, self.user_id.as_ref(), reply_to, withdraws).await?;
        let (registration, receivers) = self
            .registry
            .register(&id, items, permit, reply_to.is_some(), withdrawal)
            .ok_or_else(|| PublishError::DuplicateId { id: id.clone() })?;
        let place = place.with_body(message.body.len()).await;
        let (published, result) = oneshot::channel();
        let outgoing =
            Outgoing { id, model, registration: registration.number(), message, published, _place: place };
        self.outgoing.send(outgoing).map_err(|_| self.end())?;
        match result.await.unwrap_or_else(|_| Err(self.end())) {
            Ok(()) => Ok((registration, receivers)),
            Err(error) => {
                // Without a withdrawal: the broker does not have the job, or the client has ended and can publish none. A client that
                // closes has withdrawn it.
                registration.forget();
                Err(error)
            }
        }
    }

    fn deadline(&self, options: &SubmitOptions) -> Result<Option<Deadline>, PublishError> {
        let Some(after) = options.timeout.or(self.timeout) else {
            return Ok(None);
        };
        let at = Instant::now().checked_add(after).ok_or_else(|| PublishError::Option {
            name: "timeout",
            problem: "longer than the clock's range".to_owned(),
        })?;
        Ok(Some(Deadline { at, after }))
    }

    /// Why the client's task has ended.
    fn end(&self) -> PublishError {
        self.shared.end.get().cloned().unwrap_or(PublishError::Closed)
    }
}
