//! Device memory: admitted before a process starts, measured while it runs, and back before its slot is used again.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use vramq_inference::process::{Costs, Item, Need, PassEnd, SlotState};

use crate::device::{FileDevice, Stranger};
use crate::env::{DEADLINE, Env, done, ended, is_alive, pid, run, state, until};

pub const MIB: u64 = 1 << 20;

pub fn env_with(mib: u64, by_process: bool) -> (tempfile::TempDir, Env) {
    let folder = tempfile::tempdir().unwrap();
    let device = FileDevice::new(folder.path(), mib, by_process);
    (folder, Env::on(Arc::new(device)))
}

#[tokio::test]
async fn a_process_holds_what_the_device_lost() {
    for by_process in [true, false] {
        let (_folder, env) = env_with(1000, by_process);
        let pool = env.probe("env = { BASE_MIB = \"300\" }").await;
        assert_eq!(pool.resident(), Some(300 * MIB));
        assert_eq!(pool.status().held_bytes(), 300 * MIB);
        env.close(pool).await;
    }
}

/// What a process takes while it loads does not come back at the end of a pass.
#[tokio::test]
async fn the_memory_of_a_loading_process_is_reported() {
    let (folder, env) = env_with(1000, true);
    let file = folder.path().join("loading");
    let keys = format!(
        "instances = 2\nenv = {{ BASE_MIB = \"300\", LOAD = \"holds-while-file\", FILE = \"{}\" }}",
        file.display()
    );
    let pool = env.probe(&keys).await;
    assert_eq!((pool.loading_bytes().await, pool.status().resident_bytes()), (0, 300 * MIB));
    std::fs::write(&file, "").unwrap();
    let passes = [run(&pool, &["sleep 100"]), run(&pool, &["sleep 100"])];
    let end = std::time::Instant::now() + DEADLINE;
    while pool.loading_bytes().await != 300 * MIB {
        assert!(std::time::Instant::now() < end, "{:?}", pool.status());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(pool.status().resident_bytes(), 300 * MIB);
    std::fs::remove_file(&file).unwrap();
    until("both run", || (0..2).all(|slot| state(&pool, slot) == "running")).await;
    assert_eq!((pool.loading_bytes().await, pool.status().resident_bytes()), (0, 600 * MIB));
    passes.iter().for_each(|pass| pass.cancel());
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_is_measured_whatever_it_says() {
    let keys = "env = { BASE_MIB = \"300\", WEIGHTS_MIB = \"5000\" }";
    for (by_process, resident) in [(true, 300), (false, 1000)] {
        let (_folder, env) = env_with(1000, by_process);
        let pool = env.probe(keys).await;
        assert_eq!(pool.resident(), Some(resident * MIB));
        env.close(pool).await;
    }
}

#[tokio::test]
async fn a_model_that_does_not_fit_is_not_waited_for_at_start() {
    let (_folder, env) = env_with(1000, true);
    let start = async |keys: &str| env.start(env.config("probe.py", keys)).await.unwrap_err().to_string();
    let error = start("vram = { base_mib = 3000 }").await;
    assert_eq!(
        error,
        "loading takes 3000 MiB of device memory (as declared or measured), and 1000 of 1000 MiB are free"
    );
    let other = env.probe("env = { BASE_MIB = \"600\" }").await;
    let busy = run(&other, &["sleep 100"]);
    let error = start("vram = { base_mib = 600 }\nload_s = 1").await;
    assert!(error.contains("takes 600 MiB") && error.contains("400 of 1000 MiB are free"), "{error}");
    busy.cancel();
    env.close(other).await;
}

#[tokio::test]
async fn a_busy_process_makes_room_after_its_pass_for_a_model_that_has_none() {
    let (_folder, env) = env_with(1000, true);
    let more = "vram = { base_mib = 600 }\nenv = { BASE_MIB = \"600\" }";
    let (busy, idle) = (env.probe(more).await, env.start(env.config("probe.py", more)));
    let idle = {
        // The first process is idle when the second model starts, and makes room for it.
        idle.await.unwrap()
    };
    let began = std::time::Instant::now();
    // Enough passes for minutes, so that a model that is loaded on a slow machine still finds the other one busy.
    let passes: Vec<_> = (0..250).map(|_| run(&busy, &["sleep 0.5"])).collect();
    // The other process has made room for the busy one.
    until("the busy one is loaded", || state(&busy, 0) == "running").await;
    let (_, end) = ended(&idle, &["echo a"]).await;
    let reason = match end {
        // After some seconds the jobs of the waiting model are sent to other workers.
        PassEnd::NotRun { reason } => reason,
        end => panic!("{end:?}"),
    };
    assert!(reason.contains("takes 600 MiB of device memory"), "{reason}");
    until("it is loaded, while the other model has passes", || idle.status().unavailable.is_none()).await;
    assert!(busy.status().waiting > 0, "{:?} {:?} {:?}", began.elapsed(), busy.status(), idle.status());
    assert_eq!(done(&idle, &["echo a"]).await, [json!("a")]);
    drop(passes);
    busy.close().await;
    idle.close().await;
    env.assert_clean();
}

#[tokio::test]
async fn the_need_of_a_pass_is_unknown_until_it_is_learned() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("vram = { per = \"characters\" }\nenv = { BASE_MIB = \"100\" }").await;
    let costs = |text: &str| [Costs::new(&Item::Text(text.to_owned()))];
    assert_eq!(pool.need(&costs("take 200")), Need::Unknown);
    for _ in 0..3 {
        done(&pool, &["take 200"]).await;
    }
    let Need::Bytes(need) = pool.need(&costs("take 200")) else { panic!("not learned") };
    assert!((200 * MIB..220 * MIB).contains(&need), "{need}");
    assert_eq!(pool.need(&costs(&"x".repeat(1000))), Need::Unknown);
    // What was learned can be kept.
    let mut again = Env::new();
    again.learned = pool.learned();
    let kept = again.probe("vram = { per = \"characters\" }").await;
    assert_eq!(kept.need(&costs("take 200")), Need::Bytes(need));
    again.close(kept).await;
    env.close(pool).await;
}

/// What the device has free, in MiB.
async fn free(env: &Env) -> u64 {
    env.account.snapshot().await.unwrap().reading.free / MIB
}

/// Waits until the device has so many MiB free.
async fn free_reaches(env: &Env, mib: u64) {
    let wait = async {
        while free(env).await < mib {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("memory comes back");
}

#[tokio::test]
async fn caches_of_a_process_are_not_resident_and_are_given_back_on_request() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("env = { BASE_MIB = \"100\" }").await;
    for _ in 0..3 {
        done(&pool, &["keep 700"]).await;
    }
    let Need::Bytes(need) = pool.need_of(1.0) else { panic!("not learned") };
    assert!((700 * MIB..740 * MIB).contains(&need), "{need}");
    assert_eq!(free(&env).await, 200);
    // The next pass has the free memory and the kept memory: more than it needs.
    assert_eq!(pool.status().resident_bytes(), 100 * MIB);
    pool.trim();
    free_reaches(&env, 900).await;
    assert_eq!((pool.status().resident_bytes(), pool.need_of(1.0)), (100 * MIB, Need::Bytes(need)));
    env.close(pool).await;
}

#[tokio::test]
async fn memory_that_a_process_keeps_for_good_is_resident_and_its_passes_need_less() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("env = { BASE_MIB = \"100\" }").await;
    // As weights that the first pass loads.
    done(&pool, &["leak 200"]).await;
    for _ in 0..3 {
        done(&pool, &["take 300"]).await;
    }
    pool.trim();
    until("the process has given back what it can", || pool.status().resident_bytes() == 300 * MIB).await;
    let Need::Bytes(need) = pool.need_of(1.0) else { panic!("not learned") };
    assert!((300 * MIB..330 * MIB).contains(&need), "{need}");
    env.close(pool).await;
}

#[tokio::test]
async fn an_idle_process_keeps_nothing_from_other_models() {
    let (_folder, mut env) = env_with(1000, true);
    env.shares_device = true;
    let (one, other) =
        (env.probe("env = { BASE_MIB = \"100\" }").await, env.probe("env = { BASE_MIB = \"100\" }").await);
    done(&one, &["keep 700"]).await;
    free_reaches(&env, 800).await;
    done(&other, &["take 700"]).await;
    one.close().await;
    env.close(other).await;
}

/// More would not be faster.
#[tokio::test]
async fn on_the_cpu_no_more_instances_than_processors() {
    let folder = tempfile::tempdir().unwrap();
    let mut env = Env::on(Arc::new(FileDevice::new(folder.path(), 100_000, true).on_host()));
    env.budget = 100_000 * MIB;
    let processors = std::thread::available_parallelism().unwrap().get().min(64);
    let small = "vram = { mib_per_unit = 1 }\nenv = { BASE_MIB = \"1\" }";
    for (instances, expected) in
        [("", processors), ("instances = \"auto\"\n", processors), ("instances = 64\n", 64)]
    {
        let pool = env.probe(&format!("{instances}{small}")).await;
        assert_eq!(pool.instances(), expected, "{instances}");
        env.close(pool).await;
    }
}

#[tokio::test]
async fn as_many_instances_as_the_budget_admits() {
    let (_folder, mut env) = env_with(1000, true);
    env.budget = 1000 * MIB;
    let pool = env.probe("vram = { mib_per_unit = 50 }\nenv = { BASE_MIB = \"200\" }").await;
    assert_eq!(pool.instances(), 4);
    let around = tempfile::tempdir().unwrap();
    let gate = around.path().join("gate");
    // None ends before four run, however long their processes take to load.
    let held = format!("until {}", gate.display());
    let passes: Vec<_> = (0..8).map(|_| run(&pool, &[&held])).collect();
    until("four run", || {
        pool.status().slots.iter().filter(|slot| matches!(slot.state, SlotState::Running { .. })).count() == 4
    })
    .await;
    std::fs::write(&gate, "").unwrap();
    for pass in passes {
        assert!(matches!(pass.finish().await.1, PassEnd::Done { .. }));
    }
    assert_eq!(pool.status().slots.len(), 4);
    env.close(pool).await;
}

/// A stranger has the memory of a process that died. For as long as it holds that, the slot is withheld, and no pass runs.
async fn a_stranger_withholds_the_slot_for(hold: Duration, by_process: bool) {
    let (_folder, env) = env_with(1000, by_process);
    let pool = env.probe("env = { BASE_MIB = \"400\" }").await;
    let stranger = Stranger::start();
    let (_, end) = ended(&pool, &[&format!("bequeath 400 {}", stranger.pid())]).await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    until("the slot is withheld", || state(&pool, 0) == "withheld").await;
    assert_eq!(pool.status().withheld_bytes(), 400 * MIB);
    let starts = pool.status().slots[0].starts;
    // Work waits: the device would have room for another process, but this slot's memory is not back. After some seconds its pass is
    // sent away, so that its job can go to another worker.
    let waiting = run(&pool, &["echo a"]);
    until("the stranger has held it for long enough", || {
        let slot = pool.status().slots[0].clone();
        let SlotState::Withheld { bytes, since } = slot.state else { panic!("given up: {slot:?}") };
        assert_eq!((bytes, slot.starts, slot.pid), (400 * MIB, starts, None));
        since.elapsed() >= hold
    })
    .await;
    let (outputs, end) = waiting.finish().await;
    assert!(outputs.is_empty() && matches!(end, PassEnd::NotRun { .. }), "{end:?}");
    drop(stranger);
    until("there is a process again", || pool.status().unavailable.is_none()).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    assert_eq!(pool.status().withheld_bytes(), 0);
    env.close(pool).await;
}

/// Longer than the worker has patience with anything else.
#[tokio::test]
async fn a_slot_is_withheld_for_as_long_as_another_program_holds_its_memory() {
    for by_process in [true, false] {
        a_stranger_withholds_the_slot_for(Duration::from_secs(7), by_process).await;
    }
}

#[tokio::test]
#[ignore = "takes 20 s: make nightly"]
async fn a_slot_is_withheld_for_twenty_seconds() {
    a_stranger_withholds_the_slot_for(Duration::from_secs(20), true).await;
}

#[tokio::test]
async fn running_out_on_the_device_is_typed_and_costs_nobody_else() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("instances = 2\nenv = { BASE_MIB = \"100\" }").await;
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["take 100", "take 5000"]).await;
    assert_eq!(outputs.len(), 1);
    let PassEnd::OutOfMemory { report, .. } = end else { panic!("{end:?}") };
    assert_eq!((report.asked, report.total), (Some(5000 * MIB), Some(1000 * MIB)));
    assert_eq!(report.source, "test device");
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

