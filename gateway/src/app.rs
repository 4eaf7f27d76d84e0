//! The state that all requests share, and the permits that a request needs before the gateway handles it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::sync::watch;
use tokio::time::timeout;
use vramq_amqp::Depth;
use vramq_producer::Client;

use crate::adoption::Adoption;
use crate::background_work::BackgroundWork;
use crate::body_memory::BodyMemory;
use crate::broker::fleet::ModelView;
use crate::broker::link::Link;
use crate::broker::outlook::{self, Outlook};
use crate::byte_budget::ByteBudget;
use crate::config::Config;
use crate::drain::Drain;
use crate::files::FileStore;
use crate::in_flight::{InFlight, Permit};
use crate::jobs::{Jobs, ResultStore};
use crate::keys::{Caller, Keys};
use crate::metrics::Metrics;
use crate::operator::Operator;
use crate::outputs::OutputStore;
use crate::problem::Problem;

/// The gateway's state. Clones share it.
#[derive(Clone, Debug)]
pub struct App(Arc<Shared>);

#[derive(Debug)]
pub struct Shared {
    pub config: Config,
    pub keys: Arc<Keys>,
    pub client: Client,
    pub link: Arc<Link>,
    pub jobs: Jobs,
    /// `None`: results are kept in memory only.
    pub results: Option<ResultStore>,
    /// Adopts jobs of gateways with the same result store. `Some` if `results` is.
    pub adoption: Option<Adoption>,
    pub files: Option<FileStore>,
    /// `None`: callers get references to outputs in a store, and cannot download them here.
    pub outputs: Option<OutputStore>,
    /// `None`: dead letters can be read, but not retried or dropped.
    pub operator: Option<Arc<Operator>>,
    pub metrics: Metrics,
    in_flight: InFlight,
    readers: InFlight,
    streams: InFlight,
    pub bodies: BodyMemory,
    /// The memory for jobs that are read, until they are sent.
    pub answers: ByteBudget,
    /// The memory for uploads on their way to their place.
    pub uploads: ByteBudget,
    /// Requests that got no result because the drain ended.
    cut_off: AtomicU64,
    /// The unfinished jobs whose replies this gateway alone takes.
    own_jobs: AtomicUsize,
    /// What a gateway that stops waits for although no request does.
    pub background: BackgroundWork,
    pub drain: watch::Receiver<Drain>,
}

impl std::ops::Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// An unfinished job whose replies this gateway alone takes.
#[derive(Debug)]
pub struct OwnJob(App);

