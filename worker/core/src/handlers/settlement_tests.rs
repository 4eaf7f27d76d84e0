//! Tests of parts that are not taken.

use vramq_schemas::{JobHeaders, Reason};

use crate::action::{Action, Publication};
use crate::event::{Event, PassResult, PublicationOutcome};
use crate::handlers::test_worker::{Worker, replied};
use crate::ids::JobKey;

const JOB: JobKey = JobKey(1);

/// More than a part's worth of bytes.
const LARGE: usize = 2 * 1024 * 1024;

/// The queue was deleted after it had taken some replies of the part.
#[test]
fn a_dead_letter_counts_the_items_of_a_part_that_the_caller_has() {
    let mut worker = Worker::new();
    worker.job(JOB.0, 16, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(LARGE); 8]);
    assert_eq!(replied(&actions), [(JOB, 8, false)]);
    assert!(worker.apply(Event::RepliesTaken { job: JOB, up_to: 5 }).is_empty());
    let outcome = PublicationOutcome::Unroutable { destination: "replies".to_owned() };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    let is_beside =
        |action: &Action| matches!(action, Action::Publish { publication: Publication::DeadReplies(_), .. });
    assert!(actions.iter().any(is_beside), "{actions:?}");
    let outcome = PublicationOutcome::Confirmed { messages: 1 };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    let letter = actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
            Some((headers.as_ref()?.items_done, rejection.reason))
        }
        _ => None,
    });
    assert_eq!(letter, Some((5, Reason::Unroutable)), "{actions:?}");
}
