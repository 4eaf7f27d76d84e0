//! The lock on a device that several processes share: any number of ordinary passes run at a time, or one exclusive pass.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The lock of a device. It consists of two files beside the device's own: a process locks the gate first and keeps it until it
/// has the second file too. So waiting processes get the lock in the order in which they came: neither exclusive nor ordinary
/// passes starve. The kernel frees the locks of a process that dies.
///
/// Each pass opens the files for itself, because `flock` does not keep two passes of one handle apart.
#[derive(Debug)]
pub struct DeviceLock(Option<Shared>);

#[derive(Debug)]
struct Shared {
    device: PathBuf,
    waiters: Waiters,
}

/// The right to run a pass on the device. Dropping it unlocks the device.
#[derive(Debug)]
#[must_use = "dropping it unlocks the device"]
pub struct DeviceLockGuard(Option<File>);

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
        Files::open(device)?;
        Ok(Self(Some(Shared { device: device.to_owned(), waiters: Waiters::default() })))
    }

    /// Waits until the pass may run. Cancel-safe: if the future is dropped, the lock goes to the next pass that waits.
    ///
    /// A thread waits in `flock`, which only a signal could interrupt. After a cancellation it stays, and the next pass of the same kind
    /// takes it over. So there are never more threads than passes that waited at the same time. If no pass took it over, it unlocks the
    /// device as soon as it has the lock. Until then the passes behind it wait as if the pass were still there.
    ///
    /// # Errors
    /// The files fail, or the system starts no thread.
    pub async fn enter(&self, exclusive: bool) -> io::Result<DeviceLockGuard> {
        let Some(Shared { device, waiters }) = &self.0 else { return Ok(DeviceLockGuard(None)) };
        let place = match waiters.take_over(exclusive) {
            Some(place) => place,
            None => {
                let files = Files::open(device)?;
                if files.try_lock(exclusive)? {
                    return files.entered();
                }
                waiters.start(files, exclusive)?
            }
        };
        place.wait().await
    }
}

/// The id of the next waiter in this process.
static NEXT_WAITER: AtomicU64 = AtomicU64::new(0);

/// The threads that wait for the lock.
#[derive(Clone, Debug, Default)]
struct Waiters(Arc<Mutex<Vec<Waiter>>>);

#[derive(Debug)]
struct Waiter {
    id: u64,
    exclusive: bool,
    /// The pass that waits; `None` if it was cancelled.
    pass: Option<oneshot::Sender<io::Result<DeviceLockGuard>>>,
}

/// A pass that waits. If it is dropped, its thread is left for another pass.
struct Place<'a> {
    waiters: &'a Waiters,
    id: u64,
    entered: oneshot::Receiver<io::Result<DeviceLockGuard>>,
}

impl Waiters {
    /// The thread of a cancelled pass, if there is one of this kind.
    fn take_over(&self, exclusive: bool) -> Option<Place<'_>> {
        let mut all = self.all();
        let waiter = all.iter_mut().find(|waiter| waiter.exclusive == exclusive && waiter.pass.is_none())?;
        let (pass, entered) = oneshot::channel();
        waiter.pass = Some(pass);
        Some(Place { waiters: self, id: waiter.id, entered })
    }

    /// Starts a thread that waits for the files.
    fn start(&self, files: Files, exclusive: bool) -> io::Result<Place<'_>> {
        let (pass, entered) = oneshot::channel();
        let id = NEXT_WAITER.fetch_add(1, Ordering::Relaxed);
        self.all().push(Waiter { id, exclusive, pass: Some(pass) });
        let waiters = self.clone();
        let wait = move || {
            let locked = files.lock(exclusive);
            // An `Err` has the guard of a cancelled pass, which unlocks the device.
            let _ = waiters.remove(id).and_then(|pass| pass.send(locked).err());
        };
        let started = std::thread::Builder::new().name("device-lock".to_owned()).spawn(wait);
        started.inspect_err(|_| drop(self.remove(id)))?;
        Ok(Place { waiters: self, id, entered })
    }

    fn remove(&self, id: u64) -> Option<oneshot::Sender<io::Result<DeviceLockGuard>>> {
        let mut all = self.all();
        let at = all.iter().position(|waiter| waiter.id == id)?;
        all.swap_remove(at).pass
    }

    /// Nothing panics while it holds the lock.
    fn all(&self) -> MutexGuard<'_, Vec<Waiter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    async fn wait(mut self) -> io::Result<DeviceLockGuard> {
        let entered = (&mut self.entered).await;
        entered.unwrap_or_else(|_| Err(io::Error::other("the thread that waits for the lock panicked")))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // It is gone if the thread has the lock already: then the guard is dropped with the channel.
        if let Some(waiter) = self.waiters.all().iter_mut().find(|waiter| waiter.id == self.id) {
            waiter.pass = None;
        }
    }
}

