//! Reads a job's body and prepares its inputs for passes. CPU work.

use std::panic::{AssertUnwindSafe, catch_unwind};

use vramq_core::rejection::Rejection;
use vramq_schemas::{Encoding, Input, Job, JobHeaders, Reason, codec, fields, headers};

use crate::broker::message::JOB_HEADER_BYTES_MAX;
use crate::broker::received::ReceivedJob;
use crate::engine::Item;
use crate::failpoint::{self, Site};
use crate::model::Model;
use crate::preparation::Unprepared;
use crate::stores::{Stores, Wanted};
use crate::wire_size::check_reply_bytes;

/// A job that was read.
#[derive(Debug)]
pub struct Decoded {
    /// The encoding of its replies.
    pub encoding: Encoding,
    /// Items of the whole job.
    pub items_total: u32,
    /// Index of the first item that is still to run.
    pub first: u32,
    /// The prepared items from `first` on, and the inputs that are not prepared yet.
    pub items: Vec<Item>,
    pub rest: Unprepared,
    /// Whether the caller wants `progress` replies.
    pub wants_progress: bool,
    /// The routing key of the workers that must run it instead. No items are prepared then.
    pub moves_to: Option<String>,
    /// Inputs that must be fetched first. No items are prepared then, and the job is read again with the inputs.
    pub wanted: Vec<Wanted>,
}

/// Inputs by reference: the stores, and what was fetched from them.
#[derive(Debug)]
pub struct References<'a> {
    pub stores: &'a Stores,
    /// Fetched inputs with their indices within the job. They replace the references.
    pub fetched: Vec<(usize, Vec<u8>)>,
}

/// Reads a job, and prepares its first inputs until their costs reach `cost`, or all of them.
///
/// # Errors
/// Why the job can never run.
pub fn decode(
    received: &ReceivedJob,
    model: &Model,
    references: References<'_>,
    cost: usize,
) -> Result<Decoded, Rejection> {
    let read = || {
        failpoint::reach(Site::Decode, [received.id()]);
        parse(received, model, references, cost)
    };
    // A library that panics on an input must not end this worker, nor the next one that receives the job.
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(Rejection::new(Reason::EngineFailed, "reading the job panicked; see the worker's log"))
    })
}

/// Reads a job's message, and checks everything that does not depend on the engine.
fn read_message(received: &ReceivedJob, model: &Model) -> Result<(JobHeaders, Encoding, Job), Rejection> {
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
    let job: Job = codec::decode(&received.delivery.data, encoding)
        .map_err(|error| with_content_encoding(error.into(), received))?;
    if job.model != model.name {
        let error = format!("the job is for model `{}`, this queue is for `{}`", job.model, model.name);
        return Err(Rejection::new(Reason::WrongModel, error));
    }
    if job.inputs.is_empty() {
        return Err(malformed("the job has no inputs".to_owned()));
    }
    if headers.items_done as usize > job.inputs.len() {
        let (done, total) = (headers.items_done, job.inputs.len());
        return Err(malformed(format!("header `items-done` is {done}, the job has {total} items")));
    }
    if received.is_expired() {
        // Saves the work below; the core checks the expiration again.
        let summary = &received.summary;
        return Err(Rejection::expired(summary.published_ms, summary.at_ms, received.expires_at_ms()));
    }
    check_revision(received, model)?;
    Ok((headers, encoding, job))
}

/// Adds why a body cannot be read that was compressed.
fn with_content_encoding(rejection: Rejection, received: &ReceivedJob) -> Rejection {
    match received.delivery.properties.content_encoding() {
        // Kombu names a character set there.
        Some(encoding)
            if !encoding.as_str().is_empty() && !encoding.as_str().eq_ignore_ascii_case("utf-8") =>
        {
            let error = format!(
                "{}; workers do not read the content encoding {:?}: publish the body without compression",
                rejection.error,
                encoding.as_str()
            );
            Rejection { error, ..rejection }
        }
        _ => rejection,
    }
}

