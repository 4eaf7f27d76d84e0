//! Tests of who makes room, and for whom.

use super::*;
use crate::process::device_view::Reading;

const MIB: u64 = 1 << 20;
const NOBODY: [u64; 0] = [];
const WAITER: u64 = 100;

fn look(free: u64, ours: u64) -> Look {
    let reading = Reading { free: free * MIB, total: 8000 * MIB, own: 0 };
    Look { reading, ours: ours * MIB, once: 0, tells_apart: true }
}

fn program(held: u64, loaded: Option<Instant>, idle: Option<Instant>) -> Program {
    Program { held: held * MIB, loaded, idle, ..Program::new(1, false) }
}

/// What the programs hold, as the device reports it.
fn ours(programs: &[Program]) -> u64 {
    programs.iter().map(|program| program.held).sum::<u64>() / MIB
}

fn asked(entries: &Entries) -> Vec<u64> {
    let asked = entries.programs.iter().filter(|(_, program)| program.is_asked_to_end);
    asked.map(|(id, _)| *id).collect()
}

/// The programs that are asked to end for `request`, while `free` MiB are free.
fn evicted(programs: Vec<Program>, request: Request, free: u64) -> Vec<u64> {
    let look = look(free, ours(&programs));
    evicted_at(programs, request, look)
}

fn evicted_at(programs: Vec<Program>, request: Request, look: Look) -> Vec<u64> {
    let mut entries = Entries { programs: (0..).zip(programs).collect(), ..Entries::default() };
    let now = Instant::now();
    assert_eq!(entries.reserve(WAITER, request, look, now), None);
    // The freed memory is kept for the waiting program only.
    if entries.evicted.is_some() {
        assert_eq!(entries.promised_to_others(WAITER + 1, now), request.bytes);
    }
    assert_eq!(entries.promised_to_others(WAITER, now), 0);
    asked(&entries)
}

#[test]
fn who_makes_room_was_idle_for_longest_or_else_loaded_for_longest() {
    let at = |s| Some(Instant::now() + Duration::from_secs(s));
    let request = Request { bytes: 500 * MIB, busy_too: false };
    let idle = || vec![program(300, at(0), at(9)), program(300, at(1), at(8)), program(300, at(2), None)];
    assert_eq!(evicted(idle(), request, 0), [1]);
    let busy = || vec![program(600, at(1), None), program(600, at(0), None), program(600, None, None)];
    assert_eq!(evicted(busy(), request, 0), NOBODY);
    let for_long = Request { busy_too: true, ..request };
    assert_eq!(evicted(busy(), for_long, 0), [1]);
    // A program that was asked already, and is still in its pass, is not asked again.
    let mut asked = busy();
    asked[1].is_asked_to_end = true;
    assert_eq!(evicted(asked, for_long, 0), [0, 1]);
    // A program that came back for its jobs gets time for them.
    let mut kept = busy();
    kept[1].kept_until = at(60);
    assert_eq!(evicted(kept, for_long, 0), [0]);
}

#[test]
fn no_process_is_ended_if_that_frees_too_little() {
    let at = Some(Instant::now());
    let programs = || vec![program(300, at, at), program(900, None, None)];
    let request = Request { bytes: 500 * MIB, busy_too: false };
    assert_eq!(evicted(programs(), request, 199), NOBODY);
    assert_eq!(evicted(programs(), request, 200), [0]);
    // After a while the program that is still loading counts, too.
    let for_long = Request { busy_too: true, ..request };
    assert_eq!(evicted(programs(), for_long, 199), [0]);
    assert_eq!(evicted(programs(), Request { bytes: 1400 * MIB, ..for_long }, 199), NOBODY);
    // If it is unknown what they hold, they are asked.
    let unknown = Look { tells_apart: false, ..look(199, 1200) };
    assert_eq!(evicted_at(programs(), request, unknown), [0]);
    // What one-shot programs hold is free when they end by themselves, and not before.
    let once = Look { once: 400 * MIB, ..look(0, 700) };
    let one = || vec![program(300, at, at)];
    assert_eq!(evicted_at(one(), for_long, once), NOBODY);
    assert_eq!(evicted_at(one(), for_long, look(0, 700)), [0]);
}

#[test]
fn one_program_after_the_other_is_asked_to_end_whatever_else_ends() {
    let (now, after) = (Instant::now(), |s| Some(Instant::now() + Duration::from_secs(s)));
    let request = Request { bytes: 900 * MIB, busy_too: true };
    let programs = [program(400, after(0), None), program(400, after(1), None)];
    let mut entries = Entries { programs: (10..).zip(programs).collect(), ..Entries::default() };
    assert_eq!(entries.reserve(WAITER, request, look(200, 800), now), None);
    let once = entries.enter(Program::new(9, true));
    entries.remove(once);
    assert_eq!(entries.reserve(WAITER, request, look(200, 800), now), None);
    assert_eq!(asked(&entries), [10]);
    entries.remove(10);
    assert_eq!(entries.reserve(WAITER, request, look(600, 400), now), None);
    assert_eq!(asked(&entries), [11]);
}

