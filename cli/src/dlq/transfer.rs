//! Taking what a plan chose out of a queue: each letter leaves it only when it is safe elsewhere.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};
use vramq_amqp::Verdict;

use super::dead_letter::Fingerprint;
use super::destination::{Destination, PendingLetter};
use super::error::Error;
use super::plan::{Claim, Claims, Kind, Plan, Reading};
use super::queue_lock::QueueLock;
use super::reader::{Acks, Reader, Unacked};
use crate::output::progress::Progress;
use crate::output::text::counted;
use crate::signals::Signals;

/// How long letters are held at a stretch. The broker closes the channel of whoever holds some for longer than its
/// `consumer_timeout`, 30 minutes by default; a slow rate over many letters takes longer than that.
const LEASE_MAX: Duration = Duration::from_secs(600);

/// How long the broker may take to confirm what is under way at the end.
const CONFIRMS_MAX: Duration = Duration::from_secs(60);

/// How often the queue is read again for letters whose removal the broker has forgotten. RabbitMQ 3.10 hands 32
/// acknowledgements at a time on to a quorum queue, and forgets the rest if the channel closes meanwhile.
const CHECKS_MAX: u32 = 10;

/// Letters that are named one by one when they stay.
const KEPT_MAX: usize = 10;

/// What came of an action on one queue.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Safe elsewhere, and removed.
    pub(super) done: Vec<Fingerprint>,
    /// Still in the queue, and why.
    pub(super) kept: Vec<(Fingerprint, String)>,
    /// Selected, and not there any more.
    pub(super) gone: usize,
    /// Results that were delivered in `done`.
    delivered: HashSet<Fingerprint>,
}

impl Outcome {
    pub(super) fn is_whole(&self) -> bool {
        self.kept.is_empty() && self.gone == 0
    }

    /// What a person has to know beyond the count; of an action that ended early, the count as well.
    pub(super) fn tell(&self, done: &str, selected: usize, ended_early: bool) {
        if ended_early {
            let count = self.done.len();
            eprintln!(
                "{count} of {} {done}; the others are where they were",
                counted(selected as u64, "letter")
            );
        }
        for (fingerprint, why) in self.kept.iter().take(KEPT_MAX) {
            eprintln!("{fingerprint} stays: {why}");
        }
        let more = self.kept.len().saturating_sub(KEPT_MAX) as u64;
        if more > 0 {
            eprintln!("… and {} more: the action log has all", counted(more, "letter"));
        }
        if self.gone > 0 {
            let gone = counted(self.gone as u64, "letter");
            eprintln!(
                "{gone} not there any more: somebody else was faster, so {} were {done}",
                self.done.len()
            );
        }
    }
}

/// One action on one queue.
pub(super) struct Transfer<'a> {
    pub(super) queue_lock: &'a QueueLock,
    pub(super) destination: Destination<'a>,
    pub(super) progress: &'a Progress,
    pub(super) signals: &'a mut Signals,
    pub(super) outcome: &'a mut Outcome,
}

