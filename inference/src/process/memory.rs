//! Accounts a device's memory to programs that start and end: what they hold, what a new one may take, and whether the memory of
//! an ended one returned.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep};

pub use super::claim::{Claim, Snapshot};
use super::device_calls::{CALL_MAX, DeviceCalls};
use super::device_view::{DeviceView, Reading};
pub use super::entries::RunningPass;
use super::entries::{Entries, Program, Request};
use super::look::{LOOK, until_look};
use super::program_group::ProgramGroup;
use super::shared_snapshot::Snapshots;
use crate::process_tree::{self, ProcessTree};

/// If a device has not reported for so long what processes hold, it does not do so any more: its driver's library may have been replaced.
const SILENT_MAX: Duration = Duration::from_secs(30);

/// How long an exclusive pass waits for programs that are loading. Most load in less. One that takes longer may have all its memory by
/// then.
const LOADS_WAIT: Duration = Duration::from_secs(60);

/// How long a program waits for idle ones before busy ones are asked to end after their passes, and what becomes free is kept for it.
const BUSY_AFTER: Duration = Duration::from_secs(10);

/// The account of one device, shared by all models on it.
#[derive(Debug)]
pub struct DeviceAccount {
    view: Arc<dyn DeviceView>,
    calls: DeviceCalls,
    entries: Mutex<Entries>,
    snapshots: Snapshots,
    /// When the device last reported what processes hold. If it does not do so soon after, that snapshot has failed.
    told_at: Mutex<Option<Instant>>,
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
            calls: DeviceCalls::new(CALL_MAX),
            entries: Mutex::default(),
            snapshots: Snapshots::default(),
            told_at: Mutex::default(),
        })
    }

    pub fn view(&self) -> &dyn DeviceView {
        &*self.view
    }

    /// Takes a snapshot of the device: what it shows is from after the call. `None` if the device cannot be read. Programs that wait ask
    /// often, and a snapshot reads all processes of the machine, so calls at the same time share one.
    pub async fn snapshot(self: &Arc<Self>) -> Option<Snapshot> {
        self.snapshots
            .shared(|| {
                let account = Arc::clone(self);
                async { self.calls.call(move || account.look_now()).await? }
            })
            .await
    }

    fn look_now(&self) -> Option<Snapshot> {
        let stays = |program: &Program| program.is_once || program.is_stuck;
        let (all, staying, running, most, removed) = {
            let entries = self.entries();
            let group = |is_counted: &dyn Fn(&Program) -> bool| ProgramGroup::of(&entries, is_counted);
            let running = group(&|program| entries.runs_pass(program));
            (group(&|_| true), group(&stays), running, entries.most(), entries.removed)
        };
        let tree = ProcessTree::read();
        // Before what is ours.
        let reading = self.view.memory(&tree.under(&all.keepers))?;
        let told = all.told(&*self.view, &tree);
        let ours = told.unwrap_or(all.noted);
        let staying = match told {
            Some(_) => staying.told(&*self.view, &tree).unwrap_or(staying.noted),
            None => staying.noted,
        };
        // Nothing, where the device does not tell what they hold already: a program that waits must not wait for that twice.
        let held = (most > 0).then(|| running.told(&*self.view, &tree)).flatten();
        let owed = held.map_or(0, |held| most.saturating_sub(held));
        let tells_apart = self.tells_apart(told.is_some(), Instant::now());
        Some(Snapshot { reading, ours, staying, owed, tells_apart, removed })
    }

    /// Whether the device reports what processes hold, or has done so a moment ago. `told`: it does so now.
    fn tells_apart(&self, told: bool, now: Instant) -> bool {
        // A poisoned lock is usable: nothing panics while it is held.
        let mut told_at = self.told_at.lock().unwrap_or_else(PoisonError::into_inner);
        if told {
            *told_at = Some(now);
        }
        told_at.is_some_and(|at| now.saturating_duration_since(at) < SILENT_MAX)
    }

    /// What the processes under a keeper hold. `None` if the device cannot tell, or does not answer.
    pub async fn held_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let account = Arc::clone(self);
        self.calls.call(move || account.view.held_by(&process_tree::descendants(keeper))).await?
    }

    /// The same, for readings many times a second: does not read all processes of the machine, and may miss some that end.
    pub async fn sample_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let account = Arc::clone(self);
        self.calls.call(move || account.view.held_by(&process_tree::descendants_nearby(keeper))).await?
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
        // Until the device can be read.
        let mut reading = Reading::default();
        loop {
            let snapshot = self.snapshot().await;
            if let Some(snapshot) = snapshot {
                reading = snapshot.reading;
                if bytes > reading.total {
                    return Err(reading);
                }
            }
            let busy_too = since.elapsed() > BUSY_AFTER && is_only();
            if let Some(entry) = self.reserve(&waiter, Request { bytes, busy_too }, snapshot, Instant::now())
            {
                return Ok(entry);
            }
            waiting(reading, since.elapsed());
            sleep(until_look(since.elapsed())).await;
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
        snapshot: Option<Snapshot>,
        now: Instant,
    ) -> Option<Entry> {
        let id = self.entries().reserve(waiter.number, request, snapshot, now)?;
        Some(Entry { account: Arc::clone(self), id })
    }

    /// Notes what the program of this keeper holds now.
    pub fn note_held(&self, keeper: i32, bytes: u64) {
        let mut entries = self.entries();
        if let Some(program) = entries.programs.values_mut().find(|program| program.keeper == keeper) {
            program.held = bytes;
        }
    }

    /// Notes what the program of this keeper has taken since its load began. That it holds so much may be an estimate.
    pub fn note_taken(&self, keeper: i32, bytes: u64) {
        let mut entries = self.entries();
        if let Some(program) = entries.programs.values_mut().find(|program| program.keeper == keeper) {
            program.taken = bytes;
        }
    }

    /// How much of an estimated claim has returned in the end: a driver may free memory in steps.
    async fn all_returned(self: &Arc<Self>, claim: Claim, now: Snapshot) -> u64 {
        let mut returned = claim.returned(now);
        if claim.sure == claim.held {
            return returned;
        }
        loop {
            sleep(LOOK).await;
            let Some(later) = self.snapshot().await else { continue };
            let later = claim.returned(later);
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

    /// Memory that programs which are loading have been promised, and have not taken yet: it is not free for passes.
    pub fn promised(&self) -> u64 {
        self.entries().not_taken()
    }

    /// Records a pass until the entry is dropped. No program is loaded into what the pass may take, unless it has waited for long. A pass
    /// that would take what a program that loads was promised waits for it, and so does an exclusive one; but not for ever, because other
    /// passes of the worker may wait for this one.
    pub async fn pass(self: &Arc<Self>, pass: RunningPass) -> Entry {
        let id = self.entries().pass(pass);
        let entry = Entry { account: Arc::clone(self), id };
        if pass.exclusive || !self.has_beside_loads(pass.budget).await {
            self.until_loaded(LOADS_WAIT).await;
        }
        entry
    }

    /// Whether so much is free besides what programs that load were promised.
    async fn has_beside_loads(self: &Arc<Self>, bytes: u64) -> bool {
        // A snapshot reads all processes of the machine.
        if self.promised() == 0 {
            return true;
        }
        let Some(snapshot) = self.snapshot().await else { return true };
        snapshot.reading.free >= bytes.saturating_add(self.promised())
    }

    async fn until_loaded(&self, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.entries().reserved.is_empty() && Instant::now() < until {
            sleep(LOOK).await;
        }
    }

    /// A number that changes with the account, if one pass runs, and nothing else of the worker's programs moves.
    pub(super) fn changes_beside_one_pass(&self) -> Option<u64> {
        self.entries().changes_beside_one_pass()
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
        // Also where the load took so long that it seemed to be stuck.
        self.change(|program| (program.loaded, program.is_stuck) = (Some(Instant::now()), false));
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
        if claim.held == 0 {
            return 0;
        }
        let (account, since) = (Arc::clone(&entry.account), Instant::now());
        loop {
            let now = account.snapshot().await;
            let left = now.map_or(claim.held, |now| claim.missing(now));
            if let Some(now) = now.filter(|_| left == 0) {
                drop(entry);
                return account.all_returned(claim, now).await;
            }
            missing(left);
            sleep(until_look(since.elapsed())).await;
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
