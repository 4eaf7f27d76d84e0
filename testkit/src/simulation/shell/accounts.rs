//! Checks that the headers of another attempt or of a dead letter describe the job's past correctly.

use vramq_core::action::Route;
use vramq_core::event::Source;
use vramq_core::ids::JobKey;
use vramq_core::observation::{Cause, End, Settled};
use vramq_core::rejection::Rejection;
use vramq_core::units::{FreeMib, Mib};
use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST, WORKER_LOST};
use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{Attempt, JobHeaders, MinimumRequirement, Reason};

use super::Shell;
use super::as_known::caller_as_known;
use super::stored_job::{SeenEnd, StoredJob};
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;
use crate::simulation::names::LARGER_KEY;

/// A job of more full passes than this is a large one.
pub(super) const PASSES_OF_SMALL: usize = 4;

/// Workers that a job may crash before it runs alone.
pub(super) const SUSPECT_AFTER: u32 = 2;

/// How often a job waits for a worker with its revision.
const REVISION_WAITS: u32 = 16;

/// How often a job waits for a store, or for room on the disk or the device.
const STORE_WAITS: u32 = 64;

/// How long a quarantined job may wait for its first pass.
const FIRST_PASS_WITHIN: Micros = 60 * SECOND;

impl Shell {
    /// The headers that a job was delivered with.
    pub(super) fn headers_of(&self, env: &Env, stored: &StoredJob) -> JobHeaders {
        match &env.ledger.letter(stored.letter).kind {
            Kind::Job { headers, .. } => headers.as_deref().cloned().unwrap_or_default(),
            _ => JobHeaders::default(),
        }
    }

