//! Tests of who makes room, and for whom.

use super::*;
use crate::process::device_view::Reading;

const MIB: u64 = 1 << 20;
const NOBODY: [u64; 0] = [];
const WAITER: u64 = 100;

fn snapshot(free: u64, ours: u64) -> Snapshot {
    let reading = Reading { free: free * MIB, total: 8000 * MIB, own: 0 };
    Snapshot { reading, ours: ours * MIB, tells_apart: true, ..Snapshot::default() }
}

/// As [`Entries::reserve`], with a snapshot from this moment.
fn ask(
    entries: &mut Entries,
    waiter: u64,
    request: Request,
    snapshot: Snapshot,
    now: Instant,
) -> Option<u64> {
    entries.reserve(waiter, request, Some(Snapshot { removed: entries.removed, ..snapshot }), now)
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
    let snapshot = snapshot(free, ours(&programs));
    evicted_at(programs, request, snapshot)
}

fn evicted_at(programs: Vec<Program>, request: Request, snapshot: Snapshot) -> Vec<u64> {
    let mut entries = Entries { programs: (0..).zip(programs).collect(), ..Entries::default() };
    let now = Instant::now();
    assert_eq!(ask(&mut entries, WAITER, request, snapshot, now), None);
    // The freed memory is kept for the waiting program only.
    if entries.evicted.is_some() {
        assert_eq!(entries.promised_to_others(WAITER + 1, now), request.bytes);
    }
    assert_eq!(entries.promised_to_others(WAITER, now), 0);
    asked(&entries)
}

#[test]
fn the_program_that_was_idle_or_else_loaded_for_longest_makes_room() {
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
    let unknown = Snapshot { tells_apart: false, ..snapshot(199, 1200) };
    assert_eq!(evicted_at(programs(), request, unknown), [0]);
    // What one-shot programs hold is free when they end by themselves, and not before.
    let once = Snapshot { staying: 400 * MIB, ..snapshot(0, 700) };
    let one = || vec![program(300, at, at)];
    assert_eq!(evicted_at(one(), for_long, once), NOBODY);
    assert_eq!(evicted_at(one(), for_long, snapshot(0, 700)), [0]);
}

#[test]
fn one_program_after_the_other_is_asked_to_end_whatever_else_ends() {
    let (now, after) = (Instant::now(), |s| Some(Instant::now() + Duration::from_secs(s)));
    let request = Request { bytes: 900 * MIB, busy_too: true };
    let programs = [program(400, after(0), None), program(400, after(1), None)];
    let mut entries = entries(programs);
    assert_eq!(ask(&mut entries, WAITER, request, snapshot(200, 800), now), None);
    let once = entries.enter(Program::new(9, true));
    entries.remove(once);
    assert_eq!(ask(&mut entries, WAITER, request, snapshot(200, 800), now), None);
    assert_eq!(asked(&entries), [10]);
    entries.remove(10);
    assert_eq!(ask(&mut entries, WAITER, request, snapshot(600, 400), now), None);
    assert_eq!(asked(&entries), [11]);
}

/// An account with these programs, from number 10 on.
fn entries<const COUNT: usize>(programs: [Program; COUNT]) -> Entries {
    Entries { next: 99, programs: (10..).zip(programs).collect(), ..Entries::default() }
}

/// That of a program, by a snapshot from before it ended.
fn claim(held: u64, alive: Snapshot) -> Claim {
    Claim { alive, held: held * MIB, sure: held * MIB }
}

#[test]
fn no_other_program_is_asked_to_end_while_enough_comes_back() {
    let now = Instant::now();
    let after = |s| Some(now + Duration::from_secs(s));
    for (busy_too, idle) in [(false, after(0)), (true, None)] {
        let request = |mib: u64| Request { bytes: mib * MIB, busy_too };
        // 200 MiB are free, and the first program holds 400.
        for (mib, then) in [(600, NOBODY.to_vec()), (700, vec![11])] {
            let mut entries = entries([program(400, after(0), idle), program(400, after(1), idle)]);
            assert_eq!(ask(&mut entries, WAITER, request(mib), snapshot(200, 800), now), None);
            assert_eq!(asked(&entries), [10]);
            entries.ended(10, claim(400, snapshot(200, 800)), now);
            // All of its memory is missing, then half of it.
            for free in [200, 400] {
                assert_eq!(ask(&mut entries, WAITER, request(mib), snapshot(free, 400), now), None);
                assert_eq!(asked(&entries), then, "{mib} of {free}");
            }
            // It stays away for too long.
            assert_eq!(
                ask(&mut entries, WAITER, request(mib), snapshot(400, 400), now + EVICTION_LIMIT),
                None
            );
            assert_eq!(asked(&entries), [11]);
        }
    }
}

