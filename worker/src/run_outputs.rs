//! The outputs of consecutive items of a job, which become a reply.

use std::sync::OnceLock;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use vramq_core::rejection::Rejection;
use vramq_schemas::Output;
use vramq_schemas::output_name::OutputOwner;

use crate::stores::outputs::{Offered, OutputStore};

/// The most outputs of one job that are written to a store at a time, so that a job with many does not block those of other jobs.
const WRITES_PER_JOB: usize = 4;

/// The outputs of a run of items.
#[derive(Debug)]
pub struct RunOutputs {
    pub outputs: Vec<Output>,
    /// The tokens of each item, if the engine counts them.
    pub tokens: Option<Vec<u32>>,
}

impl RunOutputs {
    /// Writes large outputs to a store. Returns the outputs with references in their place, and why an output was not written, if so.
    /// `offset`: the index of the first item within the job.
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
            // The store has failed for one output. The others would only wait as long.
            if first_reason.get().is_some() {
                return Ok::<_, Rejection>(output);
            }
            let Offered { output, unwritten } = store.offer(owner, index, output).await?;
            if let Some(why) = unwritten {
                // An `Err` means that another reason came first.
                let _ = first_reason.set(why);
            }
            Ok(output)
        });
        let outputs = stream::iter(offers).buffered(WRITES_PER_JOB).try_collect().await?;
        Ok((Self { outputs, tokens }, unwritten.into_inner()))
    }
}
