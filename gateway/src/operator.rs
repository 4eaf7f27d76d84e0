//! Actions of operators on dead letters: they run as a second user of the broker, with the plan, the lock and the log of `vramq
//! dlq`.

mod request;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use serde::Serialize;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::sync::watch;
use tokio::time::sleep;
use vramq_dlq::archive::{self, Archive};
use vramq_dlq::audit_log::AuditLog;
use vramq_dlq::destination::Target;
use vramq_dlq::plan::{Kinds, Plan, Query};
use vramq_dlq::republish::Changes;
use vramq_dlq::scan::{self, Planned};
use vramq_dlq::transfer::{Ended, TransferReport, Transfers};
use vramq_dlq::{Access, Error, Stop, Stops};

use crate::broker::dead_letters::{Collected, Letters};
use crate::config;
use crate::drain::{Drain, LAST_ANSWERS};
use crate::off_runtime::joined;
use crate::problem::{Problem, Retry};
pub use request::ActionRequest;

/// The longest wait for the lock of a queue. People wait half a minute at a page, and proxies wait longer.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(30);

/// The most letters that are counted for the page. Reading 10,000 takes about a second.
const COUNTED_MAX: u64 = 10_000;

/// The most readers at a time; each has its own connection.
const LOOKS_MAX: usize = 4;

/// `Retry-After` while other requests read or act.
const BUSY_RETRY: Duration = Duration::from_secs(2);

/// The most kept letters that the answer names. The action log names all.
const KEPT_MAX: usize = 100;

/// The user of the broker that acts for operators, and where the log and the archives go.
#[derive(Debug)]
pub struct Operator {
    access: Access,
    folder: PathBuf,
    host: String,
    looks: Semaphore,
    /// Only one action at a time, so that no other one changes the queues between an action's plan and its end.
    actions: Arc<Semaphore>,
}

/// The action on dead letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Jobs go to their queue again, results to their reply queue.
    Retry,
    /// Letters are archived and removed from the queue.
    Drop,
}

/// The plan of an action, and its result.
#[derive(Debug, Serialize)]
pub struct Report {
    pub action: Action,
    pub model: String,
    /// Letters that the plan has.
    pub letters: u64,
    pub jobs: u64,
    pub results: u64,
    /// Jobs that these results answer, so that a retry does not run them again.
    pub answered: u64,
    /// Letters, of all in the plan, that were retried before and failed again.
    pub retried: u64,
    /// Selected fingerprints that match no letter.
    pub missing: Vec<String>,
    /// What was done; `None` if the action was only planned.
    pub done: Option<Done>,
}

/// What an action has done.
#[derive(Debug, Serialize)]
pub struct Done {
    /// Letters that have left the queue.
    pub moved: u64,
    pub stayed: u64,
    /// The first letters that stayed, each with the reason.
    pub kept: Vec<Kept>,
    /// Letters that were no longer there.
    pub gone: u64,
    /// The file with the dropped letters; `vramq dlq restore` puts them back.
    pub archive: Option<String>,
    /// The action's id in the action log.
    pub action_id: String,
}

/// A letter that stayed in its queue.
#[derive(Debug, Serialize)]
pub struct Kept {
    pub fingerprint: String,
    pub why: String,
}

