//! Tests of further queues that cannot be consumed: only their own consumers stop.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::test_worker::{CHANNEL, MODEL, Worker, consumers, requeued};
use crate::action::{Action, JobQueue, Route, SessionEnd};
use crate::event::{Event, PassResult, PublicationOutcome, QueueCount, QueueCounts, SessionFacts, Source};
use crate::ids::{ChannelId, ConsumerId, Fingerprint, ItemIndex, JobKey, QueueIndex};
use crate::observation::Observation;

const FURTHER: QueueIndex = QueueIndex(1);

fn worker() -> Worker {
    Worker::with_a_further_queue("team-a.jobs")
}

fn consumer_of(worker: &Worker, queue: QueueIndex) -> ConsumerId {
    let Source::Jobs(_, consumer) = worker.source_of(queue) else { panic!("a consumer of jobs") };
    consumer
}

fn session_end(actions: &[Action]) -> Option<&SessionEnd> {
    actions.iter().find_map(|action| match action {
        Action::EndSession(end) => Some(end),
        _ => None,
    })
}

/// Whether the last observation of the further queue says that it is missing.
fn missing(actions: &[Action]) -> Option<bool> {
    actions.iter().rev().find_map(|action| match action {
        Action::Observe(Observation::QueueMissing { queue: FURTHER, is_missing, .. }) => Some(*is_missing),
        _ => None,
    })
}

fn is_looked_for(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::LookForQueue { queue: FURTHER, .. }))
}

fn consumes(actions: &[Action], wanted: QueueIndex) -> bool {
    let is_of =
        |action: &Action| matches!(action, Action::Consume { queue, .. } if *queue == JobQueue::Jobs(wanted));
    actions.iter().any(is_of)
}

fn lost() -> Event {
    Event::QueueLost { model: MODEL, queue: FURTHER, error: "NOT_FOUND".to_owned() }
}

fn looked_for(result: Result<(), &str>) -> Event {
    let result = result.map_err(str::to_owned);
    Event::QueueLookedFor { model: MODEL, queue: FURTHER, result }
}

/// Waits until the next check is due.
fn wait(worker: &mut Worker) -> Vec<Action> {
    worker.now += Duration::from_secs(10);
    worker.apply(Event::Timer)
}

#[test]
fn a_further_queue_that_is_deleted_is_looked_for_until_it_is_back() {
    let mut worker = worker();
    let further = worker.source_of(FURTHER);
    worker.job(1, 1, further, JobHeaders::default());
    let consumer = consumer_of(&worker, FURTHER);
    let actions = worker.apply(Event::ConsumerEnded { consumer });
    assert_eq!((session_end(&actions), missing(&actions)), (None, Some(true)));
    assert!(!consumes(&actions, FURTHER));
    // Its other consumers are stopped.
    worker.consumers_end(&actions);
    // Its job still runs to the end.
    assert_eq!(worker.pass().items, [(JobKey(1), ItemIndex(0))]);
    // Not declared yet: its owner may be about to declare it again.
    assert!(!is_looked_for(&worker.apply(Event::Timer)));
    assert!(is_looked_for(&wait(&mut worker)));
    for error in ["NOT_FOUND", "NOT_FOUND", "PRECONDITION_FAILED"] {
        let actions = worker.apply(looked_for(Err(error)));
        assert!(!is_looked_for(&actions) && !consumes(&actions, FURTHER));
        assert!(is_looked_for(&wait(&mut worker)), "{error}");
    }
    let actions = worker.apply(looked_for(Ok(())));
    assert_eq!(missing(&actions), Some(false));
    assert!(consumes(&actions, FURTHER), "{actions:?}");
    assert!(!is_looked_for(&wait(&mut worker)));
    // A queue that was found is lost again.
    assert_eq!(missing(&worker.apply(lost())), Some(true));
    assert!(is_looked_for(&wait(&mut worker)));
}

#[test]
fn a_model_without_its_own_queue_has_no_session() {
    let mut worker = worker();
    let consumer = consumer_of(&worker, QueueIndex::OWN);
    let actions = worker.apply(Event::ConsumerEnded { consumer });
    assert!(matches!(session_end(&actions), Some(SessionEnd::Lost(_))), "{actions:?}");
}

