//! The outputs of consecutive items of a job, which become a reply.

use std::sync::OnceLock;
use std::time::Instant;

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use vramq_core::rejection::Rejection;
use vramq_schemas::Output;
use vramq_schemas::output_name::OutputOwner;

use crate::stores::outputs::{Offered, OutputReply, OutputStore};
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
    /// `offset`: the index of the first item within the job. All outputs are written by the reply's time or, if that comes later, by when one
    /// write could have ended. Without this limit many outputs and a slow store would hold the job until the broker ends the session over it.
    ///
    /// # Errors
    /// An output is lost.
    pub async fn stored(
        self,
        offset: u32,
        store: &OutputStore,
        owner: &OutputOwner,
        reply: OutputReply,
    ) -> Result<(Self, Option<String>), Rejection> {
        let Self { outputs, tokens } = self;
        let reply = OutputReply { until: reply.until.max(Instant::now() + store.write_max()), ..reply };
        let (unwritten, too_large) = (OnceLock::new(), OnceLock::new());
        let (first_reason, lost) = (&unwritten, &too_large);
        let offers = (offset..).zip(outputs).map(|(index, output)| async move {
            // The store has failed for one output. The others would only wait as long. One that fits no reply does wait, until such a one
            // is lost: it ends the job.
            let has_failed =
                lost.get().is_some() || first_reason.get().is_some() && fits_reply(&output, reply.encoding);
            if has_failed {
                return Ok::<_, Rejection>(output);
            }
            let Offered { output, unwritten } = store.offer(owner, index, output, reply).await?;
            if let Some(why) = unwritten {
                let failed = if fits_reply(&output, reply.encoding) { first_reason } else { lost };
                // An `Err` means that another reason came first.
                let _ = failed.set(why);
            }
            Ok(output)
        });
        let outputs = stream::iter(offers).buffered(WRITES_PER_JOB).try_collect().await?;
        Ok((Self { outputs, tokens }, too_large.into_inner().or(unwritten.into_inner())))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vramq_schemas::Encoding;

    use super::*;
    use crate::stores::outputs::{Destination, OutputConfig};

    /// The job's time is over, for example because its last pass took long. Its outputs would be lost if they fitted no reply.
    #[tokio::test]
    async fn outputs_have_the_time_of_one_write_at_least() {
        let folder = tempfile::tempdir().unwrap();
        let store = OutputStore::new(&OutputConfig {
            destination: Destination::Folder(folder.path().to_owned()),
            url: "file:///srv/out".parse().unwrap(),
            above: 4,
            write_max: Duration::from_secs(60),
        });
        let output = Output::Bytes { media_type: "image/png".to_owned(), bytes: b"12345".to_vec() };
        let run = RunOutputs { outputs: vec![output; 9], tokens: None };
        let owner = OutputOwner::new("m", None, "job");
        let (stored, unwritten) = run
            .stored(0, &store, &owner, OutputReply { encoding: Encoding::Json, until: Instant::now() })
            .await
            .unwrap();
        assert!(stored.outputs.iter().all(|output| matches!(output, Output::Uri(_))), "{stored:?}");
        assert_eq!((stored.outputs.len(), unwritten), (9, None));
    }
}
