//! How much the core keeps, and what bounds it. Each state knows its own bound; the simulation checks all of them every second.

use crate::Core;
use crate::consumers::ModelConsumers;

/// A collection of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub what: &'static str,
    pub entries: usize,
    pub most: usize,
}

impl Size {
    pub(crate) fn of(what: &'static str, entries: usize, most: usize) -> Self {
        Self { what, entries, most }
    }
}

impl Core {
    /// The collections that grow with jobs, callers or commands.
    pub fn sizes(&self) -> impl Iterator<Item = Size> {
        let unacked = self.unacked();
        let slots = self.models.iter().map(|model| usize::from(model.slots_max.get())).sum();
        let queues = self.models.iter().map(|model| model.queues.len()).sum();
        let single = [
            self.jobs.size(unacked),
            self.health.size(unacked),
            self.timers.size(slots + queues),
            self.withdrawals.size(),
            self.quarantine.size(queues),
            Size::of("unacknowledged jobs", self.consumers.iter().map(ModelConsumers::unacked).sum(), slots),
        ];
        let session = self.session.sizes(unacked);
        let scheduler = self.scheduler.sizes(unacked);
        let destinations = self.destinations.sizes(unacked);
        single.into_iter().chain(session).chain(scheduler).chain(destinations).chain(self.redelivery.sizes())
    }
}