fn parse(
    received: &ReceivedJob,
    model: &Model,
    references: References<'_>,
    cost: usize,
) -> Result<Decoded, Rejection> {
    let (headers, encoding, mut job) = read_message(received, model)?;
    let wants_progress =
        job.params.take_progress().map_err(|error| Rejection::new(Reason::InvalidInput, error))?;
    let engine = &*model.engine;
    let References { stores, fetched } = references;
    for (at, bytes) in fetched {
        if let Some(input) = job.inputs.get_mut(at) {
            *input = Input::Bytes(bytes);
        }
    }
    let Job { inputs: all, params, .. } = &job;
    let first = headers.items_done as usize;
    let inputs = all.get(first..).unwrap_or_default();
    let wanted = wanted(stores, model, inputs, first)?;
    if !wanted.is_empty() {
        // Finds faults in the other inputs before anything is fetched.
        engine.check(all, params).map_err(|e| Rejection::new(Reason::InvalidInput, e.to_string()))?;
    }
    // A job moves only once. Otherwise two rules that name each other's workers would move it for ever.
    let may_move = !headers.moved && wanted.is_empty();
    let moves_to = if may_move { engine.moves_to(inputs) } else { None };
    let runs = moves_to.is_none() && wanted.is_empty();
    if runs {
        engine.check(all, params).map_err(|e| Rejection::new(Reason::InvalidInput, e.to_string()))?;
        let output_max = |input: &Input| {
            let most = engine.output_max(input, params)?;
            Some(model.outputs.as_ref().map_or(most, |outputs| outputs.bound(most)))
        };
        check_reply_bytes(output_max, inputs, encoding, model.reply_max)?;
    }
    // Cannot overflow: bounded by ITEMS_MAX.
    let items_total = u32::try_from(all.len()).unwrap_or(u32::MAX);
    let mut rest = Unprepared::new(job.inputs, first, job.params);
    let items = if runs { rest.prepare(engine, cost)? } else { Vec::new() };
    let first = headers.items_done;
    Ok(Decoded { encoding, items_total, first, items, rest, wants_progress, moves_to, wanted })
}

/// The references among a job's inputs from index `first` on, with their stores. Empty for a worker without stores, or a model that reads
/// references itself.
fn wanted(stores: &Stores, model: &Model, inputs: &[Input], first: usize) -> Result<Vec<Wanted>, Rejection> {
    if stores.is_empty() || model.engine.takes_references() {
        return Ok(Vec::new());
    }
    let references = inputs.iter().enumerate().filter_map(|(at, input)| match input {
        Input::Uri(uri) => Some(stores.find(first + at, uri)),
        _ => None,
    });
    references.collect()
}

/// Checks that this worker has the model revision that the job demands. Outputs of two revisions must not be mixed in one store.
fn check_revision(received: &ReceivedJob, model: &Model) -> Result<(), Rejection> {
    let wanted = received.model_revision();
    let wanted = wanted.map_err(|error| Rejection::new(Reason::Malformed, error.to_string()))?;
    let Some(wanted) = wanted else { return Ok(()) };
    let own = model.engine.revision();
    if own.as_ref() == Some(&wanted) {
        return Ok(());
    }
    let own = own.map_or("none that it can tell".to_owned(), |own| format!("`{own}`"));
    let error = format!("the job demands revision `{wanted}` of the model, this worker has {own}");
    Err(Rejection::new(Reason::WrongRevision, error))
}

