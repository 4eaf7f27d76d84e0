//! Who runs on a device that several processes share: any number of ordinary passes, or one exclusive pass.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;

/// The way to the device. Two locked files beside the device's own: whoever wants in takes the gate first and keeps it
/// until it is in. So an exclusive pass that waits at the gate is not passed by others for ever, nor are they by it: they
/// queue in the order in which they came. The kernel frees the locks of a process that dies.
///
/// For one thread at a time: `flock` does not keep threads of one handle apart.
#[derive(Debug)]
pub struct Lane(Option<Files>);

#[derive(Debug)]
struct Files {
    gate: File,
    lane: File,
}

/// Leave to run a pass; the way is free again when it is dropped.
#[derive(Debug)]
#[must_use = "dropping it lets others in"]
pub struct Leave<'a>(Option<&'a File>);

impl Lane {
    /// The way to a device that nobody shares.
    pub fn own() -> Self {
        Self(None)
    }

    /// The way to the device of a file.
    ///
    /// # Errors
    /// The files beside it cannot be made.
    pub fn shared(device: &Path) -> io::Result<Self> {
        let open = |suffix: &str| {
            let mut name = device.as_os_str().to_owned();
            name.push(suffix);
            OpenOptions::new().write(true).create(true).truncate(false).open(name)
        };
        Ok(Self(Some(Files { gate: open(".gate")?, lane: open(".lane")? })))
    }

    /// Waits until the pass may run.
    ///
    /// # Errors
    /// The files fail.
    pub fn enter(&self, exclusive: bool) -> io::Result<Leave<'_>> {
        let Some(Files { gate, lane }) = &self.0 else { return Ok(Leave(None)) };
        uninterrupted(|| gate.lock())?;
        let entered = uninterrupted(|| if exclusive { lane.lock() } else { lane.lock_shared() });
        gate.unlock()?;
        entered.map(|()| Leave(Some(lane)))
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(File::unlock) {
            tracing::error!(%error, "unlock the way to the device");
        }
    }
}

fn uninterrupted(mut lock: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            locked => return locked,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    #[test]
    fn an_exclusive_pass_is_alone() {
        let folder = tempfile::tempdir().unwrap();
        let running = AtomicI64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let lane = Lane::shared(&folder.path().join("memory")).unwrap();
                let running = &running;
                scope.spawn(move || {
                    for pass in 0..200 {
                        let exclusive = (thread + pass) % 3 == 0;
                        let leave = lane.enter(exclusive).unwrap();
                        let weight = if exclusive { 100 } else { 1 };
                        let before = running.fetch_add(weight, Ordering::SeqCst);
                        assert!(if exclusive { before == 0 } else { before < 100 }, "{before}");
                        running.fetch_sub(weight, Ordering::SeqCst);
                        drop(leave);
                    }
                });
            }
        });
    }

    #[test]
    fn a_device_of_ones_own_is_always_free() {
        let lane = Lane::own();
        let _one = lane.enter(true).unwrap();
        let _other = lane.enter(true).unwrap();
    }
}
