//! Jobs between [`Client::submit`](crate::Client::submit) and the broker's answer. They survive the loss of a session:
//! unconfirmed jobs are published again.

use std::collections::{BTreeMap, HashSet, VecDeque};

use lapin::ErrorKind;
use vramq_amqp::{CONFIRMS_IN_FLIGHT, PublishOutcome, PublishPipeline, Settled};
use vramq_schemas::BODY_BYTES_MAX;

use crate::error::PublishError;
use crate::outgoing::Outgoing;
use crate::registry::Registry;

/// AMQP's codes for an exchange that does not exist, and for one that this user may not write to.
const NOT_FOUND: u16 = 404;
const ACCESS_REFUSED: u16 = 403;

/// AMQP's codes with which a broker closes the connection over a frame: malformed or too large, of values or a command that it does not know,
/// unexpected, and not implemented. Others are about the connection.
const OVER_A_FRAME: [u16; 5] = [501, 502, 503, 505, 540];

/// The jobs that the broker has not confirmed. A session's publisher knows each by its number here.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// In the order of publishing; at most [`CONFIRMS_IN_FLIGHT`].
    unconfirmed: BTreeMap<u64, Outgoing>,
    next: u64,
    /// Jobs of an earlier session, to be published again.
    backlog: VecDeque<u64>,
    /// Some job up to this number made the broker close the channel. Until then jobs are sent one at a time, so that the faulty one is
    /// found and the others get through.
    suspects_until: Option<u64>,
    /// Sessions lost, and attempts to connect failed, since the last confirm.
    pub(crate) failures: u32,
}

impl Window {
    /// Prepares for a new session: everything unconfirmed is to be published again.
    pub(crate) fn begin_session(&mut self) {
        self.backlog = self.unconfirmed.keys().copied().collect();
    }

    /// Whether a new job may be taken.
    pub(crate) fn has_room(&self, publisher: &PublishPipeline<u64>) -> bool {
        self.backlog.is_empty()
            && self.unconfirmed.len() < CONFIRMS_IN_FLIGHT
            && publisher.in_flight() < self.width()
            && publisher.has_room()
    }

    /// Publishes a new job, unless its caller has given up on it.
    pub(crate) fn send(
        &mut self,
        publisher: &mut PublishPipeline<u64>,
        outgoing: Outgoing,
        registry: &Registry,
    ) {
        if !registry.mark_sent(&outgoing.id, outgoing.registration) {
            return outgoing.finish(Ok(()));
        }
        let number = self.next;
        self.next += 1;
        publisher.publish(number, outgoing.message.clone());
        self.unconfirmed.insert(number, outgoing);
    }

    /// Publishes jobs of an earlier session again, as far as there is room.
    pub(crate) fn resend(&mut self, publisher: &mut PublishPipeline<u64>, registry: &Registry) {
        while publisher.in_flight() < self.width()
            && publisher.has_room()
            && let Some(number) = self.backlog.pop_front()
        {
            let Some(outgoing) = self.unconfirmed.get(&number) else {
                continue;
            };
            if registry.is_in_flight(&outgoing.id, outgoing.registration) {
                publisher.publish(number, outgoing.message.clone());
            } else if let Some(outgoing) = self.unconfirmed.remove(&number) {
                // The job was answered, so it was published; or its caller no longer waits.
                outgoing.finish(Ok(()));
            }
        }
    }

    /// Gives callers the broker's answers.
    ///
    /// # Errors
    /// Why the channel was lost, if it was.
    pub(crate) fn settle(
        &mut self,
        publisher: &PublishPipeline<u64>,
        settled: Settled<u64>,
        registry: &Registry,
    ) -> lapin::Result<()> {
        for (number, outcome) in settled.outcomes {
            if let Some(outgoing) = self.unconfirmed.remove(&number) {
                self.failures = 0;
                if let PublishOutcome::Confirmed = outcome {
                    registry.mark_confirmed(&outgoing.id, outgoing.registration);
                }
                let result = answer(&outgoing, outcome);
                outgoing.finish(result);
            }
        }
        let Some(error) = settled.lost else { return Ok(()) };
        self.lost(publisher, &error);
        Err(error)
    }

    /// Notes why channel or connection are lost.
    pub(crate) fn lost(&mut self, publisher: &PublishPipeline<u64>, error: &lapin::Error) {
        self.blame(error, &publisher.unconfirmed().copied().collect());
    }

    /// Fails every job of the window.
    pub(crate) fn fail(&mut self, error: &PublishError) {
        for outgoing in std::mem::take(&mut self.unconfirmed).into_values() {
            outgoing.finish(Err(error.clone()));
        }
    }

