//! Device memory of programs that load: it is back before the slot of a failed load is used again, and passes do not get it meanwhile.

use std::sync::Arc;

use serde_json::json;
use vramq_inference::process::{DeviceView, PassEnd, PassRequest, Reading, SlotState};

use crate::device::Stranger;
use crate::env::{Env, done, ended, run, state, texts, until};
use crate::memory::{MIB, env_with};

/// The process had not loaded its model yet.
#[tokio::test]
async fn a_slot_is_withheld_until_the_memory_of_a_failed_load_is_back() {
    let (folder, env) = env_with(1000, true);
    let file = folder.path().join("heir");
    let keys = format!("env = {{ BASE_MIB = \"400\", LOAD = \"heir\", FILE = {file:?} }}");
    let pool = env.probe(&keys).await;
    let stranger = Stranger::start();
    std::fs::write(&file, stranger.pid().to_string()).unwrap();
    ended(&pool, &["kill"]).await;
    let waiting = run(&pool, &["echo a"]);
    until("the next process has taken its memory", || {
        state(&pool, 0) == "loading" && pool.status().held_bytes() == 400 * MIB
    })
    .await;
    std::fs::remove_file(&file).unwrap();
    until("the slot is withheld", || pool.status().withheld_bytes() == 400 * MIB).await;
    assert!(matches!(waiting.finish().await.1, PassEnd::NotRun { .. }));
    drop(stranger);
    until("there is a process again", || pool.status().unavailable.is_none()).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

/// A pass that has not taken its memory yet.
#[tokio::test]
async fn a_program_is_not_loaded_into_what_a_running_pass_may_take() {
    let (folder, env) = env_with(1000, true);
    let large = env.probe("vram = { base_mib = 600 }\nenv = { BASE_MIB = \"600\" }").await;
    ended(&large, &["kill"]).await;
    let other = env.probe("env = { BASE_MIB = \"100\" }").await;
    let (started, gate) = (folder.path().join("started"), folder.path().join("gate"));
    let items = [format!("write {}", started.display()), format!("until {}", gate.display())];
    let request = PassRequest { budget: Some(500 * MIB), ..texts(&[&items[0], &items[1]]) };
    let pass = other.run(request).unwrap();
    until("the pass runs", || started.exists()).await;
    // 900 MiB are free.
    let waiting = run(&large, &["echo a"]);
    until("the program waits", || {
        large.status().slots[0].state == SlotState::WaitingForMemory { bytes: 600 * MIB }
    })
    .await;
    std::fs::write(&gate, "").unwrap();
    assert!(matches!(pass.finish().await.1, PassEnd::Done { .. }));
    until("it is loaded", || large.status().loaded() == 1).await;
    drop(waiting);
    large.close().await;
    env.close(other).await;
}

/// Passes are not admitted to it.
#[tokio::test]
async fn memory_is_reserved_for_a_program_until_it_has_taken_it() {
    for (load, promised) in [("while-file", 600), ("holds-while-file", 0)] {
        let (folder, env) = env_with(1000, true);
        let file = folder.path().join("loading");
        let keys = format!(
            "vram = {{ base_mib = 600 }}\nenv = {{ BASE_MIB = \"600\", LOAD = \"{load}\", FILE = {file:?} }}"
        );
        let pool = env.probe(&keys).await;
        ended(&pool, &["kill"]).await;
        std::fs::write(&file, "").unwrap();
        let pass = run(&pool, &["echo a"]);
        until("it loads", || state(&pool, 0) == "loading" && env.account.promised() == promised * MIB).await;
        std::fs::remove_file(&file).unwrap();
        assert!(matches!(pass.finish().await.1, PassEnd::Done { .. }));
        assert_eq!(env.account.promised(), 0);
        env.close(pool).await;
    }
}

/// As one whose driver hangs.
#[derive(Debug)]
struct Unreadable;

impl DeviceView for Unreadable {
    fn name(&self) -> &str {
        "cuda:0"
    }

    fn memory(&self, _: &[i32]) -> Option<Reading> {
        None
    }

    fn held_by(&self, _: &[i32]) -> Option<u64> {
        None
    }

    fn env(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

#[tokio::test]
async fn a_device_that_cannot_be_read_is_not_said_to_be_full() {
    let env = Env::on(Arc::new(Unreadable));
    let config = env.config("probe.py", "load_s = 1\nvram = { base_mib = 600 }");
    let error = env.start(config).await.unwrap_err().to_string();
    assert!(error.starts_with("the memory of the device cannot be read"), "{error}");
    env.assert_clean();
}
