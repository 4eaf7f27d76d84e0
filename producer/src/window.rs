//! Jobs between being handed in and being judged by the broker, across sessions.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::{Channel, Confirmation, ErrorKind};

use crate::error::PublishError;
use crate::options::CONFIRMS_IN_FLIGHT;
use crate::outgoing::Outgoing;
use crate::registry::Registry;
use crate::session::publish;
use vramq_amqp::{Confirms, Verdict};

/// AMQP's codes for an exchange that does not exist, and one that this user may not write to.
const NOT_FOUND: u16 = 404;
const ACCESS_REFUSED: u16 = 403;

/// What outlives a session.
#[derive(Debug, Default)]
pub(crate) struct Window {
    /// Jobs that the broker has not judged, in order; at most [`CONFIRMS_IN_FLIGHT`].
    unconfirmed: BTreeMap<u64, Outgoing>,
    next: u64,
    /// The broker closed the channel over one of the publishes up to this one. They are sent one at a time, so that
    /// the guilty one is found and the others get through.
    suspects_until: Option<u64>,
    /// Sessions lost, and attempts failed, since the last confirm.
    pub(crate) failures: u32,
}

/// A completed publish: its number, and what came of it.
pub(crate) type Confirmed = (u64, lapin::Result<Confirmation>);

/// What ends with a session.
pub(crate) struct Sending {
    channel: Channel,
    sent: FuturesUnordered<BoxFuture<'static, Confirmed>>,
    /// Sent, and no confirm yet.
    open: HashSet<u64>,
    /// The numbers of what was sent and is not judged, by job id.
    numbers: HashMap<String, u64>,
    confirms: Confirms,
    /// Publishes of an earlier session, to be sent again.
    backlog: VecDeque<u64>,
}

impl Sending {
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    pub(crate) async fn next(&mut self) -> Option<Confirmed> {
        self.sent.next().await
    }
}

impl Window {
    pub(crate) fn open(&self, channel: &Channel) -> Sending {
        Sending {
            channel: channel.clone(),
            sent: FuturesUnordered::new(),
            open: HashSet::new(),
            numbers: HashMap::new(),
            confirms: Confirms::default(),
            backlog: self.unconfirmed.keys().copied().collect(),
        }
    }

    /// Whether a new job may be taken in.
    pub(crate) fn has_room(&self, sending: &Sending) -> bool {
        sending.backlog.is_empty()
            && self.unconfirmed.len() < CONFIRMS_IN_FLIGHT
            && sending.open.len() < self.width()
    }

    pub(crate) fn send(&mut self, sending: &mut Sending, outgoing: Outgoing) {
        let number = self.next;
        self.next += 1;
        transmit(sending, number, &outgoing);
        self.unconfirmed.insert(number, outgoing);
    }

    /// Sends again what an earlier session left unjudged, as far as there is room.
    pub(crate) fn resend(&mut self, sending: &mut Sending, registry: &Registry) {
        while sending.open.len() < self.width()
            && let Some(number) = sending.backlog.pop_front()
        {
            let Some(outgoing) = self.unconfirmed.get(&number) else {
                continue;
            };
            if registry.contains(&outgoing.id) {
                transmit(sending, number, outgoing);
            } else if let Some(outgoing) = self.unconfirmed.remove(&number) {
                // Answered already, so it was published; or forgotten, and nobody listens.
                outgoing.judge(Ok(()));
            }
        }
    }

    /// Tells the publishers what the broker made of their jobs.
    ///
    /// # Errors
    /// What ended the channel, if it ended.
    pub(crate) fn judge(&mut self, sending: &mut Sending, first: Confirmed) -> lapin::Result<()> {
        let mut lost = None::<lapin::Error>;
        let mut next = Some(first);
        while let Some((number, result)) = next {
            match result {
                Ok(confirmation) => {
                    let ack = !confirmation.is_nack();
                    let carried = confirmation
                        .take_message()
                        .and_then(|message| message.properties.message_id().clone())
                        .and_then(|id| sending.numbers.get(id.as_str()).copied());
                    sending.open.remove(&number);
                    sending.confirms.complete(number, ack, carried);
                }
                // What the broker said tells more than that the channel is gone.
                Err(error) if lost.is_none() || error.is_amqp_error() => lost = Some(error),
                Err(_) => {}
            }
            next = sending.sent.next().now_or_never().flatten();
        }
        let open = &sending.open;
        for (number, verdict) in sending.confirms.settle(|number| open.contains(&number)) {
            if let Some(outgoing) = self.unconfirmed.remove(&number) {
                self.failures = 0;
                sending.numbers.remove(&outgoing.id);
                let model = outgoing.model.to_string();
                outgoing.judge(match verdict {
                    Verdict::Accepted => Ok(()),
                    Verdict::Rejected => Err(PublishError::QueueFull { model }),
                    Verdict::Returned => Err(unroutable(model, "312 NO_ROUTE")),
                });
            }
        }
        match lost {
            None => Ok(()),
            Some(error) => {
                self.blame(&error, &sending.open);
                Err(error)
            }
        }
    }

