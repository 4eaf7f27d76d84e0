//! The task of one job: publishes the job, follows it, and after a withdrawal waits until the job has ended.

mod end;
mod records;
mod withdrawn;

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::runtime::Handle;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use uuid::Uuid;
use vramq_producer::{Client, Input, Job, JobError, Params, Pending, Progress, SubmitOptions};
use vramq_schemas::ItemProgress;
use vramq_schemas::headers::{REQUEST_ID, TENANT};
use vramq_schemas::output_name::tenant_of;
use vramq_schemas::withdrawal::{self, Digest};

use crate::app::{App, OwnJob, Permits, draining};
use crate::body_memory::BodyRoom;
use crate::config::Broker;
use crate::drain::Drain;
use crate::jobs::claim::{ABANDONED_AFTER, Claim};
use crate::jobs::earlier::JobName;
use crate::jobs::entry::{Entry, PROGRESS, State};
use crate::jobs::in_time::in_time;
use crate::jobs::registry::Added;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;
use crate::trace::Trace;
use end::Decision;
pub(crate) use end::End;
pub(crate) use records::StoreUnreadable;
pub(crate) use withdrawn::withdraw;

/// How long a job is awaited, from its submission to its last reply. The client library ends the wait.
pub const JOB_MAX: Duration = Duration::from_secs(3600);

/// The interval of `progress` events about the queue, for clients that follow a waiting job.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

/// The job that a request asks for.
#[derive(Debug)]
pub struct Submission {
    pub caller: Arc<Caller>,
    /// The caller's own name for the job; a new UUID if `None`.
    pub name: Option<JobName>,
    pub idempotency_key: Option<String>,
    /// Whether the caller can ask for the job later.
    pub kept: bool,
    pub model: String,
    pub inputs: Vec<Input>,
    pub params: Params,
    pub batch_hint: Option<u32>,
    pub model_revision: Option<String>,
    pub fingerprint: [u8; 32],
    pub trace: Trace,
    pub permits: Permits,
    /// The request's share of the memory for bodies.
    pub body: BodyRoom,
    /// The claim on the job's name, if other gateways could publish the same job.
    pub claim: Option<Claim>,
}

/// Starts a job, or finds the one that the same request has started before.
///
/// # Errors
/// Its id or idempotency key stands for another request; or the gateway stops, and would not await the job.
pub fn start(app: &App, submission: Submission) -> Result<Arc<Entry>, Problem> {
    if *app.drain.borrow() == Drain::Over {
        return Err(draining());
    }
    let owner = submission.caller.name.clone();
    let (id, message_id) = match submission.name {
        Some(JobName { id, message_id, .. }) => (id, message_id),
        None => {
            let id = Uuid::now_v7().to_string();
            (id.clone(), id)
        }
    };
    let items = submission.inputs.len();
    let entry = Entry::new(id, message_id, owner, submission.model.clone(), items, submission.fingerprint);
    let entry = Arc::new(entry.called_by(&callers(&app.config.broker, &submission.caller)));
    submission.trace.subject.is_job(&entry.message_id);
    let kept = submission.kept || submission.idempotency_key.is_some();
    if kept && let Added::Existing(before) = app.jobs.add(&entry, submission.idempotency_key.as_deref())? {
        return Ok(before);
    }
    let options = SubmitOptions {
        id: Some(entry.message_id.clone()),
        key: app.key(&submission.model),
        priority: submission.caller.priority,
        batch_hint: submission.batch_hint,
        model_revision: submission.model_revision,
        traceparent: Some(submission.trace.traceparent),
        tracestate: submission.trace.tracestate,
        headers: [
            (withdrawal::DIGEST, Some(Digest::of(&entry.secret).to_string())),
            (REQUEST_ID, Some(submission.trace.request_id)),
            (TENANT, submission.caller.tenant.clone()),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value?)))
        .collect(),
        ..SubmitOptions::default()
    };
    let job = Job { model: submission.model, inputs: submission.inputs, params: submission.params };
    let task = Task {
        app: app.clone(),
        entry: Arc::clone(&entry),
        idempotency_key: submission.idempotency_key,
        kept,
    };
    let held = Some((submission.permits, submission.caller));
    let (body, claim) = (submission.body, submission.claim);
    let own = task.recorded().is_none().then(|| app.own_job());
    if own.is_none() {
        // A job that is published without its record is lost with this gateway: no other one knows whose replies it gets.
        stop_not_before(app, &entry, |state| !matches!(state, State::Publishing));
    }
    tokio::spawn(async move { task.run(task.live(job, options, body, claim), held, own).await });
    Ok(entry)
}

