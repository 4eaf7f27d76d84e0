//! A pass of a program: its items, the outputs and progress while it runs, and its result.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Duration;
use vramq_schemas::Output;

use super::item::Item;
use super::keeper::Death;
use super::protocol::{FailureKind, OomReport};
use super::scratch;

/// Progress events that may wait for the caller. More are dropped, because the next one is newer.
const PROGRESS_WAITING_MAX: usize = 8;

/// What to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassRequest {
    pub items: Vec<Item>,
    /// The same for all items of a pass.
    pub params: Map<String, Value>,
    /// Device bytes that it may take beyond the weights.
    pub budget: Option<u64>,
    /// It has the device for itself: no program is loaded meanwhile.
    pub exclusive: bool,
    /// Whether to measure the peak. The pool sets this.
    pub measure: bool,
}

/// The events of a pass, in this order: outputs in the order of the items, progress between them, and one end.
#[derive(Clone, Debug, PartialEq)]
pub enum PassEvent {
    /// An item is finished, even if others fail, unless the end [voids](PassEnd::voids_outputs) all outputs.
    Output {
        item: usize,
        output: Output,
    },
    Progress {
        item: usize,
        fraction: f64,
        note: String,
    },
    End(PassEnd),
}

/// How a pass ended. `stderr` is the last that the program printed during the pass, for the reply and the dead letter.
#[derive(Clone, Debug, PartialEq)]
pub enum PassEnd {
    /// Every item has its output. `peak`: the most device bytes that the pass held beyond what the loaded process had, as the program says
    /// or as was measured, whichever is more; `None` where neither is known.
    Done { peak: Option<u64> },
    /// The device's memory ran out. The process goes on, unless that is known only `by_text`: a program that failed had printed a known
    /// message.
    OutOfMemory { item: Option<usize>, report: Box<OomReport>, stderr: String, by_text: bool },
    /// The program says that it failed, or an item cannot be run.
    Failed { kind: FailureKind, item: Option<usize>, detail: String, stderr: String },
    /// The program broke the protocol, and was ended.
    Protocol { fault: String, stderr: String },
    /// The process died. That counts against the jobs of this pass.
    Crashed { death: Death, stderr: String },
    /// It took too long.
    TimedOut { limit: Duration, killed: bool, stderr: String },
    /// The caller cancelled it. `killed`: the process did not stop by itself.
    Cancelled { killed: bool },
    /// It never began: the model cannot be loaded, or the pool was closed. This counts against no job.
    NotRun { reason: String },
    /// A disk has no room for its items, or for what the program wrote while it ran them; `asked` bytes, if that is known. Or it does not
    /// answer. Fewer items may have room. The process goes on, unless its own files take that room.
    DiskFull { asked: Option<u64>, detail: String },
}

impl PassEnd {
    /// Whether its outputs may belong to other items than those that they came for: the program lost count of them, or broke the
    /// protocol otherwise.
    pub fn voids_outputs(&self) -> bool {
        matches!(self, Self::Protocol { .. } | Self::Failed { kind: FailureKind::Output, item: None, .. })
    }

    /// The items cannot be written to the scratch folder. That is no job's fault: the disk may have room later, and another worker has
    /// another disk. But an item that is larger than the disk itself never fits.
    pub(super) fn not_written(error: &io::Error, items: usize, bytes: u64, scratch: &Path) -> Self {
        let mib = bytes.div_ceil(1 << 20);
        let detail = format!(
            "write the items to the scratch folder: {error}; they have {mib} MiB{}",
            free_there(", and", scratch)
        );
        if items > 1 || scratch::could_hold(scratch, bytes) {
            return Self::DiskFull { asked: Some(bytes), detail };
        }
        Self::Failed { kind: FailureKind::HostMemory, item: None, detail, stderr: String::new() }
    }

    /// A disk does not answer within the time of an item. Another worker has another disk.
    pub(super) fn slow_disk(what: &str, limit: Duration) -> Self {
        let detail = format!("{what}: that took longer than {} s (item_s)", limit.as_secs_f64());
        Self::DiskFull { asked: None, detail }
    }

    /// A disk has no room for what the program wrote, as the program said.
    pub(super) fn disk_full(said: &str, scratch: &Path) -> Self {
        let detail = format!(
            "a disk has no room for what the program wrote: {said}{}",
            free_there("; in its scratch folder", scratch)
        );
        Self::DiskFull { asked: None, detail }
    }
}

/// `words` and the free bytes of the scratch folder; empty if its file system does not report them.
fn free_there(words: &str, scratch: &Path) -> String {
    let free = scratch::free(scratch).map(|free| format!("{words} {} MiB are free", free >> 20));
    free.unwrap_or_default()
}

/// Why a pass is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Cancelled,
    TimedOut,
}

