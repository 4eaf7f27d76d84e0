//! The wire contract of vramq: jobs, replies, dead letters, headers, heartbeats, commands, withdrawals, topology names. No I/O.

mod attempt;
pub mod codec;
pub mod control;
pub mod dead_letter;
mod embedding;
pub mod fields;
pub mod headers;
mod job;
pub mod json_budget;
mod json_text;
mod msgpack;
mod notation;
mod output;
pub mod output_name;
mod reason;
mod reply;
mod sparse;
pub mod status;
pub mod topology;
mod trace;
pub mod withdrawal;

pub use attempt::Attempt;
pub use codec::{BODY_BYTES_MAX, DecodeError, EncodeError, Encoding};
pub use dead_letter::{DeadLetter, Misfit};
pub use embedding::{Dtype, Embedding, EmbeddingFormat, Values};
pub use headers::{InvalidHeader, JobHeaders, ReplyHeaders};
pub use job::{ITEMS_MAX, Input, Job, MODEL_NAME_BYTES_MAX, PARAMS_BYTES_MAX, Params};
pub use json_text::{InvalidJson, JsonText};
pub use output::Output;
pub use reason::{Reason, UnknownReason};
pub use reply::{Failure, ItemProgress, Outputs, PROGRESS_NOTE_BYTES_MAX, ReplyKind};
pub use sparse::Sparse;
pub use trace::{InvalidTraceparent, TraceContext, Traceparent, is_tracestate};
