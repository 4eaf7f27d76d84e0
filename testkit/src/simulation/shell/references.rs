//! Inputs in stores: the shell recognises references when it reads a job, and fetches them when the core asks for it.

use std::sync::Arc;
use std::time::Duration;

use vramq_core::event::{Event, FetchFault};
use vramq_core::ids::{JobKey, StoreIndex};
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;

use super::as_known::caller_as_known;
use super::stored_job::{StoredJob, Withdrawn};
use super::{Sabotage, Shell};
use crate::simulation::agenda::{Happening, MILLI, Micros, SECOND};
use crate::simulation::env::Env;

/// Reading that failed after so long shows that a store is silent for the job's caller.
const SILENT_AFTER: Micros = 2 * SECOND;

/// The stores of the world. Each job has one of them.
const STORES: u64 = 2;

/// A store did not answer a caller's job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Silence {
    at: Micros,
    lasted: Micros,
}

impl Silence {
    /// None of the caller's jobs fetch from the store until then.
    fn pause_ends(self) -> Micros {
        self.at + self.lasted.max(10 * SECOND)
    }

    /// Few do until then.
    fn ends(self) -> Micros {
        self.pause_ends() + (2 * self.lasted).max(60 * SECOND)
    }
}

impl Shell {
    /// A job refers to inputs in its store.
    pub(super) fn referring(&mut self, env: &Env, job: JobKey) {
        let may_wait = self.silence(env, job).is_some_and(|silence| {
            let has_place = env.now >= silence.pause_ends() && !self.place_is_taken(env, job);
            env.now < silence.ends() && !has_place
        });
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        stored.may_wait_unfetched = may_wait;
        let stores = vec![store_as_known(env, job, stored)];
        self.ready.push_back(Event::Referring { job, stores });
    }

    /// The last silence of the job's store for its caller.
    fn silence(&self, env: &Env, job: JobKey) -> Option<Silence> {
        let stored = self.jobs.get(&job)?;
        self.silences.get(&store_and_caller(env, stored)).copied()
    }

    /// Whether the store fell silent for the job's caller right now, so that a job that fetches may give its slot up.
    pub(super) fn fell_silent(&self, env: &Env, stored: &StoredJob) -> bool {
        self.silences.get(&store_and_caller(env, stored)).is_some_and(|silence| silence.at == env.now)
    }

    /// Whether an eighth of the slots, at least one, fetch for the job's caller from its store.
    fn place_is_taken(&self, env: &Env, job: JobKey) -> bool {
        let Some(stored) = self.jobs.get(&job) else { return false };
        let slots = usize::from(self.core.status().models[stored.model.0].slots);
        // What a withdrawn job still fetches is in nobody's way.
        let fetches = |other: &&StoredJob| {
            other.fetches_since.is_some() && other.what.is_none() && !other.is_publishing
        };
        let others = self.jobs.iter().filter(|(key, _)| **key != job).map(|(_, other)| other);
        let of_both = |other: &&StoredJob| store_and_caller(env, other) == store_and_caller(env, stored);
        others.filter(fetches).filter(of_both).count() >= (slots / 8).max(1)
    }

    /// Starts to fetch the inputs of a job. A store that is slow takes nearly as long as a fetch may.
    pub(super) fn fetch_inputs(&mut self, env: &mut Env, job: JobKey) {
        if let Some(stored) = self.jobs.get(&job).filter(|stored| stored.withdrawn == Withdrawn::Yes) {
            let number = stored.job.0;
            env.ledger.fail("a withdrawn job is not read", || format!("job {number} is fetched for"));
        }
        if let Some(silence) = self.silence(env, job).filter(|silence| env.now < silence.ends())
            && (env.now < silence.pause_ends() || self.place_is_taken(env, job))
        {
            env.ledger.fail("few jobs fetch from a silent store", || format!("{job}, {silence:?}"));
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
        let took = stored.fetches_since.take().map_or(0, |since| env.now - since);
        let (known_as, key) = (store_as_known(env, job, stored), store_and_caller(env, stored));
        let fault = |reason, is_transient| {
            let rejection = Rejection::new(reason, "the store says so");
            let stores = if is_transient { vec![known_as] } else { Vec::new() };
            Err(FetchFault { rejection, is_transient, stores, took: Duration::from_micros(took) })
        };
        let result = match env.stores.below(100) {
            0..10 => {
                stored.store_failed = !stored.is_publishing;
                if took >= SILENT_AFTER && !stored.is_publishing {
                    self.silences.insert(key, Silence { at: env.now, lasted: took });
                }
                fault(Reason::StoreUnavailable, true)
            }
            10..13 => {
                env.ledger.excuses_mut(stored.job).reference_missing = true;
                fault(Reason::ReferenceMissing, false)
            }
            _ => {
                stored.has_inputs = true;
                Ok(())
            }
        };
        self.handle(env, Event::Fetched { job, result });
    }
}

/// The store of a job, and its caller as the core knows it.
fn store_and_caller(env: &Env, stored: &StoredJob) -> (u64, Option<Arc<str>>) {
    (stored.job.0 as u64 % STORES, caller_as_known(env, &env.ledger.job(stored.job).spec))
}

/// The store of a job as the core is told; one of its own if a deliberate fault has the core forget silent stores.
fn store_as_known(env: &Env, job: JobKey, stored: &StoredJob) -> StoreIndex {
    let is_forgotten = env.plan.sabotage == Some(Sabotage::SilentStoreForgotten);
    let store = if is_forgotten { job.0 } else { store_and_caller(env, stored).0 };
    StoreIndex(usize::try_from(store).unwrap_or(usize::MAX))
}
