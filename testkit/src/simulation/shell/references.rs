//! Inputs in stores: the shell recognises references when it reads a job, and fetches them when the core asks for it.

use vramq_core::event::{Event, FetchFault};
use vramq_core::ids::JobKey;
use vramq_core::rejection::Rejection;
use vramq_schemas::Reason;

use super::Shell;
use super::stored_job::Withdrawn;
use crate::simulation::agenda::{Happening, MILLI, SECOND};
use crate::simulation::env::Env;

impl Shell {
    /// Starts to fetch the inputs of a job. A store that is slow takes nearly as long as a fetch may.
    pub(super) fn fetch_inputs(&mut self, env: &mut Env, job: JobKey) {
        if let Some(stored) = self.jobs.get(&job).filter(|stored| stored.withdrawn == Withdrawn::Yes) {
            let number = stored.job.0;
            env.ledger.fail("a withdrawn job is not read", || format!("job {number} is fetched for"));
        }
        let latency = if env.stores.chance(5) { 20 * SECOND } else { 200 * MILLI };
        let at = env.now + env.stores.bits() % latency;
        env.agenda.at(at, Happening::Fetched { life: self.life, job });
    }

    /// A store has answered, or did not in time.
    pub fn inputs_fetched(&mut self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get_mut(&job) else { return };
        let fault = |reason, is_transient| {
            Err(FetchFault { rejection: Rejection::new(reason, "the store says so"), is_transient })
        };
        let result = match env.stores.below(100) {
            0..10 => {
                stored.store_failed = !stored.is_publishing;
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
