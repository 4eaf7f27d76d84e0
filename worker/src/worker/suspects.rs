//! The loop's way with suspects: all else is settled first, so that a worker that dies of one takes nobody with it, and so
//! that nobody else is to blame.

use std::ops::ControlFlow;

use super::{Loop, Outcome};

impl Loop<'_> {
    /// Asks whether there are suspects. By and by rather than by a consumer, which would have them delivered beside others.
    pub(super) fn look_for_suspects(&mut self) {
        let busy = self.quiet_for.is_some() || !self.looking.is_empty();
        if busy || self.host.draining || self.leaving || self.broker_blocks {
            return;
        }
        let has_room = |model: &usize| self.host.capacities[*model].slots() > 0;
        for model in (0..self.host.models.len()).filter(has_room) {
            let count = self.session.count_suspects(model);
            self.looking.push(Box::pin(async move { (model, count.await) }));
        }
    }

    /// There are so many of a model. The worker stops consuming, settles what it has, and then takes them one by one.
    pub(super) async fn found_suspects(&mut self, model: usize, count: u32) -> ControlFlow<Outcome> {
        if count == 0 || self.quiet_for.is_some() {
            return ControlFlow::Continue(());
        }
        tracing::info!(model = self.host.models[model].name, count, "suspects wait: each will run alone");
        self.quiet_for = Some(model);
        self.follow_capacity().await
    }

    /// Takes the next suspect, if nothing else is in hand.
    pub(super) fn take_suspect(&mut self) {
        let Some(model) = self.quiet_for else { return };
        let alone = self.jobs_in_hand() == 0 && self.consuming.iter().all(|consuming| consuming.is_over());
        if alone && self.fetching.is_empty() && !self.leaving && !self.host.draining {
            let fetched = self.session.fetch_suspect(model);
            self.fetching.push(Box::pin(async move { (model, fetched.await) }));
        }
    }

    /// There are none left.
    pub(super) async fn no_more_suspects(&mut self) -> ControlFlow<Outcome> {
        self.quiet_for = None;
        self.follow_capacity().await
    }
}
