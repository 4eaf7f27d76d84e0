//! The HTTP client by which spans are sent, on the SDK's own thread.

use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};

/// How long a collector may take for a batch of spans.
const EXPORT_MAX: Duration = Duration::from_secs(5);

/// The most bytes of a collector's answer that are read.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;

#[derive(Debug)]
pub(crate) struct Collector {
    agent: ureq::Agent,
    /// Whether the last batch was lost. Only the first loss in a row is logged.
    failing: AtomicBool,
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.send(request);
        let fault = match &answer {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(response.status().to_string()),
            Err(error) => Some(error.to_string()),
        };
        match (self.failing.swap(fault.is_some(), Ordering::Relaxed), fault) {
            (false, Some(error)) => {
                tracing::warn!(
                    error,
                    "spans are lost: the collector does not take them; nothing else is affected"
                );
            }
            (true, None) => tracing::info!("the collector takes spans again"),
            _ => {}
        }
        answer
    }
}

impl Collector {
    pub(crate) fn new() -> Self {
        let agent = ureq::AgentBuilder::new().timeout(EXPORT_MAX).build();
        Self { agent, failing: AtomicBool::new(false) }
    }

    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let mut sent = self.agent.request(head.method.as_str(), &head.uri.to_string());
        for (name, value) in &head.headers {
            sent = sent.set(name.as_str(), value.to_str()?);
        }
        let answer = match sent.send_bytes(&body) {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => return Err(error.into()),
        };
        let status = answer.status();
        let mut bytes = Vec::new();
        answer.into_reader().take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Response::builder().status(status).body(bytes.into())?)
    }
}