/// Checks the properties that replies repeat.
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use lapin::BasicProperties;
    use lapin::message::Delivery;
    use vramq_core::event::Source;
    use vramq_core::ids::ModelIndex;
    use vramq_schemas::{EmbeddingFormat, Input, Output, Params};

    use super::*;
    use crate::config::Config;
    use crate::engine::{Engine, InvalidInput, OutputMax, PassError, PassShape};
    use crate::publishers::PublisherRules;

    /// An engine that takes texts and counts those that it prepares.
    #[derive(Default)]
    struct Counting {
        prepared: AtomicUsize,
    }

    impl Engine for Counting {
        fn resident_bytes(&self) -> u64 {
            0
        }

        fn item_cost_max(&self) -> usize {
            10
        }

        fn pass_bytes(&self, _: PassShape) -> u64 {
            0
        }

        fn output_max(&self, _: &Input, _: &Params) -> Option<OutputMax> {
            Some(OutputMax::Bytes(1 << 20))
        }

        fn check(&self, inputs: &[Input], _: &Params) -> Result<(), InvalidInput> {
            match inputs.iter().position(|input| !matches!(input, Input::Text(_))) {
                Some(at) => Err(InvalidInput(format!("inputs[{at}] is not a text"))),
                None => Ok(()),
            }
        }

        fn prepares_in_pieces(&self) -> bool {
            true
        }

        fn prepare(&self, inputs: &[Input], _: &Params) -> Result<Vec<Item>, InvalidInput> {
            self.prepared.fetch_add(inputs.len(), SeqCst);
            let item = |_| Item::Tokens { ids: [7; 10].into(), format: EmbeddingFormat::default() };
            Ok(inputs.iter().map(item).collect())
        }

        fn run(&self, _: &[Item]) -> Result<Vec<Output>, PassError> {
            Ok(Vec::new())
        }
    }

    /// Reads a job with these inputs, up to a cost of 100. Also returns how many inputs were prepared.
    fn read(inputs: Vec<Input>, reply_mib: u64) -> (Result<Decoded, Rejection>, usize) {
        let engine = Arc::new(Counting::default());
        let toml = format!("[model.m]\nengine = 'echo'\nreply_mib_max = {reply_mib}");
        let config = Config::read(Some(&toml), &[]).unwrap();
        let model = Model::new(ModelIndex(0), &config.models[0], NonZeroU16::MIN, Arc::clone(&engine) as _);
        engine.prepared.store(0, SeqCst);
        let job = Job { model: "m".to_owned(), inputs, params: Params::default() };
        let body = codec::encode(&job, Encoding::Json).unwrap();
        let mut delivery = Delivery::mock(1, "".into(), "m".into(), false, body);
        delivery.properties = BasicProperties::default().with_message_id("1".into());
        let received = ReceivedJob::now(delivery, Source::Quarantine, &Arc::new(PublisherRules::default()));
        let references = References { stores: &Stores::new(&[], 0), fetched: Vec::new() };
        let decoded = decode(&received, &model, references, 100);
        (decoded, engine.prepared.load(SeqCst))
    }

    #[test]
    fn of_a_job_of_many_texts_few_are_prepared_when_it_is_read() {
        let (decoded, prepared) = read(vec![Input::Text("a".into()); 60_000], 100_000);
        let decoded = decoded.unwrap();
        assert_eq!((decoded.items_total, decoded.items.len() + decoded.rest.len()), (60_000, 60_000));
        assert!(decoded.items.len() == prepared && prepared < 1000, "{prepared} are prepared");
    }

    #[test]
    fn a_job_whose_replies_would_be_too_large_is_not_prepared_at_all() {
        let (decoded, prepared) = read(vec![Input::Text("a".into()); 1000], 10);
        assert_eq!((decoded.unwrap_err().reason, prepared), (Reason::TooLarge, 0));
    }

    #[test]
    fn an_input_that_the_engine_does_not_take_is_found_before_any_is_prepared() {
        let mut inputs = vec![Input::Text("a".into()); 5000];
        inputs[4999] = Input::Uri("s3://x".into());
        let (decoded, prepared) = read(inputs, 100_000);
        let rejection = decoded.unwrap_err();
        assert_eq!((rejection.reason, prepared), (Reason::InvalidInput, 0));
        assert_eq!(rejection.error, "inputs[4999] is not a text");
    }
}
