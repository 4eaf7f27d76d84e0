//! Moves the selected dead letters of a queue to a destination. Each leaves its queue only when the destination has it.

mod after_lease;
mod in_flight;
mod report;

use std::fmt;
use std::time::Duration;

use after_lease::{Next, Remaining, after_lease};
use in_flight::{AnsweredJob, InFlight, LeaseEnd};
pub use report::TransferReport;
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout};

use crate::access::Access;
use crate::audit_log::{AuditLog, End};
use crate::destination::{Destination, PendingLetter, Started, Target};
use crate::error::Error;
use crate::plan::{Claim, Claims, Kind, Plan};
use crate::queue_lock::QueueLock;
use crate::reader::{Reader, Unacked};
use crate::stop::Stops;

/// The longest time for which dead letters are held unacknowledged. The broker closes a channel that holds a delivery for longer
/// than its `consumer_timeout`, 30 minutes by default; many dead letters at a low rate take longer.
const LEASE_MAX: Duration = Duration::from_secs(600);

/// The longest wait for the confirms that are outstanding at the end.
const CONFIRMS_MAX: Duration = Duration::from_secs(60);

/// Called with the number of letters that have left their queue since the last call.
pub type OnMoved<'a> = &'a (dyn Fn(usize) + Send + Sync);

/// How the transfer from one queue ended.
#[derive(Debug)]
pub struct Ended {
    pub report: TransferReport,
    /// What ended it early, so that the rest of the queue is unchanged; or why its end is not in the action log.
    pub error: Option<Error>,
}

/// What the transfers of one action have in common.
pub struct Transfers<'a> {
    pub access: &'a Access,
    pub audit_log: AuditLog,
    /// Further fields for the audit log.
    pub detail: Value,
    pub on_moved: OnMoved<'a>,
}

impl fmt::Debug for Transfers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfers").field("audit_log", &self.audit_log).finish_non_exhaustive()
    }
}

impl Transfers<'_> {
    /// Moves the selected letters of one model's queue to the target.
    ///
    /// # Errors
    /// It did not begin: the queue cannot be opened, or its beginning cannot be logged.
    pub async fn run(
        &mut self,
        model: &str,
        plan: &Plan,
        target: &mut Target<'_>,
        stops: &mut Stops,
    ) -> Result<Ended, Error> {
        let lock = QueueLock::open_unless(self.access, model, stops).await?;
        let ended = self.run_locked(&lock, plan, target, stops).await;
        lock.close().await;
        ended
    }

    async fn run_locked(
        &mut self,
        lock: &QueueLock,
        plan: &Plan,
        target: &mut Target<'_>,
        stops: &mut Stops,
    ) -> Result<Ended, Error> {
        let destination = Destination::open(self.access, target).await?;
        self.audit_log.log_begin(&lock.queue, &plan.selected, self.detail.clone())?;
        let mut report = TransferReport::default();
        if destination.delivers_results() {
            report.needed = plan.results_of_answered().collect();
        }
        let transfer =
            Transfer { queue_lock: lock, destination, on_moved: self.on_moved, stops, report: &mut report };
        let ended = transfer.run(plan).await;
        let TransferReport { done, unknown, kept, gone, .. } = &report;
        let delivered = &report.delivered_and_there();
        let end = End { done, unknown, delivered, kept, gone: *gone };
        let logged = self.audit_log.log_end(&lock.queue, &end, ended.as_ref().err());
        // Also where the log cannot be written any more, as on a full disk: the letters were moved.
        let error = match (ended, logged) {
            (Err(error), Err(unlogged)) => {
                report.unlogged = Some(unlogged.to_string());
                Some(error)
            }
            (ended, logged) => ended.and(logged).err(),
        };
        Ok(Ended { report, error })
    }
}

struct Transfer<'a> {
    queue_lock: &'a QueueLock,
    destination: Destination<'a>,
    on_moved: OnMoved<'a>,
    stops: &'a mut Stops,
    report: &'a mut TransferReport,
}

