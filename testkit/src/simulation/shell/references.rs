//! Inputs in stores: the shell recognises references when it reads a job, and fetches them when the core asks for it.

use vramq_core::event::{Event, FetchFault};
use vramq_core::ids::{JobKey, StoreIndex};
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;

use super::as_known::caller_as_known;
use super::stored_job::{StoredJob, Withdrawn};
use super::{Sabotage, Shell};
use crate::simulation::agenda::{Happening, MILLI, Micros, SECOND};
use crate::simulation::env::Env;

/// A fetch that failed after so long shows that the store is silent for the caller. No job of his tries it for a while afterwards, and then
/// one at a time does, until the worker may have forgotten it or a fetch succeeds.
const SILENT_AFTER: Micros = 2 * SECOND;
const UNTRIED: Micros = 10 * SECOND;
const FORGOTTEN_BY: Micros = 720 * SECOND;

impl Shell {
    /// A job refers to inputs in the store.
    pub(super) fn referring(&mut self, env: &Env, job: JobKey) {
        let was_silent = self.silent_since(env, job).is_some_and(|since| env.now < since + FORGOTTEN_BY);
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        stored.store_was_silent = was_silent;
        // Each job has a store of its own.
        let is_unknown = env.plan.sabotage == Some(Sabotage::SilentStoreForgotten);
        let store = if is_unknown { usize::try_from(job.0).unwrap_or(usize::MAX) } else { 0 };
        self.ready.push_back(Event::Referring { job, stores: vec![StoreIndex(store)] });
    }

    /// When the store last failed slowly for the job's caller, if no fetch for the caller succeeded since.
    fn silent_since(&self, env: &Env, job: JobKey) -> Option<Micros> {
        let stored = self.jobs.get(&job)?;
        let caller = caller_as_known(env, &env.ledger.job(stored.job).spec);
        self.silent_for.get(&caller).copied()
    }

    /// Whether a fetch for another job of the same caller is under way.
    fn fetches_for_caller(&self, env: &Env, job: JobKey) -> bool {
        let caller_of = |key: &JobKey| {
            self.jobs.get(key).map(|stored| caller_as_known(env, &env.ledger.job(stored.job).spec))
        };
        // What a withdrawn job still fetches is in nobody's way.
        let fetches = |stored: &StoredJob| {
            stored.fetches_since.is_some() && stored.what.is_none() && !stored.is_publishing
        };
        let others = self.jobs.iter().filter(|(key, stored)| **key != job && fetches(stored));
        others.into_iter().any(|(key, _)| caller_of(key) == caller_of(&job))
    }

    /// Starts to fetch the inputs of a job. A store that is slow takes nearly as long as a fetch may.
    pub(super) fn fetch_inputs(&mut self, env: &mut Env, job: JobKey) {
        if let Some(stored) = self.jobs.get(&job).filter(|stored| stored.withdrawn == Withdrawn::Yes) {
            let number = stored.job.0;
            env.ledger.fail("a withdrawn job is not read", || format!("job {number} is fetched for"));
        }
        if let Some(since) =
            self.silent_since(env, job).filter(|since| env.now < since + UNTRIED + FORGOTTEN_BY / 2)
        {
            let is_too_soon = env.now < since + UNTRIED;
            if is_too_soon || self.fetches_for_caller(env, job) {
                env.ledger
                    .fail("a silent store is tried by one job at a time", || format!("{job}, since {since}"));
            }
        }
        if let Some(stored) = self.jobs.get_mut(&job) {
            stored.fetches_since = Some(env.now);
        }
        let latency = if env.stores.chance(5) { 20 * SECOND } else { 200 * MILLI };
        let at = env.now + env.stores.bits() % latency;
        env.agenda.at(at, Happening::Fetched { life: self.life, job });
    }

    /// A store has answered, or did not in time.
    pub fn inputs_fetched(&mut self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        let since = stored.fetches_since.take();
        let caller = caller_as_known(env, &env.ledger.job(stored.job).spec);
        let fault = |reason, is_transient| {
            Err(FetchFault { rejection: Rejection::new(reason, "the store says so"), is_transient })
        };
        let result = match env.stores.below(100) {
            0..10 => {
                stored.store_failed = !stored.is_publishing;
                if since.is_some_and(|since| env.now >= since + SILENT_AFTER) && !stored.is_publishing {
                    self.silent_for.insert(caller, env.now);
                }
                fault(Reason::StoreUnavailable, true)
            }
            10..13 => {
                env.ledger.excuses_mut(stored.job).reference_missing = true;
                fault(Reason::ReferenceMissing, false)
            }
            _ => {
                stored.has_inputs = true;
                if !stored.is_publishing {
                    self.silent_for.remove(&caller);
                }
                Ok(())
            }
        };
        self.handle(env, Event::Fetched { job, result });
    }
}
