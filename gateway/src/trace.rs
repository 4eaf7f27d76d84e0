//! The ids by which a request and its job are found in logs and traces.

use std::sync::{Arc, OnceLock};

use axum::http::{HeaderMap, HeaderName};
use uuid::Uuid;
use vramq_schemas::Traceparent;
use vramq_schemas::headers::{TRACEPARENT, TRACESTATE};

/// The header with the id of a request, in both directions.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The longest request id that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// The ids by which a request and its job are found in logs and traces.
#[derive(Clone, Debug)]
pub struct Trace {
    pub request_id: String,
    /// The client's `traceparent`, if it is valid.
    pub client: Option<Traceparent>,
    /// The `traceparent` of the request's job: the request's own span if the gateway sends spans to a collector. Otherwise the client's, or
    /// a new one.
    pub traceparent: String,
    /// The client's `tracestate`, if it is valid and came with a valid `traceparent`. Not longer than the standard requires everybody to
    /// forward.
    pub tracestate: Option<String>,
    /// Shared by the request's handler and its line in the access log, which is written also if the client hangs up.
    pub subject: Arc<Subject>,
}

/// The caller and the job of a request, once its handler knows them.
#[derive(Debug, Default)]
pub struct Subject {
    caller: OnceLock<String>,
    job: OnceLock<String>,
}

impl Subject {
    pub(crate) fn is_of(&self, caller: &str) {
        self.caller.get_or_init(|| caller.to_owned());
    }

    /// Records the job, by the id that workers log.
    pub(crate) fn is_job(&self, message_id: &str) {
        self.job.get_or_init(|| message_id.to_owned());
    }

    /// The caller's name; empty if it is not known.
    pub(crate) fn caller(&self) -> &str {
        self.caller.get().map_or("", String::as_str)
    }

    /// The job's message id; empty if there is none.
    pub(crate) fn job(&self) -> &str {
        self.job.get().map_or("", String::as_str)
    }
}

impl Trace {
    /// The client's ids as far as they are valid, and new ones otherwise.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let text = |name: &HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let request_id = text(&REQUEST_ID)
            .filter(|id| {
                (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
            })
            .map_or_else(|| Uuid::now_v7().to_string(), str::to_owned);
        let client =
            text(&HeaderName::from_static(TRACEPARENT)).and_then(|text| text.parse::<Traceparent>().ok());
        let tracestate = client
            .as_ref()
            .and_then(|_| text(&HeaderName::from_static(TRACESTATE)))
            .filter(|state| vramq_schemas::is_tracestate(state))
            .map(str::to_owned);
        let traceparent = client.as_ref().map_or_else(new_traceparent, ToString::to_string);
        Self { request_id, client, traceparent, tracestate, subject: Arc::default() }
    }
}

/// A new, unsampled `traceparent`: nobody collects the trace, but the logs of gateway and worker share its id.
fn new_traceparent() -> String {
    // A UUID is never zero.
    let (trace, span) = (Uuid::new_v4().simple().to_string(), Uuid::new_v4().simple().to_string());
    format!("00-{trace}-{}-00", &span[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(headers: &[(&'static str, &str)]) -> Trace {
        let pairs = headers.iter();
        Trace::of(
            &pairs.map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect(),
        )
    }

    #[test]
    fn a_clients_ids_are_kept_if_they_are_sane() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let kept = trace(&[("x-request-id", "abc"), ("traceparent", parent), ("tracestate", "a=b")]);
        assert_eq!((kept.request_id.as_str(), kept.traceparent.as_str()), ("abc", parent));
        assert_eq!(kept.tracestate.as_deref(), Some("a=b"));
        assert_eq!(trace(&[("tracestate", "a=b")]).tracestate, None, "it belongs to another trace");
        let large = format!("a={}", "b".repeat(511));
        assert_eq!(trace(&[("traceparent", parent), ("tracestate", large.as_str())]).tracestate, None);
        let long = "x".repeat(129);
        for odd in ["", "a b", &long] {
            let made = trace(&[("x-request-id", odd), ("traceparent", "00-zz")]);
            assert!(Uuid::parse_str(&made.request_id).is_ok());
            assert!(made.traceparent.parse::<Traceparent>().is_ok(), "{}", made.traceparent);
        }
    }
}
