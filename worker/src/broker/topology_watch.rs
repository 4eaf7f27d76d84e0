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

/// How often the worker looks: soon enough for a person who has deleted the wrong thing. One look takes some twelve small requests per
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

impl TopologyWatch {
    pub fn new(aux: AuxChannel, broker: BrokerConfig, models: Vec<Arc<Model>>) -> Self {
        Self { aux, broker, models, known: Vec::new() }
    }

    /// Looks until the session is over. Reports on `declared` that something was declared again.
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
        let mut errors = self.missing().await?;
        let (is_missing, declares) = (!errors.is_empty(), self.broker.declare);
        for error in errors.iter().filter(|error| !self.known.contains(error)) {
            if declares {
                tracing::warn!(error, "an exchange or a queue is missing: declaring it again");
            } else {
                tracing::error!(
                    error,
                    "an exchange or a queue is missing, and [broker] has declare = false: declare it"
                );
            }
        }
        if is_missing && declares {
            for model in &self.models {
                if let Err(error) = topology::declare(&self.aux.connection, &self.broker, model).await {
                    let error = error.to_string();
                    if !self.known.contains(&error) {
                        tracing::error!(error, "cannot declare the exchanges and queues again");
                    }
                    errors.push(error);
                }
            }
            declared.send_replace(());
        }
        self.known = errors;
        Ok(())
    }

    /// What the broker says about each exchange and queue that it does not find.
    async fn missing(&mut self) -> Result<Vec<String>, TopologyError> {
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
                // The broker has closed the channel.
                Err(error) => missing.push(error.missing().ok_or(error)?),
            }
        }
        Ok(missing)
    }
}
