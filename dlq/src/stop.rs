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

/// Requests to end early. After the first one no further letters are taken: those in flight are settled, and the broker is asked whether it
/// has all acknowledgements. The second one ends that, too.
#[derive(Debug)]
pub struct Stops {
    requests: mpsc::Receiver<Stop>,
    received: u32,
}

impl Stops {
    /// A sender of requests to end, and their receiver.
    pub fn channel() -> (mpsc::Sender<Stop>, Self) {
        // More than two change nothing.
        let (sender, receiver) = mpsc::channel(2);
        (sender, Self { requests: receiver, received: 0 })
    }

    /// Waits for the next request.
    ///
    /// Cancel safety: none is lost.
    pub async fn next(&mut self) -> Stop {
        match self.requests.recv().await {
            Some(stop) => {
                self.received += 1;
                stop
            }
            None => std::future::pending().await,
        }
    }

    /// Whether the second one has come.
    pub(crate) fn are_urgent(&self) -> bool {
        self.received > 1
    }
}