#[test]
fn a_lost_queue_that_is_reported_twice_is_handled_once() {
    let mut worker = worker();
    assert_eq!(missing(&worker.apply(lost())), Some(true));
    let consumer = consumer_of(&worker, FURTHER);
    for event in [lost(), Event::ConsumerEnded { consumer }, lost()] {
        let actions = worker.apply(event);
        assert_eq!((session_end(&actions), missing(&actions)), (None, None), "{actions:?}");
    }
    let checks = wait(&mut worker);
    assert_eq!(checks.iter().filter(|action| matches!(action, Action::LookForQueue { .. })).count(), 1);
}

/// A queue that is deleted again and again must not excuse jobs that crash workers.
#[test]
fn a_lost_queue_excuses_its_own_jobs_and_no_others() {
    let mut worker = worker();
    let (own, further) = (worker.source_of(QueueIndex::OWN), worker.source_of(FURTHER));
    worker.job(1, 1, further, JobHeaders::default());
    worker.apply(lost());
    worker.apply(looked_for(Ok(())));
    let mut comes_again = |key, message, source| {
        let delivery = crate::event::Delivery {
            fingerprint: Fingerprint(message),
            redelivered: true,
            delivery_count: Some(2),
            ..Worker::delivery(key, source, JobHeaders::default())
        };
        let actions = worker.apply(Event::Delivered(Box::new(delivery)));
        requeued(&actions).into_iter().map(|(_, _, route)| route).collect::<Vec<_>>()
    };
    assert_eq!(comes_again(2, 1, further), [], "of two returns the queue explains one");
    assert_eq!(comes_again(3, 3, own), [Route::Quarantine]);
}

/// The stream of a consumer may hold deliveries that the core sees only after the loss. Their acks fail, and they are redelivered.
#[test]
fn a_lost_queue_excuses_jobs_that_were_still_under_way() {
    let mut worker = worker();
    let further = worker.source_of(FURTHER);
    worker.apply(lost());
    worker.arrives(1, further, JobHeaders::default());
    worker.apply(looked_for(Ok(())));
    let delivery = crate::event::Delivery {
        fingerprint: Fingerprint(1),
        redelivered: true,
        delivery_count: Some(2),
        ..Worker::delivery(2, further, JobHeaders::default())
    };
    let actions = worker.apply(Event::Delivered(Box::new(delivery)));
    assert!(requeued(&actions).is_empty(), "of two returns the queue explains one: {actions:?}");
}

#[test]
fn a_drain_does_not_wait_for_consumers_of_a_channel_that_is_closed() {
    let mut worker = worker();
    worker.apply(lost());
    let actions = worker.apply(Event::StopRequested { signal: "SIGTERM" });
    let stopped: Vec<_> =
        actions.iter().filter(|action| matches!(action, Action::StopConsumer { .. })).collect();
    assert!(!stopped.is_empty() && session_end(&actions).is_none(), "{actions:?}");
    let ended = worker.consumers_end(&actions);
    assert_eq!(session_end(&ended), Some(&SessionEnd::Drained));
    assert!(!is_looked_for(&wait(&mut worker)));
}

/// A job of one item comes by this channel, runs and is answered; its ack is sent.
fn ack(worker: &mut Worker, key: u64, channel: ChannelId) -> Vec<(ChannelId, u64)> {
    arrives_by(worker, key, channel);
    end(worker, key)
}

fn arrives_by(worker: &mut Worker, key: u64, channel: ChannelId) {
    let delivery = crate::event::Delivery {
        channel,
        tag: crate::ids::DeliveryTag(1),
        ..Worker::delivery(key, worker.source_of(FURTHER), JobHeaders::default())
    };
    worker.apply(Event::Delivered(Box::new(delivery)));
}

fn end(worker: &mut Worker, key: u64) -> Vec<(ChannelId, u64)> {
    worker.decoded(key, 1);
    let order = worker.pass();
    worker.ends(&order, PassResult::Done, vec![Some(1)]);
    worker
        .apply(Event::Published { job: JobKey(key), outcome: PublicationOutcome::Confirmed { messages: 1 } });
    let acks = worker.apply(Event::Idle).into_iter().filter_map(|action| match action {
        Action::Ack { channel, frames } => Some((channel, frames[0].tag().0)),
        _ => None,
    });
    acks.collect()
}

