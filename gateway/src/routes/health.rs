//! `/livez`, `/readyz` and `/metrics`, for orchestrators and Prometheus. `/health`, as in text-embeddings-inference, is `/readyz`. No key
//! is needed.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::drain::Drain;
use crate::job_sessions;
use crate::metrics::Now;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Answers as long as the program does. A lost broker is not unhealthy.
pub async fn livez() -> &'static str {
    "alive\n"
}

/// Whether a balancer should send requests here.
pub async fn readyz(State(app): State<App>) -> Response {
    let not_ready = |why: &'static str| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    if *app.drain.borrow() != Drain::Serving {
        return not_ready("draining\n");
    }
    if !app.link.is_connected() {
        return not_ready("no connection to the broker\n");
    }
    if !job_sessions::are_there(&app.client, app.adoption.as_ref()) {
        return not_ready("no connection to the broker for jobs\n");
    }
    "ready\n".into_response()
}

pub async fn metrics(State(app): State<App>) -> Response {
    let (kept_jobs, kept_bytes) = app.jobs.size();
    let (withdrawals, connected) = (&app.link.withdrawals, app.link.is_connected());
    let connected = connected && job_sessions::are_there(&app.client, app.adoption.as_ref());
    let (withdrawals, excess) = (withdrawals.len(), withdrawals.excess());
    let unfinished_jobs = app.own_jobs_count();
    let now = Now { unfinished_jobs, kept_jobs, kept_bytes, withdrawals, excess, connected };
    ([(header::CONTENT_TYPE, OPEN_METRICS)], app.metrics.encode(now)).into_response()
}
