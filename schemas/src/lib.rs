//! The wire contract of vramq: jobs, replies, dead letters, headers, heartbeats, commands, withdrawals, topology names. No I/O.
//!
//! Headers are values of `amq-protocol-types`, as `lapin` reads them. The published crate cannot read all that RabbitMQ delivers: names
//! that are not UTF-8 are errors, and nested tables have no limit. vramq's programs are built with a patched one, which keeps such headers
//! as bytes in `unreadable-headers` ([`headers::unreadable`]). With the published crate that header does not occur.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

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
mod limits;
mod msgpack;
mod notation;
mod output;
pub mod output_name;
mod params;
mod reading;
mod reason;
mod reply;
mod sparse;
pub mod status;
pub mod topology;
mod trace;
mod transcript;
pub mod withdrawal;

pub use attempt::Attempt;
pub use codec::{DecodeError, EncodeError, Encoding};
pub use dead_letter::{DeadLetter, MinimumRequirement};
pub use embedding::{Dtype, Embedding, EmbeddingFormat, Values};
pub use headers::{InvalidHeader, JobHeaders, ReplyHeaders};
pub use job::{Input, Job};
pub use json_text::{InvalidJson, JsonText};
pub use limits::{
    BODY_BYTES_MAX, HEADER_BYTES_MAX, ITEMS_MAX, MODEL_NAME_BYTES_MAX, MODEL_REVISION_BYTES_MAX,
    PARAMS_BYTES_MAX, TENANT_BYTES_MAX,
};
pub use output::Output;
pub use params::Params;
pub use reason::{Reason, UnknownReason};
pub use reply::{
    Failure, FailureHeaders, ItemProgress, Outputs, PROGRESS_NOTE_BYTES_MAX, ProgressHeaders, ReplyKind,
};
pub use sparse::Sparse;
pub use trace::{InvalidTraceparent, TraceContext, Traceparent, is_tracestate};
