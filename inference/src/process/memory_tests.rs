//! Tests of the memory account of processes: which memory is missing, and which process makes room.

use super::*;

const MIB: u64 = 1 << 20;
const NOBODY: [u64; 0] = [];
const WAITER: u64 = 100;

fn look(free: u64, ours: u64) -> Look {
    let reading = Reading { free: free * MIB, total: 8000 * MIB, own: 0 };
    Look { reading, ours: ours * MIB, tells_apart: true }
}

fn program(held: u64, loaded: Option<Instant>, idle: Option<Instant>) -> Program {
    let (held, evict) = (held * MIB, Arc::default());
    Program { keeper: 1, held, loaded, idle, is_asked_to_end: false, kept_until: None, evict }
}

/// The programs that are asked to end for `request`, while `free` MiB are free.
fn evicted(programs: Vec<Program>, request: Request, free: u64) -> Vec<u64> {
    let mut entries = Entries { programs: (0..).zip(programs).collect(), ..Entries::default() };
    let now = Instant::now();
    entries.evict(WAITER, request, free * MIB, now);
    // The freed memory is promised to the waiting program only.
    let is_promised = entries.evicted.is_some();
    assert_eq!(entries.promised_to_others(WAITER + 1, now), if is_promised { request.bytes } else { 0 });
    assert_eq!(entries.promised_to_others(WAITER, now), 0);
    let asked = entries.programs.iter().filter(|(_, program)| program.is_asked_to_end);
    asked.map(|(id, _)| *id).collect()
}

#[test]
fn who_makes_room_was_idle_for_longest_or_else_loaded_for_longest() {
    let at = |s| Some(Instant::now() + Duration::from_secs(s));
    let request = Request { bytes: 500 * MIB, busy_too: false, is_measured: true };
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
    let request = Request { bytes: 500 * MIB, busy_too: false, is_measured: true };
    assert_eq!(evicted(programs(), request, 199), NOBODY);
    assert_eq!(evicted(programs(), request, 200), [0]);
    // After a while the program that is still loading counts, too.
    let for_long = Request { busy_too: true, ..request };
    assert_eq!(evicted(programs(), for_long, 199), [0]);
    assert_eq!(evicted(programs(), Request { bytes: 1400 * MIB, ..for_long }, 199), NOBODY);
    // If it is unknown what they hold, they are asked.
    assert_eq!(evicted(programs(), Request { is_measured: false, ..request }, 199), [0]);
}

#[test]
fn memory_that_others_hold_instead_is_missing() {
    let claim = Claim { alive: look(3000, 4000), held: 2000 * MIB, sure: 2000 * MIB };
    assert_eq!(claim.missing(look(5000, 2000)), 0);
    // It is dead, and its memory is not free.
    assert_eq!(claim.missing(look(3000, 2000)), 2000 * MIB);
    // Another program of ours has taken the memory meanwhile, so it has returned.
    assert_eq!(claim.missing(look(3000, 4000)), 0);
    // What others took beyond what it held is not its memory.
    assert_eq!(claim.missing(look(0, 2000)), 2000 * MIB);
    assert_eq!(claim.missing(look(4950, 2000)), 0);
    // What the worker's own passes took meanwhile is not its memory.
    let own = Reading { own: 2000 * MIB, ..look(3000, 2000).reading };
    assert_eq!(claim.missing(Look { reading: own, ..look(3000, 2000) }), 0);
}

/// 2,000 MiB by the difference. Others may have taken 500 of them.
#[test]
fn memory_that_may_be_of_others_is_not_waited_for() {
    let claim = Claim { alive: look(3000, 4000), held: 2000 * MIB, sure: 1500 * MIB };
    for (free, missing, returned) in [
        (3000, 2000, 0),
        (4400, 600, 1400),
        // The rounding of the device counts for nothing.
        (4450, 0, 1450),
        (4500, 0, 1500),
        (5000, 0, 2000),
        // Others freed memory meanwhile.
        (5700, 0, 2700),
    ] {
        let now = look(free, 2000);
        assert_eq!((claim.missing(now), claim.returned(now)), (missing * MIB, returned * MIB), "{free}");
    }
}
