//! The device memory of one-shot programs: how many run at once, and what must be back before the next one starts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use vramq_inference::process::{DeviceView, Need, PassEnd, Reading};

use crate::device::{FileDevice, Stranger};
use crate::env::{DEADLINE, Env, ended, parent, processes_of, run, state, until};
use crate::once::script;

/// Takes as much of the device's memory as the item says, and then does what the item says.
const TAKES: &str = "import os, sys, time\nfrom device import Device\nwords = open(sys.argv[1]).read().split()\n\
                     device = Device(os.environ['DEVICE'])\ndevice.take(int(words[0]) << 20)\ntime.sleep(0.3)\n\
                     if words[1:]: device.bequeath(int(words[0]) << 20, int(words[1]))\nprint(1)";

fn env_with(mib: u64) -> (tempfile::TempDir, Env) {
    let folder = tempfile::tempdir().unwrap();
    let mut env = Env::on(Arc::new(FileDevice::new(folder.path(), mib, true)));
    env.budget = mib << 20;
    (folder, env)
}

#[tokio::test]
async fn as_many_run_at_once_as_the_budget_admits() {
    let (_folder, env) = env_with(1000);
    for (vram, instances) in [
        ("", 1),
        ("vram = { mib_per_unit = 200 }", 5),
        ("vram = { base_mib = 100, mib_per_unit = 150 }", 4),
        ("vram = { base_mib = 300 }", 3),
        // The need of a pixel says nothing about an image.
        ("vram = { per = \"pixels\", mib_per_unit = 0.006 }", 1),
        ("vram = { base_mib = 300, per = \"pixels\", mib_per_unit = 0.006 }", 3),
        ("vram = { mib_per_unit = 0 }", std::thread::available_parallelism().unwrap().get().min(64)),
    ] {
        let pool = script(&env, TAKES, vram).await;
        assert_eq!(pool.instances(), instances, "{vram}");
        env.close(pool).await;
    }
    // What all of it takes, the program itself included, is admitted.
    let pool = script(&env, TAKES, "vram = { base_mib = 100, mib_per_unit = 150 }").await;
    assert_eq!(pool.need_of(1.0), Need::Bytes(250 << 20));
    env.close(pool).await;
    let pool = script(&env, TAKES, "").await;
    for _ in 0..3 {
        assert_eq!(ended(&pool, &["240"]).await.0.len(), 1);
    }
    let Need::Bytes(need) = pool.need_of(1.0) else { panic!("not learned") };
    assert!((240 << 20..=252 << 20).contains(&need), "{need}");
    assert_eq!(pool.instances(), 3);
    env.close(pool).await;
}

/// Also where nothing is learned of the programs.
#[tokio::test]
async fn a_slot_is_withheld_while_another_program_holds_the_memory_of_one() {
    for more in ["", "vram = { mib_per_unit = 400, learn = false }"] {
        let (_folder, env) = env_with(1000);
        let pool = script(&env, TAKES, &format!("instances = 1\n{more}")).await;
        let stranger = Stranger::start();
        let (outputs, end) = ended(&pool, &[&format!("400 {}", stranger.pid())]).await;
        assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 1, "{end:?}");
        until("the slot is withheld", || state(&pool, 0) == "withheld").await;
        assert_eq!(pool.status().withheld_bytes(), 400 << 20);
        // A pass waits. The device would have room for another program.
        let waiting = run(&pool, &["1"]);
        tokio::time::sleep(std::time::Duration::from_secs(2)).await;
        assert_eq!(state(&pool, 0), "withheld");
        drop(stranger);
        assert!(matches!(waiting.finish().await.1, PassEnd::Done { .. }));
        assert_eq!(pool.status().withheld_bytes(), 0);
        env.close(pool).await;
    }
}

/// The stranger holds the memory of the first item's program; the second one is not started beside it.
#[tokio::test]
async fn a_pass_ends_where_the_memory_of_a_program_is_not_back() {
    let (_folder, env) = env_with(1000);
    let pool = script(&env, TAKES, "instances = 1").await;
    let stranger = Stranger::start();
    let (outputs, end) = ended(&pool, &[&format!("400 {}", stranger.pid()), "1"]).await;
    assert!(matches!(end, PassEnd::NotRun { .. }) && outputs.len() == 1, "{end:?}");
    until("other workers get its jobs", || pool.status().unavailable.is_some()).await;
    assert!(pool.status().unavailable.unwrap().reason.contains("400 MiB of device memory"));
    drop(stranger);
    until("it is served again", || pool.status().unavailable.is_none()).await;
    assert_eq!(ended(&pool, &["1"]).await.0.len(), 1);
    env.close(pool).await;
}

