//! A job as a message: checked, encoded, with its properties.

use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use uuid::Uuid;
use vramq_schemas::topology::check_model_name;
use vramq_schemas::{BODY_BYTES_MAX, Encoding, ITEMS_MAX, Input, Job, codec, fields, headers};

use crate::error::PublishError;
use crate::options::SubmitOptions;

/// The delivery mode of a message that survives a restart of the broker.
const PERSISTENT: u8 = 2;

/// Bodies from this size on are encoded and decoded off the runtime: at some 500 MB/s the runtime's thread would be
/// busy for more than 100 µs.
const BLOCKING_BYTES: usize = 64 * 1024;

/// A message on its way into the jobs exchange.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) id: String,
    pub(crate) model: ShortString,
    pub(crate) body: std::sync::Arc<[u8]>,
    pub(crate) properties: BasicProperties,
    /// Told once, when the broker has judged the message.
    pub(crate) judged: oneshot::Sender<Result<(), PublishError>>,
    /// Its share of the bytes in flight.
    pub(crate) _bytes: OwnedSemaphorePermit,
}

impl Outgoing {
    pub(crate) fn judge(self, verdict: Result<(), PublishError>) {
        // Nobody listens to a job whose future was dropped at this moment.
        let _ = self.judged.send(verdict);
    }
}

/// What is known of a job's message before it may be sent.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) id: String,
    pub(crate) model: ShortString,
    pub(crate) items: usize,
    pub(crate) body: Vec<u8>,
    pub(crate) properties: BasicProperties,
}

impl Message {
    pub(crate) async fn new(
        job: Job,
        options: &SubmitOptions,
        encoding: Encoding,
        reply_to: Option<&ShortString>,
    ) -> Result<Self, PublishError> {
        check_model_name(&job.model)?;
        let items = job.inputs.len();
        if items == 0 {
            return Err(PublishError::NoInputs);
        }
        if items > ITEMS_MAX {
            return Err(PublishError::TooManyItems { items, cap: ITEMS_MAX });
        }
        let id = match &options.id {
            Some(id) => id.clone(),
            None => Uuid::now_v7().to_string(),
        };
        let properties = properties(&id, options, encoding, reply_to)?;
        let model = short("model", &job.model)?;
        let bytes = job.inputs.iter().map(input_bytes).sum::<usize>();
        // Every encoding takes at least the bytes of its inputs, so a huge job is refused before it is written.
        check_size(bytes)?;
        let body = off_runtime(bytes, move || codec::encode(&job, encoding)).await?;
        check_size(body.len())?;
        Ok(Self { id, model, items, body, properties })
    }
}

/// Runs work over `bytes` bytes where it does not hold up the runtime.
pub(crate) async fn off_runtime<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    if bytes < BLOCKING_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(failed) => std::panic::resume_unwind(failed.into_panic()),
    }
}

fn input_bytes(input: &Input) -> usize {
    match input {
        Input::Text(text) | Input::Uri(text) => text.len(),
        Input::Bytes(bytes) => bytes.len(),
    }
}

fn check_size(bytes: usize) -> Result<(), PublishError> {
    if bytes > BODY_BYTES_MAX {
        return Err(PublishError::TooLarge { bytes, cap: BODY_BYTES_MAX });
    }
    Ok(())
}

fn properties(
    id: &str,
    options: &SubmitOptions,
    encoding: Encoding,
    reply_to: Option<&ShortString>,
) -> Result<BasicProperties, PublishError> {
    if id.is_empty() {
        return Err(PublishError::Option { name: "id", problem: "it is empty".to_owned() });
    }
    let id = short("id", id)?;
    let mut table = FieldTable::default();
    if options.batch_hint == Some(0) {
        return Err(PublishError::Option {
            name: "batch_hint",
            problem: "0 items fit no pass; use 1 or more".to_owned(),
        });
    }
    if let Some(hint) = options.batch_hint {
        table.insert(headers::BATCH_HINT.into(), fields::long(hint.into()));
    }
    if let Some(traceparent) = &options.traceparent {
        table.insert(headers::TRACEPARENT.into(), fields::text(traceparent));
    }
    for (name, value) in &options.headers {
        table.insert(short("headers", name)?, fields::text(value));
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut properties = BasicProperties::default()
        .with_message_id(id.clone())
        .with_correlation_id(id)
        .with_timestamp(now.as_secs())
        .with_content_type(encoding.content_type().into())
        .with_delivery_mode(PERSISTENT)
        .with_headers(table);
    if let Some(queue) = reply_to {
        properties = properties.with_reply_to(queue.clone());
    }
    if let Some(priority) = options.priority {
        properties = properties.with_priority(priority);
    }
    if let Some(expiration) = options.expiration {
        properties = properties.with_expiration(expiration_ms(expiration)?);
    }
    Ok(properties)
}

/// AMQP's `expiration`: milliseconds as text.
fn expiration_ms(expiration: Duration) -> Result<ShortString, PublishError> {
    // The broker refuses more than 32 bits by closing the channel, and with it every publish in flight.
    u32::try_from(expiration.as_millis()).map(|ms| ms.to_string().into()).map_err(|_| PublishError::Option {
        name: "expiration",
        problem: "longer than the broker's 49 days".to_owned(),
    })
}

fn short(name: &'static str, text: &str) -> Result<ShortString, PublishError> {
    ShortString::try_new(text).map_err(|_| PublishError::Option {
        name,
        problem: format!("{} bytes, at most 255 fit AMQP", text.len()),
    })
}