impl Drop for DeviceLockGuard {
    /// Unlocks explicitly: a child process that was just forked has the file too until it executes its program.
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.as_ref().map(File::unlock) {
            tracing::error!(%error, "cannot unlock the device: other processes wait for it until this process ends");
        }
    }
}

/// The two files, opened for one pass.
struct Files {
    gate: File,
    shared: File,
}

impl Files {
    fn open(device: &Path) -> io::Result<Self> {
        let open = |suffix: &str| {
            let mut name = device.as_os_str().to_owned();
            name.push(suffix);
            OpenOptions::new().write(true).create(true).truncate(false).open(name)
        };
        Ok(Self { gate: open(".gate")?, shared: open(".lane")? })
    }

    /// Locks both files if that is possible at once. Otherwise the gate may be locked, as the place in the order.
    fn try_lock(&self, exclusive: bool) -> io::Result<bool> {
        let try_shared = || if exclusive { self.shared.try_lock() } else { self.shared.try_lock_shared() };
        match self.gate.try_lock().and_then(|()| try_shared()) {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Waits for both files. A gate that is locked already stays so.
    fn lock(self, exclusive: bool) -> io::Result<DeviceLockGuard> {
        uninterrupted(|| self.gate.lock())?;
        uninterrupted(|| if exclusive { self.shared.lock() } else { self.shared.lock_shared() })?;
        self.entered()
    }

    /// Both files are locked: lets the next process through the gate.
    fn entered(self) -> io::Result<DeviceLockGuard> {
        self.gate.unlock()?;
        Ok(DeviceLockGuard(Some(self.shared)))
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
    use std::pin::pin;
    use std::sync::atomic::AtomicI64;
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let within = runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), future).await });
        within.expect("the lock does not come")
    }

    #[test]
    fn an_exclusive_pass_is_alone() {
        let folder = tempfile::tempdir().unwrap();
        let running = AtomicI64::new(0);
        let lock = DeviceLock::shared(&folder.path().join("memory")).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (lock, running) = (&lock, &running);
                scope.spawn(move || {
                    for pass in 0..200 {
                        let exclusive = (thread + pass) % 3 == 0;
                        let guard = block_on(lock.enter(exclusive)).unwrap();
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
    fn ordinary_passes_do_not_overtake_an_exclusive_one() {
        let folder = tempfile::tempdir().unwrap();
        let lock = DeviceLock::shared(&folder.path().join("memory")).unwrap();
        let running = block_on(lock.enter(false)).unwrap();
        let mut exclusive = pin!(lock.enter(true));
        assert!(exclusive.as_mut().now_or_never().is_none());
        let mut ordinary = pin!(lock.enter(false));
        assert!(ordinary.as_mut().now_or_never().is_none(), "it runs before the exclusive one");
        drop(running);
        let alone = block_on(exclusive).unwrap();
        assert!(ordinary.as_mut().now_or_never().is_none());
        drop(alone);
        let _guard = block_on(ordinary).unwrap();
    }

    #[test]
    fn a_cancelled_pass_keeps_nobody_from_the_device() {
        let folder = tempfile::tempdir().unwrap();
        let lock = DeviceLock::shared(&folder.path().join("memory")).unwrap();
        for exclusive in [true, false] {
            let running = block_on(lock.enter(true)).unwrap();
            assert!(lock.enter(exclusive).now_or_never().is_none());
            let mut next = pin!(lock.enter(true));
            assert!(next.as_mut().now_or_never().is_none());
            drop(running);
            let _guard = block_on(next).unwrap();
        }
    }

    #[test]
    fn passes_that_are_cancelled_one_after_the_other_leave_one_thread() {
        let folder = tempfile::tempdir().unwrap();
        let lock = DeviceLock::shared(&folder.path().join("memory")).unwrap();
        let running = block_on(lock.enter(true)).unwrap();
        for _ in 0..100 {
            assert!(lock.enter(false).now_or_never().is_none());
        }
        let waiters = &lock.0.as_ref().unwrap().waiters;
        assert_eq!(waiters.all().len(), 1);
        let mut next = pin!(lock.enter(false));
        assert!(next.as_mut().now_or_never().is_none());
        drop(running);
        let _guard = block_on(next).unwrap();
        assert_eq!(waiters.all().len(), 0);
    }

    #[test]
    fn a_device_that_is_not_shared_is_always_free() {
        let lock = DeviceLock::own();
        let _one = block_on(lock.enter(true)).unwrap();
        let _other = block_on(lock.enter(true)).unwrap();
    }
}