impl Operator {
    /// Makes the folder, if it is missing.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn open(settings: config::Operator) -> Result<Self, String> {
        let config::Operator { address, folder } = settings;
        std::fs::create_dir_all(&folder)
            .map_err(|e| format!("operator.folder: {}: {e}", folder.display()))?;
        Ok(Self {
            access: Access {
                address,
                connection_name: format!("vramq-gateway operator {}", std::process::id()),
                lock_wait_max: LOCK_WAIT_MAX,
                on_lock_wait: |waiting| tracing::info!("{waiting}"),
            },
            folder,
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            looks: Semaphore::new(LOOKS_MAX),
            actions: Arc::new(Semaphore::new(1)),
        })
    }

    /// Reads a model's dead letters under the lock, so that an action that follows finds all of them in their queue.
    ///
    /// # Errors
    /// The broker's, or too many other requests read.
    pub async fn look(&self, model: &str) -> Result<Letters, Problem> {
        let _permit = self.looks.try_acquire().map_err(|_| others_look())?;
        let mut collected = Collected::default();
        let read = scan::scan_first(&self.access, model, COUNTED_MAX, |letter| {
            collected.add(&letter);
            Ok(())
        });
        match read.await {
            Ok(total) => Ok(collected.finish(total)),
            Err(Error::NoQueue(_)) => Ok(Letters::default()),
            Err(error) => Err(problem(&error)),
        }
    }

    /// Waits until no action runs, at most until `over`. Returns whether none runs.
    pub async fn is_idle_before(&self, over: impl Future<Output = ()>) -> bool {
        tokio::select! {
            biased;
            // The semaphore is never closed.
            _ = self.actions.acquire() => true,
            () = over => false,
        }
    }

    /// Plans an action and, if the operator has confirmed the plan, carries it out. It goes on to its end when the caller hangs
    /// up, and ends early when the gateway does.
    ///
    /// # Errors
    /// Nothing is selected; the plan is not the one that was confirmed; another action runs; the broker's.
    pub async fn act(
        self: &Arc<Self>,
        action: Action,
        request: ActionRequest,
        by: &str,
        drain: watch::Receiver<Drain>,
    ) -> Result<Report, Problem> {
        let query = request.query()?;
        let permit = Arc::clone(&self.actions).try_acquire_owned().map_err(|_| {
            let message = "another action on dead letters runs on this gateway";
            Problem::busy(StatusCode::CONFLICT, "action_running", message, BUSY_RETRY)
        })?;
        let (this, who) = (Arc::clone(self), format!("{by}@{} (gateway)", self.host));
        // Blocks on disk writes, so it must not run on a thread that serves other requests.
        let runtime = Handle::current();
        let acting = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            runtime.block_on(this.plan_and_run(action, request, query, who, drain))
        });
        joined(acting).await
    }

    async fn plan_and_run(
        &self,
        action: Action,
        request: ActionRequest,
        query: Query,
        who: String,
        drain: watch::Receiver<Drain>,
    ) -> Result<Report, Problem> {
        let ActionRequest { model, confirm, .. } = request;
        let planned = scan::plan(&self.access, std::slice::from_ref(&model), &query).await;
        let Planned { plans, missing } = planned.map_err(|error| problem(&error))?;
        let plan = plans.into_iter().next().map(|(_, plan)| plan).unwrap_or_default();
        let Kinds { jobs, results, answered, retried } = plan.kinds();
        let letters = plan.selected.len() as u64;
        let missing = missing.iter().map(|name| name.trim_start_matches("fp:").to_owned()).collect();
        let mut report =
            Report { action, model, letters, jobs, results, answered, retried, missing, done: None };
        let Some(confirmed) = confirm else { return Ok(report) };
        if confirmed != letters {
            let message = format!("there are {letters} such dead letters, not {confirmed}: nothing was done");
            return Err(Problem::new(StatusCode::CONFLICT, "plan_changed", message));
        }
        if letters > 0 {
            report.done = Some(self.run(&report, &plan, who, drain).await?);
        }
        Ok(report)
    }

    async fn run(
        &self,
        report: &Report,
        plan: &Plan,
        who: String,
        drain: watch::Receiver<Drain>,
    ) -> Result<Done, Problem> {
        let (command, past) = match report.action {
            Action::Retry => ("retry", "retried"),
            Action::Drop => ("drop", "dropped"),
        };
        let log = AuditLog::open(&self.folder.join("actions.jsonl"), command, who.clone());
        let audit_log = log.map_err(|error| problem(&error))?;
        let action_id = audit_log.action().to_owned();
        let changes = Changes::default();
        let mut archive = match report.action {
            Action::Retry => None,
            Action::Drop => {
                let path = self.folder.join(archive::file_name(&format!("-{action_id}")));
                Some(Archive::create(&path).map_err(|error| problem(&error))?)
            }
        };
        let path = archive.as_ref().map(|archive| archive.path().to_string_lossy().into_owned());
        let mut target = match &mut archive {
            Some(archive) => Target::File(archive),
            None => Target::Queues { changes: &changes, rate: None },
        };
        let mut transfers = Transfers {
            access: &self.access,
            audit_log,
            detail: json!({"archive": path, "at": "page"}),
            on_moved: &|_| {},
        };
        let mut stops = stopped_by(drain);
        let ended = transfers.run(&report.model, plan, &mut target, &mut stops).await;
        let Ended { report: transferred, error } = ended.map_err(|error| problem(&error))?;
        let early_end = transferred.early_end(past, plan.selected.len(), "look again").join("; ");
        let TransferReport { done, kept, gone, .. } = transferred;
        let (moved, stayed) = (done.len() as u64, kept.len() as u64);
        tracing::info!(
            command,
            model = report.model,
            who,
            moved,
            stayed,
            gone,
            action_id,
            "dead letters moved"
        );
        if let Some(error) = error {
            let Problem { status, code, message, .. } = problem(&error);
            let archived =
                path.map_or(String::new(), |path| format!("; what was dropped is in the gateway's {path}"));
            let message = format!("{message}; {early_end}{archived}");
            return Err(Problem::new(status, code, message).with_retry(Retry::No));
        }
        let kept = kept.into_iter().take(KEPT_MAX);
        let kept = kept.map(|(of, why)| Kept { fingerprint: of.to_string(), why }).collect();
        Ok(Done { moved, stayed, kept, gone: gone as u64, archive: path, action_id })
    }
}

