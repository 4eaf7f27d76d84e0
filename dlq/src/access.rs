//! How an action reaches the broker, and what ends it early.

use std::time::Duration;

use lapin::Connection;
use tokio::sync::mpsc;
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
    /// The longest wait until another program releases the lock of a queue.
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

/// Why an action is to end before it is through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// By the person who started it.
    Interrupted,
    /// The process is to end.
    Terminated,
}

/// Requests to end early. The first one stops the reading, and what is under way is settled; a second one stops that, too.
#[derive(Debug)]
pub struct Stops(mpsc::Receiver<Stop>);

impl Stops {
    /// A sender of requests to end, and their receiver.
    pub fn channel() -> (mpsc::Sender<Stop>, Self) {
        // More than two change nothing.
        let (sender, receiver) = mpsc::channel(2);
        (sender, Self(receiver))
    }

    /// Waits for the next request.
    ///
    /// Cancel safety: none is lost.
    pub async fn next(&mut self) -> Stop {
        match self.0.recv().await {
            Some(stop) => stop,
            None => std::future::pending().await,
        }
    }
}
