//! Packs the items of a pass for its program: a frame, and files for items that are too large for it. If there is much to pack, another thread
//! does it, because the worker's event loop runs on the runtime's only thread.

use std::path::{Path, PathBuf};

use tokio::time::{Duration, sleep};

use super::PassLimits;
use crate::process::aside::{Aside, tidy};
use crate::process::frame::Frame;
use crate::process::item::{self, Item};
use crate::process::pass::{Cancellation, PassEnd, PassRequest};
use crate::process::protocol::{FailureKind, ToModel};
use crate::process::steps::AT_ONCE_BYTES_MAX;

/// A pass as its program gets it.
#[derive(Debug)]
pub(super) struct Packed {
    /// The bytes of the frame.
    pub(super) frame: Vec<u8>,
    pub(super) files: Files,
}

/// The files of a pass in the scratch folder of its program.
#[derive(Debug)]
pub(super) struct Files {
    pass: u64,
    /// Items of the pass; 0 if none of them has a file.
    items: usize,
    scratch: PathBuf,
}

impl Packed {
    /// Packs a pass.
    ///
    /// # Errors
    /// How the pass ends without having begun. It has no files then, or soon none.
    pub(super) async fn of(
        pass: u64,
        request: PassRequest,
        limits: &PassLimits,
        scratch: &Path,
        aside: &Aside,
        cancellation: &mut Cancellation,
    ) -> Result<Self, PassEnd> {
        let bytes: u64 = request.items.iter().map(Item::size).sum();
        let soft = limits.soft(request.items.len());
        if bytes <= AT_ONCE_BYTES_MAX as u64 {
            return pack(pass, request, soft, scratch);
        }
        let scratch = scratch.to_owned();
        tokio::select! {
            // `None` is a panic, which was logged.
            packed = aside.run(move || pack(pass, request, soft, &scratch), discard) => {
                packed.unwrap_or_else(|| Err(not_packed()))
            }
            _ = cancellation.wait() => Err(PassEnd::Cancelled { killed: false }),
            () = sleep(limits.item) => Err(PassEnd::slow_disk("write the items to the scratch folder", limits.item)),
        }
    }
}

impl Files {
    /// Removes those that the program has left.
    pub(super) async fn remove(self) {
        if self.items > 0 {
            tidy(move || self.remove_now()).await;
        }
    }

    fn remove_now(&self) {
        item::unpack(self.pass, self.items, &self.scratch);
    }
}

/// Removes the files of a pass that does not begin.
fn discard(packed: Result<Packed, PassEnd>) {
    if let Ok(Packed { files, .. }) = packed {
        files.remove_now();
    }
}

fn pack(pass: u64, request: PassRequest, limit: Duration, scratch: &Path) -> Result<Packed, PassEnd> {
    let count = request.items.len();
    let (items, blobs) = item::pack(pass, &request.items, scratch).map_err(|error| {
        item::unpack(pass, count, scratch);
        let bytes = request.items.iter().map(Item::size).sum();
        PassEnd::not_written(&error, count, bytes, scratch)
    })?;
    let PassRequest { items: inputs, params, budget, measure, .. } = request;
    drop(inputs);
    let has_files = items.iter().any(|item| item.file.is_some());
    let deadline_ms = limit.as_millis().try_into().unwrap_or(u64::MAX);
    let message = ToModel::Run { pass, items, params, budget, deadline_ms, measure };
    let frame = Frame { message, blobs }.encode().map_err(|error| {
        item::unpack(pass, count, scratch);
        failed(FailureKind::Input, format!("the items do not fit a frame: {error}"))
    })?;
    let files = Files { pass, items: if has_files { count } else { 0 }, scratch: scratch.to_owned() };
    Ok(Packed { frame, files })
}

fn not_packed() -> PassEnd {
    let detail = "internal error: the items of the pass were not packed; please report it";
    failed(FailureKind::Model, detail.to_owned())
}

fn failed(kind: FailureKind, detail: String) -> PassEnd {
    PassEnd::Failed { kind, item: None, detail, stderr: String::new() }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::{Arc, mpsc};

    use futures_util::{FutureExt as _, poll};
    use tokio::task::spawn_blocking;

    use super::*;
    use crate::process::pass::PassJob;

    fn limits(item: Duration) -> PassLimits {
        PassLimits { model: "m".to_owned(), item, kill: Duration::ZERO }
    }

    fn request(item: Item) -> PassRequest {
        PassRequest { items: vec![item], ..PassRequest::default() }
    }

    /// One that goes by a file.
    fn large() -> PassRequest {
        request(Item::Bytes { media_type: None, bytes: vec![7; 5 << 20] })
    }

    /// Keeps the only other thread busy until something is sent.
    fn busy() -> mpsc::Sender<()> {
        let (go_on, waits) = mpsc::channel();
        spawn_blocking(move || waits.recv());
        go_on
    }

    #[test]
    fn large_passes_are_packed_on_another_thread_and_cancelled_ones_leave_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let (scratch, files) = (folder.path(), || std::fs::read_dir(folder.path()).unwrap().count());
        let (mut job, handle) = PassJob::new(PassRequest::default(), &Arc::default());
        let (mut limits, aside) = (limits(Duration::from_secs(600)), Aside::default());
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let small = request(Item::Text("small".to_owned()));
            let packed =
                Packed::of(1, small, &limits, scratch, &aside, &mut job.cancellation).now_or_never();
            assert!(matches!(packed, Some(Ok(Packed { files: Files { items: 0, .. }, .. }))), "{packed:?}");

            let go_on = busy();
            {
                let packing = Packed::of(2, large(), &limits, scratch, &aside, &mut job.cancellation);
                let mut packing = pin!(packing);
                assert!(poll!(packing.as_mut()).is_pending());
                go_on.send(()).unwrap();
                let packed = packing.await.unwrap();
                assert_eq!((packed.files.items, files()), (1, 1));
                packed.files.remove().await;
                assert_eq!(files(), 0);
            }

            let go_on = busy();
            limits.item = Duration::from_millis(1);
            let packing = Packed::of(3, large(), &limits, scratch, &aside, &mut job.cancellation);
            let packed = tokio::time::timeout(Duration::from_secs(60), packing).await;
            let end = packed.expect("it waits for the thread").unwrap_err();
            assert!(
                matches!(&end, PassEnd::DiskFull { detail, .. } if detail.contains("took longer than 0.001 s")),
                "{end:?}"
            );
            handle.cancel();
            limits.item = Duration::from_secs(600);
            let packing = Packed::of(4, large(), &limits, scratch, &aside, &mut job.cancellation);
            assert_eq!(packing.await.unwrap_err(), PassEnd::Cancelled { killed: false });
            go_on.send(()).unwrap();
            // Its turn comes after the thread has packed.
            spawn_blocking(|| ()).await.unwrap();
            assert_eq!(files(), 0);
        });
    }
}