/// Other requests read dead letters.
pub fn others_look() -> Problem {
    let message = "other operators look at dead letters at the moment";
    Problem::busy(StatusCode::TOO_MANY_REQUESTS, "overloaded", message, BUSY_RETRY)
}

/// Requests to end early, made when the gateway's drain is over. The second one comes so early that the action's end is in its log, and its
/// caller hears of it, before the gateway ends.
fn stopped_by(mut drain: watch::Receiver<Drain>) -> Stops {
    let (sender, stops) = Stops::channel();
    tokio::spawn(async move {
        let over = async { drain.wait_for(|drain| *drain == Drain::Over).await.is_ok() };
        tokio::select! {
            true = over => {
                let _ = sender.send(Stop::Terminated).await;
                sleep(LAST_ANSWERS / 2).await;
                let _ = sender.send(Stop::Terminated).await;
            }
            () = sender.closed() => {}
        }
    });
    stops
}

/// The error for the page. Clients must not retry any of them: a person decides.
fn problem(error: &Error) -> Problem {
    let (status, code) = match error {
        Error::Usage(_) => (StatusCode::BAD_REQUEST, "invalid_request"),
        Error::NoQueue(_) => (StatusCode::NOT_FOUND, "not_found"),
        Error::Refused(_) => (StatusCode::BAD_GATEWAY, "broker_refused"),
        Error::Unreachable(_) => (StatusCode::SERVICE_UNAVAILABLE, "broker_unreachable"),
        Error::Stopped(_) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        Error::File(_) | Error::Failed(_) | Error::BrokenPipe => (StatusCode::BAD_GATEWAY, "store"),
    };
    Problem::new(status, code, error.to_string()).with_retry(Retry::No)
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::drain::last_answers_over;

    #[tokio::test]
    async fn the_end_of_a_drain_stops_an_action_and_waits_for_it_no_longer_than_for_answers() {
        let folder = tempfile::tempdir().unwrap();
        let address = "amqp://localhost".parse().unwrap();
        let settings = config::Operator { address, folder: folder.path().to_owned() };
        let operator = Operator::open(settings).unwrap();
        let (drain, drained) = watch::channel(Drain::Serving);
        let over = last_answers_over(drained.clone()).shared();
        assert!(operator.is_idle_before(over.clone()).await);
        let _acting = operator.actions.acquire().await.unwrap();
        let mut stops = stopped_by(drained);
        drain.send_replace(Drain::Over);
        let both = async { (stops.next().await, stops.next().await) };
        let both = tokio::time::timeout(Duration::from_secs(60), both).await.expect("it goes on");
        assert_eq!(both, (Stop::Terminated, Stop::Terminated));
        over.clone().await;
        assert_eq!(operator.is_idle_before(over).now_or_never(), Some(false), "a second wait");
    }
}
