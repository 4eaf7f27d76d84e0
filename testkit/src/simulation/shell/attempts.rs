//! Checks replies and further attempts when they are published: parts are sent in order, finished items are kept, and after a failed pass
//! the job is tried with fewer items.

use vramq_core::action::{Route, Run};
use vramq_core::ids::JobKey;
use vramq_schemas::JobHeaders;

use super::Shell;
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;

/// A worker notices at its next reading, at most a second later, that it has waited too long for a device on which a pass hangs.
const GIVEN_UP_AFTER: Micros = 2 * SECOND;

impl Shell {
    /// Checks that replies are sent in order, with outputs that exist.
    pub(super) fn check_reply(&self, env: &mut Env, job: JobKey, run: &Run) {
        let Some(stored) = self.jobs.get(&job) else { return };
        self.check_cap_of_reply(env, job, run);
        let (from, to) = (run.offset as usize, (run.offset + run.items) as usize);
        let has_all =
            stored.outputs.get(from..to).is_some_and(|outputs| outputs.iter().all(|output| *output));
        let is_end = !run.is_last || to == stored.outputs.len();
        if run.offset != stored.next || !has_all || !is_end {
            let (number, next) = (stored.job.0, stored.next);
            env.ledger.fail("parts leave in order and whole", || {
                format!("job {number}: {run:?}, and {next} is next")
            });
        }
    }

    /// Checks that another attempt keeps finished items, is smaller than what failed, and that no pass runs the job meanwhile.
    pub(super) fn check_requeue(&self, env: &mut Env, job: JobKey, headers: &JobHeaders, route: &Route) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let number = stored.job.0;
        let Kind::Job { headers: before, .. } = &env.ledger.letter(stored.letter).kind else { return };
        let before = before.as_deref().cloned().unwrap_or_default();
        if stored.is_dead_refused {
            return self.check_undecided(env, job, headers);
        }
        // The worker does not wait for passes of a lost device, nor for passes behind one that never ends.
        let hung_at = env.devices[self.device].hung_at(env.now);
        let given_up = self.lost.is_some() || hung_at.is_some_and(|at| env.now - at <= GIVEN_UP_AFTER);
        if given_up {
            let items =
                self.passes_with(job).flat_map(|flight| &flight.order.items).filter(|(of, _)| *of == job);
            items.for_each(|(_, item)| env.ledger.in_vain(stored.job, item.0));
        }
        let stale = stored.outputs.iter().skip(stored.next as usize).filter(|there| **there).count();
        if !given_up && stale != stored.recomputed {
            let told = stored.recomputed;
            env.ledger.fail("counters match events", || {
                format!("job {number}: {told} outputs are to be computed again, and {stale} are lost")
            });
        }
        let is_finished = !given_up && stored.outputs.get(stored.next as usize) == Some(&true);
        if is_finished || headers.items_done != stored.next {
            let (next, done) = (stored.next, headers.items_done);
            env.ledger.fail("finished items are kept", || {
                format!("job {number}: items-done {done}, answered {next}")
            });
        }
        for item in
            (stored.next..).zip(stored.outputs.iter().skip(stored.next as usize)).filter(|(_, there)| **there)
        {
            env.ledger.in_vain(stored.job, item.0);
        }
        if headers.attempt > before.attempt {
            self.check_attempt(env, number, &before, headers, route);
        }
        if !given_up && let Some(flight) = self.passes_with(job).next() {
            let pass = flight.order.pass;
            env.ledger.fail("a job is requeued when its passes have ended", || {
                format!("job {number} is in pass {pass}")
            });
        }
    }

    /// Checks that a job whose dead letter was refused keeps what its caller has. What else was computed of it, or is in a pass, is lost.
    fn check_undecided(&self, env: &mut Env, job: JobKey, headers: &JobHeaders) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let answered = stored.refused_from.unwrap_or(stored.next);
        if headers.items_done != answered {
            let (number, done) = (stored.job.0, headers.items_done);
            env.ledger.fail("finished items are kept", || {
                format!("job {number}: items-done {done}, answered {answered}")
            });
        }
        let outputs = (answered..).zip(stored.outputs.iter().skip(answered as usize));
        let computed = outputs.filter(|(_, there)| **there).map(|(item, _)| item);
        let in_passes = self.passes_with(job).flat_map(|flight| &flight.order.items);
        let running = in_passes.filter(|(of, _)| *of == job).map(|(_, item)| item.0);
        computed.chain(running).for_each(|item| env.ledger.in_vain(stored.job, item));
    }

    fn check_attempt(
        &self,
        env: &mut Env,
        number: usize,
        before: &JobHeaders,
        headers: &JobHeaders,
        route: &Route,
    ) {
        let Some(last) = headers.last_out_of_memory() else {
            return env
                .ledger
                .fail("an attempt is written down", || format!("job {number}: {:?}", headers.history));
        };
        let hint = headers.batch_hint.unwrap_or(u32::MAX);
        let is_smaller = last.items > 1 && hint <= last.items / 2 && hint > 0;
        let is_alone = last.items == 1 && headers.exclusive && !before.exclusive;
        let is_later =
            last.items == 1 && matches!(route, Route::Later(_)) && headers.delays > 0 && headers.delays <= 8;
        let is_larger = last.items == 1 && matches!(route, Route::OtherWorkers(_));
        // An exclusive hint may have been relaxed by passes that have fitted since.
        let again = last.items == 1 && headers.exclusive && headers.items_done > before.items_done;
        if !(is_smaller || is_alone || is_later || is_larger || again) {
            let (items, route) = (last.items, route.clone());
            env.ledger.fail("hints fall strictly", || {
                format!(
                    "job {number}: hint {hint} after {items} items, exclusive {}, by {route:?}",
                    headers.exclusive
                )
            });
        }
    }
}