/// Has a gateway that stops wait until the job's state is such, within the time of the drain.
fn stop_not_before(app: &App, entry: &Arc<Entry>, is_such: fn(&State) -> bool) {
    // Without a runtime the process has ended its drain.
    let Ok(runtime) = Handle::try_current() else { return };
    let (work, mut watched) = (app.background.begin(), entry.watch());
    runtime.spawn(async move {
        // An `Err`: the entry is gone, and with it the job's task.
        let _ = watched.wait_for(is_such).await;
        drop(work);
    });
}

/// The callers that workers may see behind a job: the gateway's user, or a tenant if the workers' configuration lets that user name
/// tenants.
pub(crate) fn callers(broker: &Broker, caller: &Caller) -> Vec<Option<String>> {
    let Some(user) = broker.address.user_id().filter(|_| !broker.anonymous) else { return vec![None] };
    let tenant = caller.tenant.as_deref().map(|tenant| Some(tenant_of(user, tenant)));
    [Some(user.to_owned())].into_iter().chain(tenant).collect()
}

/// A job with its entry, on its way to an end.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) app: App,
    pub(crate) entry: Arc<Entry>,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) kept: bool,
}

impl Task {
    /// Follows the job's `life` until its end. After a withdrawal callers have their answer, and the task still follows the job to its end.
    ///
    /// `held` is dropped at the job's end, or at its withdrawal if the job then [counts apart](Self::count_withdrawn). `own` counts the job
    /// among those that are lost with this gateway. It is dropped at the job's end, or as soon as the link repeats the job's withdrawal: a
    /// gateway that stops waits for those.
    pub(crate) async fn run(
        &self,
        life: impl Future<Output = End>,
        held: Option<(Permits, Arc<Caller>)>,
        own: Option<OwnJob>,
    ) {
        let mut life = std::pin::pin!(life);
        let end = tokio::select! {
            end = &mut life => Some(end),
            () = self.entry.withdrawn() => None,
        };
        let Some(end) = end else {
            return self.withdraw(life, held, own).await;
        };
        // Nobody may be waiting for the job, and its end is to be stored all the same.
        let work = self.app.background.begin();
        let is_over = self.end(end).await;
        drop((work, held));
        if is_over {
            // The job has ended for its callers, so nobody waits for the removal.
            self.remove_record().await;
        }
    }

    /// From the publish to the last reply.
    async fn live(&self, job: Job, options: SubmitOptions, body: BodyRoom, claim: Option<Claim>) -> End {
        let model = job.model.clone();
        let client = self.recorded().map_or(&self.app.client, |(_, adoption)| &adoption.client);
        if claim.as_ref().is_some_and(|claim| !claim.is_held()) {
            // This process stood still for long: another gateway may be publishing the job.
            return End::Unpublished(Problem::claimed(&self.entry.id, ABANDONED_AFTER), claim);
        }
        let pending = match client.submit(job, options).await {
            Ok(pending) => pending,
            Err(error) => {
                let after = self.app.accepted_after(&model);
                let problem = Problem::unpublished(&error, &self.entry.message_id, after);
                return End::Unpublished(problem, claim);
            }
        };
        drop(body);
        self.app.link.queues().published(&model);
        self.put_record(client).await;
        // From here on other gateways find the record.
        drop(claim);
        self.entry.happened("queued", self.estimate(), Some(State::Queued));
        self.follow(pending, client).await
    }

