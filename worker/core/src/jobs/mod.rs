//! The stages of a job: [`Received`] -> [`Running`] -> [`Settling`] -> [`Confirmed`]. Each stage consumes the one before. So a
//! job cannot be acknowledged before the broker has confirmed its reply, its requeue or its dead letter. A job that is given back
//! goes from [`Settling`] to [`Ended`] without being acknowledged.

mod progress;
mod running;
mod settling;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub(crate) use progress::ReplyExcess;
pub(crate) use running::{NextStep, Running, StopReason};
pub(crate) use settling::{PublishPolicy, Reader, Settling, Step, undeliverable};
use vramq_schemas::JobHeaders;

use crate::action::Run;
use crate::disposition::JobOutcome;
use crate::event::{DecodedJob, Delivery, Now, Source};
use crate::ids::{Fingerprint, JobKey, ModelIndex, QueueIndex, StoreIndex};
use crate::observation::{End, Settled};
use crate::rejection::Rejection;
use crate::sizes::Size;

/// A job's fetch of inputs.
#[derive(Debug)]
struct Fetch {
    stores: Vec<StoreIndex>,
    since: Instant,
}

/// A job that was delivered and is being read.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) delivery: Delivery,
    /// How many workers were lost while they held the job, as the poison policy counts them for this delivery.
    crashes: u32,
    /// Whether its passes have no items of other jobs, because it may be the reason why workers or processes crash.
    runs_alone: bool,
    /// Whether its passes have the device to themselves. If its process dies once more, the job is dead-lettered.
    is_last_try: bool,
    /// The queue that it first came from, whose share its passes take.
    queue: QueueIndex,
    /// The inputs that it refers to are being fetched.
    fetch: Option<Fetch>,
    /// When they were, if it refers to inputs.
    fetched_at: Option<Instant>,
    pub(crate) at: Instant,
    pub(crate) at_ms: u64,
}

impl Received {
    pub(crate) fn new(delivery: Delivery, now: Now) -> Self {
        let queue = QueueIndex(0);
        let runs_alone = delivery.source == Source::Quarantine;
        Self {
            delivery,
            crashes: 0,
            runs_alone,
            is_last_try: false,
            queue,
            fetch: None,
            fetched_at: None,
            at: now.at,
            at_ms: now.unix_ms,
        }
    }

    /// Its passes take the share of this queue.
    pub(crate) fn of_share(mut self, queue: QueueIndex) -> Self {
        self.queue = queue;
        self
    }

    /// Sets the crashes that the poison policy has counted.
    pub(crate) fn set_crashes(&mut self, crashes: u32) {
        self.crashes = crashes;
    }

    /// The job was lost with processes. Its passes get no items of other jobs and, on the last try, the whole device.
    pub(crate) fn run_alone(&mut self, is_last_try: bool) {
        (self.runs_alone, self.is_last_try) = (true, is_last_try);
    }

    pub(crate) fn is_last_try(&self) -> bool {
        self.is_last_try
    }

    pub(crate) fn runs_alone(&self) -> bool {
        self.runs_alone
    }

    pub(crate) fn fetch_begins(&mut self, stores: Vec<StoreIndex>, now: Instant) {
        self.fetch = Some(Fetch { stores, since: now });
    }

    pub(crate) fn fetch_ended(&mut self, now: Instant) {
        (self.fetch, self.fetched_at) = (None, Some(now));
    }

    /// Since when nothing but its reading and the worker itself has kept it from a pass.
    pub(crate) fn complete_since(&self) -> Instant {
        self.fetched_at.unwrap_or(self.at)
    }

    pub(crate) fn is_fetching(&self) -> bool {
        self.fetch.is_some()
    }

    pub(crate) fn is_fetching_from(&self, store: StoreIndex) -> bool {
        self.fetch.as_ref().is_some_and(|fetch| fetch.stores.contains(&store))
    }

    /// The headers of a job that has not run here, with the crashes that the poison policy has counted. If the job is published again, the
    /// new message starts without the broker's count of deliveries, so the headers must keep them.
    pub(crate) fn reached(&self) -> JobHeaders {
        let mut headers = self.delivery.headers.clone().unwrap_or_default();
        headers.crashes = self.crashes();
        headers
    }

    /// The outcome of a job that ends as a dead letter without having run here.
    pub(crate) fn rejected(&self, rejection: Rejection) -> JobOutcome {
        match self.delivery.headers {
            Some(_) => JobOutcome::dead_letter_unrun(self.reached(), rejection),
            None => JobOutcome::DeadLetter { headers: None, rejection },
        }
    }

    /// Workers and processes that were lost while they held it, before this delivery.
    pub(crate) fn crashes(&self) -> u32 {
        self.delivery.headers.as_ref().map_or(0, |headers| headers.crashes).max(self.crashes)
    }

