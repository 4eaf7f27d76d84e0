//! Turns a job into a message: checks it, encodes it, sets its properties and headers.

use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use tokio::sync::oneshot;
use uuid::Uuid;
use vramq_amqp::{Message, PERSISTENT, new_secret};
use vramq_schemas::headers::{BATCH_HINT, MODEL_REVISION, TRACEPARENT, TRACESTATE};
use vramq_schemas::topology::{JOBS_EXCHANGE, check_model_name};
use vramq_schemas::withdrawal::{DIGEST, Withdrawal};
use vramq_schemas::{
    BODY_BYTES_MAX, Encoding, HEADER_BYTES_MAX, ITEMS_MAX, Input, Job, MODEL_REVISION_BYTES_MAX, codec,
    fields, is_tracestate,
};

use crate::error::PublishError;
use crate::key_limits::BodyPlace;
use crate::options::SubmitOptions;

/// Bodies from this size on are encoded and decoded on a blocking thread: at some 500 MB/s they would keep a runtime thread
/// busy for more than 100 µs.
const BLOCKING_BYTES: usize = 64 * 1024;

/// A job's message on its way into the jobs exchange.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) id: String,
    pub(crate) model: String,
    /// The number of its registration.
    pub(crate) registration: u64,
    pub(crate) message: Message,
    /// Receives one value, when the outcome of publishing is known.
    pub(crate) published: oneshot::Sender<Result<(), PublishError>>,
    /// Its place among the jobs of its routing key.
    pub(crate) _place: BodyPlace,
}

impl Outgoing {
    pub(crate) fn finish(self, result: Result<(), PublishError>) {
        // An `Err`: the caller has dropped its future.
        let _ = self.published.send(result);
    }
}

/// A job, checked and encoded.
#[derive(Debug)]
pub(crate) struct EncodedJob {
    pub(crate) id: String,
    pub(crate) items: usize,
    pub(crate) message: Message,
    /// The withdrawal of the job, if this client may withdraw it; see [`SubmitOptions::headers`].
    pub(crate) withdrawal: Option<Withdrawal>,
}

impl EncodedJob {
    pub(crate) async fn new(
        mut job: Job,
        options: &SubmitOptions,
        encoding: Encoding,
        user_id: Option<&ShortString>,
        reply_to: Option<&ShortString>,
        withdraws: bool,
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
        if options.progress {
            job.params.ask_for_progress();
        }
        let mut properties = properties(&id, options, encoding, reply_to)?;
        if let Some(user) = user_id {
            properties = properties.with_user_id(user.clone());
        }
        let mut headers = headers(options)?;
        // A caller that names a digest has its own secret.
        let withdrawal = (withdraws && !headers.contains_key(DIGEST))
            .then(|| Withdrawal { job: id.clone(), secret: new_secret() });
        if let Some(withdrawal) = &withdrawal {
            headers.insert(DIGEST.into(), whole(&withdrawal.digest().to_string()));
        }
        check_header_bytes(&headers)?;
        let key = options.key_of(&job);
        check_model_name(key)?;
        let routing_key = short("key", key)?;
        let bytes = job.inputs.iter().map(input_bytes).sum::<usize>();
        // Every encoding takes at least the bytes of its inputs, so a huge job is refused before it is encoded.
        check_size(bytes)?;
        let encoded = off_runtime(bytes, move || codec::encode(&job, encoding)).await;
        let body = encoded.ok_or(PublishError::Closed)??;
        check_size(body.len())?;
        let exchange = JOBS_EXCHANGE.into();
        let message =
            Message { exchange, routing_key, properties, headers, body: body.into(), mandatory: true };
        Ok(Self { id, items, message, withdrawal })
    }
}

/// Runs work over `bytes` bytes, on a blocking thread if it is long. `None` if its runtime ends before the work begins.
pub(crate) async fn off_runtime<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    if bytes < BLOCKING_BYTES {
        return Some(work());
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Some(done),
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => None,
        },
    }
}

