//! Middleware of every request: gives it an id and a trace, writes its line in the access log, counts it, and writes errors in
//! the shape of its API.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use vramq_schemas::headers::TRACEPARENT;

use crate::app::App;
use crate::metrics::{self, Route};
use crate::problem::{JOB_ID, Problem, Shape};
use crate::trace::{REQUEST_ID, Trace};

/// The caller's name: handlers put it into the response, for the log.
#[derive(Clone, Debug)]
pub struct CallerName(pub String);

/// The outermost layer.
pub async fn observe(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let trace = Trace::of(request.headers());
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
    request.extensions_mut().insert(trace.clone());
    let mut response = match host_problem(&app, request.headers()) {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    };
    if let Some(problem) =
        response.extensions_mut().remove::<Problem>().or_else(|| unshaped(&response, &route))
    {
        let rendered = problem.render(Shape::of(&path));
        let inner = std::mem::replace(&mut response, rendered);
        response.extensions_mut().extend(inner.extensions().clone());
    }
    add_headers(response.headers_mut(), &trace);
    log(&method, &path, &response, &trace, start);
    let status = response.status().as_u16();
    app.metrics.requests.get_or_create(&metrics::Request { route: route.clone(), status }).inc();
    app.metrics.seconds.get_or_create(&Route { route }).observe(start.elapsed().as_secs_f64());
    response
}

/// The framework's own words on a URL that it cannot read are no JSON.
fn unshaped(response: &Response, route: &str) -> Option<Problem> {
    let status = response.status();
    let probe = matches!(route, "/livez" | "/readyz");
    let text = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    (status.is_client_error() && text && !probe).then(|| {
        Problem::new(status, "invalid_request", "the path or the query of the URL cannot be understood")
    })
}

/// Without keys only this machine may call; a page of another site that has its own name point to this machine may not.
fn host_problem(app: &App, headers: &HeaderMap) -> Option<Problem> {
    if app.keys.required() {
        return None;
    }
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let name = if host.starts_with('[') {
        host.split(']').next()?.trim_start_matches('[')
    } else {
        host.split(':').next()?
    };
    let local = name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let message = "without keys this gateway answers requests to localhost only";
    (!local).then(|| Problem::new(StatusCode::FORBIDDEN, "host", message))
}

fn add_headers(headers: &mut HeaderMap, trace: &Trace) {
    // Both were checked: they are visible ASCII.
    for (name, value) in
        [(REQUEST_ID, &trace.request_id), (HeaderName::from_static(TRACEPARENT), &trace.traceparent)]
    {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
    headers.entry(header::X_CONTENT_TYPE_OPTIONS).or_insert(HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

fn log(method: &Method, path: &str, response: &Response, trace: &Trace, start: Instant) {
    let job = response.headers().get(JOB_ID).and_then(|job| job.to_str().ok()).unwrap_or_default();
    let caller = response.extensions().get::<CallerName>().map_or("", |caller| caller.0.as_str());
    let ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    let status = response.status().as_u16();
    let path = &path[..path.floor_char_boundary(256)];
    let (request_id, traceparent) = (&trace.request_id, &trace.traceparent);
    // Probes come every few seconds.
    if matches!(path, "/livez" | "/readyz" | "/metrics") && status == 200 {
        tracing::debug!(%method, path, status, ms, request_id, "request");
    } else {
        tracing::info!(%method, path, status, ms, caller, job, request_id, traceparent, "request");
    }
}
