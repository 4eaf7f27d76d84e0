//! The outputs of consecutive items of a job, which become a reply.

use std::sync::OnceLock;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use vramq_core::rejection::Rejection;
use vramq_schemas::output_name::OutputOwner;
use vramq_schemas::{Encoding, Output};

use crate::stores::outputs::{Offered, OutputStore};
use crate::wire_size::fits_reply;

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
    /// `offset`: the index of the first item within the job. `encoding`: that of the reply.
    ///
    /// # Errors
    /// An output is lost.
    pub async fn stored(
        self,
        offset: u32,
        store: &OutputStore,
        owner: &OutputOwner,
        encoding: Encoding,
    ) -> Result<(Self, Option<String>), Rejection> {
        let Self { outputs, tokens } = self;
        let (unwritten, too_large) = (OnceLock::new(), OnceLock::new());
        let (first_reason, lost) = (&unwritten, &too_large);
        let offers = (offset..).zip(outputs).map(|(index, output)| async move {
            // The store has failed for one output. The others would only wait as long. One that fits no reply does wait, until such a one
            // is lost: it ends the job.
            let has_failed =
                lost.get().is_some() || first_reason.get().is_some() && fits_reply(&output, encoding);
            if has_failed {
                return Ok::<_, Rejection>(output);
            }
            let Offered { output, unwritten } = store.offer(owner, index, output, encoding).await?;
            if let Some(why) = unwritten {
                let failed = if fits_reply(&output, encoding) { first_reason } else { lost };
                // An `Err` means that another reason came first.
                let _ = failed.set(why);
            }
            Ok(output)
        });
        let outputs = stream::iter(offers).buffered(WRITES_PER_JOB).try_collect().await?;
        Ok((Self { outputs, tokens }, too_large.into_inner().or(unwritten.into_inner())))
    }
}
