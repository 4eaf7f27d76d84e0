//! What a core is told about models, callers and its budget: the truth, unless a deliberate fault changes it.

use std::num::NonZeroU32;
use std::sync::Arc;

use vramq_core::admission::Budget;
use vramq_core::settings::ModelFacts;

use super::Sabotage;
use crate::simulation::env::Env;
use crate::simulation::ledger::JobSpec;

/// Who a job is from.
pub(super) fn caller_as_known(env: &Env, spec: &JobSpec) -> Option<Arc<str>> {
    let is_known = env.plan.sabotage != Some(Sabotage::CallersCountAsOne);
    spec.identity.clone().filter(|_| is_known)
}

/// The models of a worker.
pub(super) fn models_as_known(sabotage: Option<Sabotage>, mut models: Vec<ModelFacts>) -> Vec<ModelFacts> {
    if sabotage == Some(Sabotage::QueueWeightsIgnored) {
        let queues = models.iter_mut().flat_map(|model| &mut model.queues);
        queues.for_each(|queue| queue.weight = NonZeroU32::MIN);
    }
    if sabotage == Some(Sabotage::ModelWeightsIgnored) {
        models.iter_mut().for_each(|model| model.share = NonZeroU32::MIN);
    }
    if sabotage == Some(Sabotage::ReplyCapIgnored) {
        models.iter_mut().for_each(|model| model.reply_max = u64::MAX);
    }
    models
}

/// The device's bytes for passes. Only the core gives permits for them.
pub(super) fn budget_as_known(sabotage: Option<Sabotage>, bytes: u64) -> Budget {
    let budget = Budget::new(bytes);
    if sabotage == Some(Sabotage::LeakedPermit) {
        std::mem::forget(budget.try_acquire(1));
    }
    budget
}
