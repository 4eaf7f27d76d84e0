//! The life of a gateway: start, serve, drain, end.

mod runtime;
mod start;
mod sweeps;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::timeout;
use vramq_producer::Client;
use vramq_spans::Spans;

use crate::app::App;
use crate::config::Config;
use crate::drain::{Drain, drain_begins, drain_on_signal, last_answers_over};
use crate::routes::router;
use crate::server::Connections;
pub use runtime::run_to_end;
use start::{Started, start};

/// How long the connections to the broker may take to close: somewhat longer than a client gives the broker for its answer. The process ends
/// then, and the broker notices that.
const CLOSE_MAX: Duration = Duration::from_secs(4);

/// The exit codes of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Drained = 0,
    CutOff = 1,
    Usage = 2,
    Unreachable = 3,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Runs a gateway until it has drained. A signal during the start, which may wait for the broker, ends it at once.
///
/// # Errors
/// In words: the gateway cannot start as it is configured.
pub async fn run(config: Config) -> Result<Exit, String> {
    let (stop, drained) = watch::channel(Drain::Serving);
    tokio::spawn(drain_on_signal(stop, config.http.drain)?);
    let started = tokio::select! {
        // A gateway that has started drains.
        biased;
        started = start(config, drained.clone()) => started?,
        () = drain_begins(drained) => {
            tracing::info!("stopped before it served");
            return Ok(Exit::Drained);
        }
    };
    let Some(Started { app, server, spans }) = started else { return Ok(Exit::Unreachable) };
    let connections = server.serve(router(app.clone(), spans.clone()), &app.metrics).await;
    let all_answered = drain(&app, connections).await;
    Ok(end(&app, spans, all_answered).await)
}

/// Waits for what would be lost with the process: answers, work that goes on without its request, withdrawals, actions of operators. Returns
/// whether all requests were answered.
async fn drain(app: &App, connections: Connections) -> bool {
    let over = last_answers_over(app.drain.clone()).shared();
    let mut all_answered = false;
    let ending = async {
        connections.all_answered().await;
        all_answered = true;
        let work = app.background.count();
        if work > 0 {
            tracing::info!(
                work,
                "waiting for work that goes on without its request, such as storing a withdrawal"
            );
        }
        app.background.all_ended().await;
    };
    tokio::select! {
        () = ending => {}
        () = over.clone() => {
            let work = app.background.count();
            if work > 0 {
                tracing::warn!(
                    work,
                    "stopping before all work has ended that goes on without its request, such as storing a withdrawal"
                );
            }
        }
    }
    let last_action = async {
        // An action whose caller has hung up may still run. The end of the drain stops it.
        if let Some(operator) = &app.operator
            && !operator.is_idle_before(over).await
        {
            tracing::warn!(
                "stopping before an action on dead letters has ended: none is lost, and some may be in their queue and where they went to"
            );
        }
    };
    tokio::join!(app.leave_unfinished_jobs(), last_action);
    all_answered
}

/// Closes the connections to the broker, sends the last spans, and chooses the exit code.
async fn end(app: &App, spans: Option<Arc<Spans>>, all_answered: bool) -> Exit {
    let clients = app.adoption.iter().map(|adoption| &adoption.client).chain([&app.client]);
    let sending_spans = async {
        if let Some(spans) = spans {
            // An `Err` is a panic of the SDK, which only loses spans.
            let _ = tokio::task::spawn_blocking(move || spans.finish()).await;
        }
    };
    tokio::join!(close_all(clients.map(Client::close), CLOSE_MAX), sending_spans);
    let cut_off = app.cut_off_count();
    tracing::info!(all_answered, cut_off, "drained");
    if all_answered && cut_off == 0 { Exit::Drained } else { Exit::CutOff }
}

/// Closes connections at the same time, within `most` in all: a broker with an alarm does not answer on those that have published.
async fn close_all(closing: impl IntoIterator<Item = impl Future<Output = ()>>, most: Duration) {
    if timeout(most, join_all(closing)).await.is_err() {
        tracing::info!("stopping before the broker has closed all connections");
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::pending;

    use futures_util::future::Either;

    use super::*;

    /// Much longer than the test takes.
    const TEST_MAX: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_connection_that_does_not_close_holds_up_neither_the_others_nor_the_end() {
        let is_closed = Cell::new(false);
        let closing = [Either::Left(pending::<()>()), Either::Right(async { is_closed.set(true) })];
        timeout(TEST_MAX, close_all(closing, Duration::from_millis(1))).await.expect("the end");
        assert!(is_closed.get());
    }
}