    /// Checks the headers of another attempt, and its route.
    pub(super) fn check_account(&self, env: &mut Env, job: JobKey, headers: &JobHeaders, route: &Route) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let (who, number) = (self.life.worker, stored.job.0);
        let before = self.headers_of(env, stored);
        let wrong = self.wrong_account(env, stored, &before, headers).or_else(|| {
            let ran_out = before.attempt > 0 || !stored.ran_out.is_empty();
            let is_kept =
                headers.batch_hint == before.batch_hint || (ran_out && headers.batch_hint != Some(0));
            (!is_kept).then_some("a hint that nothing changed")
        });
        let wrong = wrong.or_else(|| self.wrong_route(env, stored, &before, headers, route));
        // A job that was not read may move to the quarantine, where losses among other jobs do not count.
        let lost_here = before.crashes.saturating_add(self.unexplained_returns(stored));
        let is_forgotten = stored.is_decoded && headers.crashes < lost_here;
        let wrong = wrong.or_else(|| is_forgotten.then_some("a worker that was lost with it is forgotten"));
        if let Some(what) = wrong {
            env.ledger.fail("an attempt tells the truth about those before", || {
                format!("worker-{who}: job {number}: {what}: {headers:?} by {route:?} after {before:?}")
            });
        }
    }

    /// Checks the headers that attempts and dead letters have in common. Returns what is wrong.
    fn wrong_account(
        &self,
        env: &Env,
        stored: &StoredJob,
        before: &JobHeaders,
        headers: &JobHeaders,
    ) -> Option<&'static str> {
        let known = before.history.len();
        if headers.history.get(..known) != Some(&before.history[..]) {
            return Some("history was rewritten");
        }
        let (new, mut tried, mut incidents) = (&headers.history[known..], 0_u32, 0_u32);
        for attempt in new {
            let is_now = (stored.delivered_ms..=env.unix_ms()).contains(&attempt.at_ms);
            if attempt.worker != format!("worker-{}", self.life.worker) || !is_now {
                return Some("an entry of another worker, or of another time");
            }
            match attempt.outcome.as_str() {
                DEVICE_LOST | PROCESS_LOST | WORKER_LOST => incidents += 1,
                _ if stored.ran_out.contains(attempt) => tried += 1,
                _ => return Some("an out-of-memory that never was"),
            }
        }
        if tried > 1 || headers.attempt != before.attempt.saturating_add(tried) {
            return Some("the attempts are miscounted");
        }
        let crashes = headers.crashes.checked_sub(before.crashes);
        if crashes.is_none_or(|crashes| crashes < incidents || crashes > self.crashes_max(stored)) {
            return Some("the crashes are miscounted");
        }
        let is_same = headers.expires_at_ms == before.expires_at_ms
            && (headers.revision_waits == before.revision_waits + u32::from(stored.is_of_other_revision)
                || (stored.is_dead_refused && headers.revision_waits == before.revision_waits))
            && (headers.moved == before.moved || (headers.moved && env.ledger.job(stored.job).spec.moves))
            && headers.queue == self.queue_header(stored, before);
        let own = env.ledger.job(stored.job).spec.headers.batch_hint;
        let is_forged = !env.ledger.job(stored.job).spec.headers.history.is_empty();
        let is_remembered = headers.batch_hint_max == own || headers.attempt == 0 || is_forged;
        if !is_same || !is_remembered && env.ledger.job(stored.job).spec.headers.attempt == 0 {
            return Some("a header was lost");
        }
        if headers.delays > before.delays.saturating_add(tried)
            || headers.waits > before.waits.saturating_add(1)
        {
            return Some("the waits are miscounted");
        }
        let waits = headers.store_waits.checked_sub(before.store_waits);
        let is_counted = match waits {
            Some(0) => !stored.store_failed || tried > 0 || stored.is_dead_refused,
            // The decision may have been made before.
            Some(1) => {
                // The worker waits for inputs no longer than it may hold a job.
                let is_overdue = !stored.is_decoded && env.now > stored.delivered_at + self.hold_limit(env);
                let lacked_store = stored.store_failed
                    || stored.may_wait_unfetched
                    || is_overdue
                    || self.fell_silent(env, stored);
                let lacked_room = stored.had_no_room_alone || is_left_in_quarantine(env, stored);
                tried == 0 && (lacked_store || lacked_room)
            }
            _ => false,
        };
        (!is_counted)
            .then_some("the waits for a store, or for room on the disk or the device, are miscounted")
    }

    /// The queue that a job first came from, as its headers name it: its passes take that queue's share.
    fn queue_header(&self, stored: &StoredJob, before: &JobHeaders) -> Option<String> {
        match stored.source {
            Source::Jobs(queue, _) if queue.is_further() => {
                Some(self.models[stored.model.0].queues[queue.0].name.clone())
            }
            _ => before.queue.clone(),
        }
    }

    /// The most workers, devices and programs that may have been lost with a job, at its return or since its delivery here.
    fn crashes_max(&self, stored: &StoredJob) -> u32 {
        let sick = self.health.findings - stored.findings_before;
        let hung = u32::from(stored.was_behind_hung);
        stored.returns + stored.programs_lost + sick + hung + u32::from(self.lost.is_some())
    }

    /// What is wrong with the route of another attempt.
    fn wrong_route(
        &self,
        env: &Env,
        stored: &StoredJob,
        before: &JobHeaders,
        headers: &JobHeaders,
        route: &Route,
    ) -> Option<&'static str> {
        let spec = &env.ledger.job(stored.job).spec;
        let large = PASSES_OF_SMALL * self.models[stored.model.0].pass_cost_max;
        let left = spec.costs.iter().skip(before.items_done as usize);
        let is_large = left.sum::<usize>() > large;
        match (route, stored.source) {
            (Route::Now, Source::Jobs(..)) | (Route::Quarantine, Source::Quarantine) => None,
            (Route::Bulk, Source::Bulk(_)) => None,
            (Route::Bulk, Source::Jobs(..)) => (!is_large).then_some("a small job among the large ones"),
            (Route::Quarantine, _) => {
                (headers.crashes < SUSPECT_AFTER).then_some("quarantined without a reason")
            }
            (Route::Now | Route::Bulk, _) => Some("back by another queue"),
            (Route::OtherWorkers(key), _) => {
                let has_key = self.models[stored.model.0].larger.as_ref() == Some(key);
                let is_moved = spec.moves && key == LARGER_KEY;
                (!is_moved && (!has_key || stored.ran_out.is_empty()))
                    .then_some("sent to a larger device without need")
            }
            (Route::Later(ms), _) => {
                let (turn, last) = (wait_of(before, headers), DELAYS_MS.len() - 1);
                // After a full queue or a lost worker, always the shortest wait.
                let turns = turn.map_or(0..=0, |turn| turn.min(last).saturating_sub(1)..=turn.min(last) + 1);
                let is_due = turns.map(|turn| turn.min(last)).any(|turn| DELAYS_MS[turn] == *ms);
                // The wait that replaces a full queue.
                let is_instead = stored.was_refused && *ms == DELAYS_MS[0];
                // Only a person makes room among the dead letters.
                let is_undecided = stored.is_dead_refused && *ms == DELAYS_MS[last];
                (!is_due && !is_instead && !is_undecided).then_some("another wait than its turn's")
            }
        }
    }

    /// Checks a dead letter: the reason, the answered items, and the required device.
    pub(super) fn check_dead_letter(
        &self,
        env: &mut Env,
        job: JobKey,
        headers: Option<&JobHeaders>,
        rejection: &Rejection,
    ) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let (who, number) = (self.life.worker, stored.job.0);
        let wrong = self.wrong_dead_letter(env, stored, headers, rejection);
        if let Some(what) = wrong {
            env.ledger.fail("a dead letter tells the truth", || {
                format!("worker-{who}: job {number}: {what}: {headers:?}, {rejection:?}")
            });
        }
    }

    fn wrong_dead_letter(
        &self,
        env: &Env,
        stored: &StoredJob,
        headers: Option<&JobHeaders>,
        rejection: &Rejection,
    ) -> Option<&'static str> {
        let is_crasher = rejection.reason == Reason::Crashed;
        let before = self.headers_of(env, stored);
        if rejection.error.len() < 8 {
            return Some("it does not say why");
        }
        if rejection.reason == Reason::WrongRevision && before.revision_waits < REVISION_WAITS {
            return Some("workers with its revision may be there later");
        }
        if let Some(headers) = headers {
            if headers.items_done != stored.refused_from.unwrap_or(stored.next) {
                return Some("other items than these were answered");
            }
            if is_crasher && headers.crashes != SUSPECT_AFTER {
                return Some("once retried it would not run alone");
            }
            let crashes = if is_crasher { before.crashes } else { headers.crashes };
            let mut headers = JobHeaders { crashes, ..headers.clone() };
            if is_crasher {
                // The history names the loss. The number of crashes is the one for a retry.
                headers.history.truncate(before.history.len());
            }
            if let Some(what) = self.wrong_account(env, stored, &before, &headers) {
                return Some(what);
            }
        } else if stored.has_started {
            return Some("it tells nothing of its attempts");
        }
        let last = headers.and_then(JobHeaders::last_out_of_memory);
        match (rejection.reason, rejection.requirement, last) {
            (Reason::OutOfMemory, Some(needs), Some(last)) => {
                wrong_requirement(needs, last, &rejection.error)
            }
            // It never had a pass.
            (Reason::OutOfMemory, None, _) if before.store_waits >= STORE_WAITS => None,
            (Reason::OutOfMemory, ..) => Some("what would fit is missing"),
            (_, Some(_), _) => Some("a need of memory that is not the reason"),
            _ => None,
        }
    }

    /// Checks that the counted end of a job matches what the broker last confirmed about it.
    pub(super) fn check_settled(&self, env: &mut Env, settled: &Settled) {
        let Some(stored) = self.jobs.get(&settled.job) else {
            return env.ledger.fail("each end has the right metric label", || format!("{settled:?}"));
        };
        let caller = caller_as_known(env, &env.ledger.job(stored.job).spec);
        let is_true = match (settled.end, &stored.end) {
            (End::Replied, Some(SeenEnd::Replied))
            | (End::GivenBack, Some(SeenEnd::GivenBack))
            | (End::Withdrawn, Some(SeenEnd::Withdrawn))
            | (End::AlreadySettled, None) => true,
            // A silent reply queue gets no notice.
            (End::Withdrawn, None) => env.ledger.is_silent(stored.job),
            (End::DeadLettered(reason), Some(SeenEnd::DeadLettered(seen)))
            | (End::Rejected(reason), Some(SeenEnd::Rejected(seen))) => reason == *seen,
            (End::Requeued(cause), Some(SeenEnd::Requeued(headers, route))) => {
                is_cause(cause, &self.headers_of(env, stored), headers, route)
            }
            _ => false,
        };
        let first_pass_at = settled.first_pass_at.map(|at| env.micros_of(at));
        let ready_at = env.micros_of(settled.ready_at);
        let is_timed =
            (stored.delivered_at..=env.now).contains(&ready_at) && first_pass_at == stored.first_pass_at;
        let is_his = settled.caller.as_deref() == caller.as_deref() && settled.model == stored.model;
        if !(is_true && is_timed && is_his) {
            let (who, end) = (self.life.worker, stored.end.clone());
            env.ledger.fail("each end has the right metric label", || {
                format!("worker-{who}: job {}: {settled:?}, and the broker confirmed {end:?}", stored.job.0)
            });
        }
    }
}