#[test]
fn memory_that_is_missing_once_counts_once() {
    let (now, at) = (Instant::now(), Some(Instant::now()));
    let mut entries = entries([program(400, at, at), program(400, at, at), program(400, at, at)]);
    for id in [10, 11] {
        entries.ended(id, claim(400, snapshot(0, 1200)), now);
    }
    let coming = |free| entries.coming(snapshot(free, 400), now);
    assert_eq!([0, 300, 400, 700, 800].map(coming), [800, 500, 400, 100, 0].map(|mib| mib * MIB));
    // 400 are back, and 400 missing.
    let request = |mib: u64| Request { bytes: mib * MIB, busy_too: false };
    assert_eq!(ask(&mut entries, WAITER, request(1300), snapshot(400, 400), now), None);
    assert_eq!(asked(&entries), NOBODY, "it would not be enough");
    assert_eq!(ask(&mut entries, WAITER, request(1200), snapshot(400, 400), now), None);
    assert_eq!(asked(&entries), [12]);
    // A program that died a moment ago, and its memory is free.
    assert!(busy().can_make_room(600 * MIB, snapshot(600, 0), now));
    assert!(!busy().can_make_room(601 * MIB, snapshot(600, 0), now));
}

#[test]
fn a_snapshot_that_failed_or_is_from_before_a_change_decides_nothing() {
    let (now, at) = (Instant::now(), Some(Instant::now()));
    let request = Request { bytes: 500 * MIB, busy_too: true };
    let mut entries = entries([program(600, at, at), program(600, at, at)]);
    assert_eq!(entries.reserve(WAITER, request, None, now), None);
    assert_eq!((asked(&entries), entries.promise.is_none()), (NOBODY.to_vec(), true));
    let before = snapshot(0, 1200);
    assert_eq!(entries.reserve(WAITER, request, Some(before), now), None);
    assert_eq!(asked(&entries), [10]);
    // It ends, and its memory is back at once.
    entries.remove(10);
    assert_eq!(entries.reserve(WAITER, request, Some(before), now), None);
    assert_eq!(asked(&entries), NOBODY);
    let reserved = ask(&mut entries, WAITER, request, snapshot(600, 600), now).expect("it is free");
    entries.gives_up(WAITER);
    // It has taken its memory. Now nobody else gets it, because an earlier snapshot showed it as free.
    let before = Snapshot { removed: entries.removed, ..snapshot(600, 600) };
    entries.remove(reserved);
    assert_eq!(entries.reserve(WAITER + 1, request, Some(before), now), None);
    // A program that needs nothing, as far as is known, starts even if the device cannot be read.
    let nothing = Request { bytes: 0, ..request };
    assert!(entries.reserve(WAITER, nothing, None, now).is_some());
}

/// One-shot programs end many times a second.
#[test]
fn where_programs_end_all_the_time_others_are_asked_to_end_nevertheless() {
    let now = Instant::now();
    let at = Some(now);
    let request = Request { bytes: 500 * MIB, busy_too: false };
    let mut entries = entries([program(600, at, at)]);
    let mut ask_late = |after: Duration| {
        let before = snapshot(0, 600);
        let before = Snapshot { removed: entries.removed, ..before };
        let once = entries.enter(Program { held: 1, ..Program::new(9, true) });
        entries.remove(once);
        assert_eq!(entries.reserve(WAITER, request, Some(before), now + after), None);
        asked(&entries)
    };
    assert_eq!(ask_late(Duration::ZERO), NOBODY);
    assert_eq!(ask_late(STALE_MAX / 2), NOBODY);
    assert_eq!(ask_late(STALE_MAX), [10]);
}

