//! Tests of what the account says of a device that does not answer.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::timeout;

use super::*;

const TOTAL: u64 = 1000;

/// A device that sometimes does not say what processes hold.
#[derive(Debug, Default)]
pub(super) struct Unsteady {
    tells: AtomicBool,
}

impl DeviceView for Unsteady {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self, _: &[i32]) -> Option<Reading> {
        Some(Reading { free: 400, total: TOTAL, own: 0 })
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
fn a_device_that_has_told_processes_apart_does_so_although_a_snapshot_failed() {
    let device = Arc::new(Unsteady::default());
    let account = DeviceAccount::new(Arc::<Unsteady>::clone(&device));
    let entry = account.enter(0);
    entry.holds(500, false);
    for (tells, tells_apart, ours) in [(false, false, 500), (true, true, 600), (false, true, 500)] {
        device.tells.store(tells, Ordering::Relaxed);
        let snapshot = account.look_now().unwrap();
        assert_eq!((snapshot.tells_apart, snapshot.ours), (tells_apart, ours));
    }
    // Snapshots have failed for long. Otherwise no program would be asked to end, where what was noted is not enough.
    let later = Instant::now() + SILENT_MAX;
    assert_eq!([false, true, false].map(|told| account.tells_apart(told, later)), [false, true, true]);
}

/// It took so long that it seemed not to end. Otherwise it would never be asked to make room.
#[test]
fn a_program_that_is_loaded_after_all_is_not_stuck() {
    let account = DeviceAccount::new(Arc::new(Unsteady::default()));
    let entry = account.enter(0);
    entry.is_stuck();
    entry.is_loaded();
    assert!(account.entries().programs.values().all(|program| !program.is_stuck));
}

/// A device whose driver hangs for a while.
#[derive(Debug, Default)]
struct Hanging {
    is_over: AtomicBool,
}

impl DeviceView for Hanging {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self, _: &[i32]) -> Option<Reading> {
        self.held_by(&[]);
        Some(Reading { free: 400, total: TOTAL, own: 0 })
    }

    fn held_by(&self, _: &[i32]) -> Option<u64> {
        while !self.is_over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Some(600)
    }

    fn env(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// Otherwise a pass would not end before the driver answers, and no program would be asked to end.
#[tokio::test]
async fn calls_to_a_device_that_hangs_fail_after_a_while() {
    let device = Arc::new(Hanging::default());
    let account = Arc::new(DeviceAccount {
        view: Arc::<Hanging>::clone(&device),
        calls: DeviceCalls::new(Duration::from_millis(100)),
        entries: Mutex::default(),
        snapshots: Snapshots::default(),
        told_at: Mutex::default(),
    });
    let asked = timeout(Duration::from_secs(60), async {
        tokio::join!(account.held_under(1), account.sample_under(1), account.snapshot())
    });
    let told = asked.await;
    device.is_over.store(true, Ordering::Relaxed);
    assert_eq!(told.ok(), Some((None, None, None)));
}

/// Otherwise one of them runs out of memory. Other passes of the worker may wait for this one, so it does not wait for ever.
#[tokio::test]
async fn a_pass_without_room_beside_programs_that_load_waits_for_them() {
    let account = DeviceAccount::new(Arc::new(Unsteady::default()));
    let loading = account.admit(300, || true, |_, _| {}).await.unwrap();
    assert_eq!(account.promised(), 300);
    let pass = RunningPass { keeper: None, resident: 0, budget: 100, exclusive: false };
    drop(account.pass(pass).await);
    // It would take what the program was promised.
    let large = RunningPass { budget: 101, ..pass };
    let waits = timeout(Duration::from_millis(300), account.pass(large)).await;
    assert!(waits.is_err());
    let exclusive = account.pass(RunningPass { exclusive: true, ..pass });
    let mut exclusive = std::pin::pin!(exclusive);
    assert!(futures_util::poll!(&mut exclusive).is_pending());
    account.until_loaded(Duration::ZERO).await;
    drop(loading);
    exclusive.await;
    account.pass(large).await;
}
