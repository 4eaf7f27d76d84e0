//! The loop's look at what waits at the broker. Suspects are run alone: all else is settled first, so that a worker that dies
//! of one takes nobody with it, and so that nobody else is to blame. And where jobs wait that should have been delivered, the
//! consumer is dead.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;

use super::{Loop, Outcome};
use crate::amqp::session::Waiting;

/// Looks, a second apart, at which jobs waited that this worker has slots for, until it believes that nobody delivers them.
/// RabbitMQ 3.10 does so with the consumer of a queue that is deleted and made anew at once.
const STARVED_LOOKS: u32 = 10;

/// How long a worker takes suspects and nothing else, before it turns to other jobs for as long.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// How long a session that follows a lost one has to stand before the worker takes suspects: if it is lost as well, others would
/// take that for the death of a worker, and three of those condemn.
pub(super) const CALM: Duration = Duration::from_secs(10);

/// Workers that look after suspects, for each of these.
const WORKERS_PER_SUSPECT: u32 = 2;

/// Not all workers stop for one suspect: a few of those that consume the queue, by chance, each second.
fn is_our_turn(waiting: Waiting) -> bool {
    let lot = u32::from(uuid::Uuid::new_v4().as_bytes()[0]) * waiting.consumers.max(1) / 256;
    lot < waiting.suspects.saturating_mul(WORKERS_PER_SUSPECT)
}

impl Loop<'_> {
    /// Asks what waits. By and by rather than by a consumer, which would have suspects delivered beside others.
    pub(super) fn look_at_queues(&mut self) {
        let busy = self.quiet_for.is_some() || !self.looking.is_empty();
        if busy || self.host.draining || self.host.paused || self.leaving || self.broker_blocks {
            return;
        }
        let has_room = |model: &usize| self.host.capacities[*model].slots() > 0;
        for model in (0..self.host.models.len()).filter(has_room) {
            let waiting = self.session.count_waiting(model);
            self.looking.push(Box::pin(async move { (model, waiting.await) }));
        }
    }

    /// So much waits of a model. If there are suspects, the worker stops consuming, settles what it has, and then takes
    /// them one by one.
    pub(super) async fn looked(&mut self, model: usize, waiting: Waiting) -> ControlFlow<Outcome> {
        if self.quiet_for.is_some() || self.host.paused {
            return ControlFlow::Continue(());
        }
        let name = &self.host.models[model].name;
        if waiting.suspects > 0 && self.look_at <= Instant::now() && is_our_turn(waiting) {
            tracing::info!(model = name, count = waiting.suspects, "suspects wait: each will run alone");
            (self.quiet_for, self.quiet_since) = (Some(model), None);
            return self.follow_capacity().await;
        }
        // With others on the queue somebody takes them; and the broker may let only one at a time.
        let ours = waiting.jobs > 0 && waiting.consumers <= 1;
        let starved = ours && self.in_hand[model] == 0 && self.consuming[model].is_on();
        self.starved[model] = if starved { self.starved[model] + 1 } else { 0 };
        if self.starved[model] < STARVED_LOOKS {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break(Outcome::Lost(format!(
            "the broker delivers no jobs of `{name}`, though some wait"
        )))
    }

    /// Takes the next suspect, if nothing else is in hand.
    pub(super) fn take_suspect(&mut self) {
        let Some(model) = self.quiet_for else { return };
        let alone = self.jobs_in_hand() == 0 && self.consuming.iter().all(|consuming| consuming.is_over());
        if alone
            && self.fetching.is_empty()
            && !self.leaving
            && !self.host.draining
            && !self.host.paused
            && self.quiet_since.get_or_insert_with(Instant::now).elapsed() < QUIET_MAX
        {
            let fetched = self.session.fetch_suspect(model);
            self.fetching.push(Box::pin(async move { (model, fetched.await) }));
        }
    }

    /// There are none left, or others have waited for long enough: they have as much time now.
    pub(super) async fn no_more_suspects(&mut self) -> ControlFlow<Outcome> {
        let now = Instant::now();
        self.look_at =
            now + self.quiet_since.map_or(QUIET_MAX, |since| now.duration_since(since).min(QUIET_MAX));
        self.quiet_for = None;
        self.follow_capacity().await
    }

    /// Whether the time for suspects is up, and none is in hand.
    pub(super) fn is_quiet_for_too_long(&self) -> bool {
        let long = self.quiet_since.is_some_and(|since| since.elapsed() >= QUIET_MAX);
        self.quiet_for.is_some() && long && self.jobs_in_hand() == 0 && self.fetching.is_empty()
    }
}
