//! How an action reaches the broker.

use std::time::Duration;

use lapin::Connection;
use vramq_amqp::Address;

use crate::error::Error;
use crate::text::safe;

/// How long closing a connection may take before the caller goes on without waiting for it.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// The broker's user that reads and moves dead letters.
#[derive(Clone, Debug)]
pub struct Access {
    pub address: Address,
    /// What the broker's list of connections shows.
    pub connection_name: String,
    /// The longest wait for the lock of a queue.
    pub lock_wait_max: Duration,
    /// Called once, with a sentence for people, when a queue's lock is not free.
    pub on_lock_wait: fn(&str),
}

impl Access {
    /// # Errors
    /// The broker is unreachable, or refuses the user.
    pub async fn connect(&self) -> Result<Connection, Error> {
        self.address.connect(&self.connection_name).await.map_err(|error| {
            let text = format!("connect to {}", safe(&error.to_string()));
            if error.is_refusal() { Error::Refused(text) } else { Error::Unreachable(text) }
        })
    }
}

/// Closes a connection properly, so that the broker logs no warning. Best effort: what it held is settled.
pub async fn close(connection: &Connection) {
    let _ = tokio::time::timeout(CLOSE_MAX, connection.close(200, "OK".into())).await;
}