/// The caller's handle of a pass. Dropping it cancels the pass.
#[derive(Debug)]
pub struct PassHandle {
    events: mpsc::Receiver<PassEvent>,
    cancel: watch::Sender<bool>,
    /// Declared after `cancel`, and so dropped after it: the pool must see the cancellation when it is notified.
    wake: WakeOnDrop,
    ended: bool,
}

/// Notifies the pool of a cancelled pass, which may still wait there. A drop notifies too.
#[derive(Debug)]
struct WakeOnDrop(Arc<Notify>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl PassHandle {
    /// The next event; `None` after the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<PassEvent> {
        if self.ended {
            return None;
        }
        let event = self.next_event().await;
        self.ended = matches!(event, PassEvent::End(_));
        Some(event)
    }

    /// The next event. The owner of a pass always ends it. A pass that was dropped without an end means that its task has panicked.
    /// It counts as failed, so that a job that causes the panic runs alone and is not retried for ever.
    async fn next_event(&mut self) -> PassEvent {
        self.events.recv().await.unwrap_or_else(|| {
            PassEvent::End(PassEnd::Failed {
                kind: FailureKind::Model,
                item: None,
                detail: "internal error: the pass was dropped without an end; please report it".to_owned(),
                stderr: String::new(),
            })
        })
    }

    /// Asks for the pass to stop. Its end says whether it did. A pass that has not begun ends without having run.
    pub fn cancel(&self) {
        self.cancel.send_replace(true);
        self.wake.0.notify_one();
    }

    /// Waits for the end, and returns the outputs that count with it.
    pub async fn finish(self) -> (Vec<Output>, PassEnd) {
        self.finish_with(|_, _, _| {}, std::future::pending()).await
    }

    /// As [`finish`](Self::finish). `on_progress` gets each item's index in the pass, its fraction, and a note. The pass is
    /// cancelled when `cancelled` is ready; its end is still awaited.
    pub async fn finish_with(
        mut self,
        mut on_progress: impl FnMut(usize, f64, String),
        cancelled: impl Future<Output = ()>,
    ) -> (Vec<Output>, PassEnd) {
        let mut cancelled = std::pin::pin!(cancelled);
        let mut is_cancelled = false;
        let mut outputs = Vec::new();
        loop {
            tokio::select! {
                event = self.next_event() => match event {
                    PassEvent::Output { output, .. } => outputs.push(output),
                    PassEvent::Progress { item, fraction, note } => on_progress(item, fraction, note),
                    PassEvent::End(end) => {
                        if end.voids_outputs() {
                            outputs.clear();
                        }
                        return (outputs, end);
                    }
                },
                () = &mut cancelled, if !is_cancelled => {
                    is_cancelled = true;
                    self.cancel();
                }
            }
        }
    }
}

/// The other side of a [`PassHandle`]: a pass that waits, or runs.
#[derive(Debug)]
pub(super) struct PassJob {
    pub request: PassRequest,
    pub events: Events,
    pub cancellation: Cancellation,
}

impl PassJob {
    /// `cancelled` is notified when the handle cancels the pass.
    pub fn new(request: PassRequest, cancelled: &Arc<Notify>) -> (Self, PassHandle) {
        // Has room for all outputs and the end: sending them never waits or fails.
        let (sender, events) = mpsc::channel(request.items.len() + PROGRESS_WAITING_MAX + 1);
        let (cancel, is_cancelled) = watch::channel(false);
        let job = Self { request, events: Events(sender), cancellation: Cancellation(is_cancelled) };
        let wake = WakeOnDrop(Arc::clone(cancelled));
        (job, PassHandle { events, cancel, wake, ended: false })
    }

    pub fn end(self, end: PassEnd) {
        self.events.send(PassEvent::End(end));
    }
}

/// Where a pass reports to.
#[derive(Debug)]
pub struct Events(mpsc::Sender<PassEvent>);

impl Events {
    pub(super) fn output(&self, item: usize, output: Output) {
        self.send(PassEvent::Output { item, output });
    }

    /// Reports progress, unless that would take the room of the outputs and the end.
    pub(super) fn progress(&self, item: usize, fraction: f64, note: String, outputs_left: usize) {
        if self.0.capacity() > outputs_left + 1 {
            self.send(PassEvent::Progress { item, fraction, note });
        }
    }

    /// There is room (see [`PassJob::new`]). `Err` means that the caller has left.
    fn send(&self, event: PassEvent) {
        let _ = self.0.try_send(event);
    }
}

/// Receives the request to stop a pass.
#[derive(Debug)]
pub struct Cancellation(watch::Receiver<bool>);

impl Cancellation {
    /// Waits for it. Cancel-safe.
    pub(super) async fn wait(&mut self) -> Stop {
        // `Err` means that the handle was dropped.
        let _ = self.0.wait_for(|cancelled| *cancelled).await;
        Stop::Cancelled
    }

    /// Whether nobody waits for the end of the pass any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.0.has_changed().is_err()
    }

    pub(super) fn is_cancelled(&self) -> bool {
        *self.0.borrow() || self.is_abandoned()
    }
}