/// After its death its own memory is free too, so what it asked for would seem to have had room.
#[tokio::test]
async fn a_process_that_died_of_a_full_device_tells_what_was_free_while_it_lived() {
    let (_folder, env) = env_with(1500, true);
    let pool = env.probe("env = { BASE_MIB = \"600\" }").await;
    for (text, asked, free) in [
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 0: cudaMalloc failed: out of memory",
            1024,
            900,
        ),
        // The program reports it itself.
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which \
             512.00 MiB is free.",
            2048,
            512,
        ),
    ] {
        let (_, end) = ended(&pool, &[&format!("abort {text}\n")]).await;
        let PassEnd::OutOfMemory { report, .. } = end else { panic!("{end:?}") };
        assert_eq!((report.asked, report.free), (Some(asked * MIB), Some(free * MIB)), "{text}");
    }
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_that_leaks_is_replaced() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("env = { BASE_MIB = \"100\" }").await;
    let mut pids = Vec::new();
    // 2 MiB per pass would fill the device after 450 passes. The pool checks every 50.
    for _ in 0..600 {
        pids.push(done(&pool, &["leak 2"]).await.remove(0));
    }
    pids.dedup();
    assert_eq!(pids.len(), 6);
    env.close(pool).await;
}

/// As soon as it is back, the pass that waits runs.
#[tokio::test]
async fn a_slot_serves_again_as_soon_as_its_memory_is_back() {
    let (_folder, env) = env_with(1000, true);
    let pool = env.probe("env = { BASE_MIB = \"400\" }").await;
    let stranger = Stranger::start();
    ended(&pool, &[&format!("bequeath 400 {}", stranger.pid())]).await;
    until("the slot is withheld", || state(&pool, 0) == "withheld").await;
    let waiting = run(&pool, &["echo a"]);
    drop(stranger);
    assert!(matches!(waiting.finish().await.1, PassEnd::Done { .. }));
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_waits_until_its_memory_is_free() {
    let (folder, mut env) = env_with(1000, true);
    env.budget = 1000 * MIB;
    let pool = env.probe("instances = 2\nvram = { base_mib = 600 }\nenv = { BASE_MIB = \"600\" }").await;
    let first = run(&pool, &["sleep 100"]);
    until("it runs", || state(&pool, 0) == "running").await;
    let second = run(&pool, &["echo a"]);
    let waits = || {
        pool.status()
            .slots
            .get(1)
            .is_some_and(|slot| matches!(slot.state, SlotState::WaitingForMemory { .. }))
    };
    until("the second process waits", waits).await;
    first.cancel();
    // Either the first process runs it, or the second one is started for it.
    assert!(matches!(second.finish().await.1, PassEnd::Done { .. }));
    env.close(pool).await;
    drop(folder);
}

#[tokio::test]
async fn work_of_another_model_ends_the_process_that_was_idle_for_longest() {
    let (_folder, env) = env_with(1000, true);
    let more = "vram = { base_mib = 400 }\nenv = { BASE_MIB = \"400\" }";
    let (first, second) = (env.probe(more).await, env.probe(more).await);
    let (one, two) = (pid(&first).await, pid(&second).await);
    let third = env.probe(more).await;
    assert_eq!(done(&third, &["echo a"]).await, [json!("a")]);
    assert!(!is_alive(one) && is_alive(two));
    // The first process returns when it has work, and another one is ended.
    assert_eq!(done(&first, &["echo a"]).await, [json!("a")]);
    assert!(!is_alive(two));
    for pool in [first, second, third] {
        pool.close().await;
    }
    env.assert_clean();
}
