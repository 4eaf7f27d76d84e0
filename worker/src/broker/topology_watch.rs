//! Notices that an exchange or a queue was deleted while the worker runs, and declares it again.
//!
//! A worker learns of some deletions by itself: the consumer of a queue ends, or a publish is refused. But it may not publish for hours.
//! Meanwhile publishers have no exchange, and jobs whose delay ends stay in their delay queues.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::aux_channel::{AuxChannel, is_over};
use super::topology::{self, Entity, TopologyError};
use crate::config::BrokerConfig;
use crate::model::Model;

/// How often the worker looks: soon enough for a person who has deleted the wrong thing. One look takes some thirty small requests per
/// model.
const EVERY: Duration = Duration::from_secs(10);

/// Looks for the exchanges and queues of one session.
#[derive(Debug)]
pub struct TopologyWatch {
    aux: AuxChannel,
    broker: BrokerConfig,
    models: Vec<Arc<Model>>,
    /// The errors of the last look, each of which was logged.
    known: Vec<String>,
}

/// What the broker says about an exchange or a queue that it does not find.
struct Missing {
    error: String,
    /// Whether workers declare it.
    is_declared: bool,
}

impl TopologyWatch {
    pub fn new(aux: AuxChannel, broker: BrokerConfig, models: Vec<Arc<Model>>) -> Self {
        Self { aux, broker, models, known: Vec::new() }
    }

    /// Looks until the session is over. After each look in which exchanges are declared `declared` changes: queues of the session's own are to
    /// be bound to them again.
    pub async fn run(mut self, declared: watch::Sender<()>, mut over: watch::Receiver<bool>) {
        while self.aux.connection.status().connected() {
            let look = async {
                tokio::time::sleep(EVERY).await;
                if let Err(error) = self.look(&declared).await {
                    tracing::debug!(%error, "cannot look for exchanges and queues");
                }
            };
            tokio::select! {
                () = look => {}
                () = is_over(&mut over) => return,
            }
        }
    }

    async fn look(&mut self, declared: &watch::Sender<()>) -> Result<(), TopologyError> {
        let mut errors = Vec::new();
        for Missing { error, is_declared } in self.missing().await? {
            match (self.known.contains(&error), is_declared) {
                (true, _) => {}
                (false, true) => {
                    tracing::warn!(error, "an exchange or a queue is missing: declaring it again");
                }
                (false, false) => {
                    tracing::error!(
                        error,
                        "an exchange or a queue is missing, and workers do not declare it: declare it"
                    );
                }
            }
            errors.push(error);
        }
        if self.broker.declare {
            errors.extend(self.declare().await?);
            declared.send_replace(());
        }
        self.known = errors;
        Ok(())
    }

    /// Declares and binds everything, also if nothing is missing: another worker may have declared a deleted exchange before this one looked,
    /// and has bound its own queues alone. What is there as it should be stays as it is. Returns what the broker refuses.
    async fn declare(&mut self) -> Result<Vec<String>, TopologyError> {
        let mut refused = Vec::new();
        for model in &self.models {
            let channel = self.aux.open().await.map_err(TopologyError::no_channel)?;
            match topology::declare_on(&channel, &self.broker, model).await {
                Ok(()) => self.aux.channel = Some(channel),
                // The session ends.
                Err(error @ TopologyError::Lost { .. }) => return Err(error),
                Err(error) => {
                    // What is missing was named before.
                    let is_new = error.missing().is_none() && !self.known.contains(&error.to_string());
                    if is_new {
                        tracing::error!(%error, "cannot declare the exchanges and queues again");
                    }
                    refused.push(error.to_string());
                }
            }
        }
        Ok(refused)
    }

    async fn missing(&mut self) -> Result<Vec<Missing>, TopologyError> {
        let mut entities: Vec<_> =
            self.models.iter().flat_map(|model| Entity::of(&self.broker, model)).collect();
        if self.broker.declare {
            // Workers run without them where they do not declare them (docs/security.md).
            entities.extend(Entity::of_control_plane(&self.broker));
        }
        let (mut seen, mut missing) = (HashSet::new(), Vec::new());
        for entity in entities.iter().filter(|entity| seen.insert(entity.name().to_owned())) {
            let channel = self.aux.open().await.map_err(TopologyError::no_channel)?;
            match entity.check(&channel).await {
                Ok(()) => self.aux.channel = Some(channel),
                // The session ends.
                Err(error @ TopologyError::Lost { .. }) => return Err(error),
                // The broker has closed the channel.
                Err(error) => match error.missing() {
                    Some(error) => missing.push(Missing { error, is_declared: entity.is_declared() }),
                    // Whether it is there is unknown: this worker may not look at it, or it is a queue that is exclusive to another
                    // connection. That hides none of the others.
                    None => tracing::debug!(%error, "cannot look at an exchange or a queue"),
                },
            }
        }
        Ok(missing)
    }
}
