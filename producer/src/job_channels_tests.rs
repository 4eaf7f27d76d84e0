//! Which jobs are isolated or refused when the broker closes a channel or the connection, and which channel a job has.

use lapin::Error;
use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};
use tokio::sync::oneshot;
use vramq_amqp::Message;

use super::*;
use crate::key_limits::KeyLimits;

type Published = oneshot::Receiver<Result<(), PublishError>>;

/// Jobs for these keys, numbered from 0.
async fn with_jobs(keys: &[&str]) -> (JobChannels, Vec<Published>) {
    let (mut channels, limits, mut results) = (JobChannels::default(), KeyLimits::default(), Vec::new());
    for (number, key) in keys.iter().enumerate() {
        let (published, result) = oneshot::channel();
        let message = Message { routing_key: (*key).into(), ..Message::default() };
        let place = limits.place(key).await.with_body(1).await;
        let (id, model, registration) = (number.to_string(), "m".to_owned(), number as u64);
        channels.add(Outgoing { id, model, registration, message, published, _place: place });
        results.push(result);
    }
    (channels, results)
}

fn protocol_error(kind: impl Into<AMQPErrorKind>) -> Error {
    ErrorKind::ProtocolError(AMQPError::new(kind.into(), "why".into())).into()
}

impl JobChannels {
    fn confirmed(&mut self, number: u64) {
        let at = self.channel_with(number).unwrap();
        self.finish(at, number, |_| Ok(()));
    }

    fn turn(&mut self) -> Turn {
        self.isolation.turn(Instant::now())
    }
}

/// A job that the broker never accepts is found by publishing the isolated ones one at a time.
#[tokio::test]
async fn a_faulty_job_is_found_and_the_others_get_through() {
    for code in [406, 501] {
        let (mut channels, mut results) = with_jobs(&["m"; 5]).await;
        channels.find_faulty(code, "why", &[0, 1, 2, 3]);
        assert!(results.iter_mut().all(|result| result.try_recv().is_err()));
        // The first gets through, the second is refused alone.
        assert_eq!(channels.turn(), Turn::Isolated(0));
        channels.confirmed(0);
        assert_eq!(channels.turn(), Turn::Isolated(1));
        channels.find_faulty(code, "why", &[1]);
        let refused = results[1].try_recv().unwrap().unwrap_err();
        assert!(matches!(refused, PublishError::Refused { code: with, .. } if code == with), "{refused:?}");
        assert_eq!(channels.turn(), Turn::Isolated(2));
        // The last isolated job is through: all others follow.
        channels.confirmed(2);
        channels.confirmed(3);
        assert_eq!(channels.turn(), Turn::Others);
        assert!(results[4].try_recv().is_err());
    }
}

#[tokio::test]
async fn errors_about_the_exchange_fail_every_job() {
    for (kind, unroutable) in [(AMQPSoftError::NOTFOUND, true), (AMQPSoftError::ACCESSREFUSED, false)] {
        let (mut channels, mut results) = with_jobs(&["m", "n", "m"]).await;
        channels.note_loss(&protocol_error(kind), Some(0));
        for result in &mut results {
            let error = result.try_recv().unwrap().unwrap_err();
            assert_eq!(matches!(error, PublishError::Unroutable { .. }), unroutable, "{error:?}");
        }
        assert!(channels.keys.is_empty());
        assert_eq!(channels.turn(), Turn::Others);
    }
}

#[tokio::test]
async fn a_lost_connection_isolates_no_job() {
    for error in [protocol_error(AMQPHardError::CONNECTIONFORCED), ErrorKind::MissingHeartbeatError.into()] {
        let (mut channels, mut results) = with_jobs(&["m"]).await;
        channels.connection_lost(&error, &Registry::default());
        assert!(results[0].try_recv().is_err());
        assert_eq!(channels.turn(), Turn::Others);
    }
}

#[tokio::test]
async fn errors_name_the_model_and_a_key_of_another_name() {
    for (key, named) in [("m", "model `m`"), ("m-large", "model `m` with key `m-large`")] {
        for (outcome, says) in [
            (PublishOutcome::Returned, format!("no queue for {named}: is a worker for it configured?")),
            (PublishOutcome::Refused, format!("the queue of {named} is full; try again later")),
        ] {
            let (channels, _results) = with_jobs(&[key]).await;
            let error = publish_result(channels.channels[0].get(0).unwrap(), outcome).unwrap_err();
            assert!(error.to_string().starts_with(&says), "{error}");
        }
    }
}

/// The user may have fewer channels: from then on models share them, for a while.
#[tokio::test]
async fn a_limit_of_the_broker_is_kept_for_a_while() {
    let (mut channels, _results) = with_jobs(&["a", "b"]).await;
    channels.connection_lost(&protocol_error(AMQPHardError::NOTALLOWED), &Registry::default());
    let now = Instant::now();
    assert_eq!(channels.limit(now), Some(1));
    assert_eq!(channels.limit(now + LIMITED_FOR), None);
}

#[tokio::test]
async fn each_key_with_jobs_has_a_channel_while_there_are_enough() {
    let (mut channels, _results) = with_jobs(&["a", "b", "a"]).await;
    let of = |channels: &JobChannels| (0..3).map(|number| channels.channel_with(number)).collect::<Vec<_>>();
    assert_eq!(of(&channels), [Some(0), Some(1), Some(0)]);
    channels.confirmed(0);
    assert_eq!(channels.keys["a"].jobs, 1);
    channels.confirmed(2);
    // The channel of `a` has no jobs any more.
    let (mut others, _others) = with_jobs(&["c", "d"]).await;
    for outgoing in others.channels.iter_mut().flat_map(JobChannel::take_jobs).map(|(_, outgoing)| outgoing) {
        channels.channels_max = 2;
        channels.add(outgoing);
    }
    assert_eq!(channels.channel_with(3), Some(0));
    assert_eq!(channels.channels.len(), 2, "`d` shares a channel");
}
