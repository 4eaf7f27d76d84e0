//! Tests of what must return when a program ends.

use super::*;

const MIB: u64 = 1 << 20;

fn snapshot(free: u64, ours: u64) -> Snapshot {
    let reading = Reading { free: free * MIB, total: 8000 * MIB, own: 0 };
    Snapshot { reading, ours: ours * MIB, tells_apart: true, ..Snapshot::default() }
}

#[test]
fn memory_that_others_hold_instead_is_missing() {
    let claim = Claim { alive: snapshot(3000, 4000), held: 2000 * MIB, sure: 2000 * MIB };
    assert_eq!(claim.missing(snapshot(5000, 2000)), 0);
    // It is dead, and its memory is not free.
    assert_eq!(claim.missing(snapshot(3000, 2000)), 2000 * MIB);
    // Another program of ours has taken the memory meanwhile, so it has returned.
    assert_eq!(claim.missing(snapshot(3000, 4000)), 0);
    // What others took beyond what it held is not its memory.
    assert_eq!(claim.missing(snapshot(0, 2000)), 2000 * MIB);
    assert_eq!(claim.missing(snapshot(4950, 2000)), 0);
    // What the worker's own passes took meanwhile is not its memory.
    let own = Reading { own: 2000 * MIB, ..snapshot(3000, 2000).reading };
    assert_eq!(claim.missing(Snapshot { reading: own, ..snapshot(3000, 2000) }), 0);
}

/// 2,000 MiB by the difference. Others may have taken 500 of them.
#[test]
fn memory_that_may_be_of_others_is_not_waited_for() {
    let claim = Claim { alive: snapshot(3000, 4000), held: 2000 * MIB, sure: 1500 * MIB };
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
        let now = snapshot(free, 2000);
        assert_eq!((claim.missing(now), claim.returned(now)), (missing * MIB, returned * MIB), "{free}");
    }
}
