//! Accounts a device's memory to programs that start and end: what they hold, what a new one may take, and whether the memory of
//! an ended one returned.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep, timeout};

pub use super::claim::{Claim, Look};
use super::device_view::{DeviceView, Reading};
use super::entries::{Entries, Program, Request};
use super::shared_look::Looks;
use crate::process_tree::{self, ProcessTree};

/// How often to read the device while a program waits for memory, or the pool waits for memory to return.
const LOOK: Duration = Duration::from_millis(100);

/// After this long a look counts as failed.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// How long a program waits for idle ones before busy ones are asked to end after their passes, and what becomes free is kept for it.
const BUSY_AFTER: Duration = Duration::from_secs(10);

/// The account of one device, shared by all models on it.
#[derive(Debug)]
pub struct DeviceAccount {
    view: Arc<dyn DeviceView>,
    entries: Mutex<Entries>,
    looks: Looks,
    /// Whether the device has ever reported what processes hold. If it does not do so later, that look has failed.
    has_told: AtomicBool,
}

/// An entry in the account, removed when this is dropped.
#[derive(Debug)]
pub struct Entry {
    account: Arc<DeviceAccount>,
    id: u64,
}

impl DeviceAccount {
    pub fn new(view: Arc<dyn DeviceView>) -> Arc<Self> {
        Arc::new(Self {
            view,
            entries: Mutex::default(),
            looks: Looks::default(),
            has_told: AtomicBool::new(false),
        })
    }

    pub fn view(&self) -> &dyn DeviceView {
        &*self.view
    }

    /// The processes of all programs.
    pub fn pids(&self) -> Vec<i32> {
        ProcessTree::read().under(&self.entries().keepers(|_| true))
    }

    /// Looks at the device: what it shows is from after the call. Programs that wait look often, and a look reads all processes of the
    /// machine, so calls at the same time share one.
    pub async fn look(self: &Arc<Self>) -> Look {
        self.looks
            .shared(|| {
                let account = Arc::clone(self);
                async move {
                    let looked = tokio::task::spawn_blocking(move || account.look_now());
                    // Otherwise a driver that hangs would keep programs from being ended.
                    timeout(LOOK_MAX, looked).await.ok().and_then(Result::ok).unwrap_or_default()
                }
            })
            .await
    }

    fn look_now(&self) -> Look {
        let stays = |program: &Program| program.is_once || program.is_stuck;
        let (all, staying, removed) = {
            let entries = self.entries();
            (Group::of(&entries, |_| true), Group::of(&entries, stays), entries.removed)
        };
        let tree = ProcessTree::read();
        let reading = self.view.memory();
        let told = all.told(&*self.view, &tree);
        let ours = told.unwrap_or(all.noted);
        let staying = match told {
            Some(_) => staying.told(&*self.view, &tree).unwrap_or(staying.noted),
            None => staying.noted,
        };
        let tells_apart = told.is_some() || self.has_told.load(Ordering::Relaxed);
        self.has_told.store(tells_apart, Ordering::Relaxed);
        Look { reading, ours, staying, tells_apart, removed }
    }

    /// What the processes under a keeper hold, if the device can tell.
    pub async fn held_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let account = Arc::clone(self);
        let held = move || account.view.held_by(&process_tree::descendants(keeper));
        tokio::task::spawn_blocking(held).await.ok().flatten()
    }

    /// The same, for readings many times a second: does not read all processes of the machine, and may miss some that end.
    pub async fn sample_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let account = Arc::clone(self);
        let held = move || account.view.held_by(&process_tree::descendants_nearby(keeper));
        tokio::task::spawn_blocking(held).await.ok().flatten()
    }

    /// Records a warm program until the entry is dropped.
    pub fn enter(self: &Arc<Self>, keeper: i32) -> Entry {
        self.entry(Program::new(keeper, false))
    }

    /// Records a program that runs for one item.
    pub fn enter_once(self: &Arc<Self>, keeper: i32) -> Entry {
        self.entry(Program::new(keeper, true))
    }

    /// Waits until the device has `bytes` free for a program. Reserves them until the entry is dropped, which is when the program
    /// has taken them. If that frees enough, other programs are asked to end: first the one that was idle for longest. If none is
    /// idle for some seconds, and the program is the only one of its model (`is_only`), the one that was loaded first ends after
    /// its pass, and no other program gets the memory ([`entries`](super::entries)). `waiting` gets the reading and the time waited,
    /// at each check.
    ///
    /// # Errors
    /// The device is smaller than `bytes`. Returns its last reading.
    pub async fn admit(
        self: &Arc<Self>,
        bytes: u64,
        is_only: impl Fn() -> bool,
        mut waiting: impl FnMut(Reading, Duration),
    ) -> Result<Entry, Reading> {
        let since = Instant::now();
        let waiter = self.waiter();
        loop {
            let look = self.look().await;
            let reading = look.reading;
            // The total is 0 if the device cannot be read.
            if reading.total > 0 && bytes > reading.total {
                return Err(reading);
            }
            let busy_too = since.elapsed() > BUSY_AFTER && is_only();
            if let Some(entry) = self.reserve(&waiter, Request { bytes, busy_too }, look, Instant::now()) {
                return Ok(entry);
            }
            waiting(reading, since.elapsed());
            sleep(LOOK).await;
        }
    }

    /// The next place among the programs that wait for memory.
    fn waiter(self: &Arc<Self>) -> Waiter {
        let number = self.entries().number();
        Waiter { account: Arc::clone(self), number }
    }

    /// Keeps memory for a program, or asks another one to end for it.
    fn reserve(
        self: &Arc<Self>,
        waiter: &Waiter,
        request: Request,
        look: Look,
        now: Instant,
    ) -> Option<Entry> {
        let id = self.entries().reserve(waiter.number, request, look, now)?;
        Some(Entry { account: Arc::clone(self), id })
    }

    /// Notes what the program of this keeper holds now.
    pub fn note_held(&self, keeper: i32, bytes: u64) {
        let mut entries = self.entries();
        if let Some(program) = entries.programs.values_mut().find(|program| program.keeper == keeper) {
            program.held = bytes;
        }
    }

    /// How much of an estimated claim has returned in the end: a driver may free memory in steps.
    async fn all_returned(self: &Arc<Self>, claim: Claim, now: Look) -> u64 {
        let mut returned = claim.returned(now);
        if claim.sure == claim.held {
            return returned;
        }
        loop {
            sleep(LOOK).await;
            let later = claim.returned(self.look().await);
            if later <= returned {
                return returned;
            }
            returned = later;
        }
    }

    /// Whether a program is loading, or is about to. What it takes is not known yet.
    pub fn is_loading(&self) -> bool {
        let entries = self.entries();
        !entries.reserved.is_empty() || entries.programs.values().any(|program| program.loaded.is_none())
    }

    /// Records memory that an ended program held, for a program whose entry is gone.
    pub fn returning(self: &Arc<Self>, claim: Claim) -> Returning {
        let id = self.entries().returning(claim, Instant::now());
        Returning { entry: Entry { account: Arc::clone(self), id }, claim }
    }

    fn entry(self: &Arc<Self>, program: Program) -> Entry {
        let id = self.entries().enter(program);
        Entry { account: Arc::clone(self), id }
    }

    /// A poisoned lock is usable: no panic leaves the account half changed.
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Some of the programs, when a look begins.
struct Group {
    keepers: Vec<i32>,
    /// What they were last seen to hold, and the part of it that is an estimate.
    noted: u64,
    estimated: u64,
}