#[test]
fn memory_of_a_process_that_does_not_end_is_no_room() {
    let now = Instant::now();
    let mut entries = busy();
    let large = Request { bytes: 700 * MIB, busy_too: true };
    let small = Request { bytes: 100 * MIB, busy_too: false };
    let snapshot = snapshot(400, 600);
    assert_eq!(ask(&mut entries, 1, large, snapshot, now), None);
    assert_eq!(ask(&mut entries, 2, small, snapshot, now), None, "it is kept");
    entries.programs.values_mut().for_each(|program| {
        (program.is_stuck, program.is_asked_to_end) = (true, false);
    });
    let snapshot = Snapshot { staying: 600 * MIB, ..snapshot };
    let later = now + EVICTION_LIMIT;
    assert_eq!(ask(&mut entries, 1, large, snapshot, later), None);
    assert!(ask(&mut entries, 2, small, snapshot, later).is_some());
    // Where nobody knows what programs hold, they are asked in the hope that it is enough; not one that was killed in vain.
    let unknown = Snapshot { tells_apart: false, ..snapshot };
    assert_eq!(ask(&mut entries, 3, large, unknown, later + EVICTION_LIMIT), None);
    assert!(entries.programs.values().all(|program| !program.is_asked_to_end));
}

/// An account with a loaded, busy program that holds 600 MiB.
fn busy() -> Entries {
    let programs = [program(600, Some(Instant::now()), None)];
    Entries { programs: (0..).zip(programs).collect(), ..Entries::default() }
}

#[test]
fn freed_memory_is_kept_for_the_program_that_has_waited_for_longest() {
    let now = Instant::now();
    let large = Request { bytes: 900 * MIB, busy_too: true };
    let small = Request { bytes: 200 * MIB, busy_too: false };
    let (first, second, third) = (1, 2, 3);
    let mut entries = busy();
    // 300 MiB are free. The program that waits for 900 has not waited for long yet.
    let not_yet = Request { busy_too: false, ..large };
    assert_eq!(ask(&mut entries, second, not_yet, snapshot(300, 600), now), None);
    let id = ask(&mut entries, third, small, snapshot(300, 600), now).expect("nothing is kept");
    entries.remove(id);
    // Now it has.
    assert_eq!(ask(&mut entries, second, large, snapshot(300, 600), now), None);
    assert_eq!((ask(&mut entries, third, small, snapshot(300, 600), now), asked(&entries)), (None, vec![0]));
    // Nor is it for one that has waited for long, but came later.
    assert_eq!(ask(&mut entries, third, Request { busy_too: true, ..small }, snapshot(300, 600), now), None);
    // The program has ended, and a part of its memory is missing. It counts as coming back, and the rest is kept.
    entries.ended(0, claim(600, snapshot(300, 600)), now);
    let later = now + EVICTION_LIMIT - Duration::from_secs(1);
    assert_eq!(ask(&mut entries, second, large, snapshot(500, 0), later), None);
    let later = later + Duration::from_secs(10);
    assert_eq!(ask(&mut entries, third, small, snapshot(500, 0), later), None);
    // One that came before takes the turn, although a later one has it.
    let taken = ask(&mut entries, first, large, snapshot(900, 0), later).expect("it came first");
    entries.gives_up(first);
    // What is not kept for anybody is everybody's.
    entries.remove(taken);
    assert!(ask(&mut entries, third, small, snapshot(900, 0), later).is_some());
}

