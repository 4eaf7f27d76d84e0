//! Middleware of every request: gives it an id and a trace, writes its line in the access log and its span, counts it, reads what its handler leaves of
//! its body, and writes errors in the shape of its API.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use vramq_schemas::headers::TRACEPARENT;
use vramq_spans::Spans;

use crate::app::App;
use crate::held_body::{HeldBody, UntilSent};
use crate::lingering_body::LingeringBody;
use crate::metrics::{self, Route};
use crate::problem::{HUNG_UP, JOB_ID, Problem, Shape};
use crate::request_span::{RequestSpan, method_name};
use crate::trace::{REQUEST_ID, Trace};

/// What monitoring asks every few seconds.
const PROBES: [&str; 4] = ["/livez", "/readyz", "/health", "/metrics"];

/// The longest path in the log and in spans.
const PATH_BYTES_MAX: usize = 256;

/// What observes requests.
#[derive(Clone, Debug)]
pub struct Observer {
    pub app: App,
    /// `None`: no collector takes spans.
    pub spans: Option<Arc<Spans>>,
}

/// The outermost layer.
pub async fn observe(State(observer): State<Observer>, request: Request, next: Next) -> Response {
    let seen = Seen::new(&observer, &request);
    let app = observer.app;
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(seen.trace.clone());
    let body = Body::new(LingeringBody::new(&parts.headers, body));
    let request = Request::from_parts(parts, body);
    let mut response = match host_count_problem(&request).or_else(|| host_problem(&app, &request)) {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    };
    if let Some(problem) =
        response.extensions_mut().remove::<Problem>().or_else(|| unshaped(&response, &seen.route))
    {
        response = shaped(&problem, Shape::of(&seen.path), response);
    }
    add_headers(response.headers_mut(), &seen.trace);
    seen.answered(&response);
    match response.extensions_mut().remove::<UntilSent>() {
        Some(held) => response.map(|body| Body::new(HeldBody::new(body, held))),
        None => response,
    }
}

/// A request, which is logged and counted when it is answered, or when its client hangs up before.
struct Seen {
    app: App,
    start: Instant,
    method: Method,
    path: String,
    route: String,
    trace: Trace,
    /// `None`: no collector takes spans, or the request is a probe's.
    span: Option<RequestSpan>,
    is_answered: bool,
}

impl Seen {
    fn new(observer: &Observer, request: &Request) -> Self {
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        let path = request.uri().path();
        let path = &path[..path.floor_char_boundary(PATH_BYTES_MAX)];
        let mut trace = Trace::of(request.headers());
        let spans = observer.spans.as_ref().filter(|_| !PROBES.contains(&path));
        let span = spans.map(|spans| RequestSpan::start(spans, request, route, path, &trace));
        if let Some(span) = &span {
            trace.traceparent = span.traceparent();
        }
        Self {
            app: observer.app.clone(),
            start: Instant::now(),
            method: request.method().clone(),
            path: path.to_owned(),
            route: route.unwrap_or("none").to_owned(),
            trace,
            span,
            is_answered: false,
        }
    }

    fn answered(mut self, response: &Response) {
        self.is_answered = true;
        // Also the job of a stored result.
        if let Some(job) = response.headers().get(JOB_ID).and_then(|job| job.to_str().ok()) {
            self.trace.subject.is_job(job);
        }
        self.note(response.status().as_u16());
    }

    fn note(&mut self, status: u16) {
        let Self { app, start, method, path, route, trace, span, .. } = self;
        let elapsed = start.elapsed();
        let ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let (request_id, traceparent) = (&trace.request_id, &trace.traceparent);
        let (caller, job) = (trace.subject.caller(), trace.subject.job());
        let method = method_name(method);
        // Probes come every few seconds, so successful ones are not logged.
        if PROBES.contains(&path.as_str()) && status == 200 {
            tracing::debug!(method, path, status, ms, request_id, "request");
        } else {
            tracing::info!(method, path, status, ms, caller, job, request_id, traceparent, "request");
        }
        if let Some(span) = span {
            span.end(status, caller, job);
        }
        app.metrics.requests.get_or_create(&metrics::Request { route: route.clone(), status }).inc();
        app.metrics.seconds.get_or_create(&Route { route: route.clone() }).observe(elapsed.as_secs_f64());
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        if !self.is_answered {
            self.note(HUNG_UP);
        }
    }
}

/// A problem in the shape of its API. Keeps what inner layers added to the response: the CORS headers, and the values held until the
/// response is sent.
fn shaped(problem: &Problem, shape: Shape, inner: Response) -> Response {
    let (inner, _) = inner.into_parts();
    let mut response = problem.render(shape);
    for (name, value) in &inner.headers {
        // These two headers describe the replaced body.
        if *name != header::CONTENT_TYPE && *name != header::CONTENT_LENGTH {
            response.headers_mut().append(name.clone(), value.clone());
        }
    }
    response.extensions_mut().extend(inner.extensions);
    response
}

/// The framework answers a malformed URL with plain text, not JSON.
fn unshaped(response: &Response, route: &str) -> Option<Problem> {
    let status = response.status();
    let probe = matches!(route, "/livez" | "/readyz" | "/health");
    let text = response
        .headers()
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    (status.is_client_error() && text && !probe).then(|| {
        Problem::new(status, "invalid_request", "the path or the query of the URL cannot be understood")
    })
}

