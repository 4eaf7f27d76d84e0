//! Requests to end an action before it has finished.

use tokio::sync::mpsc;

/// Why an action is to end before it is through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// By the person who started it.
    Interrupted,
    /// The process is to end.
    Terminated,
}

/// Requests to end early. The first one stops the reading, while letters in flight are settled. The second one stops that as well.
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