    /// How long the job had waited at `until`: since its publishing, or since its delivery if the publisher gave no time.
    pub(crate) fn waited(&self, until: Instant) -> Duration {
        let before = self.delivery.published_ms.map_or(0, |ms| self.at_ms.saturating_sub(ms));
        Duration::from_millis(before) + until.saturating_duration_since(self.at)
    }

    /// Whether its `expiration` has passed. The broker drops expired jobs from its queue. This check is for jobs that waited here, or whose
    /// expiration counts from a publishing time in the message. The system clock is read once, at the delivery: setting the clock forward
    /// later does not end a job.
    pub(crate) fn is_expired(&self, now: Instant) -> bool {
        let held_ms = u64::try_from(now.saturating_duration_since(self.at).as_millis()).unwrap_or(u64::MAX);
        self.delivery.expires_at_ms.is_some_and(|at| self.at_ms.saturating_add(held_ms) > at)
    }

    /// Why it ends if it is expired.
    pub(crate) fn expired(&self) -> Rejection {
        let Delivery { published_ms, expires_at_ms, .. } = self.delivery;
        Rejection::expired(published_ms, self.at_ms, expires_at_ms)
    }

    /// The stage after reading. `reply_max`: the most bytes of all its replies together.
    pub(crate) fn decoded(self, decoded: DecodedJob, reply_max: u64) -> Running {
        Running::new(self, decoded, reply_max)
    }

    /// The settling stage of a job that will not run here.
    pub(crate) fn settle(self, outcome: JobOutcome, now: Instant) -> Settling {
        let outcome = running::back_to(self.delivery.source, outcome);
        Settling::new(self, outcome, None, None, now)
    }
}

/// A job about which the broker has confirmed every publication. Only its ack is due.
#[derive(Debug)]
pub(crate) struct Confirmed(Ended);

impl Confirmed {
    /// The job's end, after its ack was sent or could not be.
    pub(crate) fn into_ended(self) -> Ended {
        self.0
    }

    pub(crate) fn ended(&self) -> &Ended {
        &self.0
    }
}

/// How a job ended here: by an ack, or given back to the broker.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) received: Received,
    pub(crate) end: End,
    first_pass_at: Option<Instant>,
    ready_at: Instant,
}

impl Ended {
    pub(crate) fn to_settled(&self, acked: bool) -> Settled {
        let Delivery { job, model, caller, .. } = &self.received.delivery;
        let (job, model, caller) = (*job, *model, caller.clone());
        let (end, first_pass_at, ready_at) = (self.end, self.first_pass_at, self.ready_at);
        Settled { job, model, caller, end, acked, first_pass_at, ready_at }
    }
}

/// A job that is held and not yet [`Confirmed`].
#[derive(Debug)]
pub(crate) enum Job {
    Received(Box<Received>),
    Running(Box<Running>),
    Settling(Box<Settling>),
}

impl Job {
    pub(crate) fn received(&self) -> &Received {
        match self {
            Self::Received(received) => received,
            Self::Running(running) => &running.received,
            Self::Settling(settling) => settling.received(),
        }
    }
}

/// The jobs that this worker holds and that are not [`Confirmed`] yet, in the order of their delivery. Actions about several jobs follow
/// that order, so the same events give the same actions. Bounded by the slots.
#[derive(Debug, Default)]
pub(crate) struct JobTable(BTreeMap<JobKey, Job>);

impl JobTable {
    pub(crate) fn insert(&mut self, job: Job) {
        self.0.insert(job.received().delivery.job, job);
    }

    pub(crate) fn get(&self, key: JobKey) -> Option<&Job> {
        self.0.get(&key)
    }

    pub(crate) fn running(&self, key: JobKey) -> Option<&Running> {
        match self.0.get(&key)? {
            Job::Running(running) => Some(running),
            _ => None,
        }
    }

    pub(crate) fn running_mut(&mut self, key: JobKey) -> Option<&mut Running> {
        match self.0.get_mut(&key)? {
            Job::Running(running) => Some(running),
            _ => None,
        }
    }

    pub(crate) fn settling(&self, key: JobKey) -> Option<&Settling> {
        match self.0.get(&key)? {
            Job::Settling(settling) => Some(settling),
            _ => None,
        }
    }

    /// How many jobs of a model have a dead letter that was refused and is offered again.
    pub(crate) fn with_refused_dead_letter(&self, model: ModelIndex) -> usize {
        let is_one = |job: &&Job| match job {
            Job::Settling(settling) => {
                settling.received().delivery.model == model
                    && settling.reader() == Reader::Operator
                    && settling.tries() > 0
            }
            _ => false,
        };
        self.0.values().filter(is_one).count()
    }

    pub(crate) fn settling_mut(&mut self, key: JobKey) -> Option<&mut Settling> {
        match self.0.get_mut(&key)? {
            Job::Settling(settling) => Some(settling),
            _ => None,
        }
    }

