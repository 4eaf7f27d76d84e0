//! One job of a run: publishes it, awaits its result.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use uuid::Uuid;
use vramq_producer::{
    Client, ItemProgress, Job, JobError, JobFailed, Output, Params, Pending, PublishError, SubmitOptions,
};
use vramq_schemas::topology::check_model_name;

use super::args::{Args, Dtype};
use super::chunks::Chunk;
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::safe;

/// What all jobs of a run have in common.
pub(super) struct JobTemplate {
    model: String,
    params: Params,
    options: SubmitOptions,
    pub(super) no_wait: bool,
    /// The most jobs in flight.
    pub(super) jobs: usize,
    /// Jobs in flight.
    out: AtomicU64,
}

/// The result of a job.
pub(super) struct JobResult {
    pub(super) id: String,
    pub(super) chunk: Chunk,
    /// One entry for each item; `None` or missing without an output.
    pub(super) outputs: Vec<Option<Output>>,
    pub(super) failure: Option<Failure>,
}

pub(super) enum Failure {
    /// Of this job only.
    Job(String),
    /// Every other job would fail as well: the exit code, and the reason.
    Fatal(u8, String),
}

/// Reads `--params`.
pub(super) fn parse_params(text: &str) -> Result<Params, String> {
    serde_json::from_str(text).map(Params).map_err(|e| e.to_string())
}

impl JobTemplate {
    /// # Errors
    /// What is wrong with the arguments.
    pub(super) fn new(args: &Args) -> Result<Self, String> {
        for name in [&args.model].into_iter().chain(&args.routing_key) {
            check_model_name(name).map_err(|e| e.to_string())?;
        }
        let mut params = args.params.clone().unwrap_or_default();
        if let Dtype::F16 = args.dtype {
            params.0.insert("dtype".to_owned(), Value::from("f16"));
        }
        Ok(Self {
            model: args.model.clone(),
            params,
            options: SubmitOptions {
                key: args.routing_key.clone(),
                timeout: args.timeout,
                priority: args.priority,
                expiration: args.expiration,
                batch_hint: args.batch_hint,
                progress: args.progress,
                model_revision: args.model_revision.clone(),
                app_id: args.app_id.clone(),
                ..SubmitOptions::default()
            },
            no_wait: args.no_wait,
            jobs: args.jobs as usize,
            out: AtomicU64::new(0),
        })
    }

    pub(super) fn out(&self) -> u64 {
        self.out.load(Ordering::Relaxed)
    }

    /// Publishes a job and, unless `no_wait`, awaits its result.
    pub(super) async fn run(&self, client: &Client, chunk: Chunk, progress: &Progress) -> JobResult {
        let id = Uuid::now_v7().to_string();
        let job = Job {
            model: self.model.clone(),
            inputs: chunk.items.iter().map(|item| item.input.clone()).collect(),
            params: self.params.clone(),
        };
        let options = SubmitOptions { id: Some(id.clone()), ..self.options.clone() };
        self.out.fetch_add(1, Ordering::Relaxed);
        let (outputs, failure) = if self.no_wait {
            let published = client.publish(job, options).await;
            if published.is_ok() {
                progress.add(chunk.items.len());
            }
            (Vec::new(), published.err().map(|error| publish_failure(client, error)))
        } else {
            match client.submit(job, options).await {
                Ok(pending) => follow(client, pending, chunk.first, progress).await,
                Err(error) => (Vec::new(), Some(publish_failure(client, error))),
            }
        };
        self.out.fetch_sub(1, Ordering::Relaxed);
        JobResult { id, chunk, outputs, failure }
    }
}

/// Awaits a job's result; every part moves the progress. `first` is the place of the job's first item in the input.
async fn follow(
    client: &Client,
    pending: Pending,
    first: usize,
    progress: &Progress,
) -> (Vec<Option<Output>>, Option<Failure>) {
    let mut parts = pending.progress();
    let mut seen = 0;
    let mut answer = std::pin::pin!(pending.outputs());
    let result = loop {
        tokio::select! {
            result = &mut answer => break result,
            Ok(()) = parts.changed() => {
                let now = parts.borrow_and_update().clone();
                progress.add(now.items_done - seen);
                seen = now.items_done;
                progress.show(now.current.map(|current| in_words(first, &current)));
            }
        }
    };
    let (outputs, failure) = match result {
        Ok(outputs) => (outputs.into_iter().map(Some).collect(), None),
        Err(JobError::Failed(JobFailed { reason, error, outputs })) => {
            (outputs, Some(Failure::Job(format!("{reason}: {error}"))))
        }
        Err(error @ (JobError::Timeout { .. } | JobError::InvalidReply(_) | JobError::ReplyQueueLost)) => {
            (Vec::new(), Some(Failure::Job(error.to_string())))
        }
        Err(error @ (JobError::Disconnected(_) | JobError::Closed)) => {
            (Vec::new(), Some(lost(client, error.to_string())))
        }
    };
    // The last part may have arrived with the end. After a timeout, items that were counted stay counted.
    let answered = outputs.iter().flatten().count();
    progress.add(answered.saturating_sub(seen));
    progress.show(None);
    (outputs, failure)
}

/// What a model reports of an item, for the progress.
fn in_words(first: usize, report: &ItemProgress) -> String {
    let (item, percent) = (first + report.item as usize, report.fraction * 100.0);
    let note = safe(&report.note);
    if note.is_empty() {
        format!("item {item}: {percent:.0} %")
    } else {
        format!("item {item}: {percent:.0} % {note}")
    }
}

/// The connection is lost for good: the broker is away, or refuses to let the client reconnect.
fn lost(client: &Client, problem: String) -> Failure {
    let code = if client.refusal().is_some() { exit::REFUSED } else { exit::UNREACHABLE };
    Failure::Fatal(code, problem)
}

fn publish_failure(client: &Client, error: PublishError) -> Failure {
    let problem = error.to_string();
    match error {
        PublishError::Unroutable { .. } | PublishError::QueueFull { .. } | PublishError::Refused { .. } => {
            Failure::Fatal(exit::REFUSED, problem)
        }
        PublishError::Disconnected(_) | PublishError::Closed | PublishError::NoReplyQueue => {
            lost(client, problem)
        }
        PublishError::Model(_)
        | PublishError::Option { .. }
        | PublishError::NoInputs
        | PublishError::TooLarge { .. }
        | PublishError::TooManyItems { .. }
        | PublishError::Encode(_)
        | PublishError::DuplicateId { .. }
        | PublishError::Timeout { .. } => Failure::Job(problem),
    }
}
