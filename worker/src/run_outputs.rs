//! The outputs of consecutive items of a job, on their way into a reply.

use std::sync::OnceLock;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use vramq_core::rejection::Rejection;
use vramq_schemas::Output;
use vramq_schemas::output_name::OutputOwner;

use crate::stores::outputs::{Offered, OutputStore};

/// Outputs of one job that are written to a store at a time: a job of many does not keep others' waiting for all of them.
const WRITES_PER_JOB: usize = 4;

/// The outputs of a run of items.
#[derive(Debug)]
pub struct RunOutputs {
    pub outputs: Vec<Output>,
    /// The tokens of each item, if the engine counts them.
    pub tokens: Option<Vec<u32>>,
}

impl RunOutputs {
    /// The same, with the large ones of them in a store; and why one was not written that should have been. `offset` is the index of
    /// the first within the job.
    ///
    /// # Errors
    /// An output is lost.
    pub async fn stored(
        self,
        offset: u32,
        store: &OutputStore,
        owner: &OutputOwner,
    ) -> Result<(Self, Option<String>), Rejection> {
        let Self { outputs, tokens } = self;
        let unwritten = OnceLock::new();
        let first_reason = &unwritten;
        let offers = (offset..).zip(outputs).map(|(index, output)| async move {
            // A store that does not work for one would keep the others waiting as long.
            if first_reason.get().is_some() {
                return Ok::<_, Rejection>(output);
            }
            let Offered { output, unwritten } = store.offer(owner, index, output).await?;
            if let Some(why) = unwritten {
                // An `Err`: another one was first.
                let _ = first_reason.set(why);
            }
            Ok(output)
        });
        let outputs = stream::iter(offers).buffered(WRITES_PER_JOB).try_collect().await?;
        Ok((Self { outputs, tokens }, unwritten.into_inner()))
    }
}
