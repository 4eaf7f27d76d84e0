//! Finds out which models have dead letters. AMQP cannot list queues, so it takes the models from RabbitMQ's management API or, where none
//! is named, from the workers' heartbeats, and asks the broker about each.

use std::collections::BTreeSet;
use std::time::Duration;

use lapin::Connection;
use tokio::time::{Instant, timeout_at};
use vramq_amqp::{Depth, next_delivery, queue_depth, subscribe_to_heartbeats};
use vramq_dlq::{Access, access};
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::{check_model_name, dead_queue};

use super::error::Error;
use super::management::ManagementApi;
use crate::output::text::safe;

/// How long heartbeats are listened for: a little more than their interval (worker.heartbeat_s, 5 s), as in `vramq status`.
const LISTEN: Duration = Duration::from_secs(6);

/// The most models that the broker is asked about. Far more than a fleet serves; bounds what a program can cause that floods the exchange
/// with names.
const MODELS_MAX: usize = 256;

/// Keys of models, and names of the workers that serve them.
#[derive(Debug, Default)]
struct Heard {
    keys: BTreeSet<String>,
    workers: BTreeSet<String>,
}

/// The keys of the models with dead letters: of those that the broker lists, or of those that workers serve now. Prints on standard error
/// that it is listening, unless `quiet`.
///
/// # Errors
/// The broker or its management API is unreachable or refuses, or no worker sends a heartbeat.
pub(super) async fn learn(
    access: &Access,
    management: Option<ManagementApi>,
    quiet: bool,
) -> Result<Vec<String>, Error> {
    let listed = match management {
        Some(api) => Some(api.models().await?),
        None => None,
    };
    if listed.is_none() && !quiet {
        eprintln!(
            "listening for the workers' models for {} s; --model NAME reads one at once, and --broker-management-url those that no worker \
             serves now",
            LISTEN.as_secs()
        );
    }
    let connection = access.connect().await?;
    let models = with_letters(&connection, listed).await;
    access::close(&connection).await;
    models
}

async fn with_letters(connection: &Connection, listed: Option<Vec<String>>) -> Result<Vec<String>, Error> {
    let keys = match listed {
        Some(keys) => keys,
        None => served_now(connection).await?,
    };
    let mut with_letters = Vec::new();
    for key in keys {
        match queue_depth(connection, &dead_queue(&key)).await? {
            // Letters that another operator holds do not count as ready, but that operator's consumer does.
            Depth::Messages { ready: 0, consumers: 0 } | Depth::NoQueue => {}
            Depth::Messages { .. } => with_letters.push(key),
            Depth::NoPermission => {
                eprintln!("{} is left out: the broker's user may not read it", safe(&dead_queue(&key)));
            }
        }
    }
    Ok(with_letters)
}

/// The keys of the models that workers serve now.
async fn served_now(connection: &Connection) -> Result<Vec<String>, Error> {
    let heard = listen(connection).await?;
    if heard.workers.is_empty() {
        return Err(Error::Failed(format!(
            "no worker sent a heartbeat within {} s, so no model is known: give --model NAME (or VRAMQ_MODEL), or --broker-management-url, \
             by which the broker lists the queues of dead letters",
            LISTEN.as_secs()
        )));
    }
    Ok(heard.keys.into_iter().collect())
}

async fn listen(connection: &Connection) -> Result<Heard, Error> {
    let mut heard = Heard::default();
    let end = Instant::now() + LISTEN;
    let mut heartbeats = subscribe_to_heartbeats(connection).await?;
    // Without their exchange no worker has been on this virtual host, and there is nothing to wait for.
    while heartbeats.is_some()
        && let Ok(delivery) = timeout_at(end, next_delivery(&mut heartbeats)).await
    {
        let lost = || Error::Unreachable("connection to the broker lost: heartbeats ended".to_owned());
        heard.take(&delivery.ok_or_else(lost)??.data);
    }
    Ok(heard)
}

impl Heard {
    /// Adds a message of the exchange of heartbeats, which other programs may publish to as well.
    fn take(&mut self, body: &[u8]) {
        let Ok(heartbeat) = serde_json::from_slice::<Heartbeat>(body) else { return };
        if heartbeat.worker.is_empty() {
            return;
        }
        let room = MODELS_MAX.saturating_sub(self.keys.len());
        let keys = heartbeat.models.into_iter().map(|model| model.key);
        self.keys.extend(keys.filter(|key| check_model_name(key).is_ok()).take(room));
        if self.workers.len() < MODELS_MAX {
            self.workers.insert(heartbeat.worker);
        }
    }
}

#[cfg(test)]
mod tests {
    use vramq_schemas::status::ModelStatus;

    use super::*;

    fn heartbeat(worker: &str, keys: &[&str]) -> Vec<u8> {
        let models = keys.iter().map(|key| ModelStatus { key: (*key).to_owned(), ..ModelStatus::default() });
        let heartbeat =
            Heartbeat { worker: worker.to_owned(), models: models.collect(), ..Heartbeat::default() };
        serde_json::to_vec(&heartbeat).unwrap()
    }

    #[test]
    fn each_model_of_all_workers_is_known_once() {
        let mut heard = Heard::default();
        for body in [heartbeat("a", &["minilm", "bge"]), heartbeat("b", &["minilm"]), heartbeat("c", &[])] {
            heard.take(&body);
        }
        assert_eq!(heard.keys.into_iter().collect::<Vec<_>>(), ["bge", "minilm"]);
        assert_eq!(heard.workers.len(), 3);
    }

    #[test]
    fn foreign_messages_name_no_model() {
        let mut heard = Heard::default();
        let long = "k".repeat(300);
        for body in
            [&b"{}"[..], b"[]", b"\xff", &heartbeat("", &["m"]), &heartbeat("a", &["", "\u{1b}[2J", &long])]
        {
            heard.take(body);
        }
        assert!(heard.keys.is_empty(), "{heard:?}");
        for number in 0..2 * MODELS_MAX {
            heard.take(&heartbeat(&number.to_string(), &[&number.to_string()]));
        }
        assert_eq!((heard.keys.len(), heard.workers.len()), (MODELS_MAX, MODELS_MAX));
    }
}
