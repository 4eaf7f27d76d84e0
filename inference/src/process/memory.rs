//! Accounts a device's memory to programs that start and end: what they hold, what a new one may take, and whether the memory of
//! an ended one returned.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep};

use super::keeper::tree;

/// How far the device's figures may be from what they were and still count as the same: rounding, and what a driver keeps for
/// itself. At most this, and at most a 64th of the device.
const TOLERANCE_MAX: u64 = 64 << 20;
const TOLERANCE_PART: u64 = 64;

/// How often the device is looked at while a program waits for memory, or memory for being given back.
const LOOK: Duration = Duration::from_millis(100);

/// How long to wait for an idle program that was asked to end before another one is asked. It may have taken a pass just then.
const EVICTION_LIMIT: Duration = Duration::from_secs(30);

/// A device, as far as programs on it are concerned. Implementations may take milliseconds: they are called off the runtime.
pub trait DeviceView: fmt::Debug + Send + Sync {
    /// `cpu`, `cuda:0`.
    fn name(&self) -> &str;

    /// The memory now. What the worker has promised to others may be left out of `free`.
    fn memory(&self) -> Reading;

    /// What these processes hold of it together; nothing, if the device cannot tell processes apart.
    fn held_by(&self, pids: &[i32]) -> Option<u64>;

    /// What programs need in their environment to find this device, and no other: `CUDA_VISIBLE_DEVICES`.
    fn env(&self) -> Vec<(String, String)>;
}

/// Bytes of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub free: u64,
    pub total: u64,
}

/// The device's memory, and how much of it our programs hold: as the device tells, or as was last measured of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    pub reading: Reading,
    pub ours: u64,
}

impl Look {
    /// What all others hold.
    fn others(&self) -> u64 {
        let Reading { free, total } = self.reading;
        total.saturating_sub(free).saturating_sub(self.ours)
    }
}

/// The memory that must return when a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The last look at the device while the program lived.
    pub alive: Look,
    /// What it held then.
    pub held: u64,
}

impl Claim {
    /// Bytes that have not returned: lost memory appears as memory of others.
    pub fn missing(&self, now: Look) -> u64 {
        let missing = now.others().saturating_sub(self.alive.others()).min(self.held);
        if missing > tolerance(now.reading.total) { missing } else { 0 }
    }
}

fn tolerance(total: u64) -> u64 {
    TOLERANCE_MAX.min(total / TOLERANCE_PART)
}

/// The account of one device, shared by all models on it.
#[derive(Debug)]
pub struct DeviceBook {
    view: Arc<dyn DeviceView>,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    /// Programs: the keeper of each, above all its processes, and what it was last seen to hold.
    programs: BTreeMap<u64, (i32, u64)>,
    /// Memory for programs that are loading.
    reserved: BTreeMap<u64, u64>,
    /// Programs with nothing to do: since when, and how to end them.
    idle: BTreeMap<u64, (Instant, Arc<Notify>)>,
    /// When an idle program was last asked to end; `None` once one has ended.
    evicted: Option<Instant>,
}

/// An entry in the account, removed when this is dropped.
#[derive(Debug)]
pub struct Entry {
    book: Arc<DeviceBook>,
    id: u64,
}

impl DeviceBook {
    pub fn new(view: Arc<dyn DeviceView>) -> Arc<Self> {
        Arc::new(Self { view, entries: Mutex::default() })
    }

    pub fn view(&self) -> &dyn DeviceView {
        &*self.view
    }

    /// The processes of all programs.
    pub fn pids(&self) -> Vec<i32> {
        let keepers: Vec<i32> = self.entries().programs.values().map(|(keeper, _)| *keeper).collect();
        keepers.into_iter().flat_map(tree::descendants).collect()
    }

    /// Looks at the device.
    pub async fn look(self: &Arc<Self>) -> Look {
        let book = Arc::clone(self);
        tokio::task::spawn_blocking(move || book.look_now()).await.unwrap_or_default()
    }

    fn look_now(&self) -> Look {
        let programs: Vec<(i32, u64)> = self.entries().programs.values().copied().collect();
        let pids: Vec<i32> = programs.iter().flat_map(|(keeper, _)| tree::descendants(*keeper)).collect();
        let measured = || programs.iter().map(|(_, held)| held).sum();
        Look { reading: self.view.memory(), ours: self.view.held_by(&pids).unwrap_or_else(measured) }
    }

    /// What the processes under a keeper hold, if the device can tell.
    pub async fn held_under(self: &Arc<Self>, keeper: i32) -> Option<u64> {
        let book = Arc::clone(self);
        let held = move || book.view.held_by(&tree::descendants(keeper));
        tokio::task::spawn_blocking(held).await.ok().flatten()
    }

