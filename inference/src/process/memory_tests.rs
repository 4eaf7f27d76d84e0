//! Tests of what a look at the device says if the device cannot be read.

use super::*;

const TOTAL: u64 = 1000;

/// A device that sometimes does not say what processes hold.
#[derive(Debug, Default)]
struct Unsteady {
    tells: AtomicBool,
}

impl DeviceView for Unsteady {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self) -> Reading {
        Reading { free: 400, total: TOTAL, own: 0 }
    }

    fn held_by(&self, _: &[i32]) -> Option<u64> {
        self.tells.load(Ordering::Relaxed).then_some(600)
    }

    fn env(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Otherwise a program would be asked to end although what it frees is not enough.
#[test]
fn a_device_that_has_told_processes_apart_does_so_although_a_look_failed() {
    let device = Arc::new(Unsteady::default());
    let account = DeviceAccount::new(Arc::<Unsteady>::clone(&device));
    let entry = account.enter(0);
    entry.holds(500, false);
    for (tells, tells_apart, ours) in [(false, false, 500), (true, true, 600), (false, true, 500)] {
        device.tells.store(tells, Ordering::Relaxed);
        let look = account.look_now();
        assert_eq!((look.tells_apart, look.ours), (tells_apart, ours));
    }
}
