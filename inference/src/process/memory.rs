//! Accounts a device's memory to programs that start and end: what they hold, what a new one may take, and whether the memory of
//! an ended one returned.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep};

pub use super::claim::{Claim, Look};
use super::device_view::{DeviceView, Reading};
use crate::process_tree;

/// How often to read the device while a program waits for memory, or the pool waits for memory to return.
const LOOK: Duration = Duration::from_millis(100);

/// How long to wait for a program that was asked to end before another one is asked.
const EVICTION_LIMIT: Duration = Duration::from_secs(30);

/// How long a program waits for idle ones before one that is busy is asked to end after its pass.
const BUSY_AFTER: Duration = Duration::from_secs(10);

/// The account of one device, shared by all models on it.
#[derive(Debug)]
pub struct DeviceAccount {
    view: Arc<dyn DeviceView>,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    programs: BTreeMap<u64, Program>,
    /// Memory for programs that are loading.
    reserved: BTreeMap<u64, u64>,
    /// When a program was last asked to end; `None` once one has ended.
    evicted: Option<Instant>,
    /// The program for which that memory was freed.
    promise: Option<Promise>,
}

/// Memory that a program was asked to free for a waiting one. Otherwise the program that ended would be the first to take it again.
#[derive(Clone, Copy, Debug)]
struct Promise {
    waiter: u64,
    bytes: u64,
    until: Instant,
}

/// A program that was started.
#[derive(Debug)]
struct Program {
    /// The ancestor of all its processes.
    keeper: i32,
    /// What it was last seen to hold.
    held: u64,
    /// When a warm process was loaded. Only loaded ones may be asked to end.
    loaded: Option<Instant>,
    /// Since when it has nothing to do.
    idle: Option<Instant>,
    is_asked_to_end: bool,
    /// Its jobs were sent away while it was not loaded. It is not asked to end before this time, so that they can come back.
    kept_until: Option<Instant>,
    /// Notified when the program is asked to end.
    evict: Arc<Notify>,
}

/// A program that waits for memory.
#[derive(Clone, Copy, Debug)]
struct Request {
    bytes: u64,
    /// Busy programs may be asked to end for it too.
    busy_too: bool,
    /// The device reports what programs hold, so it is known whether that is enough.
    is_measured: bool,
}

/// An entry in the account, removed when this is dropped.
#[derive(Debug)]
pub struct Entry {
    account: Arc<DeviceAccount>,
    id: u64,
}

impl DeviceAccount {
    pub fn new(view: Arc<dyn DeviceView>) -> Arc<Self> {
        Arc::new(Self { view, entries: Mutex::default() })
    }

    pub fn view(&self) -> &dyn DeviceView {
        &*self.view
    }

    /// The processes of all programs.
    pub fn pids(&self) -> Vec<i32> {
        let keepers: Vec<i32> = self.entries().programs.values().map(|program| program.keeper).collect();
        keepers.into_iter().flat_map(process_tree::descendants).collect()
    }

    /// Looks at the device.
    pub async fn look(self: &Arc<Self>) -> Look {
        let account = Arc::clone(self);
        tokio::task::spawn_blocking(move || account.look_now()).await.unwrap_or_default()
    }

    fn look_now(&self) -> Look {
        let of_program = |program: &Program| (program.keeper, program.held);
        let programs: Vec<(i32, u64)> = self.entries().programs.values().map(of_program).collect();
        let pids: Vec<i32> =
            programs.iter().flat_map(|(keeper, _)| process_tree::descendants(*keeper)).collect();
        let estimated = || programs.iter().map(|(_, held)| held).sum();
        let reading = self.view.memory();
        let told = self.view.held_by(&pids);
        Look { reading, ours: told.unwrap_or_else(estimated), tells_apart: told.is_some() }
    }

