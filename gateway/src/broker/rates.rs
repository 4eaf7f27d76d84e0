//! Estimates from heartbeats how many jobs a worker answers in a second, for each of its models. Pure.

use std::collections::HashMap;

use vramq_schemas::status::{Heartbeat, ModelStatus};

/// How much a new rate counts: the last five intervals make up two thirds.
const RATE_WEIGHT: f64 = 0.2;

/// Jobs a second of a worker and a model.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub per_s: f64,
    /// It was measured while the worker had more to do than it could: it is what the worker can do. Else the worker can do at least so
    /// much, which says nothing of how long jobs will wait.
    pub is_full: bool,
}

/// The rates of one worker, by model.
#[derive(Debug, Default)]
pub struct Rates(HashMap<String, Rate>);

impl Rates {
    pub fn get(&self, model: &str) -> Option<&Rate> {
        self.0.get(model)
    }

    /// Takes the next heartbeat of a worker in. A worker that had more to do than it could, at both heartbeats, shows what it can do;
    /// another one only that it can do at least so much.
    pub fn update(&mut self, before: &Heartbeat, now: &Heartbeat, backlog: impl Fn(&str) -> bool) {
        let seconds = now.sent_at_ms.saturating_sub(before.sent_at_ms) as f64 / 1000.0;
        // Heartbeats of a change of state come close together: their counters say nothing of a rate.
        if seconds < 0.5 {
            return;
        }
        self.0.retain(|name, _| now.models.iter().any(|model| model.model == *name));
        for model in &now.models {
            let Some(earlier) = before.models.iter().find(|earlier| earlier.key == model.key) else {
                continue;
            };
            // Of a heartbeat, which may say anything.
            let ended = |m: &ModelStatus| {
                let failed = m.counters.dead_lettered.saturating_add(m.counters.withdrawn);
                m.counters.answered.saturating_add(failed)
            };
            let measured = ended(model).saturating_sub(ended(earlier)) as f64 / seconds;
            let has_backlog = backlog(&model.model);
            let is_full = is_full(earlier, has_backlog) && is_full(model, has_backlog);
            let rate = match self.0.get(&model.model) {
                Some(Rate { per_s, is_full: true }) if is_full => {
                    Rate { per_s: per_s + RATE_WEIGHT * (measured - per_s), is_full }
                }
                _ if is_full && measured > 0.0 => Rate { per_s: measured, is_full },
                Some(known) => Rate { per_s: known.per_s.max(measured), ..*known },
                None if measured > 0.0 => Rate { per_s: measured, is_full },
                None => continue,
            };
            self.0.insert(model.model.clone(), rate);
        }
    }
}

/// Whether a worker had more to do than it could: jobs that wait for a pass, no slot left, or unacknowledged jobs beside those that
/// waited in the queue a moment ago.
fn is_full(model: &ModelStatus, has_backlog: bool) -> bool {
    model.waiting > 0 || model.in_hand >= u64::from(model.slots.max(1)) || (model.in_hand > 0 && has_backlog)
}