impl Transfer<'_> {
    /// Reads the queue until every claimed letter was taken and has really left the queue.
    ///
    /// # Errors
    /// What ended it early. `report` tells how far it came; the rest of the queue is unchanged.
    async fn run(mut self, plan: &Plan) -> Result<(), Error> {
        let mut claims = plan.claims();
        let mut ended = Ok(());
        let mut checks = 0;
        loop {
            let before = self.progress(&claims);
            let LeaseEnd { removed, given_back } = match self.lease(&mut claims).await {
                Ok(end) => end,
                Err(error) => {
                    let is_last = ended.is_err()
                        || !claims.has_settled()
                        || self.stops.are_urgent()
                        || matches!(error, Error::Unreachable(_));
                    ended = ended.and(Err(error));
                    if is_last {
                        self.report.acks_unsure = claims.has_settled();
                        return ended;
                    }
                    // Letters that were transferred until then still have to leave the queue reliably.
                    claims.give_up();
                    continue;
                }
            };
            let after = self.progress(&claims);
            match after_lease(before, after, removed, claims.has_settled(), checks) {
                Next::Read => {}
                Next::Check => checks += 1,
                Next::Done => return ended,
                Next::Stalled => {
                    self.report.gone = before.left.saturating_sub(given_back.len());
                    let stay = given_back.into_iter().map(|(letter, why)| (letter, why.to_owned()));
                    self.report.kept.extend(stay);
                    return ended;
                }
                Next::AcksUnsure => {
                    self.report.acks_unsure = true;
                    let error = "the broker keeps delivering dead letters that were acknowledged; they were transferred";
                    return ended.and(Err(Error::Failed(error.to_owned())));
                }
            }
        }
    }

    fn progress(&self, claims: &Claims) -> Remaining {
        Remaining { left: claims.left(), delivered: self.report.delivered.len() }
    }

    /// Reads the queue once, for at most [`LEASE_MAX`].
    async fn lease(&mut self, claims: &mut Claims) -> Result<LeaseEnd, Error> {
        let mut reader = Reader::open(self.queue_lock).await?;
        let mut in_flight = InFlight::new(reader.acks(), claims.reading());
        let read = self.read(&mut reader, &mut in_flight).await;
        // Even after an error: letters that the broker still confirms are transferred, and are removed from the queue.
        let settling =
            timeout(CONFIRMS_MAX, in_flight.settle_all(&mut self.destination, self.report, self.on_moved));
        let rest = tokio::select! {
            rest = settling => rest.unwrap_or_else(|_| Err(Error::Unreachable(
                "the broker did not confirm what was published: some dead letters may be there twice".to_owned(),
            ))),
            stop = self.stops.next() => Err(Error::Stopped(stop)),
        };
        let end = in_flight.end;
        self.report.unknown.extend(self.destination.forget());
        let back = reader.give_back().await;
        read.and(rest).and(back)?;
        Ok(end)
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
            let read = loop {
                tokio::select! {
                    biased;
                    stop = self.stops.next() => return Err(Error::Stopped(stop)),
                    settled = self.destination.settled(), if self.destination.is_due() => {
                        in_flight.settle(settled, self.report, self.on_moved)?;
                    }
                    read = &mut next, if self.destination.has_room() => break read?,
                }
            };
            let Some(unacked) = read else { return Ok(()) };
            self.decide(unacked, in_flight)?;
        }
        Ok(())
    }

    fn decide(&mut self, unacked: Unacked, in_flight: &mut InFlight<'_>) -> Result<(), Error> {
        let fingerprint = unacked.letter.fingerprint();
        let pending = PendingLetter { fingerprint, tag: unacked.tag, results: false };
        match in_flight.reading.claim(fingerprint, unacked.redelivered) {
            Claim::Leave => {}
            Claim::Remove => {
                in_flight.acks.ack(unacked.tag)?;
                in_flight.end.removed += 1;
            }
            Claim::Take(Kind::AnsweredBy(results)) if self.destination.delivers_results() => {
                let job = AnsweredJob { letter: pending, results };
                in_flight.done_if_delivered(job, self.report, self.on_moved);
            }
            Claim::Take(Kind::Results) if self.report.back.remove(&fingerprint) => {
                in_flight.delivered(pending, self.report, self.on_moved);
            }
            Claim::Take(kind) => {
                if let Started::Kept(reason) = self.destination.take(unacked, &kind)? {
                    self.report.kept.push((fingerprint, reason));
                }
            }
        }
        in_flight.acknowledged()
    }
}