#[test]
fn acks_are_for_the_channel_that_the_delivery_came_by() {
    let mut worker = worker();
    let channel = |number| ChannelId { number, ..CHANNEL };
    assert_eq!(ack(&mut worker, 1, channel(1)), [(channel(1), 1)]);
    // The queue is gone, so the broker ignores the ack.
    worker.apply(lost());
    worker.apply(Event::AcksSent { channel: channel(1), sent: vec![false] });
    worker.apply(looked_for(Ok(())));
    assert_eq!(ack(&mut worker, 2, channel(2)), [(channel(2), 1)]);
    worker.apply(Event::AcksSent { channel: channel(2), sent: vec![true] });
    assert_eq!(worker.unacked(), 0);
}

/// A queue may be deleted and declared again for as long as the session lasts.
#[test]
fn a_channel_that_a_newer_one_replaced_is_forgotten_with_its_last_ack() {
    let mut worker = worker();
    let channel = |number| ChannelId { number, ..CHANNEL };
    for number in 1..20 {
        ack(&mut worker, number.into(), channel(number));
        worker.apply(Event::AcksSent { channel: channel(number), sent: vec![number % 2 == 0] });
        worker.apply(lost());
        worker.apply(looked_for(Ok(())));
    }
    let channels = |worker: &Worker| worker.size_of("channels");
    assert_eq!(channels(&worker), 1, "that of the queue");
    // A job of an old channel ends after the newer channel has delivered.
    arrives_by(&mut worker, 100, channel(20));
    worker.apply(lost());
    worker.apply(looked_for(Ok(())));
    ack(&mut worker, 101, channel(21));
    worker.apply(Event::AcksSent { channel: channel(21), sent: vec![true] });
    end(&mut worker, 100);
    assert_eq!(channels(&worker), 2, "an ack is due for the old one");
    worker.apply(Event::AcksSent { channel: channel(20), sent: vec![true] });
    assert_eq!((channels(&worker), worker.unacked()), (1, 0));
}

#[test]
fn a_further_queue_that_delivers_nothing_is_consumed_again_and_costs_no_session() {
    let mut worker = worker();
    let waiting = |own, further| QueueCounts {
        jobs: [own, further].map(|waiting| QueueCount { waiting, consumers: 1 }).to_vec(),
        ..QueueCounts::default()
    };
    let mut counted = |counts: QueueCounts| {
        let checks =
            (0..10).map(|_| worker.apply(Event::QueuesCounted { model: MODEL, counts: counts.clone() }));
        checks.flatten().collect::<Vec<_>>()
    };
    let actions = counted(waiting(0, 5));
    assert_eq!((session_end(&actions), missing(&actions)), (None, Some(true)));
    assert!(actions.iter().any(|action| matches!(action, Action::StopConsumer { .. })), "{actions:?}");
    let actions = counted(waiting(5, 0));
    assert!(matches!(session_end(&actions), Some(SessionEnd::Lost(_))), "{actions:?}");
}

#[test]
fn a_session_that_opens_without_a_further_queue_serves_the_others() {
    let mut worker = worker();
    worker.apply(Event::SessionFailed("broken".to_owned()));
    worker.apply(Event::SessionClosed);
    let missing_now = vec![(MODEL, FURTHER, "NOT_FOUND".to_owned())];
    let facts = SessionFacts { declares: false, missing: missing_now };
    let actions = worker.apply(Event::SessionOpened(facts));
    assert!(consumes(&actions, QueueIndex::OWN) && !consumes(&actions, FURTHER), "{actions:?}");
    assert!(!consumers(&actions).is_empty());
    assert_eq!(missing(&actions), Some(true));
    assert!(is_looked_for(&wait(&mut worker)));
    assert!(consumes(&worker.apply(looked_for(Ok(()))), FURTHER));
}

#[test]
fn a_worker_that_drains_looks_for_no_queue() {
    let mut worker = worker();
    worker.apply(lost());
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(!is_looked_for(&wait(&mut worker)));
}
