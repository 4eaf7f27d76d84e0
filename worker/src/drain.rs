//! SIGTERM and SIGINT: the first one drains, the second one ends the process at once.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a worker.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From here on the signals no longer kill the process by themselves.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next signal's name. Cancel-safe.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
