//! What a caller learns about its job: its progress and its result.

use vramq_schemas::{ItemProgress, Output};

/// How far a job is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub items_done: usize,
    pub items: usize,
    /// The item that the model last reported on, until the item has its output. Only if the job asked
    /// ([`SubmitOptions::progress`](crate::SubmitOptions::progress)) and the model reports.
    pub current: Option<ItemProgress>,
}

/// A job's result, with what the replies said of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// One for every input, in their order.
    pub outputs: Vec<Output>,
    /// The tokens of all items, each counted once, also if it came twice; `None` if the worker does not count them, or if replies with some
    /// of the same items do not say how many tokens each has.
    pub tokens: Option<u64>,
    /// The revisions of the model that computed the outputs: one, or more if workers with other revisions continued the job, or
    /// none if workers do not report it.
    pub model_revisions: Vec<String>,
    /// The worker that sent the last reply.
    pub worker: String,
    /// Milliseconds that the job waited, from publishing to its first pass, as that worker reports.
    pub queued_ms: u64,
    /// Milliseconds from the first pass until that worker wrote its last reply, as it reports.
    pub ran_ms: u64,
}
