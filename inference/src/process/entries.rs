//! Decides which program gets device memory, and which one is asked to end for it. Pure: the time and the reading of the device come in.
//!
//! # How long a program waits
//!
//! Programs wait for memory in the order in which they came. One that has waited for ten seconds, and has no other process of its model,
//! may have busy programs end for it. The first of those for which room can be made has the *turn*: all that becomes free is kept for it.
//!
//! *Room can be made* if the bytes that are free, those that warm programs hold (loading and ending ones too), and those that ended
//! programs have not given back for up to [`EVICTION_LIMIT`], are enough together. Memory of other processes on the device, of the worker's
//! own passes and of one-shot programs does not count, because nobody here can end these. While they hold the same, a program that loads,
//! runs or ends does not change whether room can be made.
//!
//! While a program has the turn, another program is admitted only if its bytes are free in addition to those that are kept. So the programs
//! on the device become fewer: each that is loading is loaded (or has failed) after its load time at most, may stay for ten seconds
//! if its jobs have to come back to it, and is asked to end. One after the other is asked, the next when one has ended, or after
//! [`EVICTION_LIMIT`]. None is asked while what ended programs have not given back is enough, because that comes back within `return`.
//! Each ends after its pass. So with `n` programs on the device a turn lasts at most
//!
//! `load + 10 s + n * min(pass + end, EVICTION_LIMIT) + pass + end + return`,
//!
//! each of these the longest of any program. A program that is admitted and waits again goes to the end of the order. So a program waits
//! for at most one turn of each place that came before it, and its own, after the ten seconds. `memory_properties.rs` holds random
//! histories to this bound.
//!
//! Where strangers take so much that there is no room any more, the turn ends after [`EVICTION_LIMIT`], so that others can use what is
//! left. Memory of a process that was killed and has not ended counts as taken. On a device that does not report what processes hold, all
//! of this goes by estimates: if they are too low, there is no turn, and programs are asked to end in the hope that it is enough.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::{Duration, Instant};

use super::claim::{Claim, Removed, Snapshot};

/// How long to wait for a program that was asked to end before another one is asked. Memory that is kept for a program, and missing memory
/// that counts as coming back, expire after this time, too. Most passes are shorter, and drivers free memory faster.
const EVICTION_LIMIT: Duration = Duration::from_secs(30);

/// Where programs end all the time, each snapshot may be from before the last end. After this long such a snapshot counts, too.
const STALE_MAX: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Entries {
    next: u64,
    pub(super) programs: BTreeMap<u64, Program>,
    /// Memory for programs that are loading.
    pub(super) reserved: BTreeMap<u64, u64>,
    /// Passes of programs that run.
    pub(super) passes: BTreeMap<u64, RunningPass>,
    /// What ended programs held, until it is back.
    returning: BTreeMap<u64, Returning>,
    pub(super) removed: Removed,
    /// Since when no snapshot has shown all that had ended by then, and when the last one was used.
    stale: Option<(Instant, Instant)>,
    /// When a program was last asked to end; `None` once one that was asked has ended.
    evicted: Option<Instant>,
    /// The waiting program for which free memory is kept.
    promise: Option<Promise>,
}

/// Memory that is kept for a waiting program. Otherwise the program that ended for it would be the first to take the memory again.
#[derive(Clone, Copy, Debug)]
struct Promise {
    /// Smaller numbers came earlier.
    waiter: u64,
    bytes: u64,
    until: Instant,
    /// It has waited for long, so nobody who came later gets the promise instead.
    is_turn: bool,
}

/// Memory that has to come back.
#[derive(Clone, Copy, Debug)]
struct Returning {
    claim: Claim,
    /// When the program ended.
    since: Instant,
}

