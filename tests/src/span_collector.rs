//! A collector of spans, as OpenTelemetry's exporters know it: OTLP over HTTP, in protobuf.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::wait::until;

/// A collector that takes everything until it is dropped.
#[derive(Debug)]
pub struct SpanCollector {
    /// What `OTEL_EXPORTER_OTLP_ENDPOINT` is to be.
    pub endpoint: String,
    taken: Arc<Mutex<Taken>>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Taken {
    spans: Vec<Collected>,
    fault: Option<String>,
}

/// A span, and the program that it is from.
#[derive(Clone, Debug)]
pub struct Collected {
    /// `service.name` and `service.instance.id`.
    pub service: (String, String),
    pub span: Span,
}

impl SpanCollector {
    /// # Errors
    /// No port can be had.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let taken = Arc::<Mutex<Taken>>::default();
        let shared = Arc::clone(&taken);
        let task = tokio::spawn(async move {
            loop {
                let batch = batch(&listener).await;
                let mut taken = shared.lock().unwrap_or_else(PoisonError::into_inner);
                match batch {
                    Ok(spans) => taken.spans.extend(spans),
                    Err(error) => taken.fault = Some(format!("{error:#}")),
                }
            }
        });
        Ok(Self { endpoint, taken, task })
    }

    /// Waits for a span.
    ///
    /// # Errors
    /// It does not come, or something came that is no batch of spans.
    pub async fn span(&self, what: &str, is_it: impl Fn(&Collected) -> bool) -> Result<Collected> {
        until(what, async || {
            let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
            ensure!(taken.fault.is_none(), "{:?}", taken.fault);
            Ok(taken.spans.iter().find(|span| is_it(span)).cloned())
        })
        .await
    }

    /// Everything that has come.
    pub fn all(&self) -> Vec<Collected> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).spans.clone()
    }
}

impl Drop for SpanCollector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collected {
    pub fn trace_id(&self) -> String {
        hex(&self.span.trace_id)
    }

    pub fn id(&self) -> String {
        hex(&self.span.span_id)
    }

    /// Empty if it has none.
    pub fn parent(&self) -> String {
        hex(&self.span.parent_span_id)
    }

    pub fn attribute(&self, name: &str) -> Option<&Value> {
        let attribute = self.span.attributes.iter().find(|attribute| attribute.key == name)?;
        attribute.value.as_ref()?.value.as_ref()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Takes the next batch.
async fn batch(listener: &TcpListener) -> Result<Vec<Collected>> {
    let (stream, _) = listener.accept().await?;
    let (head, body) = request(&mut BufReader::new(stream)).await?;
    ensure!(head[0].starts_with("POST /v1/traces HTTP/1.1"), "{head:?}");
    ensure!(
        head.iter().any(|line| line.eq_ignore_ascii_case("content-type: application/x-protobuf")),
        "{head:?}"
    );
    let batch = ExportTraceServiceRequest::decode(body.as_slice())?;
    let mut spans = Vec::new();
    for resource in batch.resource_spans {
        let of = resource.resource.context("spans of no resource")?;
        let text = |name: &str| match of
            .attributes
            .iter()
            .find(|it| it.key == name)?
            .value
            .as_ref()?
            .value
            .as_ref()?
        {
            Value::StringValue(text) => Some(text.clone()),
            _ => None,
        };
        let service = text("service.name").zip(text("service.instance.id"));
        let service = service.with_context(|| format!("no service in {of:?}"))?;
        let of_scopes = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans.extend(of_scopes.map(|span| Collected { service: service.clone(), span }));
    }
    Ok(spans)
}

async fn request(stream: &mut BufReader<TcpStream>) -> Result<(Vec<String>, Vec<u8>)> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let length =
        head.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.context("no length")?];
    stream.read_exact(&mut body).await?;
    stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await?;
    Ok((head, body))
}
