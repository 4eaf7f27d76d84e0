//! Reads what a model's dead-letter queue holds, and leaves it there.

use lapin::Connection;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use serde::Serialize;
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{DeadLetter, JobHeaders, dead_letter, fields};

/// Dead letters that are read at a time: they are in nobody else's hands meanwhile.
pub const LETTERS_MAX: usize = 200;

/// The longest error text that is shown, in characters.
const ERROR_CHARS_MAX: usize = 600;

/// One dead letter, without its body.
#[derive(Clone, Debug, Serialize)]
pub struct LetterView {
    pub job: String,
    pub reason: String,
    pub error: String,
    pub dead_at_ms: Option<u64>,
    pub worker: String,
    pub attempts: u32,
    pub body_bytes: usize,
    pub needs_bytes: Option<u64>,
}

/// What a queue of dead letters holds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Letters {
    pub total: u32,
    /// The oldest of them.
    pub letters: Vec<LetterView>,
}

/// Reads the oldest letters. The channel is closed before they are returned, which puts them back where they were; the queue
/// has no delivery limit, so that looking destroys nothing.
///
/// # Errors
/// The broker's: no such queue, no permission, no connection.
pub async fn read(connection: &Connection, model: &str) -> lapin::Result<Letters> {
    let channel = connection.create_channel().await?;
    let queue = dead_queue(model);
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let total =
        channel.queue_declare(queue.as_str().into(), passive, FieldTable::default()).await?.message_count();
    let mut letters = Vec::new();
    while letters.len() < LETTERS_MAX {
        let got = channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await?;
        let Some(message) = got else { break };
        letters.push(view(&message.delivery));
    }
    channel.close(200, "looked".into()).await?;
    Ok(Letters { total, letters })
}

fn view(delivery: &lapin::message::Delivery) -> LetterView {
    let none = FieldTable::default();
    let table = delivery.properties.headers().as_ref().unwrap_or(&none);
    let text = |name: &str| table.inner().get(name).and_then(fields::as_text);
    let read = DeadLetter::read(table);
    let id = delivery.properties.message_id().as_ref().or(delivery.properties.correlation_id().as_ref());
    LetterView {
        job: id.map(|id| id.as_str().to_owned()).unwrap_or_default(),
        reason: text(dead_letter::REASON).unwrap_or_else(|| "broker".to_owned()),
        error: text(dead_letter::ERROR).unwrap_or_default().chars().take(ERROR_CHARS_MAX).collect(),
        dead_at_ms: read.as_ref().map(|letter| letter.dead_at_ms),
        worker: text(dead_letter::WORKER).unwrap_or_default(),
        attempts: JobHeaders::read(table).map_or(0, |headers| headers.attempt),
        body_bytes: delivery.data.len(),
        needs_bytes: read.and_then(|letter| letter.misfit).map(|misfit| misfit.needs_bytes),
    }
}