/// A pass that a program runs.
#[derive(Clone, Copy, Debug)]
pub struct RunningPass {
    /// That of its program; `None` for a pass of one-shot programs.
    pub keeper: Option<i32>,
    /// What its program held before it; 0 for a pass of one-shot programs.
    pub resident: u64,
    /// What the pass may take besides; 0 if that is not known.
    pub budget: u64,
    /// It has the device for itself.
    pub exclusive: bool,
}

/// A program that was started.
#[derive(Debug)]
pub(super) struct Program {
    /// The ancestor of all its processes.
    pub(super) keeper: i32,
    /// It runs for one item, and cannot be asked to end.
    pub(super) is_once: bool,
    /// What it was last seen to hold.
    pub(super) held: u64,
    /// While it loads: what it has taken of the memory that was reserved for it, as far as is known.
    pub(super) taken: u64,
    /// `held` is what the device lost while the program was loaded: the device does not report all that it holds.
    pub(super) is_estimated: bool,
    /// When a warm process was loaded. Only loaded ones may be asked to end.
    pub(super) loaded: Option<Instant>,
    /// Since when it has nothing to do.
    pub(super) idle: Option<Instant>,
    pub(super) is_asked_to_end: bool,
    /// It was killed long ago and has not ended. Nobody knows whether it will.
    pub(super) is_stuck: bool,
    /// Its jobs were sent away while it was not loaded. It is not asked to end before this time, so that they can come back.
    pub(super) kept_until: Option<Instant>,
    /// Notified when the program is asked to end.
    pub(super) evict: Arc<Notify>,
}

impl Program {
    pub(super) fn new(keeper: i32, is_once: bool) -> Self {
        Self {
            keeper,
            is_once,
            held: 0,
            taken: 0,
            is_estimated: false,
            loaded: None,
            idle: None,
            is_asked_to_end: false,
            is_stuck: false,
            kept_until: None,
            evict: Arc::default(),
        }
    }

    fn may_end(&self, request: Request, now: Instant) -> bool {
        self.loaded.is_some()
            && !self.is_stuck
            && self.kept_until.is_none_or(|until| until <= now)
            && (self.idle.is_some() || request.busy_too)
    }
}

/// What a waiting program asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) bytes: u64,
    /// It has waited for long: busy programs may be asked to end for it too.
    pub(super) busy_too: bool,
}

impl Entries {
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The keepers of some programs.
    pub(super) fn keepers(&self, is_counted: impl Fn(&Program) -> bool) -> Vec<i32> {
        self.programs.values().filter(|program| is_counted(program)).map(|program| program.keeper).collect()
    }

    /// What some programs were last seen to hold.
    pub(super) fn noted(&self, is_counted: impl Fn(&Program) -> bool) -> u64 {
        self.programs.values().filter(|program| is_counted(program)).map(|program| program.held).sum()
    }

    /// Whether a program runs a pass.
    pub(super) fn runs_pass(&self, program: &Program) -> bool {
        let is_its = |pass: &RunningPass| match pass.keeper {
            Some(keeper) => keeper == program.keeper,
            None => program.is_once,
        };
        self.passes.values().any(is_its)
    }

    /// What programs that run passes may hold.
    pub(super) fn most(&self) -> u64 {
        let most = |pass: &RunningPass| pass.resident.saturating_add(pass.budget);
        self.passes.values().map(most).fold(0, u64::saturating_add)
    }

    /// Memory that programs which are loading have been promised, and have not taken yet.
    pub(super) fn not_taken(&self) -> u64 {
        let loads = |program: &&Program| program.loaded.is_none() && !program.is_once && !program.is_stuck;
        let taken: u64 = self.programs.values().filter(loads).map(|program| program.taken).sum();
        self.reserved.values().sum::<u64>().saturating_sub(taken)
    }

    /// A number that grows with each entry, if one pass runs, and no program loads or gives memory back.
    pub(super) fn changes_beside_one_pass(&self) -> Option<u64> {
        let is_still = self.passes.len() == 1
            && self.reserved.is_empty()
            && self.returning.is_empty()
            && self.programs.values().all(|program| program.loaded.is_some());
        is_still.then_some(self.next)
    }

