//! What one reading of a queue holds: dead letters that the destination has not confirmed yet, and those that wait for others.

use std::collections::{HashMap, HashSet};

use vramq_amqp::{Outcomes, PublishOutcome};

use super::{OnMoved, TransferReport};
use crate::dead_letter::Fingerprint;
use crate::destination::{Destination, PendingLetter, TOO_LARGE};
use crate::error::Error;
use crate::plan::{Kind, Reading};
use crate::reader::Acks;

/// What one reading of the queue leaves.
#[derive(Default)]
pub(super) struct LeaseEnd {
    /// How many dead letters had to be removed again.
    pub(super) removed: usize,
    /// Read, and given back to the queue for another reading. If no other reading gets further, they stay, for these reasons.
    pub(super) given_back: Vec<(Fingerprint, &'static str)>,
}

/// What one reading of the queue holds.
pub(super) struct InFlight<'a> {
    pub(super) acks: Acks,
    pub(super) reading: Reading<'a>,
    pub(super) end: LeaseEnd,
    /// Why an acknowledgement could not be sent. What the broker confirms is counted all the same.
    fault: Option<Error>,
    /// Jobs that wait until their results are delivered, by the first undelivered letter.
    waiting: HashMap<Fingerprint, Vec<AnsweredJob>>,
    /// Delivered results, which are removed only after their job.
    held: HashMap<Fingerprint, PendingLetter>,
}

/// A job that is removed when these letters are delivered.
pub(super) struct AnsweredJob {
    pub(super) letter: PendingLetter,
    pub(super) results: Vec<Fingerprint>,
}

impl<'a> InFlight<'a> {
    /// A reading that has read nothing yet.
    pub(super) fn new(acks: Acks, reading: Reading<'a>) -> Self {
        let end = LeaseEnd::default();
        Self { acks, reading, end, fault: None, waiting: HashMap::new(), held: HashMap::new() }
    }

    pub(super) fn settle(
        &mut self,
        settled: Result<Outcomes<PendingLetter>, Error>,
        report: &mut TransferReport,
        on_moved: OnMoved<'_>,
    ) -> Result<(), Error> {
        let refused = |error: &str| Err(Error::Refused(error.to_owned()));
        // An acknowledgement that failed is the error, whatever happened after it.
        let outcomes = settled.or_else(|error| self.acknowledged().and(Err(error)))?;
        let mut result = Ok(());
        for (pending, published) in outcomes {
            let reason = match published {
                PublishOutcome::Confirmed if pending.results => {
                    self.delivered(pending, report, on_moved);
                    continue;
                }
                PublishOutcome::Confirmed => {
                    self.done(pending, report, on_moved);
                    continue;
                }
                PublishOutcome::Returned if pending.results => "its reply queue does not exist",
                // Jobs all go to the same place: the others would not arrive either.
                PublishOutcome::Returned => {
                    result = refused("there is no queue for the jobs (312 NO_ROUTE)");
                    "there is no queue for it"
                }
                PublishOutcome::Refused => {
                    result = refused("the queue is full and refuses messages");
                    "the queue is full"
                }
                PublishOutcome::TooLarge => TOO_LARGE,
            };
            report.kept.push((pending.fingerprint, reason.to_owned()));
        }
        self.acknowledged().and(result)
    }

    /// # Errors
    /// An acknowledgement could not be sent since the last call.
    pub(super) fn acknowledged(&mut self) -> Result<(), Error> {
        self.fault.take().map_or(Ok(()), Err)
    }

    /// Waits for the outcomes that are outstanding.
    pub(super) async fn settle_all(
        &mut self,
        destination: &mut Destination<'_>,
        report: &mut TransferReport,
        on_moved: OnMoved<'_>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        while !destination.is_empty() {
            let settled = destination.settled().await;
            let is_lost = settled.is_err();
            // Go on after an error, so that the other letters are acknowledged.
            result = result.and(self.settle(settled, report, on_moved));
            if is_lost {
                break;
            }
        }
        self.release_waiting(report);
        result
    }

    fn done(&mut self, pending: PendingLetter, report: &mut TransferReport, on_moved: OnMoved<'_>) {
        self.reading.settle(pending.fingerprint);
        report.done.push(pending.fingerprint);
        on_moved(1);
        if let Err(error) = self.acks.ack(pending.tag) {
            self.fault.get_or_insert(error);
        }
    }

    /// Results have reached their reply queue. Their job leaves the queue before them, so that it never runs again.
    pub(super) fn delivered(
        &mut self,
        results: PendingLetter,
        report: &mut TransferReport,
        on_moved: OnMoved<'_>,
    ) {
        let fingerprint = results.fingerprint;
        report.delivered.insert(fingerprint);
        if !report.needed.contains(&fingerprint) {
            return self.done(results, report, on_moved);
        }
        if let Some(twin) = self.held.insert(fingerprint, results) {
            self.done(twin, report, on_moved);
        }
        for job in self.waiting.remove(&fingerprint).unwrap_or_default() {
            self.done_if_delivered(job, report, on_moved);
        }
    }

    /// Removes a job whose results are all delivered, and then these. Other jobs wait.
    pub(super) fn done_if_delivered(
        &mut self,
        job: AnsweredJob,
        report: &mut TransferReport,
        on_moved: OnMoved<'_>,
    ) {
        let missing = job.results.iter().find(|results| !report.delivered.contains(*results)).copied();
        if let Some(missing) = missing {
            return self.waiting.entry(missing).or_default().push(job);
        }
        self.done(job.letter, report, on_moved);
        for fingerprint in job.results {
            report.needed.remove(&fingerprint);
            if let Some(results) = self.held.remove(&fingerprint) {
                self.done(results, report, on_moved);
            }
        }
    }

    /// Keeps jobs whose results could not be delivered, together with their delivered results. Claims jobs again whose results were not
    /// read yet, and delivered results whose job was not.
    fn release_waiting(&mut self, report: &mut TransferReport) {
        let kept: HashSet<_> = report.kept.iter().map(|(fingerprint, _)| *fingerprint).collect();
        for AnsweredJob { letter, results } in std::mem::take(&mut self.waiting).into_values().flatten() {
            if results.iter().any(|results| kept.contains(results)) {
                report.kept.push((letter.fingerprint, "its results could not be delivered".to_owned()));
                let delivered = results.into_iter().filter(|results| self.held.remove(results).is_some());
                let why = "it was delivered, and stays because other results of its job could not be";
                report.kept.extend(delivered.map(|results| (results, why.to_owned())));
            } else {
                self.end
                    .given_back
                    .push((letter.fingerprint, "some of its results were not found in the queue"));
                self.reading.unclaim(letter.fingerprint, Kind::AnsweredBy(results));
            }
        }
        for fingerprint in std::mem::take(&mut self.held).into_keys() {
            report.back.insert(fingerprint);
            self.end.given_back.push((fingerprint, "it was delivered, and stays because its job stays"));
            self.reading.unclaim(fingerprint, Kind::Results);
        }
    }
}