fn input_bytes(input: &Input) -> usize {
    match input {
        Input::Text(text) | Input::Uri(text) => text.len(),
        Input::Bytes(bytes) => bytes.len(),
        Input::Json(value) => value.as_str().len(),
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
    if id.contains(char::REPLACEMENT_CHARACTER) {
        // Workers read it for bytes that are no text, and cannot tell the two apart.
        let problem = "it has the character U+FFFD, which workers do not take there".to_owned();
        return Err(PublishError::Option { name: "id", problem });
    }
    let id = short("id", id)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut properties = BasicProperties::default()
        .with_message_id(id.clone())
        .with_correlation_id(id)
        .with_timestamp(now.as_secs())
        .with_content_type(encoding.content_type().into())
        .with_delivery_mode(PERSISTENT);
    if let Some(queue) = reply_to {
        properties = properties.with_reply_to(queue.clone());
    }
    if let Some(priority) = options.priority {
        properties = properties.with_priority(priority);
    }
    if let Some(app) = &options.app_id {
        properties = properties.with_app_id(short("app_id", app)?);
    }
    if let Some(expiration) = options.expiration {
        properties = properties.with_expiration(expiration_ms(expiration)?);
    }
    Ok(properties)
}

fn headers(options: &SubmitOptions) -> Result<FieldTable, PublishError> {
    let mut table = FieldTable::default();
    if options.batch_hint == Some(0) {
        let problem = "0 items fit no pass; use 1 or more".to_owned();
        return Err(PublishError::Option { name: "batch_hint", problem });
    }
    if let Some(hint) = options.batch_hint {
        table.insert(BATCH_HINT.into(), fields::long(hint.into()));
    }
    if let Some(traceparent) = &options.traceparent {
        // `fields::text` cuts long texts; a traceparent that long is invalid already.
        table.insert(TRACEPARENT.into(), fields::text(traceparent));
    }
    // A trace is no reason to refuse a job: workers leave out what is wrong or too large, too.
    if let Some(tracestate) = options.tracestate.as_ref().filter(|state| is_tracestate(state)) {
        table.insert(TRACESTATE.into(), fields::text(tracestate));
    }
    if let Some(revision) = &options.model_revision {
        table.insert(MODEL_REVISION.into(), whole(revision));
    }
    for (name, value) in &options.headers {
        table.insert(short("headers", name)?, whole(value));
    }
    check_revision(&table)?;
    Ok(table)
}

/// The revision that a job demands, by its option or as a header of the caller.
fn check_revision(headers: &FieldTable) -> Result<(), PublishError> {
    match headers.inner().get(MODEL_REVISION) {
        Some(AMQPValue::LongString(revision)) if revision.len() > MODEL_REVISION_BYTES_MAX => {
            let bytes = revision.len();
            let problem = format!("{bytes} bytes, at most {MODEL_REVISION_BYTES_MAX} are allowed");
            Err(PublishError::Option { name: "model_revision", problem })
        }
        _ => Ok(()),
    }
}

/// A text as a header's value. Not cut: two tenants could become one, and another revision would be demanded.
fn whole(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn check_header_bytes(headers: &FieldTable) -> Result<(), PublishError> {
    let bytes = fields::table_bytes(headers);
    if bytes > HEADER_BYTES_MAX {
        let problem = format!("they take {bytes} bytes, at most {HEADER_BYTES_MAX} are allowed");
        return Err(PublishError::Option { name: "headers", problem });
    }
    Ok(())
}

/// AMQP's `expiration`: milliseconds as text.
fn expiration_ms(expiration: Duration) -> Result<ShortString, PublishError> {
    // The broker would close the channel over more than 32 bits, and lose every publish in flight.
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

#[cfg(test)]
#[path = "outgoing_tests.rs"]
mod tests;
