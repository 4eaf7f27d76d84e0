//! The loop's consumers: opened with the slots as prefetch, and opened anew when the slots move, because a prefetch does
//! not change under a live consumer.

use std::num::NonZeroU16;
use std::ops::ControlFlow;

use super::leaving::OF_TIMEOUT;
use super::{Loop, Outcome};

/// How a model's queue is consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consuming {
    No,
    /// With so many slots as prefetch.
    Yes(u16),
    /// The broker was told to stop; deliveries that it had sent may still come.
    Stopping,
}

impl Consuming {
    pub(super) fn is_on(&self) -> bool {
        matches!(self, Self::Yes(_))
    }

    pub(super) fn is_over(&self) -> bool {
        *self == Self::No
    }
}

impl Loop<'_> {
    /// Brings the consumers in line with the slots: none while draining, paused, or sick, or
    /// while suspects run. A consumer whose slots move is stopped, and the
    /// next one starts when all jobs of the first are settled; so what the broker counts as unacknowledged never
    /// exceeds the slots, and no delivery is dropped or comes twice.
    pub(super) async fn follow_capacity(&mut self) -> ControlFlow<Outcome> {
        if self.broker_blocks {
            // It would not answer, and the session would be given up for nothing. A drain has its deadline.
            return ControlFlow::Continue(());
        }
        for model in 0..self.consuming.len() {
            let host = &*self.host;
            let closed = host.draining || host.paused || host.health.is_sick() || self.quiet_for.is_some();
            let slots = if closed { 0 } else { self.host.capacities[model].slots() };
            let done = match self.consuming[model] {
                Consuming::Yes(now) if now != slots => {
                    self.consuming[model] = Consuming::Stopping;
                    let stopped = self.session.stop_consuming(model);
                    self.cancelling.push(Box::pin(async move { (model, stopped.await) }));
                    Ok(())
                }
                Consuming::No if self.in_hand[model] == 0 => match NonZeroU16::new(slots) {
                    Some(slots) => self.start_consuming(model, slots).await,
                    None => Ok(()),
                },
                _ => Ok(()),
            };
            if let Err(error) = done {
                let name = &self.host.models[model].name;
                return ControlFlow::Break(Outcome::Lost(format!("consumer of `{name}`: {error}")));
            }
        }
        self.take_suspect();
        ControlFlow::Continue(())
    }

    async fn start_consuming(&mut self, model: usize, slots: NonZeroU16) -> Result<(), String> {
        let timeout = self.host.job_limit.div_f64(OF_TIMEOUT);
        let deliveries = self.session.consume(model, slots, timeout).await?;
        self.deliveries.push(deliveries);
        self.consuming[model] = Consuming::Yes(slots.get());
        Ok(())
    }

    /// A consumer's stream has ended.
    pub(super) async fn consumer_closed(&mut self, model: usize) -> ControlFlow<Outcome> {
        if self.consuming[model] != Consuming::Stopping {
            let name = &self.host.models[model].name;
            return ControlFlow::Break(Outcome::Lost(format!(
                "the broker cancelled the consumer of `{name}`"
            )));
        }
        self.consuming[model] = Consuming::No;
        self.follow_capacity().await
    }
}
