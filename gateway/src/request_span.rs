//! The span of a request, for an OTLP collector. It is the parent of the job's span in the worker. Names and attributes follow
//! OpenTelemetry's conventions for HTTP.

use axum::extract::Request;
use axum::http::Method;
use opentelemetry::trace::{Span as _, SpanKind, Status, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::Span;
use vramq_spans::{Spans, remote_parent, traceparent};

use crate::trace::Trace;

/// The methods that the conventions name. Others may be anything that a client sends, of any length.
const METHODS: [Method; 9] = [
    Method::CONNECT,
    Method::DELETE,
    Method::GET,
    Method::HEAD,
    Method::OPTIONS,
    Method::PATCH,
    Method::POST,
    Method::PUT,
    Method::TRACE,
];

/// What the conventions call any other method.
const OTHER: &str = "_OTHER";

/// A method as it is logged, and named in spans.
pub(crate) fn method_name(method: &Method) -> &str {
    if METHODS.contains(method) { method.as_str() } else { OTHER }
}

/// The span of a request that is not answered yet.
#[derive(Debug)]
pub(crate) struct RequestSpan(Span);

impl RequestSpan {
    /// Starts the span: a child of the client's if the client sent a valid `traceparent`. `route` is the pattern of the path, if there
    /// is such a route.
    pub fn start(spans: &Spans, request: &Request, route: Option<&str>, path: &str, trace: &Trace) -> Self {
        let parent = match &trace.client {
            Some(client) => remote_parent(client, trace.tracestate.as_deref()),
            None => Context::new(),
        };
        let method = method_name(request.method());
        let name = match (method, route) {
            (OTHER, _) => "HTTP".to_owned(),
            (method, Some(route)) => format!("{method} {route}"),
            (method, None) => method.to_owned(),
        };
        let mut attributes = vec![
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("url.path", path.to_owned()),
            KeyValue::new("vramq.request_id", trace.request_id.clone()),
        ];
        attributes.extend(route.map(|route| KeyValue::new("http.route", route.to_owned())));
        let builder = spans.tracer().span_builder(name).with_kind(SpanKind::Server);
        Self(builder.with_attributes(attributes).start_with_context(spans.tracer(), &parent))
    }

    /// What the job of this request, and the response, have as their `traceparent`.
    pub fn traceparent(&self) -> String {
        traceparent(self.0.span_context())
    }

    /// Ends the span. `caller` and `job` are empty if nobody knows them.
    pub fn end(&mut self, status: u16, caller: &str, job: &str) {
        self.0.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        for (name, value) in [("vramq.caller", caller), ("vramq.job", job)] {
            if !value.is_empty() {
                self.0.set_attribute(KeyValue::new(name, value.to_owned()));
            }
        }
        // A client's fault is no error of a server's span.
        if status >= 500 {
            self.0.set_attribute(KeyValue::new("error.type", status.to_string()));
            self.0.set_status(Status::error(""));
        }
        self.0.end();
    }
}
