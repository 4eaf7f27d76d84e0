//! Signals that end a command early.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use vramq_dlq::{Stop, Stops};

use crate::exit;

/// How long a command may take to end itself after a signal, and after a second one. Withdrawing jobs takes four seconds at most.
const END_MAX: Duration = Duration::from_secs(10);
const END_MAX_SECOND: Duration = Duration::from_secs(1);

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

/// Ends the process after a signal if the command does not do it itself: it waits for a reader of its output, and cannot act on signals.
pub(crate) fn end_if_stuck() -> io::Result<()> {
    let mut signals = Signals::new()?;
    tokio::spawn(async move {
        let (code, _) = signals.next().await;
        tokio::select! {
            () = tokio::time::sleep(END_MAX) => {}
            _ = signals.next() => tokio::time::sleep(END_MAX_SECOND).await,
        }
        std::process::exit(code.into());
    });
    Ok(())
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