/// The device does not report processes, so nobody can tell whose the memory is that is missing after the first item.
#[tokio::test]
async fn the_next_item_needs_what_is_declared_where_the_device_does_not_report_processes() {
    let folder = tempfile::tempdir().unwrap();
    let mut env = Env::on(Arc::new(FileDevice::new(folder.path(), 1000, false)));
    env.budget = 1000 << 20;
    let pool = script(&env, TAKES, "instances = 1\nvram = { mib_per_unit = 700 }").await;
    let stranger = Stranger::start();
    let (outputs, end) = ended(&pool, &[&format!("400 {}", stranger.pid()), "1"]).await;
    assert!(matches!(end, PassEnd::NotRun { .. }) && outputs.len() == 1, "{end:?}");
    // The worker gives a pass to the pool when it has room for it. The next item has as much room as the first.
    let (outputs, end) = ended(&pool, &["1", "1"]).await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 2, "{end:?}");
    env.close(pool).await;
}

/// A device that may fail to tell what processes hold.
#[derive(Debug)]
struct Forgetful {
    device: FileDevice,
    is_silent: AtomicBool,
}

impl DeviceView for Forgetful {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn memory(&self, programs: &[i32]) -> Option<Reading> {
        self.device.memory(programs)
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        if self.is_silent.load(Ordering::SeqCst) { None } else { self.device.held_by(pids) }
    }

    fn env(&self) -> Vec<(String, String)> {
        self.device.env()
    }
}

/// No request to end frees the memory of a one-shot program. A snapshot that fails must not take it for that of warm ones, nor may one from
/// before its end seem to be a new one.
#[tokio::test]
async fn the_memory_of_a_program_is_noted_while_it_runs_and_when_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let device = FileDevice::new(folder.path(), 1000, true);
    let view = Arc::new(Forgetful { device, is_silent: AtomicBool::new(false) });
    let mut env = Env::on(Arc::<Forgetful>::clone(&view));
    env.budget = 1000 << 20;
    let gate = folder.path().join("gate");
    std::fs::write(&gate, "").unwrap();
    let waits = format!("{TAKES}\nwhile os.path.exists({gate:?}): time.sleep(0.01)");
    let pool = script(&env, &waits, "instances = 1").await;
    let removed = env.account.snapshot().await.unwrap().removed.programs;
    let pass = run(&pool, &["300"]);
    for is_silent in [false, true] {
        let shown = async {
            loop {
                view.is_silent.store(is_silent, Ordering::SeqCst);
                let staying = env.account.snapshot().await.unwrap().staying;
                view.is_silent.store(false, Ordering::SeqCst);
                if staying == 300 << 20 {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(DEADLINE, shown).await.unwrap_or_else(|_| panic!("silent: {is_silent}"));
    }
    std::fs::remove_file(&gate).unwrap();
    assert!(matches!(pass.finish().await.1, PassEnd::Done { .. }));
    until("its slot is free", || state(&pool, 0) == "idle").await;
    // The end of the program, and that of the wait for its memory.
    assert_eq!(env.account.snapshot().await.unwrap().removed.programs, removed + 2);
    env.close(pool).await;
}

/// The worker restarts for it, and names what is missing.
#[tokio::test]
async fn memory_of_a_program_that_does_not_end_is_overdue() {
    const STAYS: &str = "import os, signal, sys, time\nfrom device import Device\nsignal.signal(15, signal.SIG_IGN)\n\
                         Device(os.environ['DEVICE']).take(400 << 20)\ntime.sleep(1000)";
    let (_folder, env) = env_with(1000);
    let pool = script(&env, STAYS, "item_s = 600\nkill_s = 0.5\nwithheld_s = 1").await;
    let pass = run(&pool, &["x"]);
    let free = async || env.account.snapshot().await.unwrap().reading.free >> 20;
    while free().await > 600 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // The keeper kills nothing now, as if a driver hung.
    let keeper = Pid::from_raw(parent(processes_of(env.scratch.path())[0])).unwrap();
    kill_process(keeper, Signal::STOP).unwrap();
    pass.cancel();
    assert!(matches!(pass.finish().await.1, PassEnd::Cancelled { killed: true }));
    until("the slot is overdue", || pool.overdue().is_some()).await;
    let overdue = pool.overdue().unwrap();
    assert_eq!((overdue.bytes, overdue.has_ended), (400 << 20, false));
    kill_process(keeper, Signal::CONT).unwrap();
    until("it serves again", || pool.overdue().is_none() && pool.status().unavailable.is_none()).await;
    env.close(pool).await;
}

/// The pages of a mapped file, such as a model's weights, are resident and count as available at once.
#[tokio::test]
async fn a_mapped_file_is_no_memory_that_is_missing_later() {
    let env = Env::new();
    let code = "import mmap, os, time\nwith open(os.path.join(os.environ['HOME'], 'weights'), 'w+b') as file:\n  \
                file.write(bytes(200 << 20))\n  file.flush()\n  mapped = mmap.mmap(file.fileno(), 0)\n  \
                print(sum(mapped[at] for at in range(0, len(mapped), 4096)))\n  time.sleep(1.7)";
    let pool = script(&env, code, "instances = 1").await;
    for _ in 0..2 {
        let (_, end) = ended(&pool, &["a"]).await;
        assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    }
    env.close(pool).await;
}