impl Drop for OwnJob {
    fn drop(&mut self) {
        self.0.own_jobs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The configured stores, which outlive the gateway.
#[derive(Debug)]
pub struct Stores {
    /// The result store, and the adoption that lets other gateways take over unfinished jobs.
    pub results: Option<(ResultStore, Adoption)>,
    pub files: Option<FileStore>,
    pub outputs: Option<OutputStore>,
}

/// Counts a request as in flight, for its caller and in total, until all clones are dropped. The response has one clone until it is sent;
/// the job has one, and may end later. A withdrawn job that counts apart (see [`App::admit_withdrawn`]) has none.
///
/// Its time counts in the mean that [`Retry-After`](InFlight) is made of, also if the request is refused after it was admitted, such as for
/// the memory of its body: until then it kept others out. The time of a withdrawn job that keeps its permits does not count.
#[derive(Clone, Debug)]
pub struct Permits {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    all: Permit,
    of_caller: Permit,
}

impl Permits {
    pub(crate) fn new(all: &InFlight, most: usize, of_caller: Permit) -> Result<Self, Problem> {
        match all.enter(most, Instant::now()) {
            Ok(all) => Ok(Self { held: Arc::new(Held { all, of_caller }) }),
            Err(after) => {
                of_caller.unused();
                let message = "this gateway has as many requests in flight as it may have";
                Err(too_many("overloaded", message.to_owned(), after))
            }
        }
    }

    /// Gives the permits back, and their time does not count in the mean. With clones left, the last one ends them as usual.
    pub(crate) fn unused(self) {
        if let Some(Held { all, of_caller }) = Arc::into_inner(self.held) {
            all.unused();
            of_caller.unused();
        }
    }
}

/// How long a gateway that stops waits for the ends of jobs that their callers have withdrawn: a worker that is not busy reports them
/// within milliseconds.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(2);

/// The fixed `Retry-After` for when there is no estimate: the gateway is stopping, the broker does not answer, or the wait in the queue is
/// unknown.
const FULL_RETRY: Duration = Duration::from_secs(1);

/// The `Retry-After` while no worker takes the model's jobs. A worker starts within some seconds; nothing says when one will be started.
pub const NOBODY_RETRY: Duration = Duration::from_secs(10);

impl App {
    pub fn new(
        config: Config,
        client: Client,
        link: Arc<Link>,
        stores: Stores,
        operator: Option<Operator>,
        drain: watch::Receiver<Drain>,
    ) -> Self {
        let (results, adoption) = stores.results.unzip();
        let limits = &config.limits;
        Self(Arc::new(Shared {
            jobs: Jobs::new(config.results.bytes, config.results.keep),
            results,
            adoption,
            in_flight: InFlight::default(),
            readers: InFlight::default(),
            streams: InFlight::default(),
            answers: ByteBudget::new(limits.answers_bytes, limits.answers_bytes_per_key),
            uploads: ByteBudget::new(limits.uploads_bytes, limits.uploads_bytes_per_key),
            bodies: BodyMemory::new(limits.bodies_bytes, limits.bodies_bytes_per_key),
            metrics: Metrics::default(),
            cut_off: AtomicU64::new(0),
            own_jobs: AtomicUsize::new(0),
            background: BackgroundWork::default(),
            keys: Arc::clone(&config.http.keys),
            config,
            client,
            link,
            files: stores.files,
            outputs: stores.outputs,
            operator: operator.map(Arc::new),
            drain,
        }))
    }

    /// Admits a request, before any of its body is read.
    ///
    /// # Errors
    /// The gateway drains or is full, or the caller has its share.
    pub fn admit(&self, caller: &Arc<Caller>) -> Result<Permits, Problem> {
        if *self.drain.borrow() != Drain::Serving {
            return Err(draining());
        }
        let most = self.in_flight_max(caller);
        let of_caller = caller.usage.in_flight.enter(most, Instant::now()).map_err(|after| {
            let message = format!(
                "`{}` may have {most} requests and unfinished jobs in flight, and as many withdrawn jobs that have not ended",
                caller.name
            );
            too_many("too_many_in_flight", message, after)
        })?;
        let permits = Permits::new(&self.in_flight, self.config.limits.in_flight, of_caller)?;
        // Last, so that a request that is refused for another reason does not count.
        if let Some(per_minute) = caller.requests_per_minute
            && let Err(after) = caller.usage.take_request(per_minute, Instant::now())
        {
            permits.unused();
            let message = format!("`{}` may make {per_minute} requests a minute", caller.name);
            return Err(too_many("rate_limit_exceeded", message, after));
        }
        Ok(permits)
    }

    /// Counts a withdrawn job apart from those in flight, if fewer of the caller's are counted than it may have requests in flight.
    pub fn admit_withdrawn(&self, caller: &Caller) -> Option<Permit> {
        caller.usage.withdrawn.enter(self.in_flight_max(caller), Instant::now()).ok()
    }

    /// Admits a request that reads a job's results, which are in memory until they are sent. Readers have their own limit, of the same size
    /// as the one for requests in flight: otherwise a caller whose jobs fill that limit could not read their results.
    ///
    /// # Errors
    /// The gateway is full, or the caller has its share.
    pub fn admit_reader(&self, caller: &Caller) -> Result<Permits, Problem> {
        let most = self.in_flight_max(caller);
        let of_caller = caller.usage.readers.enter(most, Instant::now()).map_err(|after| {
            let message = format!("`{}` may read {most} results at a time", caller.name);
            too_many("too_many_in_flight", message, after)
        })?;
        Permits::new(&self.readers, self.config.limits.in_flight, of_caller)
    }

    /// Admits an event stream or a download, which may take as long as its client likes. They have limits of their own, so that they keep
    /// out no other requests.
    ///
    /// # Errors
    /// The gateway is full, or the caller has its share.
    pub fn admit_stream(&self, caller: &Caller) -> Result<Permits, Problem> {
        let most = self.config.limits.streams_per_key;
        let of_caller = caller.usage.streams.enter(most, Instant::now()).map_err(|after| {
            let message = format!("`{}` may have {most} event streams and downloads at a time", caller.name);
            too_many("too_many_in_flight", message, after)
        })?;
        Permits::new(&self.streams, self.config.limits.streams, of_caller)
    }

    /// Counts a request that gets no result because the drain ends.
    pub fn cut_off(&self) {
        self.cut_off.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests that were [`cut_off`](Self::cut_off).
    pub fn cut_off_count(&self) -> u64 {
        self.cut_off.load(Ordering::Relaxed)
    }

    /// Counts an unfinished job whose replies this gateway alone takes, until the returned value is dropped.
    pub fn own_job(&self) -> OwnJob {
        self.own_jobs.fetch_add(1, Ordering::Relaxed);
        OwnJob(self.clone())
    }

    /// Jobs of [`own_job`](Self::own_job).
    pub fn own_jobs_count(&self) -> usize {
        self.own_jobs.load(Ordering::Relaxed)
    }

    /// Waits for a short time until the withdrawn jobs have ended: by then workers have their withdrawals.
    ///
    /// Leaves all other jobs to the workers, because only its caller may withdraw a job. The reply queue of those that are not recorded ends
    /// with this gateway, so that workers dead-letter them with their results.
    pub async fn leave_unfinished_jobs(&self) {
        if timeout(WITHDRAW_TIMEOUT, self.link.withdrawals.all_ended()).await.is_err() {
            let jobs = self.link.withdrawals.len();
            tracing::warn!(jobs, "stopping: workers have not said yet that all withdrawn jobs have ended");
        }
        let jobs = self.own_jobs_count();
        if jobs > 0 {
            tracing::warn!(
                jobs,
                "stopping before these jobs have ended, and no other gateway can take their replies: workers run the jobs, and dead-letter \
                 them as unroutable, with their results"
            );
        }
    }

    fn in_flight_max(&self, caller: &Caller) -> usize {
        caller.in_flight.unwrap_or(self.config.limits.in_flight_per_key)
    }

    /// A model that workers serve now, if the caller may use it.
    pub async fn served(&self, caller: &Caller, model: &str) -> Option<ModelView> {
        if !caller.may_use(model) {
            return None;
        }
        let look = || self.link.fleet().models(Instant::now()).remove(model);
        if let Some(view) = look() {
            return Some(view);
        }
        self.link.workers_are_known().await;
        look()
    }

    /// Whether a job of this model may be published now.
    ///
    /// # Errors
    /// The caller may not use the model, nobody knows it, nobody takes its jobs, or too many wait.
    pub async fn check_model(&self, caller: &Caller, model: &str) -> Result<(), Problem> {
        vramq_schemas::topology::check_model_name(model)
            .map_err(|e| Problem::invalid(e.to_string()).about("model"))?;
        if !caller.may_use(model) {
            let message = format!("`{}` may not use the model `{model}`", caller.name);
            return Err(Problem::new(StatusCode::FORBIDDEN, "model_not_allowed", message).about("model"));
        }
        let now = Instant::now();
        if let Some(of) = self.link.fleet().model_under(model, now).filter(|of| caller.may_use(of)) {
            return Err(Problem::key_of_a_model(model, &of));
        }
        let depth = self.link.depth(model).await.map_err(|no_answer| {
            let message = format!("{no_answer}; nothing was published");
            Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "broker_unreachable", message, FULL_RETRY)
        })?;
        match depth {
            Depth::NoQueue => return Err(Problem::unknown_model(model)),
            Depth::Messages { consumers: 0, .. } if !self.has_takers(model) => {
                let message = format!("no worker takes jobs of the model `{model}` at the moment");
                return Err(Problem::busy(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "no_workers",
                    message,
                    NOBODY_RETRY,
                ));
            }
            Depth::Messages { .. } | Depth::NoPermission => {}
        }
        let most = self.config.limits.queue;
        match self.estimate(model) {
            Some(Outlook { depth, wait: Some(wait) }) if wait > most => {
                let message = format!(
                    "{depth} jobs of the model `{model}` wait: a new job would wait for about {:.0} s, and this gateway accepts at most {} s",
                    wait.as_secs_f64(),
                    most.as_secs()
                );
                let after = self.accepted_after(model);
                Err(Problem::busy(StatusCode::TOO_MANY_REQUESTS, "queue_too_long", message, after))
            }
            _ => Ok(()),
        }
    }

    /// Whether a worker says that it takes jobs which this gateway publishes for a model.
    fn has_takers(&self, model: &str) -> bool {
        let key = self.key(model);
        self.link.fleet().takes(model, key.as_deref().unwrap_or(model), Instant::now())
    }

    /// The key under which jobs of a model are published, by the last count of its queue, if that is not its name.
    pub fn key(&self, model: &str) -> Option<String> {
        self.link.queues().key(model).map(str::to_owned)
    }

    /// When a job of a model that is refused now will be accepted.
    pub fn accepted_after(&self, model: &str) -> Duration {
        let after = self.estimate(model).and_then(|outlook| outlook.accepted_after(self.config.limits.queue));
        after.unwrap_or(FULL_RETRY)
    }

    /// What awaits a job of a model, by the last count of its queue; `None` if it was never counted.
    pub fn estimate(&self, model: &str) -> Option<Outlook> {
        let now = Instant::now();
        let queues = self.link.queues();
        let depth = queues.fresh(model, now).or_else(|| queues.last(model));
        let key = queues.key(model).unwrap_or(model).to_owned();
        drop(queues);
        let Some(Depth::Messages { ready, .. }) = depth else { return None };
        let rate = self.link.fleet().jobs_per_s(model, &key, now);
        Some(Outlook { depth: ready, wait: outlook::wait(ready, rate) })
    }
}

/// Nothing was published.
pub fn draining() -> Problem {
    Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "draining", "this gateway is stopping", FULL_RETRY)
}

fn too_many(code: &'static str, message: String, after: Duration) -> Problem {
    Problem::busy(StatusCode::TOO_MANY_REQUESTS, code, message, after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_refused_because_of_others_says_nothing_of_how_long_those_of_its_caller_take() {
        const HALF_MINUTE: Duration = Duration::from_secs(30);
        let (all, of_caller, now) = (InFlight::default(), InFlight::default(), Instant::now());
        let _of_others = all.enter(1, now).unwrap();
        let _before = of_caller.enter(2, now).unwrap();
        let refused = Permits::new(&all, 1, of_caller.enter(2, now).unwrap()).unwrap_err();
        assert_eq!(refused.code, "overloaded");
        // None has ended yet, so the one before is expected to take as long again.
        assert_eq!(of_caller.enter(1, now + HALF_MINUTE).unwrap_err(), HALF_MINUTE);
    }
}