    /// Ends every job of the window.
    pub(crate) fn fail(&mut self, error: &PublishError) {
        for outgoing in std::mem::take(&mut self.unconfirmed).into_values() {
            outgoing.judge(Err(error.clone()));
        }
    }

    /// Judges what was in flight when the broker closed the channel with an error of its own: a job that it will
    /// never take must not be sent again for ever.
    fn blame(&mut self, error: &lapin::Error, in_flight: &HashSet<u64>) {
        let ErrorKind::ProtocolError(said) = error.kind() else {
            return;
        };
        if !error.is_amqp_soft_error() {
            return;
        }
        let (code, text) = (said.get_id(), said.get_message().to_string());
        // These two are about the exchange, and so about every job.
        let all = matches!(code, NOT_FOUND | ACCESS_REFUSED);
        if !all && in_flight.len() > 1 {
            self.suspects_until = in_flight.iter().copied().max();
            return;
        }
        for number in in_flight {
            if let Some(outgoing) = self.unconfirmed.remove(number) {
                let model = outgoing.model.to_string();
                outgoing.judge(Err(match code {
                    NOT_FOUND => unroutable(model, &text),
                    _ => PublishError::Refused { code, text: text.clone() },
                }));
            }
        }
    }

    /// How many publishes may await their confirm now.
    fn width(&self) -> usize {
        match (self.suspects_until, self.unconfirmed.first_key_value()) {
            (Some(until), Some((oldest, _))) if *oldest <= until => 1,
            _ => CONFIRMS_IN_FLIGHT,
        }
    }
}

fn transmit(sending: &mut Sending, number: u64, outgoing: &Outgoing) {
    sending.open.insert(number);
    sending.numbers.insert(outgoing.id.clone(), number);
    let publish = publish(sending.channel.clone(), outgoing);
    sending.sent.push(publish.map(move |result| (number, result)).boxed());
}

fn unroutable(model: String, broker_says: &str) -> PublishError {
    PublishError::Unroutable { model, broker_says: broker_says.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};
    use lapin::{BasicProperties, Error};
    use tokio::sync::{Semaphore, oneshot};

    use super::*;

    type Verdicts = Vec<oneshot::Receiver<Result<(), PublishError>>>;

    /// A window with this many jobs, numbered from 0.
    fn window(jobs: u64) -> (Window, Verdicts) {
        let mut window = Window::default();
        let verdicts = (0..jobs).map(|number| {
            let (judged, verdict) = oneshot::channel();
            let bytes = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
            let outgoing = Outgoing {
                id: number.to_string(),
                model: "m".into(),
                body: Arc::from([]),
                properties: BasicProperties::default(),
                judged,
                _bytes: bytes,
            };
            window.unconfirmed.insert(number, outgoing);
            verdict
        });
        let verdicts = verdicts.collect();
        (window, verdicts)
    }

    fn said(kind: impl Into<AMQPErrorKind>) -> Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "why".into())).into()
    }

    fn all(numbers: impl IntoIterator<Item = u64>) -> HashSet<u64> {
        numbers.into_iter().collect()
    }

    /// A job that the broker never takes is found by sending the suspects one at a time.
    #[test]
    fn a_poisonous_job_is_found_and_the_others_get_through() {
        let refusal = said(AMQPSoftError::PRECONDITIONFAILED);
        let (mut window, mut verdicts) = window(5);
        window.blame(&refusal, &all(0..4));
        assert_eq!(window.width(), 1);
        assert!(verdicts.iter_mut().all(|verdict| verdict.try_recv().is_err()));
        // The first gets through, the second is refused alone.
        window.unconfirmed.remove(&0);
        window.blame(&refusal, &all([1]));
        assert!(matches!(verdicts[1].try_recv(), Ok(Err(PublishError::Refused { code: 406, .. }))));
        assert_eq!(window.width(), 1);
        // The last suspect is through: back to full width.
        window.unconfirmed.remove(&2);
        window.unconfirmed.remove(&3);
        assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        assert!(verdicts[4].try_recv().is_err());
    }

    #[test]
    fn errors_about_the_exchange_are_everyones() {
        for (kind, unroutable) in [(AMQPSoftError::NOTFOUND, true), (AMQPSoftError::ACCESSREFUSED, false)] {
            let (mut window, mut verdicts) = window(3);
            window.blame(&said(kind), &all([0, 1]));
            for verdict in &mut verdicts[..2] {
                let error = verdict.try_recv().unwrap().unwrap_err();
                assert_eq!(matches!(error, PublishError::Unroutable { .. }), unroutable, "{error:?}");
            }
            assert!(verdicts[2].try_recv().is_err());
            assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        }
    }

    #[test]
    fn a_lost_connection_is_nobodys_fault() {
        for error in [said(AMQPHardError::CONNECTIONFORCED), ErrorKind::MissingHeartbeatError.into()] {
            let (mut window, mut verdicts) = window(1);
            window.blame(&error, &all([0]));
            assert!(verdicts[0].try_recv().is_err());
            assert_eq!(window.width(), CONFIRMS_IN_FLIGHT);
        }
    }
}