    /// Follows a job that is in its queue, by the replies to it.
    pub(crate) async fn follow(&self, pending: Pending, client: &Client) -> End {
        let (reconnects, mut ticks_since) = (client.stats().reconnects, 0_u32);
        let mut progress = pending.progress();
        let mut before = progress.borrow().clone();
        let mut answer = std::pin::pin!(pending.answer_with_receipt());
        let mut ticks = interval_at(Instant::now() + PROGRESS_EVERY, PROGRESS_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // The answer first: its last part is no progress any more.
                biased;
                (answer, receipt) = &mut answer => {
                    if let Err(error @ JobError::InvalidReply(_)) = &answer {
                        self.warn_of(error);
                    }
                    return End::Answered(answer, Some(receipt));
                }
                Ok(()) = progress.changed() => {
                    let now = progress.borrow_and_update().clone();
                    self.progressed(&before, &now);
                    before = now;
                }
                _ = ticks.tick() => {
                    if matches!(self.entry.state(), State::Queued) {
                        self.entry.happened(PROGRESS, self.estimate(), None);
                    }
                    // Another gateway may have finished the job while this one was disconnected, or while both consumed the adopted queue.
                    // Mostly it has not, so this is checked less and less often.
                    let was_away = client.stats().reconnects != reconnects;
                    ticks_since += u32::from(was_away || self.entry.is_taken_elsewhere());
                    if ticks_since.is_power_of_two()
                        && let Some(state) = self.stored_end().await
                    {
                        return End::Stored(state);
                    }
                }
            }
        }
    }

    /// Logs a reply that cannot be read: its publisher is no worker, or a worker that this gateway is too old for. The job fails, unless
    /// it was withdrawn, or another gateway has stored its end.
    fn warn_of(&self, invalid: &JobError) {
        tracing::warn!(
            job = self.entry.message_id,
            model = self.entry.model,
            caller = self.entry.owner,
            error = %invalid,
            "a reply to the job cannot be read, so no further reply to it is taken: look for what publishes such replies, such as a \
             worker of another version"
        );
    }

    /// Records that a part came, or that the model reported progress of an item.
    fn progressed(&self, before: &Progress, now: &Progress) {
        let state = || Some(State::Running { items_done: now.items_done });
        if matches!(self.entry.state(), State::Queued) {
            self.entry.happened("started", json!({}), state());
        }
        if now.items_done != before.items_done {
            let data = json!({"items_done": now.items_done, "items": now.items});
            self.entry.happened("part", data, state());
        }
        // The first report says no more than that the job has started.
        let says = |current: &&ItemProgress| current.fraction > 0.0 || !current.note.is_empty();
        if let Some(current) = now.current.as_ref().filter(says).filter(|_| now.current != before.current) {
            let data = json!({"item": current.item, "fraction": current.fraction, "note": current.note});
            self.entry.happened(PROGRESS, data, state());
        }
    }

    /// The number of jobs in the queue, and the estimated wait in seconds; null if unknown.
    pub(crate) fn estimate(&self) -> serde_json::Value {
        let outlook = self.app.estimate(&self.entry.model);
        json!({
            "queue_depth": outlook.map(|outlook| outlook.depth),
            "estimated_wait_s": outlook.and_then(|outlook| outlook.wait).map(|wait| wait.as_secs_f64()),
        })
    }

    /// Ends the job. Returns whether its record is to be removed: the end is stored, and this gateway has had the last reply or gives up.
    async fn end(&self, mut end: End) -> bool {
        let mut was_withdrawn = false;
        if matches!(end, End::Answered(..))
            && let Some(state) = self.stored_end().await
            && end.yields_to(&state)
        {
            // Another gateway has taken the replies, or has withdrawn the job after its worker had answered.
            was_withdrawn = !end.is_without_reply();
            end = End::Stored(state);
        }
        let Decision { state, receipt, claim, is_to_be_stored, is_to_be_kept } = self.decide(end);
        if is_to_be_stored {
            self.store(&state).await;
            // Acknowledge the replies before the record is removed: without the record no gateway knows whose replies they are.
            drop(receipt);
        }
        let bytes = if is_to_be_kept { self.kept_bytes(&state).await } else { 0 };
        let name = state.as_str();
        if is_to_be_kept {
            self.app.metrics.ended(name);
        } else {
            self.app.jobs.forget(&self.entry, self.idempotency_key.as_deref());
        }
        // Other gateways may publish the job now, or find its end.
        drop(claim);
        let data = match &state {
            State::Done(answer) => json!({
                "items": self.entry.items, "worker": answer.worker, "tokens": answer.tokens,
                "queued_ms": answer.queued_ms, "ran_ms": answer.ran_ms,
            }),
            other => failed(other),
        };
        self.entry.happened(name, data, Some(state));
        if is_to_be_kept {
            self.keep(bytes);
        }
        is_to_be_stored || was_withdrawn
    }

    /// Stores the end before callers hear of it, so that they find it on every gateway.
    async fn store(&self, state: &State) {
        if self.kept
            && let Some(results) = &self.app.results
        {
            in_time(&self.entry.id, "cannot store a result", results.put(&self.entry, state)).await;
        }
    }

    /// The bytes of a job's results that its caller can ask for.
    async fn kept_bytes(&self, state: &State) -> usize {
        if !self.kept {
            return 0;
        }
        let state = state.clone();
        // A JSON output has to be read as a whole, and its size is not known before.
        off_runtime(usize::MAX, move || state.bytes()).await
    }

    fn keep(&self, bytes: usize) {
        if self.kept {
            self.app.jobs.finish(&self.entry, self.idempotency_key.as_deref(), bytes);
        }
    }
}

fn failed(state: &State) -> serde_json::Value {
    match state {
        State::Failed(failure) => json!({"reason": failure.problem.code, "error": failure.problem.message}),
        _ => json!({}),
    }
}
