//! Results of operations that run outside the event loop: on threads, and at the broker.

use std::sync::Arc;

use vramq_core::event::{FetchFault, PublicationOutcome};
use vramq_core::ids::JobKey;
use vramq_core::rejection::Rejection;
use vramq_schemas::ItemProgress;

use crate::broker::message::Encoded;
use crate::broker::received::ReceivedJob;
use crate::decode::Decoded;
use crate::engine::Item;
use crate::executor::CompletedPass;
use crate::job_store::Unconfirmed;
use crate::preparation::Unprepared;
use crate::stores::fetch::Fetched;

/// The result of such an operation.
pub(crate) enum Completion {
    Decoded { job: JobKey, result: Box<Result<Decoded, Rejection>> },
    Fetched { job: JobKey, result: Result<Fetched, FetchFault> },
    Prepared { job: JobKey, result: Result<Vec<Item>, Rejection>, rest: Unprepared },
    PassEnded(Box<CompletedPass>),
    Encoded { job: JobKey, kind: PublicationKind, encoded: Encoded },
    Progress { job: JobKey, progress: ItemProgress },
}

/// The kind of a publication.
#[derive(Clone, Debug)]
pub(crate) enum PublicationKind {
    /// Replies. Those that are not confirmed are kept.
    Reply,
    /// Replies to a job as dead letters. Those that are not confirmed are kept, as replies.
    DeadReplies { received: Arc<ReceivedJob>, rejection: Arc<Rejection> },
    /// The job itself, or another message about it.
    Other,
}

/// How far a publication came.
#[derive(Debug)]
pub(crate) struct Sent {
    pub kind: PublicationKind,
    pub outcome: PublicationOutcome,
    /// For replies: the items before this one are confirmed.
    pub taken_up_to: Option<u32>,
    /// The messages from the first unconfirmed one on.
    pub unconfirmed: Unconfirmed,
}