#[test]
fn memory_of_a_process_that_does_not_end_is_no_room() {
    let now = Instant::now();
    let mut entries = busy();
    let large = Request { bytes: 700 * MIB, busy_too: true };
    let small = Request { bytes: 100 * MIB, busy_too: false };
    let look = look(400, 600);
    assert_eq!(entries.reserve(1, large, look, now), None);
    assert_eq!(entries.reserve(2, small, look, now), None, "it is kept");
    entries.programs.values_mut().for_each(|program| program.is_stuck = true);
    let later = now + EVICTION_LIMIT;
    assert_eq!(entries.reserve(1, large, look, later), None);
    assert!(entries.reserve(2, small, look, later).is_some());
}

/// An account with a loaded, busy program that holds 600 MiB.
fn busy() -> Entries {
    let programs = [program(600, Some(Instant::now()), None)];
    Entries { programs: (0..).zip(programs).collect(), ..Entries::default() }
}

#[test]
fn what_becomes_free_is_kept_for_the_program_that_has_waited_for_longest() {
    let now = Instant::now();
    let large = Request { bytes: 900 * MIB, busy_too: true };
    let small = Request { bytes: 200 * MIB, busy_too: false };
    let (first, second, third) = (1, 2, 3);
    let mut entries = busy();
    // 300 MiB are free. The program that waits for 900 has not waited for long yet.
    let not_yet = Request { busy_too: false, ..large };
    assert_eq!(entries.reserve(second, not_yet, look(300, 600), now), None);
    let id = entries.reserve(third, small, look(300, 600), now).expect("nothing is kept");
    entries.remove(id);
    // Now it has.
    assert_eq!(entries.reserve(second, large, look(300, 600), now), None);
    assert_eq!((entries.reserve(third, small, look(300, 600), now), asked(&entries)), (None, vec![0]));
    // Nor is it for one that has waited for long, but came later.
    assert_eq!(entries.reserve(third, Request { busy_too: true, ..small }, look(300, 600), now), None);
    // The program has ended, and a part of its memory is missing. It counts as coming back, and the rest is kept.
    entries.remove(0);
    let returning = entries.returning(now);
    entries.misses(returning, 400 * MIB);
    let later = now + EVICTION_LIMIT - Duration::from_secs(1);
    assert_eq!(entries.reserve(second, large, look(500, 0), later), None);
    let later = later + Duration::from_secs(10);
    assert_eq!(entries.reserve(third, small, look(500, 0), later), None);
    // One that came before takes the turn, although a later one has it.
    assert_eq!(entries.reserve(first, large, look(900, 0), later), Some(returning + 1));
    entries.gives_up(first);
    // What is not kept for anybody is everybody's.
    entries.remove(returning + 1);
    assert_eq!(entries.reserve(third, small, look(900, 0), later), Some(returning + 2));
}

/// Where strangers hold so much that there is no room, or memory does not come back, others use what is free.
#[test]
fn nothing_is_kept_for_long_for_a_program_that_has_no_room() {
    let now = Instant::now();
    let (large, small) =
        (Request { bytes: 900 * MIB, busy_too: true }, Request { bytes: 200 * MIB, busy_too: false });
    let mut entries = busy();
    assert_eq!(entries.reserve(1, large, look(299, 600), now), None);
    assert!(entries.reserve(2, small, look(299, 600), now).is_some() && asked(&entries) == NOBODY);
    // There was room, and somebody took it.
    let mut entries = busy();
    assert_eq!(entries.reserve(1, large, look(300, 600), now), None);
    assert_eq!(entries.reserve(1, large, look(250, 600), now), None);
    assert_eq!(entries.reserve(2, small, look(250, 600), now + EVICTION_LIMIT / 2), None);
    assert!(entries.reserve(2, small, look(250, 600), now + EVICTION_LIMIT).is_some());
    // An ended program's memory counts for so long, and no longer.
    let mut entries = Entries::default();
    let returning = entries.returning(now);
    entries.misses(returning, 700 * MIB);
    let just_before = now + EVICTION_LIMIT - Duration::from_secs(1);
    assert!(entries.can_make_room(large.bytes, look(200, 0), just_before));
    assert!(!entries.can_make_room(large.bytes, look(200, 0), now + EVICTION_LIMIT));
    // A waiting program that is gone keeps nothing.
    let mut entries = busy();
    assert_eq!(entries.reserve(1, large, look(300, 600), now), None);
    assert_eq!(entries.reserve(2, small, look(300, 600), now), None);
    entries.gives_up(1);
    assert!(entries.reserve(2, small, look(300, 600), now).is_some());
}
