//! Operators' commands that wait for their result: a pause until the broker sends no more jobs, a cancellation until its job is settled.
//! Commands and ends of jobs come in; requests that can be answered go out.

use vramq_schemas::Reason;

use crate::ids::RequestId;
use crate::observation::End;
use crate::sizes::Size;

/// Cancellations in progress at a time. Each is checked whenever a job is settled.
const CANCELS_MAX: usize = 64;

/// Pauses that wait at a time. People request them, and all get the same answer.
const PAUSES_MAX: usize = 64;

/// A job that is to be stopped.
#[derive(Debug)]
struct Cancel {
    job: String,
    request: RequestId,
    /// The operator was told that nothing of the job waits or runs.
    is_stopped: bool,
    /// At least one job with this id ended as cancelled.
    is_cancelled: bool,
}

/// The commands that wait, in one session.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    pauses: Vec<RequestId>,
    cancels: Vec<Cancel>,
}

impl Commands {
    pub(crate) fn sizes(&self) -> [Size; 2] {
        [
            Size::of("cancellations", self.cancels.len(), CANCELS_MAX),
            Size::of("pauses", self.pauses.len(), PAUSES_MAX),
        ]
    }

    /// Records a pause. False if there are too many.
    pub(crate) fn wait_for_pause(&mut self, request: RequestId) -> bool {
        let has_room = self.pauses.len() < PAUSES_MAX;
        if has_room {
            self.pauses.push(request);
        }
        has_room
    }

    pub(crate) fn has_pauses(&self) -> bool {
        !self.pauses.is_empty()
    }

    pub(crate) fn take_pauses(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.pauses)
    }

    /// Records a cancellation. False if there are too many.
    pub(crate) fn cancel(&mut self, job: String, request: RequestId) -> bool {
        let has_room = self.cancels.len() < CANCELS_MAX;
        if has_room {
            self.cancels.push(Cancel { job, request, is_stopped: false, is_cancelled: false });
        }
        has_room
    }

    /// Whether a waiting cancellation names this job id.
    pub(crate) fn is_cancelled(&self, id: Option<&str>) -> bool {
        !self.cancels.is_empty() && self.cancels.iter().any(|cancel| Some(cancel.job.as_str()) == id)
    }

    /// Nothing of the jobs with this id waits or runs any more. Returns the requests to answer with that, each once.
    pub(crate) fn stopped(&mut self, id: Option<&str>) -> Vec<RequestId> {
        let of_job = self.cancels.iter_mut().filter(|cancel| Some(cancel.job.as_str()) == id);
        let first_time = of_job.filter_map(|cancel| {
            (!std::mem::replace(&mut cancel.is_stopped, true)).then_some(cancel.request)
        });
        first_time.collect()
    }

    /// A job with this id is settled; `others`: jobs with the same id are still held. Returns the requests that are finished, and for each
    /// whether a job ended as cancelled.
    pub(crate) fn end_cancellations(&mut self, id: &str, end: End, others: bool) -> Vec<(RequestId, bool)> {
        let as_asked = matches!(end, End::DeadLettered(Reason::Cancelled) | End::Rejected(Reason::Cancelled));
        for cancel in self.cancels.iter_mut().filter(|cancel| cancel.job == id) {
            cancel.is_cancelled |= as_asked;
        }
        if others {
            return Vec::new();
        }
        let (over, open) = std::mem::take(&mut self.cancels).into_iter().partition(|cancel| cancel.job == id);
        self.cancels = open;
        let over: Vec<Cancel> = over;
        over.into_iter().map(|cancel| (cancel.request, cancel.is_cancelled)).collect()
    }
}

/// How a job ended, as text for the operator.
pub(crate) fn describe(end: End) -> String {
    match end {
        End::Replied | End::AlreadySettled => "it was answered".to_owned(),
        End::Requeued(_) => "it was requeued; cancel it where it is delivered next".to_owned(),
        End::DeadLettered(reason) | End::Rejected(reason) => format!("it is a dead letter, as {reason}"),
        End::Withdrawn => "its caller withdrew it".to_owned(),
        End::GivenBack => "it was given back to its queue; cancel it where it is delivered next".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancellation_is_over_when_the_last_job_of_the_id_is_settled() {
        let mut commands = Commands::default();
        assert!(
            commands.cancel("a".to_owned(), RequestId(1)) && commands.cancel("b".to_owned(), RequestId(2))
        );
        assert!(
            commands.is_cancelled(Some("a"))
                && !commands.is_cancelled(Some("c"))
                && !commands.is_cancelled(None)
        );
        assert_eq!(commands.stopped(Some("a")), [RequestId(1)]);
        assert_eq!(commands.stopped(Some("a")), []);
        assert_eq!(commands.end_cancellations("a", End::DeadLettered(Reason::Cancelled), true), []);
        assert_eq!(commands.end_cancellations("a", End::Replied, false), [(RequestId(1), true)]);
        assert_eq!(commands.end_cancellations("b", End::Replied, false), [(RequestId(2), false)]);
        assert!(!commands.is_cancelled(Some("a")));
    }

    #[test]
    fn cancellations_are_bounded() {
        let mut commands = Commands::default();
        assert!((0..CANCELS_MAX).all(|n| commands.cancel(n.to_string(), RequestId(0))));
        assert!(!commands.cancel("one more".to_owned(), RequestId(0)));
    }

    #[test]
    fn pauses_are_bounded() {
        let mut commands = Commands::default();
        assert!((0..PAUSES_MAX).all(|_| commands.wait_for_pause(RequestId(0))));
        assert!(!commands.wait_for_pause(RequestId(1)));
        assert_eq!(commands.take_pauses().len(), PAUSES_MAX);
        assert!(commands.wait_for_pause(RequestId(1)));
    }
}
