//! Publishes inference jobs to vramq workers and awaits their results.
//!
//! ```no_run
//! use vramq_producer::{Client, Input, Job, Params, SubmitOptions};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("amqp://guest:guest@localhost:5672/%2f").await?;
//! let job = Job {
//!     model: "minilm".to_owned(),
//!     inputs: vec![Input::Text("a text".to_owned())],
//!     params: Params::default(),
//! };
//! let pending = client.submit(job, SubmitOptions::default()).await?; // the broker has it
//! let outputs = pending.outputs().await?; // in the order of the inputs
//! println!("{outputs:?}");
//! client.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! Delivery is at least once: after a lost connection a job whose confirm was lost is published again under the
//! same id, and workers may repeat work after a crash. Duplicate replies are dropped here; the caller gets
//! a result once.
//!
//! This crate works with `lapin` as published; its README says what the patches of vramq's own programs are for.
//!
//! A large output may be a reference, [`Output::Uri`]. With the feature `download`, `download::download` fetches its bytes.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

mod actor;
mod answer;
mod assembly;
mod client;
mod error;
mod held;
mod isolation;
mod job_channel;
mod job_channels;
mod key_limits;
mod options;
mod outgoing;
mod pending;
mod registry;
mod reply_queue;
mod session;
mod token_sum;
mod withdrawing;

pub use answer::{Answer, Progress};
pub use client::{Client, Stats};
pub use error::{ConnectError, JobError, JobFailed, PublishError};
pub use options::{Options, SubmitOptions};
pub use pending::{Pending, Receipt};
pub use vramq_amqp::{Credentials, InvalidCredentials};
pub use vramq_schemas::{
    Embedding, Encoding, Input, InvalidJson, ItemProgress, Job, JsonText, Output, Params, Reason, Sparse,
    Values,
};
#[cfg(feature = "download")]
pub use vramq_stores::{cloud::CloudOptions, download};
