//! A worker by its last heartbeat: its rates, and whether it is still present. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use vramq_schemas::status::{Counters, Heartbeat, WorkerState};

/// The shortest time from which a rate is computed. Changes of state send extra heartbeats.
const RATE_MS_MIN: u64 = 900;

/// The connection to the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Up { since: Instant },
    Down { since: Instant, why: Down },
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Down {
    /// The first attempt goes on.
    Connecting,
    Unreachable(String),
    /// The broker refused the user, or something that the user may not do.
    Refused(String),
}

impl Down {
    /// As an error. The broker's own text names the permission that is missing.
    pub(super) fn in_words(&self) -> String {
        match self {
            Self::Connecting => "no answer yet".to_owned(),
            Self::Unreachable(error) => format!("connection to the broker lost: {error}"),
            Self::Refused(error) => format!("refused by the broker: {error}"),
        }
    }
}

/// A worker, by its last heartbeat.
#[derive(Clone, Debug)]
pub(super) struct WorkerSnapshot {
    pub(super) last: Heartbeat,
    pub(super) heard: Instant,
    /// By model.
    pub(super) rates: BTreeMap<String, Rates>,
    /// The counters from which rates are computed, and when they were sent.
    base: BTreeMap<String, Counters>,
    base_at_ms: u64,
}

/// Per second, by the worker's own clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(super) struct Rates {
    pub(super) jobs_per_s: f64,
    pub(super) items_per_s: f64,
}

/// Whether a worker is still present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Presence {
    Here,
    /// Three heartbeats are missing: it is dead or cut off.
    Silent,
    /// Its last heartbeat said that it exits.
    Left,
}

impl WorkerSnapshot {
    pub(super) fn new(heartbeat: Heartbeat, now: Instant) -> Self {
        let (base, base_at_ms) = (counters(&heartbeat), heartbeat.sent_at_ms);
        Self { last: heartbeat, heard: now, rates: BTreeMap::new(), base, base_at_ms }
    }

    pub(super) fn take(&mut self, heartbeat: Heartbeat, now: Instant) {
        self.heard = now;
        let passed_ms = heartbeat.sent_at_ms.saturating_sub(self.base_at_ms);
        // After the worker's clock was set back, rates start again.
        if heartbeat.sent_at_ms < self.base_at_ms || passed_ms >= RATE_MS_MIN {
            let base = std::mem::replace(&mut self.base, counters(&heartbeat));
            self.base_at_ms = heartbeat.sent_at_ms;
            if passed_ms > 0 {
                self.rates = rates(&base, &self.base, passed_ms);
            }
        }
        self.last = heartbeat;
    }

    /// How long it has been silent while the broker was connected.
    pub(super) fn unheard(&self, link: &Link, now: Instant) -> Duration {
        match link {
            Link::Up { since } => now.saturating_duration_since(self.heard.max(*since)),
            // Without a connection no worker can be heard.
            Link::Down { .. } => Duration::ZERO,
        }
    }

    pub(super) fn presence(&self, link: &Link, now: Instant) -> Presence {
        if self.last.state == WorkerState::Gone {
            Presence::Left
        } else if self.unheard(link, now) > self.last.silence_max() {
            Presence::Silent
        } else {
            Presence::Here
        }
    }

    pub(super) fn items_per_s(&self) -> Option<f64> {
        (!self.rates.is_empty()).then(|| self.rates.values().map(|rates| rates.items_per_s).sum())
    }
}

fn counters(heartbeat: &Heartbeat) -> BTreeMap<String, Counters> {
    heartbeat.models.iter().map(|model| (model.model.clone(), model.counters)).collect()
}

fn rates(
    from: &BTreeMap<String, Counters>,
    to: &BTreeMap<String, Counters>,
    passed_ms: u64,
) -> BTreeMap<String, Rates> {
    let per_s = |from: u64, to: u64| to.saturating_sub(from) as f64 * 1000.0 / passed_ms as f64;
    to.iter()
        .filter_map(|(model, to)| {
            let from = from.get(model)?;
            let rates = Rates {
                jobs_per_s: per_s(from.answered, to.answered),
                items_per_s: per_s(from.items, to.items),
            };
            Some((model.clone(), rates))
        })
        .collect()
}
