//! Decides what the gateway does about a job's end: what it answers, stores and keeps. No I/O.

use std::sync::Arc;

use axum::http::StatusCode;
use vramq_producer::{Answer, JobError, JobFailed, Reason, Receipt};

use super::Task;
use crate::jobs::claim::Claim;
use crate::jobs::entry::{Failure, State};
use crate::problem::{Problem, Retry};

/// How a job ended.
pub(crate) enum End {
    /// The job was not published. The claim on its name is released when callers know this end.
    Unpublished(Problem, Option<Claim>),
    /// The receipt acknowledges the replies. Other gateways can get them until the end is stored.
    Answered(Result<Answer, JobError>, Option<Receipt>),
    /// Another gateway has stored the end.
    Stored(State),
    /// The job's record is gone, and no gateway has stored the end.
    Unknown,
}

impl End {
    /// Whether the end is an error that no reply reported. The replies may have gone to another gateway.
    pub(super) fn is_without_reply(&self) -> bool {
        matches!(self, Self::Answered(Err(error), _) if !matches!(error, JobError::Failed(_)))
    }

    /// Whether the end stored by another gateway replaces this one. A stored withdrawal always does, because its caller has been told of
    /// it.
    pub(super) fn yields_to(&self, stored: &State) -> bool {
        match (self, stored) {
            (Self::Answered(..), State::Withdrawn) => true,
            _ => self.is_without_reply(),
        }
    }
}

/// What the gateway does about an end.
pub(super) struct Decision {
    /// The state that the job has from now on.
    pub(super) state: State,
    pub(super) receipt: Option<Receipt>,
    pub(super) claim: Option<Claim>,
    pub(super) is_to_be_stored: bool,
    /// Whether this gateway keeps the job for its caller. If not, the name is free here: the job was not published, or another gateway
    /// keeps it.
    pub(super) is_to_be_kept: bool,
}

impl Decision {
    fn known_elsewhere(state: State) -> Self {
        Self { state, receipt: None, claim: None, is_to_be_stored: false, is_to_be_kept: false }
    }
}

impl Task {
    /// Decides what the gateway does about an end.
    pub(super) fn decide(&self, end: End) -> Decision {
        let failed = |problem, outputs, is_published| {
            State::Failed(Arc::new(Failure { problem, outputs, is_published }))
        };
        let (state, receipt, is_to_be_stored) = match end {
            End::Unpublished(problem, claim) => {
                // It names its job only if that may be in the queue. Else the same request may publish it later.
                let is_final = problem.job.is_some();
                let state = failed(problem, Vec::new(), false);
                return Decision {
                    state,
                    receipt: None,
                    claim,
                    is_to_be_stored: is_final,
                    is_to_be_kept: is_final,
                };
            }
            End::Answered(Ok(answer), receipt) => (State::Done(Arc::new(answer)), receipt, true),
            End::Answered(Err(error), receipt) => {
                let problem = Problem::unanswered(&error).of_job(&self.entry.message_id);
                // The replies still come, and another gateway can take them.
                let is_left = self.recorded().is_some()
                    && matches!(error, JobError::Closed | JobError::Disconnected(_));
                let state = match error {
                    // The caller withdrew the job at another gateway.
                    JobError::Failed(JobFailed { reason: Reason::Withdrawn, .. })
                        if self.recorded().is_some() =>
                    {
                        State::Withdrawn
                    }
                    JobError::Failed(JobFailed { outputs, .. }) => failed(problem, outputs, true),
                    _ => failed(problem, Vec::new(), true),
                };
                (state, receipt, !is_left)
            }
            // The other gateway has stored and counted this end.
            End::Stored(state) => {
                return Decision::known_elsewhere(state);
            }
            End::Unknown => {
                let message = "the job has ended, and its end is not in the store of results";
                let problem = Problem::new(StatusCode::BAD_GATEWAY, "store", message).with_retry(Retry::No);
                let state = failed(problem.of_job(&self.entry.message_id), Vec::new(), true);
                return Decision::known_elsewhere(state);
            }
        };
        Decision { state, receipt, claim: None, is_to_be_stored, is_to_be_kept: true }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_an_error_without_a_reply_may_be_anothers_answer() {
        let failed = JobFailed { reason: Reason::Withdrawn, error: String::new(), outputs: Vec::new() };
        let late = JobError::Timeout { after: Duration::ZERO, items_done: 0, items: 1 };
        for (error, expected) in
            [(late, true), (JobError::ReplyQueueLost, true), (JobError::Failed(failed), false)]
        {
            assert_eq!(End::Answered(Err(error), None).is_without_reply(), expected);
        }
        assert!(!End::Unknown.is_without_reply());
    }

    #[test]
    fn an_answer_yields_to_a_withdrawal_alone() {
        let answer = || Answer {
            outputs: Vec::new(),
            tokens: None,
            model_revisions: Vec::new(),
            worker: String::new(),
            queued_ms: 1,
            ran_ms: 2,
        };
        let done = State::Done(Arc::new(answer()));
        let failed = JobFailed { reason: Reason::Withdrawn, error: String::new(), outputs: Vec::new() };
        for (end, to_done) in [
            (Ok(answer()), false),
            (Err(JobError::Failed(failed)), false),
            (Err(JobError::ReplyQueueLost), true),
        ] {
            let end = End::Answered(end, None);
            assert!(end.yields_to(&State::Withdrawn));
            assert_eq!(end.yields_to(&done), to_done);
        }
        assert!(!End::Unknown.yields_to(&State::Withdrawn));
    }
}
