//! The arguments of `vramq submit`.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use vramq_producer::{Encoding, Options};
use vramq_schemas::ITEMS_MAX;

use super::job::parse_params;
use crate::broker::Broker;
use crate::duration;

/// Submit texts to a model, and write its outputs in the order of the input.
///
/// Inputs are texts, or JSON values with --json-inputs, and are grouped into jobs. Outputs are written as JSON lines `{"index": 0,
/// "embedding": […]}` or, for an output ending in .npy, as a NumPy array of f32 with one row per text.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq submit --model minilm 'a text' 'another'
  vramq submit --model minilm --file passages.txt -o vectors.npy
  head -n 100 passages.txt | vramq submit --model minilm --with-text - > vectors.jsonl
  vramq submit --model echo --json-inputs '[1, 2]' null

Interrupted, it withdraws the jobs that have no answer: they start no further pass. A second interrupt ends it at once.

Exit codes:
  0 all answered · 1 some jobs failed, the others are written · 2 usage or input · 3 broker unreachable
  4 refused by the broker (no queue for the model, queue full, no permission, also when it reconnects) · 130 interrupted
  141 the reader of the output has gone")]
pub(crate) struct Args {
    /// The model's name.
    #[arg(long, short)]
    pub(super) model: String,
    /// The routing key of the jobs, where the model's workers set a `key`; by default the model's name.
    #[arg(long = "key", value_name = "KEY")]
    pub(super) routing_key: Option<String>,
    /// The texts; with `-` or none, one per line of standard input.
    #[arg(value_name = "TEXT")]
    pub(super) texts: Vec<String>,
    /// A file of texts: .jsonl (each line a string, or an object), anything else one per line. A line has at most 1 MiB; client libraries
    /// take jobs of 16 MiB.
    #[arg(long, short, value_name = "FILE", conflicts_with = "texts")]
    pub(super) file: Option<PathBuf>,
    /// The field of .jsonl objects that holds the text. A field `id` is copied to the output.
    #[arg(long, default_value = "text", value_name = "NAME")]
    pub(super) field: String,
    /// The inputs are JSON values, one per argument or line, for models that take JSON.
    #[arg(long, conflicts_with = "field")]
    pub(super) json_inputs: bool,
    /// Where outputs are written; `-` is standard output. A file gets its name when it is complete.
    #[arg(long, short, value_name = "FILE")]
    pub(super) output: Option<PathBuf>,
    /// Write each text with its output (JSON lines only).
    #[arg(long)]
    pub(super) with_text: bool,
    /// Publish without waiting: print the job ids; replies go to the model's default reply queue.
    #[arg(long, conflicts_with_all = ["output", "with_text"])]
    pub(super) no_wait: bool,
    /// Texts per job.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = items_parser())]
    pub(super) job_items: u32,
    /// The most jobs in flight; also the most outputs that wait for a slow job that comes before them.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = items_parser())]
    pub(super) jobs: u32,
    /// The time limit of a job, from publishing to its last reply (30s, 5m; by default none).
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    pub(super) timeout: Option<Duration>,
    /// How long a job may wait in its queue before it expires.
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    pub(super) expiration: Option<Duration>,
    /// The priority, on queues with priorities; higher goes first.
    #[arg(long, value_name = "0-255")]
    pub(super) priority: Option<u8>,
    /// The most texts that may share a pass with this job (batch hint).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) batch_hint: Option<u32>,
    /// The type of the vectors' elements on the wire.
    #[arg(long, value_enum, default_value_t)]
    pub(super) dtype: Dtype,
    /// Engine settings, as a JSON object.
    #[arg(long, value_name = "JSON", value_parser = parse_params)]
    pub(super) params: Option<vramq_schemas::Params>,
    /// The revision of the model that must run the jobs, as `vramq status --json` shows it; workers with another one requeue
    /// them.
    #[arg(long, value_name = "REVISION")]
    pub(super) model_revision: Option<String>,
    /// The application that publishes the jobs, as replies and dead letters repeat it.
    #[arg(long, value_name = "NAME")]
    pub(super) app_id: Option<String>,
    /// Ask the model to report progress of its items, and show it; for models that take long.
    #[arg(long, conflicts_with = "no_wait")]
    pub(super) progress: bool,
    /// The encoding of messages.
    #[arg(long, value_enum, default_value_t)]
    encoding: Wire,
    /// Leave the URL's user out of the jobs, by which workers share passes. Needed where the broker knows the connection by another
    /// name, as with OAuth 2.
    #[arg(long)]
    anonymous: bool,
    /// No progress on standard error.
    #[arg(long, short)]
    pub(super) quiet: bool,
    #[command(flatten)]
    broker: Broker,
}

impl Args {
    /// How to connect.
    pub(super) fn client_options(&self) -> Options {
        let mut options = self.broker.options("submit");
        options.anonymous = self.anonymous;
        options.encoding = match self.encoding {
            Wire::Bincode => Encoding::Bincode,
            Wire::Json => Encoding::Json,
            Wire::Msgpack => Encoding::MessagePack,
        };
        options.replies = !self.no_wait;
        options.jobs_in_flight = self.jobs as usize;
        options
    }
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum Dtype {
    #[default]
    F32,
    F16,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Wire {
    #[default]
    Bincode,
    Json,
    Msgpack,
}

fn items_parser() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=ITEMS_MAX as i64)
}