impl Transfer<'_> {
    /// Reads the queue until all that is claimed was taken and is really gone.
    ///
    /// # Errors
    /// What ended it early; `outcome` says how far it came, and the rest is untouched.
    pub(super) async fn run(mut self, plan: &Plan) -> Result<(), Error> {
        let mut claims = plan.claims();
        let mut ended = Ok(());
        let mut checks = 0;
        loop {
            let left = claims.left();
            let removed = match self.lease(&mut claims).await {
                Ok(removed) => removed,
                Err(trouble) if ended.is_err() || matches!(trouble, Error::Unreachable(_)) => {
                    return ended.and(Err(trouble));
                }
                Err(trouble) => {
                    // What was done until then is still to be gone for certain.
                    ended = Err(trouble);
                    claims.give_up();
                    continue;
                }
            };
            if claims.left() == 0 {
                if !claims.has_settled() || (left == 0 && removed == 0) {
                    return ended;
                }
                if checks == CHECKS_MAX {
                    return ended.and(Err(Error::Failed(
                        "the broker goes on delivering letters that were removed; they are safe elsewhere"
                            .to_owned(),
                    )));
                }
                checks += 1;
            } else if claims.left() == left {
                self.outcome.gone = left;
                return Ok(());
            }
        }
    }

    /// Reads the queue once, for so long as letters may be held. How many had to be removed again.
    async fn lease(&mut self, claims: &mut Claims) -> Result<usize, Error> {
        let mut reader = Reader::open(self.queue_lock).await?;
        let mut in_flight =
            InFlight { acks: reader.acks(), reading: claims.reading(), removed: 0, waiting: HashMap::new() };
        let end = self.read(&mut reader, &mut in_flight).await;
        // Whatever ended it: what the broker confirms was done, and leaves the queue.
        let settling =
            timeout(CONFIRMS_MAX, in_flight.settle_all(&mut self.destination, self.outcome, self.progress));
        let rest = tokio::select! {
            rest = settling => rest.unwrap_or_else(|_| Err(unconfirmed())),
            (code, name) = self.signals.next() => Err(Error::Stopped(code, name.to_owned())),
        };
        let removed = in_flight.removed;
        let back = reader.give_back().await;
        end.and(rest).and(back)?;
        Ok(removed)
    }

    async fn read(&mut self, reader: &mut Reader<'_>, in_flight: &mut InFlight<'_>) -> Result<(), Error> {
        let start = Instant::now();
        let is_check = in_flight.reading.left() == 0;
        while (is_check || in_flight.reading.left() > 0) && start.elapsed() < LEASE_MAX {
            let at = self.destination.next_at();
            let next = async {
                if let Some(at) = at {
                    sleep_until(at).await;
                }
                reader.next().await
            };
            tokio::pin!(next);
            let taken = loop {
                tokio::select! {
                    biased;
                    (code, name) = self.signals.next() => return Err(Error::Stopped(code, name.to_owned())),
                    judged = self.destination.judged(), if self.destination.is_due() => {
                        in_flight.settle(judged?, self.outcome, self.progress).await?;
                    }
                    taken = &mut next, if self.destination.has_room() => break taken?,
                }
            };
            let Some(taken) = taken else { return Ok(()) };
            self.decide(taken, in_flight).await?;
        }
        Ok(())
    }

    async fn decide(&mut self, taken: Unacked, in_flight: &mut InFlight<'_>) -> Result<(), Error> {
        let fingerprint = taken.letter.fingerprint();
        let held = PendingLetter { fingerprint, tag: taken.tag, results: false };
        match in_flight.reading.claim(fingerprint) {
            Claim::Leave => {}
            Claim::Remove => {
                in_flight.acks.ack(taken.tag)?;
                in_flight.removed += 1;
            }
            Claim::Take(Kind::AnsweredBy(results))
                if matches!(self.destination, Destination::Queue { .. }) =>
            {
                if self.outcome.delivered.contains(&results) {
                    in_flight.done(held, self.outcome, self.progress).await?;
                } else {
                    in_flight.waiting.entry(results).or_default().push(held);
                }
            }
            Claim::Take(kind) => {
                if let Err(why) = self.destination.take(taken, &kind)? {
                    self.outcome.kept.push((fingerprint, why));
                }
            }
        }
        Ok(())
    }
}

fn unconfirmed() -> Error {
    Error::Unreachable("the broker does not confirm what was published: some may be there twice".to_owned())
}

/// What one reading holds.
struct InFlight<'a> {
    acks: Acks,
    reading: Reading<'a>,
    removed: usize,
    /// Jobs that wait for the delivery of their results.
    waiting: HashMap<Fingerprint, Vec<PendingLetter>>,
}

impl InFlight<'_> {
    async fn settle(
        &mut self,
        judged: Vec<(PendingLetter, Verdict)>,
        outcome: &mut Outcome,
        progress: &Progress,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for (held, verdict) in judged {
            match verdict {
                Verdict::Accepted => {
                    for job in self.waiting.remove(&held.fingerprint).unwrap_or_default() {
                        self.done(job, outcome, progress).await?;
                    }
                    self.done(held, outcome, progress).await?;
                }
                Verdict::Returned if held.results => {
                    outcome.kept.push((held.fingerprint, "its reply queue does not exist".to_owned()));
                }
                // The same for all jobs: they go to one place.
                Verdict::Returned => {
                    outcome.kept.push((held.fingerprint, "there is no queue for it".to_owned()));
                    result = Err(Error::Refused("there is no queue for the jobs (312 NO_ROUTE)".to_owned()));
                }
                Verdict::Rejected => {
                    outcome.kept.push((held.fingerprint, "the queue is full".to_owned()));
                    result = Err(Error::Refused("the queue is full, and takes no more".to_owned()));
                }
            }
        }
        result
    }

    /// Waits for the rest of what is under way.
    async fn settle_all(
        &mut self,
        destination: &mut Destination<'_>,
        outcome: &mut Outcome,
        progress: &Progress,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        while !destination.is_empty() {
            let judged = destination.judged().await?;
            // One that was refused does not keep others from being acknowledged.
            result = result.and(self.settle(judged, outcome, progress).await);
        }
        self.give_up_waiting(outcome);
        result
    }

    async fn done(
        &mut self,
        held: PendingLetter,
        outcome: &mut Outcome,
        progress: &Progress,
    ) -> Result<(), Error> {
        self.acks.ack(held.tag)?;
        self.reading.settle(held.fingerprint);
        outcome.done.push(held.fingerprint);
        if held.results {
            outcome.delivered.insert(held.fingerprint);
        }
        progress.add(1);
        Ok(())
    }

    /// Jobs whose results were not delivered stay, unless the results are still to come.
    fn give_up_waiting(&mut self, outcome: &mut Outcome) {
        for (results, jobs) in std::mem::take(&mut self.waiting) {
            let undeliverable = outcome.kept.iter().any(|(kept, _)| *kept == results);
            for job in jobs {
                if undeliverable {
                    outcome.kept.push((job.fingerprint, "its results could not be delivered".to_owned()));
                } else {
                    self.reading.unclaim(job.fingerprint, Kind::AnsweredBy(results));
                }
            }
        }
    }
}