/// Checks that the required device in a dead letter is that of the last attempt, and that the text agrees.
fn wrong_requirement(needs: MinimumRequirement, last: &Attempt, error: &str) -> Option<&'static str> {
    let is_true =
        needs == MinimumRequirement { item: last.item, cost: last.longest, needs_bytes: last.asked };
    let texts = [format!("item {}", last.item), Mib(last.asked).to_string(), FreeMib(last.free).to_string()];
    let is_told = texts.iter().all(|text| error.contains(text.as_str())) && error.contains(&last.device);
    let names_others = error.contains("other processes hold") == (last.foreign > 0);
    let is_for_larger = !error.contains("needs a device with") || last.asked > last.free + last.foreign;
    let is_in_pieces = error.contains("fragmented") == (last.asked <= last.free);
    match (is_true, is_told && names_others && is_for_larger && is_in_pieces) {
        (false, _) => Some("it asks for another size than the last attempt"),
        (_, false) => Some("its text is not about the last attempt"),
        _ => None,
    }
}

/// Whether a quarantined job may leave a worker because the device has had no room for it.
fn is_left_in_quarantine(env: &Env, stored: &StoredJob) -> bool {
    let is_over = env.now >= stored.delivered_at + FIRST_PASS_WITHIN;
    stored.source == Source::Quarantine && !stored.has_started && is_over
}

