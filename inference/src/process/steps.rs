//! Reads the frames of a pass, one after the other. An output that is large or in a file is read on another thread, because
//! the worker's event loop runs on the runtime's only thread.

use std::path::PathBuf;

use tokio::task::{JoinHandle, spawn_blocking};

use super::frame::Frame;
use super::frames::NoFrame;
use super::protocol::FromModel;
use super::transcript::{Fault, Step, Transcript};

/// The most bytes of items, or of an output, that are worth no other thread.
pub(super) const AT_ONCE_BYTES_MAX: usize = 16 << 10;

/// What the frames of a pass mean.
#[derive(Debug)]
pub(super) struct Steps {
    transcript: Transcript,
    scratch: PathBuf,
    /// A frame that is being read: its step, and the transcript after it.
    reading: Option<JoinHandle<(Transcript, Result<Step, Fault>)>>,
}

impl Steps {
    pub(super) fn new(pass: u64, items: usize, scratch: PathBuf) -> Self {
        Self { transcript: Transcript::new(pass, items), scratch, reading: None }
    }

    /// As of the [`Transcript`].
    pub(super) fn finished(&self) -> usize {
        self.transcript.finished()
    }

    /// What the next frame means. Cancel-safe if `frame` is: after a cancellation the next call goes on with the frame that was read, and does
    /// not poll its own.
    pub(super) async fn next(
        &mut self,
        frame: impl Future<Output = Result<Frame<FromModel>, NoFrame>>,
    ) -> Result<Step, NoFrame> {
        let fault = |fault: Fault| NoFrame::Fault(fault.to_string());
        let reading = match &mut self.reading {
            Some(reading) => reading,
            None => {
                let frame = frame.await?;
                if is_small(&frame) {
                    return self.transcript.read(frame, &self.scratch).map_err(fault);
                }
                let (mut transcript, scratch) = (self.transcript.clone(), self.scratch.clone());
                self.reading.insert(spawn_blocking(move || {
                    let step = transcript.read(frame, &scratch);
                    (transcript, step)
                }))
            }
        };
        let read = reading.await;
        self.reading = None;
        let (transcript, step) =
            read.map_err(|error| NoFrame::Fault(format!("internal error: an output was not read: {error}")))?;
        self.transcript = transcript;
        step.map_err(fault)
    }
}

fn is_small(frame: &Frame<FromModel>) -> bool {
    match &frame.message {
        FromModel::Output { output, .. } => {
            let bytes: usize = frame.blobs.iter().map(Vec::len).sum();
            output.file.is_none() && bytes <= AT_ONCE_BYTES_MAX
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::sync::mpsc;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::process::protocol::{OutputHeader, OutputKind};

    fn output(item: usize, file: Option<&str>, blob: Option<usize>) -> Frame<FromModel> {
        let (file, kind) = (file.map(str::to_owned), OutputKind::Bytes);
        let output = OutputHeader { kind, dtype: None, media_type: None, file };
        let blobs = blob.map(|bytes| vec![0; bytes]).into_iter().collect();
        Frame { message: FromModel::Output { pass: 1, item, output }, blobs }
    }

    #[test]
    fn large_outputs_are_read_on_another_thread_and_none_overtakes_them() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::write(scratch.path().join("result"), "x").unwrap();
        let mut steps = Steps::new(1, 3, scratch.path().to_owned());
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let small = output(0, None, Some(AT_ONCE_BYTES_MAX));
            let step = steps.next(ready(Ok(small))).now_or_never();
            assert!(matches!(step, Some(Ok(Step::Output { item: 0, .. }))), "{step:?}");
            let large = [output(1, Some("result"), None), output(2, None, Some(AT_ONCE_BYTES_MAX + 1))];
            for (item, large) in [1, 2].into_iter().zip(large) {
                // The other thread is busy.
                let (go_on, waits) = mpsc::channel::<()>();
                let busy = spawn_blocking(move || waits.recv());
                assert!(steps.next(ready(Ok(large))).now_or_never().is_none());
                assert_eq!(steps.finished(), item);
                go_on.send(()).unwrap();
                busy.await.unwrap().unwrap();
                let step = steps.next(pending()).await.unwrap();
                assert!(matches!(step, Step::Output { item: read, .. } if read == item), "{step:?}");
            }
            let done = Frame::from(FromModel::Done { pass: 1, peak: None });
            let step = steps.next(ready(Ok(done))).await;
            assert!(matches!(step, Ok(Step::End(_))), "{step:?}");
        });
    }
}
