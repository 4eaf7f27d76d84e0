//! Metrics by caller: they show whether callers get their shares, and can be the basis of charges.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, Once, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::{Labels, Seconds, labels};

/// Labels for jobs of publishers that the broker did not verify, and for callers beyond the first ones. A caller whose own name begins like
/// these counts as one of the others.
const ANONYMOUS: &str = "(anonymous)";
const OTHERS: &str = "(others)";

/// Metrics with the label `caller`.
#[derive(Clone, Debug)]
pub(super) struct CallerFamilies {
    pub(super) jobs: Family<Labels, Counter>,
    pub(super) items: Family<Labels, Counter>,
    pub(super) cost: Family<Labels, Counter>,
    pub(super) device_seconds: Family<Labels, Seconds>,
    pub(super) queued_seconds: Family<Labels, Histogram, fn() -> Histogram>,
}

/// The meters of a caller.
#[derive(Clone, Debug)]
pub struct CallerMeters {
    /// Jobs that ended with a reply or a dead letter.
    pub jobs: Counter,
    pub items: Counter,
    pub cost: Counter,
    pub device_seconds: Seconds,
    pub queued_seconds: Histogram,
}

/// The meters of all callers.
pub struct Callers {
    families: CallerFamilies,
    /// The most callers with separate series, given to those that came first. Each has a dozen series, and a Prometheus server keeps every
    /// series that it ever saw.
    most: usize,
    anonymous: CallerMeters,
    others: CallerMeters,
    named: Mutex<HashMap<String, CallerMeters>>,
    /// Limits the warning about too many callers to one.
    warned: Once,
}

impl Callers {
    /// So many callers have figures of their own.
    pub(super) fn new(families: CallerFamilies, most: usize) -> Self {
        let (anonymous, others) = (families.meters(ANONYMOUS), families.meters(OTHERS));
        Self { families, most, anonymous, others, named: Mutex::default(), warned: Once::new() }
    }

    /// Counts something for a caller.
    pub fn of(&self, caller: Option<&str>, count: impl FnOnce(&CallerMeters)) {
        let Some(caller) = caller else { return count(&self.anonymous) };
        if caller.starts_with('(') {
            return count(&self.others);
        }
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(meters) = named.get(caller) {
            return count(meters);
        }
        if named.len() >= self.most {
            self.warned.call_once(|| {
                tracing::warn!(
                    caller,
                    callers_max = self.most,
                    "metrics.callers_max is reached: this caller and all later ones are counted together as `(others)`"
                );
            });
            return count(&self.others);
        }
        let meters = self.families.meters(caller);
        count(&meters);
        named.insert(caller.to_owned(), meters);
    }
}

impl fmt::Debug for Callers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callers").finish_non_exhaustive()
    }
}

impl CallerFamilies {
    fn meters(&self, caller: &str) -> CallerMeters {
        let labels = labels([("caller", caller)]);
        CallerMeters {
            jobs: self.jobs.get_or_create_owned(&labels),
            items: self.items.get_or_create_owned(&labels),
            cost: self.cost.get_or_create_owned(&labels),
            device_seconds: self.device_seconds.get_or_create_owned(&labels),
            queued_seconds: self.queued_seconds.get_or_create_owned(&labels),
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::super::families::caller_histogram;
    use super::*;

    const MOST: usize = 100;

    fn families() -> CallerFamilies {
        CallerFamilies {
            jobs: Family::default(),
            items: Family::default(),
            cost: Family::default(),
            device_seconds: Family::default(),
            queued_seconds: Family::new_with_constructor(caller_histogram as fn() -> Histogram),
        }
    }

    #[test]
    fn a_flood_of_callers_makes_no_flood_of_series() {
        let families = families();
        let mut registry = Registry::default();
        registry.register("jobs", "", families.jobs.clone());
        let callers = Callers::new(families, MOST);
        let count = |caller: Option<&str>| {
            callers.of(caller, |meters| {
                meters.jobs.inc();
            });
        };
        (0..MOST + 50).for_each(|caller| count(Some(&format!("user {caller}"))));
        [Some("user 7"), Some("user 999"), Some("(anonymous)"), None].into_iter().for_each(count);
        let mut page = String::new();
        text::encode(&mut page, &registry).unwrap();
        let series: Vec<_> = page.lines().filter(|line| line.starts_with("jobs_total{")).collect();
        assert_eq!(series.len(), MOST + 2);
        for line in [
            "jobs_total{caller=\"user 7\"} 2",
            "jobs_total{caller=\"(others)\"} 52",
            "jobs_total{caller=\"(anonymous)\"} 1",
        ] {
            assert!(series.contains(&line), "{line} is not in\n{page}");
        }
    }
}
