//! Checks learned limits: a size that ran out of memory on an otherwise idle device is not tried again, limits grow back in small steps,
//! and a restarted worker knows them.

use std::collections::BTreeMap;

use vramq_core::action::PassOrder;
use vramq_core::device::{OutOfMemory, PassShape};
use vramq_core::ids::ModelIndex;
use vramq_core::learned_limits::{LearnedLimit, LimitKey};

use super::Shell;
use crate::simulation::agenda::{HOUR, Micros};
use crate::simulation::env::Env;

/// After so many passes near it, a limit is raised.
const PASSES_PER_STEP: u32 = 32;

/// Learned limits in a worker's file.
pub type LimitsFile = BTreeMap<LimitKey, LearnedLimit>;

/// For each model and length of the longest item: the fewest bytes that ran out of memory alone, and when.
pub type RanOut = BTreeMap<(usize, usize), (u64, Micros)>;

/// The state of each limit as a process has seen it.
pub(super) type Seen = BTreeMap<LimitKey, Steps>;

/// A limit on its way up.
#[derive(Debug)]
pub(super) struct Steps {
    limit: u64,
    /// Passes near the limit that fitted since it last moved. The real number may be higher after a restart.
    near: u32,
    is_loaded: bool,
}

impl Shell {
    fn limits(&self) -> LimitsFile {
        self.core.learned_limits().known().map(|(key, limit)| (key.clone(), *limit)).collect()
    }

    /// The worker writes its limits to their file.
    pub(super) fn save_limits(&mut self, env: &mut Env) {
        env.limit_files.insert(self.life.worker, self.limits());
        let all = env.ran_out.entry(self.life.worker).or_default();
        for (place, bytes) in self.ran_out.drain(..) {
            let (least, at) = all.entry(place).or_insert((bytes, env.now));
            (*least, *at) = ((*least).min(bytes), env.now);
        }
    }

    /// Checks that a pass is smaller than any that ran out of memory alone within the last hour, unless it has a single item.
    pub(super) fn check_limit(&self, env: &mut Env, order: &PassOrder) {
        let place = (order.model.0, order.shape.longest.next_power_of_two());
        let bytes = (self.models[order.model.0].pass_bytes)(order.shape);
        let ran_out = env.ran_out.get(&self.life.worker).and_then(|all| all.get(&place).copied());
        let Some((failed, _)) = ran_out.filter(|(_, at)| env.now - at < HOUR) else { return };
        if bytes >= failed && order.items.len() > 1 {
            let (who, pass) = (self.life.worker, order.pass);
            env.ledger.fail("what ran out of memory alone is not tried again", || {
                format!("worker-{who}: {pass} of {bytes} bytes, and {failed} ran out")
            });
        }
    }

    /// A pass ran out of memory. `alone`: no other pass or process can have caused it.
    pub(super) fn ran_out(&mut self, model: ModelIndex, shape: PassShape, oom: &OutOfMemory, alone: bool) {
        if alone && oom.foreign == 0 && oom.asked > oom.free {
            let bytes = (self.models[model.0].pass_bytes)(shape);
            self.ran_out.push(((model.0, shape.longest.next_power_of_two()), bytes));
            self.seen_limits.clear();
        }
    }

    /// After a pass: checks that each limit lies between what fitted and what failed, and is saved. A limit moves only after enough passes
    /// near it, and by a part of the gap. `fitted`: the pass, if it fitted.
    pub(super) fn check_limits(&mut self, env: &mut Env, fitted: Option<(ModelIndex, PassShape)>) {
        let (who, limits) = (self.life.worker, self.limits());
        let saved = env.limit_files.get(&who);
        let mut wrong = None;
        for (key, limit) in &limits {
            let is_between = limit.limit < limit.failed && limit.limit >= limit.fitted.min(limit.failed / 2);
            if !is_between {
                wrong = Some((key, limit, "is not between"));
            }
            if saved.and_then(|saved| saved.get(key)).is_none_or(|saved| saved.limit != limit.limit) {
                wrong = Some((key, limit, "is not in the file"));
            }
            let is_new = Steps { limit: limit.limit, near: 0, is_loaded: true };
            let steps = self.seen_limits.entry(key.clone()).or_insert(is_new);
            let is_near = fitted.is_some_and(|(model, shape)| {
                let model = &self.models[model.0];
                let is_of = model.name == key.model && shape.longest.next_power_of_two() == key.longest_max;
                is_of && (model.pass_bytes)(shape) >= steps.limit - steps.limit / 8
            });
            let has_gap = limit.failed - steps.limit.min(limit.failed) > limit.failed / 16;
            steps.near += u32::from(is_near && has_gap);
            if limit.limit > steps.limit {
                let is_early = !steps.is_loaded && steps.near < PASSES_PER_STEP;
                if is_early || limit.limit > steps.limit + (limit.failed - steps.limit) / 8 {
                    wrong = Some((key, limit, "grows too fast"));
                }
            } else if steps.near > PASSES_PER_STEP {
                wrong = Some((key, limit, "does not grow"));
            }
            if limit.limit != steps.limit {
                *steps = Steps { limit: limit.limit, near: 0, is_loaded: false };
            }
        }
        if let Some((key, limit, what)) = wrong {
            env.ledger.fail("a learned limit is kept, and grows back slowly", || {
                format!("worker-{who}: {key:?} {what}: {limit:?}")
            });
        }
    }
}
