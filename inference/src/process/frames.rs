//! Receives the frames of a process until it ends.

use tokio::net::unix::OwnedReadHalf;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};

use super::child::Child;
use super::frame::{Frame, FrameError};
use super::keeper::Death;
use super::protocol::FromModel;

/// Frames that may wait to be looked at. A program that sends faster waits.
const FRAMES_WAITING_MAX: usize = 16;

/// How many late reports of progress are dropped in a row. A program that sends more does not end what it began.
const LATE_MAX: u32 = 1000;

/// How long to wait for the last frame of a process that died.
pub(super) const LAST_WORD: Duration = Duration::from_millis(500);

/// Why there is no next frame.
#[derive(Debug)]
pub(super) enum NoFrame {
    Died(Death),
    Fault(String),
}

/// The next frame, or the death of the process. Cancel-safe.
pub(super) async fn next(frames: &mut Frames, child: &mut Child) -> Result<Frame<FromModel>, NoFrame> {
    tokio::select! {
        biased;
        frame = frames.next() => match frame {
            Ok(frame) => Ok(frame),
            // The process is probably dying, and its death explains more.
            Err(FrameError::Ended | FrameError::Torn | FrameError::Io(_)) => {
                match timeout(LAST_WORD, child.died()).await {
                    Ok(death) => Err(NoFrame::Died(death)),
                    Err(_) => Err(NoFrame::Fault("protocol fault: the program closed its connection".to_owned())),
                }
            }
            Err(error) => Err(NoFrame::Fault(format!("protocol fault: {error}"))),
        },
        death = child.died() => match timeout(LAST_WORD, frames.next()).await {
            Ok(Ok(frame)) => Ok(frame),
            _ => Err(NoFrame::Died(death)),
        },
    }
}

/// Frames as they are read, by a task of their own: reading is not cancel-safe.
#[derive(Debug)]
pub(super) struct Frames {
    received: mpsc::Receiver<Result<Frame<FromModel>, FrameError>>,
    reader: JoinHandle<()>,
    /// Progress of earlier passes is dropped. A thread that a program did not wait for would otherwise end the process, and with it the
    /// next pass.
    first_pass: u64,
    /// How much was dropped since the last other frame.
    late: u32,
}

impl Frames {
    pub(super) fn read(mut from: OwnedReadHalf) -> Self {
        let (sender, received) = mpsc::channel(FRAMES_WAITING_MAX);
        let reader = tokio::spawn(async move {
            loop {
                let frame = Frame::read(&mut from).await;
                let is_last = frame.is_err();
                if sender.send(frame).await.is_err() || is_last {
                    return;
                }
            }
        });
        Self { received, reader, first_pass: 0, late: 0 }
    }

    /// The pass has ended: progress that names it comes too late.
    pub(super) fn pass_ended(&mut self, pass: u64) {
        self.first_pass = pass.saturating_add(1);
    }

    /// Whether no frame can come any more: the program is dead, or has closed its connection.
    pub(super) fn are_over(&self) -> bool {
        self.received.is_closed() && self.received.is_empty()
    }

    async fn next(&mut self) -> Result<Frame<FromModel>, FrameError> {
        loop {
            let frame = self.received.recv().await.unwrap_or(Err(FrameError::Ended))?;
            match frame.message {
                FromModel::Progress { pass, .. } if pass < self.first_pass && self.late < LATE_MAX => {
                    self.late += 1;
                    tracing::debug!(
                        pass,
                        "a program reported progress of a pass that has ended: it is ignored"
                    );
                }
                _ => {
                    self.late = 0;
                    return Ok(frame);
                }
            }
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// How faults name a message.
pub(super) fn name(message: &FromModel) -> &'static str {
    match message {
        FromModel::Ready { .. } => "`ready`",
        FromModel::Output { .. } => "`output`",
        FromModel::Progress { .. } => "`progress`",
        FromModel::Done { .. } => "`done`",
        FromModel::Oom { .. } => "`oom`",
        FromModel::Failed { .. } => "`failed`",
        FromModel::Pong { .. } => "`pong`",
    }
}
