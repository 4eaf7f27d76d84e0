//! The lock on a device that several processes share: any number of ordinary passes run at a time, or one exclusive pass.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// The lock of a device. It consists of two files beside the device's own: a process locks the gate first and keeps it until it
/// has the second file too. So waiting processes get the lock in the order in which they came: neither exclusive nor ordinary
/// passes starve. The kernel frees the locks of a process that dies.
///
/// For one thread at a time: `flock` does not keep threads of one handle apart.
#[derive(Debug)]
pub struct DeviceLock(Option<Files>);

#[derive(Debug)]
struct Files {
    device: PathBuf,
    gate: File,
    shared: File,
}

/// The right to run a pass on the device. Dropping it unlocks the device.
#[derive(Debug)]
#[must_use = "dropping it unlocks the device"]
pub struct DeviceLockGuard<'a>(Option<&'a File>);

impl DeviceLock {
    /// For a device that no other process uses.
    pub fn own() -> Self {
        Self(None)
    }

    /// For a device that processes share by naming the same file.
    ///
    /// # Errors
    /// The files beside it cannot be created.
    pub fn shared(device: &Path) -> io::Result<Self> {
        let open = |suffix: &str| {
            let mut name = device.as_os_str().to_owned();
            name.push(suffix);
            OpenOptions::new().write(true).create(true).truncate(false).open(name)
        };
        let device_path = device.to_owned();
        Ok(Self(Some(Files { device: device_path, gate: open(".gate")?, shared: open(".lane")? })))
    }

    /// A handle of its own to the same lock: for another thread, and for another pass at the same time.
    ///
    /// # Errors
    /// The files cannot be opened.
    pub fn another(&self) -> io::Result<Self> {
        match &self.0 {
            Some(files) => Self::shared(&files.device),
            None => Ok(Self::own()),
        }
    }

    /// Waits until the pass may run.
    ///
    /// # Errors
    /// The files fail.
    pub fn enter(&self, exclusive: bool) -> io::Result<DeviceLockGuard<'_>> {
        let Some(Files { gate, shared, .. }) = &self.0 else { return Ok(DeviceLockGuard(None)) };
        uninterrupted(|| gate.lock())?;
        let entered = uninterrupted(|| if exclusive { shared.lock() } else { shared.lock_shared() });
        gate.unlock()?;
        entered.map(|()| DeviceLockGuard(Some(shared)))
    }
}

impl Drop for DeviceLockGuard<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(File::unlock) {
            tracing::error!(%error, "cannot unlock the device: other processes wait for it until this process ends");
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
                let lock = DeviceLock::shared(&folder.path().join("memory")).unwrap();
                let running = &running;
                scope.spawn(move || {
                    for pass in 0..200 {
                        let exclusive = (thread + pass) % 3 == 0;
                        let guard = lock.enter(exclusive).unwrap();
                        let weight = if exclusive { 100 } else { 1 };
                        let before = running.fetch_add(weight, Ordering::SeqCst);
                        assert!(if exclusive { before == 0 } else { before < 100 }, "{before}");
                        running.fetch_sub(weight, Ordering::SeqCst);
                        drop(guard);
                    }
                });
            }
        });
    }

    #[test]
    fn a_device_that_is_not_shared_is_always_free() {
        let lock = DeviceLock::own();
        let _one = lock.enter(true).unwrap();
        let _other = lock.enter(true).unwrap();
    }
}
