//! Spans for an OTLP collector, which OpenTelemetry's standard variables name (such as `OTEL_EXPORTER_OTLP_ENDPOINT`). Worker and gateway
//! share this module, and each of them decides what its spans say. If too many spans wait for the collector, further ones are dropped.

mod collector;

use std::str::FromStr as _;
use std::time::Duration;

use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use vramq_schemas::Traceparent;

use collector::Collector;

/// How long the last spans may take when the program ends.
const LAST_EXPORT_MAX: Duration = Duration::from_secs(2);

/// Where spans go.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Spans {
    /// Sends spans to the collector that the environment names; `None` if it names none. `instance` tells processes of one service apart.
    ///
    /// # Errors
    /// The variables cannot be used. The text names one.
    pub fn from_environment(
        service: &'static str,
        version: &'static str,
        instance: String,
    ) -> Result<Option<Self>, String> {
        if !has_collector() {
            return Ok(None);
        }
        let exporter = SpanExporter::builder().with_http().with_http_client(Collector::new()).build();
        let exporter = exporter.map_err(|error| format!("OTEL_EXPORTER_OTLP_ENDPOINT: {error}"))?;
        let resource = Resource::builder()
            .with_service_name(service)
            .with_attribute(KeyValue::new("service.version", version))
            .with_attribute(KeyValue::new("service.instance.id", instance))
            .build();
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        let tracer = provider.tracer(service);
        Ok(Some(Self { provider, tracer }))
    }

    pub fn tracer(&self) -> &SdkTracer {
        &self.tracer
    }

    /// Sends the waiting spans, if the collector accepts them soon. Blocks.
    pub fn finish(&self) {
        // A failure was logged when it happened.
        let _ = self.provider.shutdown_with_timeout(LAST_EXPORT_MAX);
    }
}

/// Whether the standard variables configure a collector. The SDK reads the details from them itself.
fn has_collector() -> bool {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let disabled = std::env::var("OTEL_SDK_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"));
    !disabled && (set("OTEL_EXPORTER_OTLP_ENDPOINT") || set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
}

/// The parent of a span, in another program.
pub fn remote_parent(parent: &Traceparent, state: Option<&str>) -> Context {
    remote(parent, state).map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent))
}

fn remote(parent: &Traceparent, state: Option<&str>) -> Option<SpanContext> {
    let trace_id = TraceId::from_hex(parent.trace_id()).ok()?;
    let span_id = SpanId::from_hex(parent.span_id()).ok()?;
    let flags = if parent.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::default() };
    // A state that OpenTelemetry cannot read is still passed on with the job.
    let state = state.and_then(|state| TraceState::from_str(state).ok()).unwrap_or_default();
    Some(SpanContext::new(trace_id, span_id, flags, true, state))
}

/// A span as the `traceparent` of what it causes in other programs.
pub fn traceparent(span: &SpanContext) -> String {
    format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_written_as_it_was_read() {
        for text in [
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00",
        ] {
            let read = remote(&text.parse().unwrap(), Some("a=b")).unwrap();
            assert_eq!((traceparent(&read), read.is_remote()), (text.to_owned(), true));
            assert_eq!(read.trace_state().header(), "a=b");
        }
    }
}