    pub(crate) fn take_received(&mut self, key: JobKey) -> Option<Received> {
        self.take_if(key, |job| match job {
            Job::Received(received) => Ok(*received),
            other => Err(other),
        })
    }

    /// Given so many unacknowledged ones.
    pub(crate) fn size(&self, unacked: usize) -> Size {
        Size::of("jobs", self.0.len(), unacked)
    }

    pub(crate) fn take_running(&mut self, key: JobKey) -> Option<Running> {
        self.take_if(key, |job| match job {
            Job::Running(running) => Ok(*running),
            other => Err(other),
        })
    }

    pub(crate) fn take_settling(&mut self, key: JobKey) -> Option<Settling> {
        self.take_if(key, |job| match job {
            Job::Settling(settling) => Ok(*settling),
            other => Err(other),
        })
    }

    /// Removes a job if it is at the stage that `stage` returns. `Err` puts the job back.
    fn take_if<T>(&mut self, key: JobKey, stage: impl FnOnce(Job) -> Result<T, Job>) -> Option<T> {
        stage(self.0.remove(&key)?).map_err(|job| self.insert(job)).ok()
    }

    /// The jobs whose items wait or run, in the order of their delivery.
    pub(crate) fn running_keys(&self) -> Vec<JobKey> {
        self.0.iter().filter(|(_, job)| matches!(job, Job::Running(_))).map(|(key, _)| *key).collect()
    }

    /// Changes each running job.
    pub(crate) fn for_each_running(&mut self, change: impl Fn(&mut Running)) {
        let running = self.0.values_mut().filter_map(|job| match job {
            Job::Running(running) => Some(running.as_mut()),
            _ => None,
        });
        running.for_each(change);
    }

    /// The running jobs for which `is` holds, in the order of their delivery.
    pub(crate) fn running_where(&self, is: impl Fn(JobKey, &Running) -> bool) -> Vec<JobKey> {
        let mut keys = self.running_keys();
        keys.retain(|key| self.running(*key).is_some_and(|job| is(*key, job)));
        keys
    }

    /// The jobs that are not read yet and for which `is` holds, in the order of their delivery.
    pub(crate) fn received_where(&self, is: impl Fn(&Received) -> bool) -> Vec<JobKey> {
        let is_meant = |job: &Job| matches!(job, Job::Received(received) if is(received));
        self.0.iter().filter(|(_, job)| is_meant(job)).map(|(key, _)| *key).collect()
    }

    /// Those whose inputs are being fetched.
    pub(crate) fn fetching_where(&self, is: impl Fn(&Received) -> bool) -> Vec<JobKey> {
        self.received_where(|received| received.is_fetching() && is(received))
    }

    /// The models of the jobs that have been fetching or settling for at least `least`, without large and quarantined jobs.
    pub(crate) fn stalled_for(&self, least: Duration, now: Instant) -> impl Iterator<Item = ModelIndex> {
        self.0.values().filter_map(move |job| {
            let since = match job {
                Job::Received(received) => received.fetch.as_ref()?.since,
                Job::Running(_) => return None,
                Job::Settling(settling) => settling.since(),
            };
            let Delivery { model, source, .. } = job.received().delivery;
            let is_meant =
                matches!(source, Source::Jobs(..)) && now.saturating_duration_since(since) >= least;
            is_meant.then_some(model)
        })
    }

    /// Whether a job of this id is held.
    pub(crate) fn has_id(&self, id: &str) -> bool {
        self.0.values().any(|job| job.received().delivery.id.as_deref() == Some(id))
    }

    /// The fingerprints of the messages of a queue's jobs.
    pub(crate) fn messages_of(&self, model: ModelIndex, queue: QueueIndex) -> Vec<Fingerprint> {
        let is_of = |delivery: &Delivery| {
            delivery.model == model && matches!(delivery.source, Source::Jobs(of, _) if of == queue)
        };
        let deliveries = self.0.values().map(|job| &job.received().delivery);
        deliveries.filter(|delivery| is_of(delivery)).map(|delivery| delivery.fingerprint).collect()
    }

    /// The session is lost, and its jobs will be redelivered. Removes all jobs and returns them in the order of their delivery, with their
    /// messages' fingerprints.
    pub(crate) fn forget_all(&mut self) -> Vec<(JobKey, Fingerprint)> {
        let jobs = std::mem::take(&mut self.0).into_iter();
        jobs.map(|(key, job)| (key, job.received().delivery.fingerprint)).collect()
    }
}

/// A part (consecutive finished items) that is being published while the job continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartInFlight {
    pub(crate) run: Run,
    /// How often the broker refused it.
    tries: u32,
}

impl PartInFlight {
    /// Drops the items before `item`, which the caller has received.
    pub(crate) fn taken_up_to(&mut self, item: u32) {
        self.run.skip_to(item);
    }

    /// Counts a refusal by the broker. Returns the refusals so far.
    pub(crate) fn count_refusal(&mut self) -> u32 {
        self.tries += 1;
        self.tries
    }
}