    pub(super) fn pass(&mut self, pass: RunningPass) -> u64 {
        let id = self.number();
        self.passes.insert(id, pass);
        id
    }

    pub(super) fn enter(&mut self, program: Program) -> u64 {
        let id = self.number();
        self.programs.insert(id, program);
        id
    }

    /// The program has ended. What it held has to come back.
    pub(super) fn ended(&mut self, id: u64, claim: Claim, now: Instant) {
        self.remove(id);
        self.returning.insert(id, Returning { claim, since: now });
    }

    /// Enters memory of an ended program that has no entry.
    pub(super) fn returning(&mut self, claim: Claim, now: Instant) -> u64 {
        let id = self.number();
        self.returning.insert(id, Returning { claim, since: now });
        id
    }

    /// Removes an entry of any kind.
    pub(super) fn remove(&mut self, id: u64) {
        self.passes.remove(&id);
        let program = self.programs.remove(&id);
        if program.as_ref().is_some_and(|program| program.is_asked_to_end) {
            self.evicted = None;
        }
        let held = program.map(|program| program.held);
        let returning = self.returning.remove(&id).map(|returning| returning.claim.held);
        // Programs that take no memory may end many times a second.
        let counts = |bytes: Option<u64>| u64::from(bytes.is_some_and(|bytes| bytes > 0));
        self.removed.programs += counts(held.or(returning));
        self.removed.reservations += counts(self.reserved.remove(&id));
    }

    /// A waiting program has what it asked for, or waits no more.
    pub(super) fn gives_up(&mut self, waiter: u64) {
        self.promise = self.promise.filter(|promise| promise.waiter != waiter);
    }

    /// Reserves memory for a waiting program, if there is enough that is not kept for another one; else asks a program to end for it,
    /// unless enough is coming back. `snapshot`: `None` if it failed. Then only a program that needs nothing, as far as is known, is
    /// admitted. Does nothing if the snapshot does not show what has changed since.
    pub(super) fn reserve(
        &mut self,
        waiter: u64,
        request: Request,
        snapshot: Option<Snapshot>,
        now: Instant,
    ) -> Option<u64> {
        let Some(snapshot) = snapshot else { return (request.bytes == 0).then(|| self.reserved(0)) };
        if snapshot.removed.reservations != self.removed.reservations {
            return None;
        }
        // Programs that end show as free too late, which is safe here. But another program would be asked to end in vain.
        let shows_the_ended = snapshot.removed == self.removed || self.is_stale_for_long(now);
        if snapshot.removed == self.removed {
            self.stale = None;
        }
        if shows_the_ended {
            self.take_turn(waiter, request, snapshot, now);
        }
        let reserved: u64 = self.reserved.values().sum();
        let promised = self.promised_to_others(waiter, now);
        // Passes were admitted to what they owe. But passes may follow one another without end.
        let owed = match self.passes.values().any(|pass| pass.exclusive) {
            _ if request.busy_too => 0,
            true => u64::MAX,
            false => snapshot.owed,
        };
        let unpromised = snapshot.reading.free.saturating_sub(reserved).saturating_sub(promised);
        let free = unpromised.saturating_sub(owed);
        if free >= request.bytes {
            return Some(self.reserved(request.bytes));
        }
        // One program at a time, because the next one may not be needed; and for one waiting program at a time.
        let is_due =
            self.evicted.is_none_or(|evicted| now.saturating_duration_since(evicted) >= EVICTION_LIMIT);
        let is_coming = free.saturating_add(self.coming(snapshot, now)) >= request.bytes;
        // Passes end, and most soon.
        let only_passes = unpromised >= request.bytes;
        if shows_the_ended && promised == 0 && is_due && !is_coming && !only_passes {
            self.evict(waiter, request, free, snapshot, now);
        }
        None
    }