/// RFC 9112, section 3.2: an HTTP/1.1 request has one `Host`, and no request has several. With several, a proxy before the gateway may have
/// taken another one than the gateway does.
fn host_count_problem(request: &Request) -> Option<Problem> {
    let hosts = request.headers().get_all(header::HOST).iter().count();
    let is_right = hosts == 1 || hosts == 0 && request.version() < Version::HTTP_11;
    let message = || format!("the request has {hosts} headers `Host`; it must have one");
    (!is_right).then(|| Problem::new(StatusCode::BAD_REQUEST, "host", message()))
}

/// Without keys only this machine may call. Another site could make its own host name point to this machine (DNS rebinding), so the host
/// must be local.
fn host_problem(app: &App, request: &Request) -> Option<Problem> {
    if app.keys.required() || names_local_host(request) {
        return None;
    }
    let message = "without keys this gateway answers requests to localhost only";
    Some(Problem::new(StatusCode::FORBIDDEN, "host", message))
}

/// Whether a request names this machine as its host, in its `Host` header and in its URL if they are there. HTTP/1.0 needs no header: load
/// balancers probe without one.
fn names_local_host(request: &Request) -> bool {
    // An unreadable host is not this machine.
    let is_named = |host: &HeaderValue| is_local(host.to_str().unwrap_or_default());
    request.headers().get_all(header::HOST).iter().all(is_named) && request.uri().host().is_none_or(is_local)
}

/// Whether a host, with or without a port, is this machine by its name or address.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(address) => address.split(']').next(),
        None => host.split(':').next(),
    };
    let name = name.unwrap_or_default();
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Refuses a form that another site's page sends to a gateway without keys: browsers let every page send forms anywhere.
///
/// # Errors
/// The page is neither of this machine nor of a named origin.
pub fn check_origin(app: &App, headers: &HeaderMap) -> Result<(), Problem> {
    let Some(origin) = headers.get(header::ORIGIN).filter(|_| !app.keys.required()) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = origin.split_once("://").map_or("", |(_, host)| host);
    if is_local(host) || app.config.http.cors_origins.iter().any(|named| named == origin) {
        return Ok(());
    }
    let message = "without keys this gateway takes no forms from pages of other sites (http.cors_origins)";
    Err(Problem::new(StatusCode::FORBIDDEN, "origin", message))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_few_names() {
        for local in ["localhost", "LocalHost:80", "127.0.0.1", "127.1.2.3:8080", "[::1]", "[::1]:8080"] {
            assert!(is_local(local), "{local}");
        }
        let others = [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "0.0.0.0",
            "[::]",
            "[::2]:80",
        ];
        for other in others.into_iter().chain(["192.168.0.1:80", "[", "::1", "localhost@evil.example"]) {
            assert!(!is_local(other), "{other}");
        }
    }

    #[test]
    fn a_request_names_this_machine_and_no_other() {
        let is_local = |version, uri: &str, hosts: &[&str]| {
            let request = Request::builder().version(version).uri(uri);
            let request = hosts.iter().fold(request, |request, host| request.header(header::HOST, *host));
            let request = request.body(Body::empty()).unwrap();
            host_count_problem(&request).is_none() && names_local_host(&request)
        };
        let (http_10, http_11) = (Version::HTTP_10, Version::HTTP_11);
        for (version, uri, hosts) in [
            (http_11, "/v1/models", &["localhost"][..]),
            (http_11, "http://127.0.0.1:8080/v1/models", &["localhost:8080"][..]),
            (http_10, "/livez", &[][..]),
        ] {
            assert!(is_local(version, uri, hosts), "{version:?} {uri} {hosts:?}");
        }
        for (version, uri, hosts) in [
            (http_11, "/v1/models", &["localhost", "evil.example"][..]),
            (http_11, "/v1/models", &[][..]),
            (http_11, "/v1/models", &["localhost", "localhost"][..]),
            (http_11, "http://evil.example/v1/models", &["localhost"][..]),
            (http_11, "http://localhost:80@evil.example/v1/models", &["localhost"][..]),
            (http_10, "http://evil.example/livez", &[][..]),
            (http_10, "/livez", &["evil.example"][..]),
            (http_10, "/livez", &["localhost", "localhost"][..]),
        ] {
            assert!(!is_local(version, uri, hosts), "{version:?} {uri} {hosts:?}");
        }
    }

    #[test]
    fn headers_of_inner_layers_stay_in_the_answer() {
        let mut inner = (StatusCode::NOT_FOUND, "a text").into_response();
        inner
            .headers_mut()
            .insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("https://a"));
        inner.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(6));
        inner.extensions_mut().insert("held");
        let response = shaped(&Problem::not_found("such thing"), Shape::OpenAi, inner);
        let headers = response.headers();
        assert_eq!(headers[header::ACCESS_CONTROL_ALLOW_ORIGIN], "https://a");
        let kinds: Vec<_> = headers.get_all(header::CONTENT_TYPE).iter().collect();
        assert_eq!(kinds, ["application/json"]);
        assert!(!headers.contains_key(header::CONTENT_LENGTH));
        assert_eq!(response.extensions().get::<&str>(), Some(&"held"));
    }
}
