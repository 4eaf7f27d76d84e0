//! Tests of preparing items ahead of their passes: how many are prepared, when more are requested, and when that stops.

use vramq_schemas::{JobHeaders, Reason};

use crate::action::{Action, PassOrder, Publication};
use crate::event::{DecodedJob, Event, PassResult, Source};
use crate::handlers::test_worker::{Worker, replied, requeued};
use crate::ids::JobKey;
use crate::rejection::Rejection;

const JOB: JobKey = JobKey(1);

/// The largest cost of a pass of the worker's model: eight items of cost 1.
const PASS: usize = 8;

/// How many items a job has in the shell, and how many of them were prepared.
struct Shell {
    items: u32,
    prepared: u32,
}

impl Shell {
    fn next(&mut self, cost: usize) -> Vec<usize> {
        let count = (cost as u32).min(self.items - self.prepared);
        self.prepared += count;
        vec![1; count as usize]
    }
}

/// A large job of a model's queue of large jobs, read as far as the core asked.
fn large_job(worker: &mut Worker, items: u32) -> (Shell, Vec<Action>) {
    let actions = worker.arrives(1, Source::Bulk(crate::ids::ConsumerId(9)), JobHeaders::default());
    let cost = actions.iter().find_map(|action| match action {
        Action::Decode { job: JOB, cost } => Some(*cost),
        _ => None,
    });
    let mut shell = Shell { items, prepared: 0 };
    let costs = shell.next(cost.unwrap());
    let decoded = Event::Decoded { job: JOB, result: Ok(DecodedJob { items_total: items, costs }) };
    let actions = worker.apply(decoded);
    (shell, actions)
}

/// The cost that is to be prepared.
fn asked(actions: &[Action]) -> Option<usize> {
    actions.iter().find_map(|action| match action {
        Action::Prepare { job: JOB, cost } => Some(*cost),
        _ => None,
    })
}

fn orders(actions: &[Action]) -> Vec<PassOrder> {
    let orders = actions.iter().filter_map(|action| match action {
        Action::Run(order) => Some(order.clone()),
        _ => None,
    });
    orders.collect()
}

#[test]
fn items_are_prepared_a_few_passes_ahead_until_all_have_run() {
    let mut worker = Worker::new();
    let (mut shell, actions) = large_job(&mut worker, 1000);
    assert_eq!((shell.prepared, asked(&actions)), (4 * PASS as u32 + 1, None));
    let (mut running, mut ran, mut answered) = (Vec::new(), 0, 0);
    let mut actions = worker.apply(Event::Idle);
    while answered < 1000 {
        running.extend(orders(&actions));
        if let Some(cost) = asked(&actions) {
            let costs = shell.next(cost);
            actions = worker.apply(Event::Prepared { job: JOB, result: Ok(costs) });
            assert!(asked(&actions).is_none());
            actions.extend(worker.apply(Event::Idle));
            continue;
        }
        assert!(shell.prepared - ran <= 12 * PASS as u32, "{} prepared, {ran} have run", shell.prepared);
        let order = running.remove(0);
        ran += order.items.len() as u32;
        let outputs = vec![Some(200_000); order.items.len()];
        actions = worker.ends(&order, PassResult::Done, outputs);
        for (job, items, is_last) in replied(&actions) {
            answered += items;
            assert_eq!((job, is_last), (JOB, answered == 1000));
            let outcome = crate::event::PublicationOutcome::Confirmed { messages: 1 };
            actions.extend(worker.apply(Event::Published { job, outcome }));
        }
        actions.extend(worker.apply(Event::Idle));
    }
    assert_eq!(shell.prepared, 1000);
}

#[test]
fn a_small_job_is_prepared_whole() {
    let mut worker = Worker::new();
    let (shell, actions) = large_job(&mut worker, 3 * PASS as u32);
    assert_eq!((shell.prepared, asked(&actions)), (3 * PASS as u32, None));
    let actions = worker.apply(Event::Idle);
    assert!(!orders(&actions).is_empty() && asked(&actions).is_none());
}

#[test]
fn whether_a_job_is_large_is_known_from_what_is_prepared_at_first() {
    let mut worker = Worker::new();
    worker.arrives(1, worker.source(), JobHeaders::default());
    let costs = vec![1; 4 * PASS + 1];
    let decoded = Event::Decoded { job: JOB, result: Ok(DecodedJob { items_total: 60_000, costs }) };
    let actions = worker.apply(decoded);
    assert_eq!(requeued(&actions).len(), 1, "{actions:?}");
    assert!(asked(&actions).is_none());
}

#[test]
fn an_item_that_cannot_be_prepared_ends_the_job_after_what_runs() {
    let mut worker = Worker::new();
    large_job(&mut worker, 1000);
    let actions = worker.apply(Event::Idle);
    let running = orders(&actions);
    assert!(asked(&actions).is_some() && running.len() == 3);
    let rejection = Rejection::new(Reason::InvalidInput, "inputs[40]: no token");
    let actions = worker.apply(Event::Prepared { job: JOB, result: Err(rejection) });
    assert!(orders(&actions).is_empty());
    let mut actions = Vec::new();
    for order in &running {
        actions = worker.ends(order, PassResult::Done, vec![Some(10); order.items.len()]);
    }
    // The finished items are published first.
    assert_eq!(replied(&actions), [(JOB, 3 * PASS as u32, false)]);
    let outcome = crate::event::PublicationOutcome::Confirmed { messages: 1 };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    let letter = actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { rejection, headers }, .. } => {
            Some((rejection.reason, headers.as_ref().map(|headers| headers.items_done)))
        }
        _ => None,
    });
    assert_eq!(letter, Some((Reason::InvalidInput, Some(3 * PASS as u32))), "{actions:?}");
}

#[test]
fn items_that_come_after_the_job_has_left_are_dropped() {
    let mut worker = Worker::new();
    large_job(&mut worker, 1000);
    let running = orders(&worker.apply(Event::Idle));
    let stops = worker.apply(Event::StopRequested { signal: "SIGTERM" });
    for action in stops {
        if let Action::StopConsumer { consumer, .. } = action {
            worker.apply(Event::ConsumerEnded { consumer });
        }
    }
    let actions = worker.apply(Event::Prepared { job: JOB, result: Ok(vec![1; 100]) });
    assert!(orders(&actions).is_empty() && asked(&actions).is_none());
    let mut actions = worker.apply(Event::Idle);
    for order in &running {
        actions = worker.ends(order, PassResult::Done, vec![Some(10); order.items.len()]);
    }
    assert!(orders(&actions).is_empty());
    assert_eq!(
        replied(&actions),
        [(JOB, 3 * PASS as u32, false)],
        "a drain requeues it at once: {actions:?}"
    );
    // The job is already settled, so its late items are ignored.
    worker.apply(Event::Prepared { job: JOB, result: Ok(vec![1; 100]) });
}