    /// Finds the job over which the broker closed the channel, or the connection, so that it is not published again for ever.
    fn blame(&mut self, error: &lapin::Error, in_flight: &HashSet<u64>) {
        let ErrorKind::ProtocolError(protocol_error) = error.kind() else {
            return;
        };
        let (code, text) = (protocol_error.get_id(), protocol_error.get_message().to_string());
        if !error.is_amqp_soft_error() && !OVER_A_FRAME.contains(&code) {
            return;
        }
        // These two concern the exchange, and so every job.
        let all = matches!(code, NOT_FOUND | ACCESS_REFUSED);
        if !all && in_flight.len() > 1 {
            self.suspects_until = in_flight.iter().copied().max();
            return;
        }
        for number in in_flight {
            if let Some(outgoing) = self.unconfirmed.remove(number) {
                let model = outgoing.model();
                outgoing.finish(Err(match code {
                    NOT_FOUND => unroutable(model, &text),
                    _ => PublishError::Refused { code, text: text.clone() },
                }));
            }
        }
    }

    /// How many jobs may await their confirm at the moment.
    fn width(&self) -> usize {
        match (self.suspects_until, self.unconfirmed.first_key_value()) {
            (Some(until), Some((oldest, _))) if *oldest <= until => 1,
            _ => CONFIRMS_IN_FLIGHT,
        }
    }
}

fn answer(outgoing: &Outgoing, outcome: PublishOutcome) -> Result<(), PublishError> {
    match outcome {
        PublishOutcome::Confirmed => Ok(()),
        PublishOutcome::Refused => Err(PublishError::QueueFull { model: outgoing.model() }),
        PublishOutcome::Returned => Err(unroutable(outgoing.model(), "312 NO_ROUTE")),
        PublishOutcome::TooLarge => {
            Err(PublishError::TooLarge { bytes: outgoing.message.body.len(), cap: BODY_BYTES_MAX })
        }
    }
}

fn unroutable(model: String, broker_says: &str) -> PublishError {
    PublishError::Unroutable { model, broker_says: broker_says.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lapin::Error;
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};
    use tokio::sync::{Semaphore, oneshot};
    use vramq_amqp::Message;

    use super::*;

    type Results = Vec<oneshot::Receiver<Result<(), PublishError>>>;

    /// A window with this many jobs, numbered from 0.
    fn window(jobs: u64) -> (Window, Results) {
        let mut window = Window::default();
        let results = (0..jobs).map(|number| {
            let (published, result) = oneshot::channel();
            let bytes = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            let message = Message { routing_key: "m".into(), ..Message::default() };
            let id = number.to_string();
            let outgoing = Outgoing { id, registration: number, message, published, _bytes: bytes };
            window.unconfirmed.insert(number, outgoing);
            result
        });
        let results = results.collect();
        (window, results)
    }

    fn protocol_error(kind: impl Into<AMQPErrorKind>) -> Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "why".into())).into()
    }

    fn all(numbers: impl IntoIterator<Item = u64>) -> HashSet<u64> {
        numbers.into_iter().collect()
    }

    /// A job that the broker never accepts is found by sending the suspects one at a time.
    #[test]
    fn a_faulty_job_is_found_and_the_others_get_through() {
        found_by(&protocol_error(AMQPSoftError::PRECONDITIONFAILED), 406);
        // It closes the connection.
        found_by(&protocol_error(AMQPHardError::FRAMEERROR), 501);
    }

    fn found_by(refusal: &Error, with: u16) {
        let (mut window, mut results) = window(5);
        window.blame(refusal, &all(0..4));
        assert_eq!(window.width(), 1);
        assert!(results.iter_mut().all(|result| result.try_recv().is_err()));
        // The first gets through, the second is refused alone.
        window.unconfirmed.remove(&0);
        window.blame(refusal, &all([1]));
        let refused = results[1].try_recv().unwrap().unwrap_err();
        assert!(matches!(refused, PublishError::Refused { code, .. } if code == with), "{refused:?}");
        assert_eq!(window.width(), 1);
        // The last suspect is through: back to full width.
        window.unconfirmed.remove(&2);
        window.unconfirmed.remove(&3);
        assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        assert!(results[4].try_recv().is_err());
    }

    #[test]
    fn errors_about_the_exchange_fail_every_job() {
        for (kind, unroutable) in [(AMQPSoftError::NOTFOUND, true), (AMQPSoftError::ACCESSREFUSED, false)] {
            let (mut window, mut results) = window(3);
            window.blame(&protocol_error(kind), &all([0, 1]));
            for result in &mut results[..2] {
                let error = result.try_recv().unwrap().unwrap_err();
                assert_eq!(matches!(error, PublishError::Unroutable { .. }), unroutable, "{error:?}");
            }
            assert!(results[2].try_recv().is_err());
            assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        }
    }

    #[test]
    fn a_lost_connection_blames_no_job() {
        for error in
            [protocol_error(AMQPHardError::CONNECTIONFORCED), ErrorKind::MissingHeartbeatError.into()]
        {
            let (mut window, mut results) = window(1);
            window.blame(&error, &all([0]));
            assert!(results[0].try_recv().is_err());
            assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        }
    }
}
