//! Writes learned limits to their file, off the event loop: the file may be in a folder of a network that hangs.

use tokio::sync::watch;
use vramq_core::learned_limits::LearnedLimits;

use crate::state_file::StateFile;

/// Writes one state of the limits after the other. A state that is replaced before its turn is not written.
#[derive(Debug)]
pub struct LimitsWriter {
    /// The newest state, and how many there were.
    newest: watch::Sender<(u64, LearnedLimits)>,
    /// The number of the last state that was written, or could not be.
    written: watch::Receiver<u64>,
}

impl LimitsWriter {
    /// Must be called on a runtime.
    pub fn start(file: StateFile) -> Self {
        let (newest, mut states) = watch::channel((0, LearnedLimits::default()));
        let (done, written) = watch::channel(0);
        tokio::spawn(async move {
            while states.changed().await.is_ok() {
                let (number, limits) = states.borrow_and_update().clone();
                let file = file.clone();
                // An `Err` is a panic, which was logged.
                let _ = tokio::task::spawn_blocking(move || file.write(&limits)).await;
                done.send_replace(number);
            }
        });
        Self { newest, written }
    }

    /// Has the limits written. Does not wait for it.
    pub fn save(&self, limits: &LearnedLimits) {
        self.newest.send_modify(|(number, newest)| {
            *number += 1;
            *newest = limits.clone();
        });
    }

    /// Waits until the last limits are written, or could not be.
    pub async fn finish(&self) {
        let last = self.newest.borrow().0;
        // An `Err` means that the task panicked, which was logged.
        let _ = self.written.clone().wait_for(|written| *written >= last).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::time::Duration;

    use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
    use vramq_core::learned_limits::{LearnedLimit, LimitKey};

    use super::*;

    fn limits_of(model: &str) -> LearnedLimits {
        let known = format!(
            r#"[{{"model": "{model}", "device": "cpu", "total": 1000, "longest_max": 128}},
                {{"fitted": 0, "failed": 80, "failed_at_ms": 7, "limit": 40}}]"#
        );
        let (key, limit): (LimitKey, LearnedLimit) = serde_json::from_str(&known).unwrap();
        LearnedLimits::new("cpu", 1000, BTreeMap::from([(key, limit)]))
    }

    /// Lets the reader of a named pipe go on, once it waits there.
    async fn release_reader(pipe: &Path) {
        let opened = async {
            while rustix::fs::open(pipe, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()).is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), opened).await.expect("nobody reads the pipe");
    }

    #[tokio::test]
    async fn a_disk_that_hangs_delays_nobody_and_the_newest_limits_are_written_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        let pipe = folder.path().join("ceilings.json");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).unwrap();
        let writer = LimitsWriter::start(state.clone());
        writer.save(&limits_of("first"));
        release_reader(&pipe).await;
        for model in ["replaced", "last"] {
            writer.save(&limits_of(model));
        }
        writer.finish().await;
        let models: Vec<_> = state.read().into_keys().map(|key| key.model).collect();
        assert_eq!(models, ["first", "last"]);
    }

    #[tokio::test]
    async fn nothing_is_waited_for_if_nothing_was_learned() {
        LimitsWriter::start(StateFile::in_folder(None)).finish().await;
    }
}
