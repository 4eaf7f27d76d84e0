//! Passes that their callers cancel: while they run, and while they wait for a process.

use std::sync::Arc;

use serde_json::json;
use vramq_inference::process::{PassEnd, PassEvent, PassRequest};

use crate::device::FileDevice;
use crate::env::{Env, done, pid, run, state, texts, until};

#[tokio::test]
async fn a_cancelled_pass_reports_how_it_ended() {
    let env = Env::new();
    // A long `kill_s`, so that even on a slow machine the process reads the cancel before it would be killed.
    let pool = env.probe("kill_s = 600").await;
    let before = pid(&pool).await;
    let pass = run(&pool, &["sleep 100"]);
    until("it runs", || state(&pool, 0) == "running").await;
    pass.cancel();
    assert!(matches!(pass.finish().await.1, PassEnd::Cancelled { killed: false }));
    assert_eq!(pid(&pool).await, before);
    // Nobody waits any more.
    drop(run(&pool, &["sleep 100"]));
    assert_eq!(pid(&pool).await, before);
    let (first, waiting) = (run(&pool, &["sleep 100"]), run(&pool, &["pid"]));
    waiting.cancel();
    first.cancel();
    assert!(
        matches!(waiting.finish().await, (outputs, PassEnd::Cancelled { killed: false }) if outputs.is_empty())
    );
    drop(first.finish().await);
    env.close(pool).await;

    let pool = env.probe("kill_s = 0.5").await;
    let before = pid(&pool).await;
    // Twice in a row: ending a process for a cancelled pass is not a failure, which would make the next one wait.
    for _ in 0..2 {
        let mut pass = run(&pool, &["echo a", "deaf"]);
        assert!(matches!(pass.next().await, Some(PassEvent::Output { item: 0, .. })));
        pass.cancel();
        assert!(matches!(pass.finish().await.1, PassEnd::Cancelled { killed: true }));
    }
    assert_ne!(pid(&pool).await, before);
    env.close(pool).await;
}

/// Without the cancel each pass would wait for a hundred seconds, and what it waits for does not happen before its end.
#[tokio::test]
async fn a_pass_that_is_cancelled_while_all_processes_are_busy_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let begun = folder.path().join("begun");
    let env = Env::new();
    let pool = env.probe("").await;
    let first = run(&pool, &[&format!("write {}", begun.display()), "sleep 100"]);
    until("it runs", || begun.exists()).await;
    let (waiting, dropped) = (run(&pool, &["pid"]), run(&pool, &["pid"]));
    waiting.cancel();
    assert!(matches!(waiting.finish().await.1, PassEnd::Cancelled { killed: false }));
    assert_eq!(state(&pool, 0), "running");
    drop(dropped);
    until("none waits", || pool.status().waiting == 0).await;
    assert_eq!(state(&pool, 0), "running");
    // No process is started for them.
    let process = pool.status().slots[0].pid.and_then(rustix::process::Pid::from_raw).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let (_, end) = first.finish().await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    until("it is unloaded", || state(&pool, 0) == "unloaded").await;
    assert_eq!(pool.status().slots[0].starts, 1);
    env.close(pool).await;
}

#[tokio::test]
async fn a_pass_that_is_cancelled_while_its_process_loads_ends_at_once() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hold");
    let more = format!("idle_s = 0.2\nenv = {{ LOAD = \"while-file\", FILE = {file:?} }}");
    let pool = env.probe(&more).await;
    until("it is unloaded", || state(&pool, 0) == "unloaded").await;
    std::fs::write(&file, "").unwrap();
    let pass = run(&pool, &["echo a"]);
    until("it loads", || state(&pool, 0) == "loading").await;
    pass.cancel();
    assert!(matches!(pass.finish().await.1, PassEnd::Cancelled { killed: false }));
    assert_eq!(state(&pool, 0), "loading");
    // The process survives, and runs the next pass.
    let next = run(&pool, &["echo a"]);
    std::fs::remove_file(&file).unwrap();
    let (outputs, end) = next.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 1, "{end:?}");
    assert_eq!(pool.status().slots[0].starts, 2);
    env.close(pool).await;
}

#[tokio::test]
async fn no_process_is_started_for_a_pass_that_is_cancelled_while_it_waits_for_memory() {
    let folder = tempfile::tempdir().unwrap();
    let env = Env::on(Arc::new(FileDevice::new(folder.path(), 1000, true)));
    let more = "instances = 2\nvram = { base_mib = 600 }\nenv = { BASE_MIB = \"600\" }";
    let pool = env.probe(more).await;
    let first = run(&pool, &["sleep 100"]);
    until("it runs", || state(&pool, 0) == "running").await;
    let second = run(&pool, &["echo a"]);
    until("the second process waits", || state(&pool, 1) == "waiting-for-memory").await;
    second.cancel();
    assert!(matches!(second.finish().await.1, PassEnd::Cancelled { killed: false }));
    until("it waits no more", || state(&pool, 1) == "unloaded").await;
    assert_eq!((state(&pool, 0), pool.status().slots[1].starts), ("running", 0));
    first.cancel();
    assert!(matches!(first.finish().await.1, PassEnd::Cancelled { .. }));
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

/// One that has the device for itself waits for programs that load.
#[tokio::test]
async fn a_pass_that_is_cancelled_while_it_waits_for_a_load_does_not_begin() {
    let folder = tempfile::tempdir().unwrap();
    let env = Env::on(Arc::new(FileDevice::new(folder.path(), 1000, true)));
    let begun = folder.path().join("begun");
    let warm = env.probe("").await;
    let touch = ["/usr/bin/touch", begun.to_str().unwrap()];
    let once = env.start(env.config_of(&touch, "mode = \"once\"")).await.unwrap();
    // As for a program that loads.
    let reserved = env.account.admit(1, || false, |_, _| ()).await.unwrap();
    for pool in [&warm, &once] {
        let items = texts(&[&format!("write {}", begun.display())]);
        let pass = pool.run(PassRequest { exclusive: true, ..items }).unwrap();
        until("its slot has it", || state(pool, 0) == "running").await;
        pass.cancel();
        let (_, end) = pass.finish().await;
        assert!(matches!(end, PassEnd::Cancelled { killed: false }), "{end:?}");
    }
    drop(reserved);
    assert_eq!(done(&warm, &["echo a"]).await, [json!("a")]);
    assert!(!begun.exists());
    assert_eq!(once.status().slots[0].starts, 0);
    warm.close().await;
    env.close(once).await;
}
