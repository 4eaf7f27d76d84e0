//! The page for operators, its data, and the description of the API. All files are in the binary: the page loads nothing from
//! elsewhere.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use serde_json::json;
use vramq_amqp::Depth;

use super::Authenticated;
use crate::app::App;
use crate::problem::Problem;

/// The content security policy: scripts, styles and requests only from the gateway itself.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

const OPENAPI: &str = include_str!("../../page/openapi.json");

/// `GET /`.
pub async fn index() -> Response {
    asset(HTML, include_str!("../../page/index.html"))
}

/// `GET /docs`.
pub async fn docs() -> Response {
    asset(HTML, include_str!("../../page/docs.html"))
}

/// `GET /page/{file}`.
pub async fn file(Path(name): Path<String>) -> Response {
    match name.as_str() {
        "page.js" => asset(SCRIPT, include_str!("../../page/page.js")),
        "common.js" => asset(SCRIPT, include_str!("../../page/common.js")),
        "dead.js" => asset(SCRIPT, include_str!("../../page/dead.js")),
        "chart.js" => asset(SCRIPT, include_str!("../../page/chart.js")),
        "docs.js" => asset(SCRIPT, include_str!("../../page/docs.js")),
        "page.css" => asset(STYLE, include_str!("../../page/page.css")),
        _ => Problem::not_found("such file").into_response(),
    }
}

/// `GET /openapi.json`.
pub async fn openapi() -> Response {
    asset("application/json", OPENAPI)
}

fn asset(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let mut response = text.into_response();
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// `GET /v1/status`: workers, models and their queues. Tenants see the models that they may use; workers are for operators.
pub async fn status(State(app): State<App>, Authenticated(caller): Authenticated) -> impl IntoResponse {
    let now = Instant::now();
    let names: Vec<_> =
        app.link.fleet().models(now).into_keys().filter(|name| caller.may_use(name)).collect();
    // Refreshes the counts. Where the broker does not answer, the answer has the last one.
    join_all(names.iter().map(|name| app.link.depth(name))).await;
    let models = app.link.fleet().models(now);
    let models: BTreeMap<_, _> = models
        .into_iter()
        .filter(|(name, _)| names.contains(name))
        .map(|(name, view)| {
            let queue = match app.link.queues().last(&name) {
                Some(Depth::Messages { ready, consumers }) => json!({"ready": ready, "consumers": consumers}),
                _ => json!(null),
            };
            let wait_s = app.estimate(&name).and_then(|outlook| outlook.wait).map(|wait| wait.as_secs_f64());
            (name, json!({"workers": view, "queue": queue, "estimated_wait_s": wait_s}))
        })
        .collect();
    let workers = if caller.operator { app.link.fleet().workers(now) } else { Vec::new() };
    let at_ms = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "at_ms": u64::try_from(at_ms).unwrap_or(u64::MAX),
        "caller": {"name": caller.name, "operator": caller.operator},
        "connected": app.link.is_connected(),
        "models": models,
        "workers": workers,
    }))
}