/// The index of an attempt's wait among waits of its kind, if these grow.
fn wait_of(before: &JobHeaders, headers: &JobHeaders) -> Option<usize> {
    let counts = [
        (before.waits, headers.waits),
        (before.store_waits, headers.store_waits),
        (before.revision_waits, headers.revision_waits),
        (before.attempt, headers.attempt),
    ];
    let at = counts.iter().position(|(before, now)| now > before)?;
    let turn = if at == 3 { headers.delays } else { counts[at].1 };
    Some((turn as usize).saturating_sub(1))
}

/// Whether this change of headers, by this route, can have that cause.
fn is_cause(cause: Cause, before: &JobHeaders, headers: &JobHeaders, route: &Route) -> bool {
    let ran_out = headers.attempt > before.attempt;
    let last_items = headers.last_out_of_memory().map_or(0, |last| last.items);
    let waited = headers.waits > before.waits;
    match cause {
        Cause::Smaller => ran_out && last_items > 1,
        Cause::Exclusive => ran_out && last_items == 1 && headers.exclusive,
        Cause::Delayed => {
            let is_after_a_try = ran_out && last_items == 1 && headers.delays > 0;
            // Or in quarantine.
            let is_unrun = !ran_out && headers.store_waits > before.store_waits;
            matches!(route, Route::Later(_)) && (is_after_a_try || is_unrun)
        }
        Cause::Larger => ran_out && matches!(route, Route::OtherWorkers(_)),
        // Or a rule moves the job.
        Cause::TargetQueueFull => waited,
        Cause::DeadQueueFull => matches!(route, Route::Later(_)) && !ran_out,
        Cause::ReplyQueueFull => waited && !ran_out,
        Cause::StoreUnavailable | Cause::ScratchFull => headers.store_waits > before.store_waits && !ran_out,
        Cause::Quarantine => matches!(route, Route::Quarantine) && !ran_out,
        Cause::Bulk | Cause::Turn => !ran_out,
        Cause::Counted | Cause::Unfinished => !ran_out && !waited,
        Cause::WrongRevision => headers.revision_waits > before.revision_waits && !ran_out,
        Cause::Moved => headers.moved && matches!(route, Route::OtherWorkers(_)) && !ran_out,
    }
}