/// Where strangers hold so much that there is no room, or memory does not come back, others use what is free.
#[test]
fn nothing_is_kept_for_long_for_a_program_that_has_no_room() {
    let now = Instant::now();
    let (large, small) =
        (Request { bytes: 900 * MIB, busy_too: true }, Request { bytes: 200 * MIB, busy_too: false });
    let mut entries = busy();
    assert_eq!(ask(&mut entries, 1, large, snapshot(299, 600), now), None);
    assert!(ask(&mut entries, 2, small, snapshot(299, 600), now).is_some() && asked(&entries) == NOBODY);
    // There was room, and somebody took it.
    let mut entries = busy();
    assert_eq!(ask(&mut entries, 1, large, snapshot(300, 600), now), None);
    assert_eq!(ask(&mut entries, 1, large, snapshot(250, 600), now), None);
    assert_eq!(ask(&mut entries, 2, small, snapshot(250, 600), now + EVICTION_LIMIT / 2), None);
    assert!(ask(&mut entries, 2, small, snapshot(250, 600), now + EVICTION_LIMIT).is_some());
    // An ended program's memory counts for so long, and no longer.
    let mut entries = Entries::default();
    entries.returning(claim(700, snapshot(200, 700)), now);
    let just_before = now + EVICTION_LIMIT - Duration::from_secs(1);
    assert!(entries.can_make_room(large.bytes, snapshot(200, 0), just_before));
    assert!(!entries.can_make_room(large.bytes, snapshot(200, 0), now + EVICTION_LIMIT));
    // A waiting program that is gone keeps nothing.
    let mut entries = busy();
    assert_eq!(ask(&mut entries, 1, large, snapshot(300, 600), now), None);
    assert_eq!(ask(&mut entries, 2, small, snapshot(300, 600), now), None);
    entries.gives_up(1);
    assert!(ask(&mut entries, 2, small, snapshot(300, 600), now).is_some());
}

#[test]
fn no_program_is_loaded_into_what_passes_were_admitted_to() {
    let now = Instant::now();
    let request = Request { bytes: 500 * MIB, busy_too: false };
    let mut entries = busy();
    let pass = entries.pass(RunningPass {
        keeper: Some(1),
        resident: 600 * MIB,
        budget: 400 * MIB,
        exclusive: false,
    });
    assert_eq!(entries.most(), 1000 * MIB);
    assert!(entries.programs.values().all(|program| entries.runs_pass(program)));
    // It has 600 of its 1,000.
    let owing = Snapshot { owed: 400 * MIB, ..snapshot(800, 600) };
    assert_eq!(ask(&mut entries, WAITER, request, owing, now), None);
    let small = Request { bytes: 400 * MIB, ..request };
    let loading = ask(&mut entries, WAITER, small, owing, now).expect("so much is free besides");
    entries.remove(loading);
    entries.remove(pass);
    assert_eq!(entries.most(), 0);
    // An exclusive pass may take all. No program is asked to end for one that only waits for a pass.
    let pass = entries.pass(RunningPass { keeper: None, resident: 0, budget: 0, exclusive: true });
    assert_eq!(ask(&mut entries, WAITER, small, snapshot(800, 600), now), None);
    assert_eq!(asked(&entries), NOBODY);
    entries.remove(pass);
    assert!(ask(&mut entries, WAITER, small, snapshot(800, 600), now).is_some());
}

/// Passes may follow one another without end: those of a model whose need is never known, or of one that always has work.
#[test]
fn bytes_that_passes_may_take_delay_a_load_only_briefly() {
    let now = Instant::now();
    let exclusive = RunningPass { keeper: Some(1), resident: 0, budget: 0, exclusive: true };
    for pass in [exclusive, RunningPass { budget: 400 * MIB, exclusive: false, ..exclusive }] {
        let mut entries = busy();
        entries.pass(pass);
        entries.programs.values_mut().for_each(|program| program.idle = Some(now));
        let request = Request { bytes: 300 * MIB, busy_too: false };
        let snapshot = Snapshot { owed: 400 * MIB, ..snapshot(400, 600) };
        assert_eq!(ask(&mut entries, WAITER, request, snapshot, now), None);
        let for_long = Request { busy_too: true, ..request };
        assert!(ask(&mut entries, WAITER, for_long, snapshot, now).is_some());
        assert_eq!(asked(&entries), NOBODY, "the memory is free");
    }
}

#[test]
fn a_promise_ends_where_the_program_has_taken_it() {
    let mut entries = entries([program(0, None, None), program(600, Some(Instant::now()), None)]);
    let reserved = entries.reserved(500 * MIB);
    assert_eq!(entries.not_taken(), 500 * MIB);
    for (held, left) in [(200, 300), (700, 0)] {
        entries.programs.get_mut(&10).unwrap().taken = held * MIB;
        assert_eq!(entries.not_taken(), left * MIB);
    }
    entries.remove(reserved);
    assert_eq!(entries.not_taken(), 0);
}
