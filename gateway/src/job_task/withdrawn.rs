//! Withdraws jobs, and counts the withdrawn ones until they have ended.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::timeout;
use vramq_schemas::withdrawal::Withdrawal;

use super::{End, Task, stop_not_before};
use crate::app::{App, OwnJob, Permits};
use crate::in_flight::Permit;
use crate::jobs::entry::{Entry, State};
use crate::keys::Caller;

/// How long a withdrawn job's end is awaited, and its withdrawal repeated. A job that a policy of the broker removed never ends.
const WITHDRAWN_AWAITED_MAX: Duration = Duration::from_secs(3600);

/// Withdraws a job, unless it has ended. The withdrawal is stored and sent also if the caller hangs up meanwhile.
pub(crate) fn withdraw(app: &App, entry: &Arc<Entry>) {
    stop_not_before(app, entry, State::is_end);
    entry.withdraw();
}

impl Task {
    /// Sends the withdrawal to the workers, and answers callers. Goes on to follow its `life`, for as long as a withdrawal may take.
    pub(super) async fn withdraw(
        &self,
        life: impl Future,
        held: Option<(Permits, Arc<Caller>)>,
        own: Option<OwnJob>,
    ) {
        let is_elsewhere = self.entry.is_taken_elsewhere();
        if is_elsewhere && let Some(state) = self.stored_end().await {
            // The job has ended, so the withdrawal changes nothing.
            self.end(End::Stored(state)).await;
            return;
        }
        self.store(&State::Withdrawn).await;
        if is_elsewhere {
            // Once workers hear of the withdrawal, the job ends, and its own gateway removes the record, which this one must not write again.
            self.record_withdrawal().await;
        }
        let withdrawal = Withdrawal { job: self.entry.message_id.clone(), secret: self.entry.secret.clone() };
        // Before its caller hears of it: a gateway that stops answers its callers, and then waits only for withdrawals that it knows of.
        let awaited = self.app.link.withdrawals.add(withdrawal);
        drop(own);
        let counted = held.map(|(permits, caller)| self.count_withdrawn(permits, &caller, awaited.is_some()));
        self.entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        self.keep(0);
        self.app.metrics.withdrawn.inc();
        if !is_elsewhere {
            // Only this task removes the record, and not before it goes on with the job's life.
            self.record_withdrawal().await;
        }
        // Let the publish go on: the withdrawal also reaches a job that is published after it.
        let _ = timeout(WITHDRAWN_AWAITED_MAX, life).await;
        if let Some(counted) = counted {
            give_back(counted);
        }
        // After the places are free: the gauge of open withdrawals is 0 only then.
        drop(awaited);
        self.remove_record().await;
    }

    /// Counts a withdrawn job until its end, because it may be in its queue until then, with its inputs. It counts apart from the jobs in
    /// flight, so that a caller who hangs up now and then can send as many requests as before. If its caller has as many withdrawn jobs as it
    /// may, or the link does not repeat its withdrawal, it keeps its permits. So no caller fills a queue by withdrawing what it sends, and the
    /// client awaits no more jobs than it has places for.
    fn count_withdrawn(
        &self,
        permits: Permits,
        caller: &Caller,
        is_repeated: bool,
    ) -> Result<Permit, Permits> {
        let apart = if is_repeated { self.app.admit_withdrawn(caller) } else { None };
        apart.ok_or(permits)
    }
}

/// Gives back what counted a withdrawn job, which has ended.
fn give_back(counted: Result<Permit, Permits>) {
    match counted {
        Ok(apart) => drop(apart),
        // How long a withdrawn job waited says nothing of how long requests take.
        Err(permits) => permits.unused(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::in_flight::InFlight;

    #[test]
    fn how_long_a_withdrawn_job_waited_says_nothing_of_how_long_requests_take() {
        const HALF_MINUTE: Duration = Duration::from_secs(30);
        let (all, of_caller, now) = (InFlight::default(), InFlight::default(), Instant::now());
        let _before = [&all, &of_caller].map(|of| of.enter(1, now).unwrap());
        let permits = Permits::new(&all, 2, of_caller.enter(2, now).unwrap()).unwrap();
        give_back(Err(permits));
        for of in [all, of_caller] {
            // None has ended yet, so the one before is expected to take as long again.
            assert_eq!(of.enter(1, now + HALF_MINUTE).unwrap_err(), HALF_MINUTE);
        }
    }
}