    fn is_stale_for_long(&mut self, now: Instant) -> bool {
        // Where no program has waited for a while, nothing is known of the time in between.
        let asks_on = |(_, used): &(Instant, Instant)| now.saturating_duration_since(*used) < STALE_MAX;
        let since = self.stale.filter(asks_on).map_or(now, |(since, _)| since);
        self.stale = Some((since, now));
        now.saturating_duration_since(since) >= STALE_MAX
    }

    fn reserved(&mut self, bytes: u64) -> u64 {
        let id = self.number();
        self.reserved.insert(id, bytes);
        id
    }

    /// Bytes that are kept for another waiting program: free, or about to be freed.
    fn promised_to_others(&self, waiter: u64, now: Instant) -> u64 {
        let of_others = |promise: &Promise| promise.waiter != waiter && promise.until > now;
        self.promise.filter(of_others).map_or(0, |promise| promise.bytes)
    }

    /// Gives a program that has waited for long the turn, unless one that came before it has the turn.
    fn take_turn(&mut self, waiter: u64, request: Request, snapshot: Snapshot, now: Instant) {
        if !request.busy_too || !self.can_make_room(request.bytes, snapshot, now) {
            return;
        }
        let comes_first =
            |promise: &Promise| promise.is_turn && promise.waiter < waiter && promise.until > now;
        if !self.promise.as_ref().is_some_and(comes_first) {
            let (bytes, until) = (request.bytes, now + EVICTION_LIMIT);
            self.promise = Some(Promise { waiter, bytes, until, is_turn: true });
        }
    }

    /// Whether so much is free when all warm programs have ended.
    fn can_make_room(&self, bytes: u64, snapshot: Snapshot, now: Instant) -> bool {
        let held = snapshot.ours.saturating_sub(snapshot.staying);
        snapshot.reading.free.saturating_add(held).saturating_add(self.coming(snapshot, now)) >= bytes
    }

    /// What ended programs have not given back yet, and will soon.
    fn coming(&self, snapshot: Snapshot, now: Instant) -> u64 {
        let is_soon =
            |returning: &&Returning| now.saturating_duration_since(returning.since) < EVICTION_LIMIT;
        let claims = || self.returning.values().filter(is_soon).map(|returning| returning.claim);
        let missing = claims().map(|claim| claim.missing(snapshot)).fold(0, u64::saturating_add);
        // Memory that is missing for one claim may be that of another. Together they miss what others seem to hold more than at first.
        let grown = claims().map(|claim| snapshot.taken_since(&claim.alive)).max();
        missing.min(grown.unwrap_or(0))
    }

    /// Asks one program to end, if there is enough room then or after others have ended too.
    fn evict(&mut self, waiter: u64, request: Request, free: u64, snapshot: Snapshot, now: Instant) {
        let is_enough = if request.busy_too {
            self.can_make_room(request.bytes, snapshot, now)
        } else {
            let idle = self.noted(|program| program.may_end(request, now));
            free.saturating_add(idle).saturating_add(self.coming(snapshot, now)) >= request.bytes
        };
        // If the device does not report what they hold, nobody knows.
        if snapshot.tells_apart && !is_enough {
            return;
        }
        let is_next = |program: &&mut Program| program.may_end(request, now) && !program.is_asked_to_end;
        let first = |program: &&mut Program| (program.idle.is_none(), program.idle.or(program.loaded));
        if let Some(program) = self.programs.values_mut().filter(is_next).min_by_key(first) {
            program.is_asked_to_end = true;
            program.evict.notify_one();
            self.evicted = Some(now);
            let (bytes, until) = (request.bytes, now + EVICTION_LIMIT);
            self.promise = Some(Promise { waiter, bytes, until, is_turn: request.busy_too });
        }
    }
}

#[cfg(test)]
#[path = "entries_tests.rs"]
mod tests;
