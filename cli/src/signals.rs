//! Signals that end a command early.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit;

pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next signal; its exit code and name.
    pub(crate) async fn next(&mut self) -> (u8, &'static str) {
        tokio::select! {
            _ = self.interrupt.recv() => (exit::INTERRUPTED, "interrupted"),
            _ = self.terminate.recv() => (exit::TERMINATED, "terminated"),
        }
    }
}
