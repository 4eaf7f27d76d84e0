//! Signals that end a command early.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use vramq_dlq::{Stop, Stops};

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

/// Signals as requests to end an action on dead letters.
pub(crate) fn stops() -> io::Result<Stops> {
    let mut signals = Signals::new()?;
    let (sender, stops) = Stops::channel();
    tokio::spawn(async move {
        loop {
            let stop = match signals.next().await.0 {
                exit::INTERRUPTED => Stop::Interrupted,
                _ => Stop::Terminated,
            };
            // Its receiver goes with the action.
            if sender.send(stop).await.is_err() {
                return;
            }
        }
    });
    Ok(stops)
}