impl Group {
    fn of(entries: &Entries, is_counted: impl Fn(&Program) -> bool) -> Self {
        let estimated = entries.noted(|program| program.is_estimated && is_counted(program));
        Self { keepers: entries.keepers(&is_counted), noted: entries.noted(&is_counted), estimated }
    }

    /// What they hold, as the device reports it; `None` if it does not. A program's memory is estimated where other processes hold it, so what
    /// its own processes hold does not contain it.
    fn told(&self, view: &dyn DeviceView, tree: &ProcessTree) -> Option<u64> {
        let told = view.held_by(&tree.under(&self.keepers))?;
        Some(told.saturating_add(self.estimated))
    }
}

impl Entry {
    /// Notes that the program has ended. What it held is missing from now on, until it is back.
    pub fn ended(self, claim: Claim, now: Instant) -> Returning {
        self.account.entries().ended(self.id, claim, now);
        Returning { entry: self, claim }
    }

    /// Notes what the program holds, and whether that is an estimate.
    pub fn holds(&self, bytes: u64, is_estimated: bool) {
        self.change(|program| (program.held, program.is_estimated) = (bytes, is_estimated));
    }

    /// Notes that it is loaded, and may be asked to end from now on.
    pub fn is_loaded(&self) {
        self.change(|program| program.loaded = Some(Instant::now()));
    }

    /// Notes that its jobs were sent away before it was loaded: it is not asked to end before they can be back.
    pub fn is_kept(&self) {
        self.change(|program| program.kept_until = Some(Instant::now() + BUSY_AFTER));
    }

    /// Notes that it was killed and does not end.
    pub fn is_stuck(&self) {
        self.change(|program| program.is_stuck = true);
    }

    /// Notes that it has nothing to do, until the guard is dropped.
    pub fn idle(&self) -> Idle<'_> {
        self.change(|program| program.idle = Some(Instant::now()));
        Idle(self)
    }

    /// Notified when the program is asked to end.
    pub fn evict_signal(&self) -> Arc<Notify> {
        let entries = self.account.entries();
        entries.programs.get(&self.id).map(|program| Arc::clone(&program.evict)).unwrap_or_default()
    }

    /// Whether the program was asked to end, because another one needs the memory.
    pub fn is_asked_to_end(&self) -> bool {
        self.account.entries().programs.get(&self.id).is_some_and(|program| program.is_asked_to_end)
    }

    fn change(&self, change: impl FnOnce(&mut Program)) {
        if let Some(program) = self.account.entries().programs.get_mut(&self.id) {
            change(program);
        }
    }
}

/// A place among the programs that wait for memory. Dropping it gives up what was promised to it.
#[derive(Debug)]
struct Waiter {
    account: Arc<DeviceAccount>,
    number: u64,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.account.entries().gives_up(self.number);
    }
}

/// Memory that an ended program held. Until this is dropped, what is missing of it counts as coming back.
#[derive(Debug)]
pub struct Returning {
    entry: Entry,
    claim: Claim,
}

impl Returning {
    /// Waits until the memory is back; what has returned. `missing` gets the missing bytes at each check.
    pub async fn until_back(self, mut missing: impl FnMut(u64)) -> u64 {
        let Self { entry, claim } = self;
        let account = Arc::clone(&entry.account);
        loop {
            let now = account.look().await;
            let left = claim.missing(now);
            if left == 0 {
                drop(entry);
                return account.all_returned(claim, now).await;
            }
            missing(left);
            sleep(LOOK).await;
        }
    }
}

/// The time in which a program has nothing to do.
#[derive(Debug)]
pub struct Idle<'a>(&'a Entry);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.change(|program| program.idle = None);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.account.entries().remove(self.id);
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "memory_properties.rs"]
mod properties;
