//! Whether the gateway still takes requests, and what ends a drain.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::sleep;

/// How long the last answers may take, after the drain has ended the waiting requests. What still moves then is cut off, such as an upload.
pub const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Whether the gateway serves, drains, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drain {
    Serving,
    /// Takes no new requests.
    Draining,
    /// Requests that still wait are answered with 503.
    Over,
}

/// Resolves at the first signal.
pub async fn drain_begins(mut drain: watch::Receiver<Drain>) {
    let _ = drain.wait_for(|drain| *drain != Drain::Serving).await;
}

/// Resolves when the drain is over, and the last answers have had their time.
pub async fn last_answers_over(mut drain: watch::Receiver<Drain>) {
    let _ = drain.wait_for(|drain| *drain == Drain::Over).await;
    sleep(LAST_ANSWERS).await;
}

/// Listens for signals. The first one begins the drain; its deadline, `drain_max` later, or a second signal ends it.
///
/// # Errors
/// In words: the process cannot listen for signals.
pub fn drain_on_signal(
    drain: watch::Sender<Drain>,
    drain_max: Duration,
) -> Result<impl Future<Output = ()>, String> {
    let listen = |kind| signal(kind).map_err(|e| format!("listen for signals: {e}"));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!(seconds = drain_max.as_secs(), "draining");
        drain.send_replace(Drain::Draining);
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = sleep(drain_max) => {}
        }
        drain.send_replace(Drain::Over);
        // Keep the sender until the process ends: the receivers stop on its value.
        std::future::pending::<()>().await;
    })
}