    /// Enters a program, for as long as it is there.
    pub fn enter(self: &Arc<Self>, keeper: i32) -> Entry {
        self.entry(|entries, id| {
            entries.programs.insert(id, (keeper, 0));
        })
    }

    /// Says that a program has nothing to do, and may be ended by the returned signal, until the entry is dropped.
    pub fn idle(self: &Arc<Self>) -> (Entry, Arc<Notify>) {
        let evict = Arc::new(Notify::new());
        let signal = Arc::clone(&evict);
        (self.entry(|entries, id| drop(entries.idle.insert(id, (Instant::now(), signal)))), evict)
    }

    /// Waits until the device has so much free for a program, and keeps it for the program until the entry is dropped, which is when
    /// the program has taken it. Ends idle programs for it, the one that was idle for longest first. `waiting` is called when it has to wait.
    pub async fn admit(self: &Arc<Self>, bytes: u64, mut waiting: impl FnMut(Reading)) -> Entry {
        loop {
            let reading = self.look().await.reading;
            if let Some(entry) = self.reserve(bytes, reading) {
                return entry;
            }
            waiting(reading);
            sleep(LOOK).await;
        }
    }

    /// Keeps memory for a program, or ends an idle one for it.
    fn reserve(self: &Arc<Self>, bytes: u64, reading: Reading) -> Option<Entry> {
        let mut entries = self.entries();
        let reserved: u64 = entries.reserved.values().sum();
        if reading.free.saturating_sub(reserved) >= bytes {
            let id = entries.number();
            entries.reserved.insert(id, bytes);
            return Some(Entry { book: Arc::clone(self), id });
        }
        // One after the other: the next one may not be needed.
        let is_ending = entries.evicted.is_some_and(|evicted| evicted.elapsed() < EVICTION_LIMIT);
        let longest = entries.idle.values().min_by_key(|(since, _)| *since).filter(|_| !is_ending);
        if let Some((_, evict)) = longest {
            evict.notify_one();
            entries.evicted = Some(Instant::now());
        }
        None
    }

    /// Waits until a claim is met; `missing` is called with the missing bytes at each check.
    pub async fn reclaim(self: &Arc<Self>, claim: Claim, mut missing: impl FnMut(u64)) {
        loop {
            let left = claim.missing(self.look().await);
            if left == 0 {
                return;
            }
            missing(left);
            sleep(LOOK).await;
        }
    }

    fn entry(self: &Arc<Self>, add: impl FnOnce(&mut Entries, u64)) -> Entry {
        let mut entries = self.entries();
        let id = entries.number();
        add(&mut entries, id);
        Entry { book: Arc::clone(self), id }
    }

    /// No panic leaves it half changed.
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

impl Entry {
    /// Notes what the program holds.
    pub fn holds(&self, bytes: u64) {
        if let Some((_, held)) = self.book.entries().programs.get_mut(&self.id) {
            *held = bytes;
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut entries = self.book.entries();
        if entries.programs.remove(&self.id).is_some() {
            entries.evicted = None;
        }
        entries.reserved.remove(&self.id);
        entries.idle.remove(&self.id);
    }
}

/// The host's memory as a device, as far as nothing better is known: what processes hold is what is resident. For trying a model by
/// hand.
#[derive(Debug)]
pub struct HostView;

impl DeviceView for HostView {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self) -> Reading {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = text.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
        };
        Reading { free: kib("MemAvailable:") << 10, total: kib("MemTotal:") << 10 }
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        Some(pids.iter().map(|pid| tree::resident_bytes(*pid)).sum())
    }

    fn env(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn look(free: u64, ours: u64) -> Look {
        Look { reading: Reading { free: free * MIB, total: 8000 * MIB }, ours: ours * MIB }
    }

    #[test]
    fn memory_that_others_hold_instead_is_missing() {
        let claim = Claim { alive: look(3000, 4000), held: 2000 * MIB };
        assert_eq!(claim.missing(look(5000, 2000)), 0);
        // It is dead, and its memory is not free.
        assert_eq!(claim.missing(look(3000, 2000)), 2000 * MIB);
        // Another program of ours took it meanwhile: that is back, and well used.
        assert_eq!(claim.missing(look(3000, 4000)), 0);
        // What others took beyond what it held is not its memory.
        assert_eq!(claim.missing(look(0, 2000)), 2000 * MIB);
        assert_eq!(claim.missing(look(4950, 2000)), 0);
    }
}
