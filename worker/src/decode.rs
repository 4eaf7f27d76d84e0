//! Reads a job's body and makes its inputs ready for passes. CPU work.

use std::panic::{AssertUnwindSafe, catch_unwind};

use vramq_core::rejection::Rejection;
use vramq_schemas::{Encoding, Job, Reason, codec, fields, headers};

use crate::broker::message::{JOB_HEADER_BYTES_MAX, ReplyAddress};
use crate::broker::received::ReceivedJob;
use crate::broker::wire_size::check_reply_bytes;
use crate::engine::Item;
use crate::failpoint::{self, Site};
use crate::model::Model;

/// A job that was read.
#[derive(Debug)]
pub struct Decoded {
    /// Where its replies go, and in which encoding.
    pub address: ReplyAddress,
    /// Items of the whole job.
    pub items_total: u32,
    /// Index of the first item that is still to run.
    pub first: u32,
    /// The items from there on.
    pub items: Vec<Item>,
    /// Its caller wants to know how far its items are.
    pub wants_progress: bool,
    /// The routing key of the workers that are to run it instead; then no items are made ready.
    pub moves_to: Option<String>,
}

/// Reads a job.
///
/// # Errors
/// Why it can never run.
pub fn decode(received: &ReceivedJob, model: &Model) -> Result<Decoded, Rejection> {
    failpoint::reach(Site::Decode, [received.id()]);
    // A library that panics on an input must not end the worker, and then the next one.
    catch_unwind(AssertUnwindSafe(|| parse(received, model))).unwrap_or_else(|_| {
        Err(Rejection::new(Reason::EngineFailed, "reading the job panicked; see the worker's log"))
    })
}

fn parse(received: &ReceivedJob, model: &Model) -> Result<Decoded, Rejection> {
    let malformed = |error: String| Rejection::new(Reason::Malformed, error);
    check_properties(received)?;
    let no_headers = Default::default();
    let table = received.headers().unwrap_or(&no_headers);
    if let Some(error) = headers::unreadable(table) {
        return Err(malformed(error));
    }
    let bytes = fields::table_bytes(table);
    if bytes > JOB_HEADER_BYTES_MAX {
        let error = format!("the headers take {bytes} bytes, at most {JOB_HEADER_BYTES_MAX} are taken");
        return Err(Rejection::new(Reason::TooLarge, error));
    }
    let body = received.delivery.data.len() as u64;
    if body > model.body_max {
        let error = format!(
            "the body takes {body} bytes, at most {} are allowed (the model's body_mib_max); send large inputs by reference",
            model.body_max
        );
        return Err(Rejection::new(Reason::TooLarge, error));
    }
    let headers = received.job_headers().map_err(|e| malformed(e.to_string()))?;
    let content_type = received.delivery.properties.content_type().as_ref();
    let encoding = Encoding::of(content_type.map(|t| t.as_str())).map_err(Rejection::from)?;
    let mut job: Job = codec::decode(&received.delivery.data, encoding).map_err(Rejection::from)?;
    if job.model != model.name {
        let error = format!("the job is for model `{}`, this queue is for `{}`", job.model, model.name);
        return Err(Rejection::new(Reason::WrongModel, error));
    }
    if job.inputs.is_empty() {
        return Err(malformed("the job has no inputs".to_owned()));
    }
    let Some(inputs) = job.inputs.get(headers.items_done as usize..) else {
        let (done, total) = (headers.items_done, job.inputs.len());
        return Err(malformed(format!("header `items-done` is {done}, the job has {total} items")));
    };
    if received.expires_at_ms().is_some_and(|at| crate::unix_ms() > at) {
        // Spares it the work below; the core checks again when it decides.
        return Err(Rejection::expired());
    }
    check_revision(received, model)?;
    let wants_progress =
        job.params.take_progress().map_err(|error| Rejection::new(Reason::InvalidInput, error))?;
    // A job moves once: two rules that point at each other's workers move nothing for ever.
    let moves_to = if headers.moved { None } else { model.engine.moves_to(inputs) };
    let items = match moves_to {
        Some(_) => Vec::new(),
        None => model
            .engine
            .prepare(inputs, &job.params)
            .map_err(|e| Rejection::new(Reason::InvalidInput, e.to_string()))?,
    };
    let address = ReplyAddress::of(received, model, encoding);
    check_reply_bytes(|item| model.engine.output_bytes_max(item), &items, encoding, model.reply_max)?;
    Ok(Decoded {
        address: match tokens(&items) {
            Some(tokens) => address.with_tokens(headers.items_done, tokens),
            None => address,
        },
        // Bounded by ITEMS_MAX, which fits.
        items_total: u32::try_from(job.inputs.len()).unwrap_or(u32::MAX),
        first: headers.items_done,
        items,
        wants_progress,
        moves_to,
    })
}

/// The tokens of each item, if the engine takes tokens.
fn tokens(items: &[Item]) -> Option<Vec<u32>> {
    let of = |item: &Item| match item {
        Item::Tokens { ids, .. } => u32::try_from(ids.len()).ok(),
        Item::Plain(_) | Item::Program(_) => None,
    };
    items.iter().map(of).collect()
}

/// A job that demands a revision of the model runs with no other: outputs of two revisions do not belong into one store.
fn check_revision(received: &ReceivedJob, model: &Model) -> Result<(), Rejection> {
    let Some(wanted) = received.model_revision() else { return Ok(()) };
    let own = model.engine.revision();
    if own.as_ref() == Some(&wanted) {
        return Ok(());
    }
    let own = own.map_or("none that it can tell".to_owned(), |own| format!("`{own}`"));
    let error = format!("the job demands revision `{wanted}` of the model, this worker has {own}");
    Err(Rejection::new(Reason::WrongRevision, error))
}

/// The properties that replies repeat.
fn check_properties(received: &ReceivedJob) -> Result<(), Rejection> {
    let malformed = |error: String| Err(Rejection::new(Reason::Malformed, error));
    let properties = &received.delivery.properties;
    let echoed = [
        ("message_id", properties.message_id()),
        ("correlation_id", properties.correlation_id()),
        ("reply_to", properties.reply_to()),
    ];
    for (name, value) in echoed {
        if value.as_ref().is_some_and(|text| text.as_str().contains(char::REPLACEMENT_CHARACTER)) {
            return malformed(format!("property {name} is not UTF-8, or holds U+FFFD"));
        }
    }
    if received.id().is_none() {
        return malformed("the job has no id: set the message_id property".to_owned());
    }
    match received.reply_to_fault() {
        Some(fault) => malformed(fault),
        None => Ok(()),
    }
}