    /// What the processes under a keeper hold, if the device can tell.
    pub async fn held_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let account = Arc::clone(self);
        let held = move || account.view.held_by(&process_tree::descendants(keeper));
        tokio::task::spawn_blocking(held).await.ok().flatten()
    }

    /// Records a program until the entry is dropped.
    pub fn enter(self: &Arc<Self>, keeper: i32) -> Entry {
        let evict = Arc::default();
        let program = Program {
            keeper,
            held: 0,
            loaded: None,
            idle: None,
            is_asked_to_end: false,
            kept_until: None,
            evict,
        };
        self.entry(|entries, id| {
            entries.programs.insert(id, program);
        })
    }

    /// Waits until the device has `bytes` free for a program. Reserves them until the entry is dropped, which is when the program
    /// has taken them. If that frees enough, other programs are asked to end: first the one that was idle for longest. If none is
    /// idle for some seconds, and the program is the only one of its model (`is_only`), the one that was loaded first ends after
    /// its pass. `waiting` gets the reading and the time waited, at each check.
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
        let waiter = self.entries().number();
        loop {
            let Look { reading, tells_apart: is_measured, .. } = self.look().await;
            // The total is 0 if the device cannot be read.
            if reading.total > 0 && bytes > reading.total {
                return Err(reading);
            }
            let busy_too = since.elapsed() > BUSY_AFTER && is_only();
            let request = Request { bytes, busy_too, is_measured };
            if let Some(entry) = self.reserve(waiter, request, reading, Instant::now()) {
                return Ok(entry);
            }
            waiting(reading, since.elapsed());
            sleep(LOOK).await;
        }
    }

    /// Keeps memory for a program, or asks another one to end for it.
    fn reserve(
        self: &Arc<Self>,
        waiter: u64,
        request: Request,
        reading: Reading,
        now: Instant,
    ) -> Option<Entry> {
        let mut entries = self.entries();
        let reserved: u64 = entries.reserved.values().sum();
        let promised = entries.promised_to_others(waiter, now);
        let free = reading.free.saturating_sub(reserved).saturating_sub(promised);
        if free >= request.bytes {
            entries.promise = entries.promise.filter(|promise| promise.waiter != waiter);
            let id = entries.number();
            entries.reserved.insert(id, request.bytes);
            return Some(Entry { account: Arc::clone(self), id });
        }
        // Only one at a time, because the next one may not be needed.
        if entries.evicted.is_none_or(|evicted| now.saturating_duration_since(evicted) >= EVICTION_LIMIT) {
            entries.evict(waiter, request, free, now);
        }
        None
    }

    /// Notes what the program of this keeper holds now.
    pub fn note_held(&self, keeper: i32, bytes: u64) {
        let mut entries = self.entries();
        if let Some(program) = entries.programs.values_mut().find(|program| program.keeper == keeper) {
            program.held = bytes;
        }
    }

    /// Waits until the claim's memory is back; what has returned. `missing` gets the missing bytes at each check.
    pub async fn reclaim(self: &Arc<Self>, claim: Claim, mut missing: impl FnMut(u64)) -> u64 {
        loop {
            let now = self.look().await;
            let left = claim.missing(now);
            if left == 0 {
                return self.all_returned(claim, now).await;
            }
            missing(left);
            sleep(LOOK).await;
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

    fn entry(self: &Arc<Self>, add: impl FnOnce(&mut Entries, u64)) -> Entry {
        let mut entries = self.entries();
        let id = entries.number();
        add(&mut entries, id);
        Entry { account: Arc::clone(self), id }
    }

    /// A poisoned lock is usable: no panic leaves the account half changed.
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Bytes promised to another waiting program: free, or about to be freed.
    fn promised_to_others(&self, waiter: u64, now: Instant) -> u64 {
        let of_others = |promise: &Promise| promise.waiter != waiter && promise.until > now;
        self.promise.filter(of_others).map_or(0, |promise| promise.bytes)
    }

    /// Bytes that are free once all programs have ended that may be asked to. After a while programs that are still loading count too: without
    /// them, a program that needs the room of several others would wait until all of these are loaded at the same time.
    fn can_become_free(&self, request: Request, may_end: impl Fn(&Program) -> bool) -> u64 {
        let counts = |program: &&Program| request.busy_too || may_end(program);
        let held: u64 = self.programs.values().filter(counts).map(|program| program.held).sum();
        let loading: u64 = if request.busy_too { self.reserved.values().sum() } else { 0 };
        held.saturating_add(loading)
    }

    /// Asks one program to end, if all that may end hold enough together.
    fn evict(&mut self, waiter: u64, request: Request, free: u64, now: Instant) {
        let may_end = |program: &Program| {
            program.loaded.is_some()
                && program.kept_until.is_none_or(|until| until <= now)
                && (program.idle.is_some() || request.busy_too)
        };
        if request.is_measured && free.saturating_add(self.can_become_free(request, may_end)) < request.bytes
        {
            return;
        }
        let is_next = |program: &&mut Program| may_end(program) && !program.is_asked_to_end;
        let first = |program: &&mut Program| (program.idle.is_none(), program.idle.or(program.loaded));
        if let Some(program) = self.programs.values_mut().filter(is_next).min_by_key(first) {
            program.is_asked_to_end = true;
            program.evict.notify_one();
            self.evicted = Some(now);
            self.promise = Some(Promise { waiter, bytes: request.bytes, until: now + EVICTION_LIMIT });
        }
    }
}

impl Entry {
    /// Notes what the program holds.
    pub fn holds(&self, bytes: u64) {
        self.change(|program| program.held = bytes);
    }

    /// Notes that it is loaded, and may be asked to end from now on.
    pub fn is_loaded(&self) {
        self.change(|program| program.loaded = Some(Instant::now()));
    }

    /// Notes that its jobs were sent away before it was loaded: it is not asked to end before they can be back.
    pub fn is_kept(&self) {
        self.change(|program| program.kept_until = Some(Instant::now() + BUSY_AFTER));
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
        let mut entries = self.account.entries();
        if entries.programs.remove(&self.id).is_some() {
            entries.evicted = None;
        }
        entries.reserved.remove(&self.id);
    }
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "memory_properties.rs"]
mod properties;
