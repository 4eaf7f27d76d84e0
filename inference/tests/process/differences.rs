//! A device that does not tell processes apart, as in containers: what others take and free while a process is loaded looks like its own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use vramq_inference::process::{Need, PassEnd, Pool};

use crate::device::{FileDevice, Stranger};
use crate::env::{DEADLINE, Env, done, ended, run, state, texts, until};

const MIB: u64 = 1 << 20;
const TOTAL_MIB: u64 = 3000;

/// What the program takes when it is loaded.
const BASE_MIB: u64 = 400;

/// A device, a neighbour on it, and programs.
struct Shared {
    folder: tempfile::TempDir,
    device: Arc<FileDevice>,
    neighbour: Stranger,
    env: Env,
}

impl Shared {
    fn new() -> Self {
        Self::on(false)
    }

    /// Whether the device tells processes apart.
    fn on(by_process: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let device = Arc::new(FileDevice::new(folder.path(), TOTAL_MIB, by_process));
        let env = Env::on(Arc::<FileDevice>::clone(&device));
        Self { folder, device, neighbour: Stranger::start(), env }
    }

    /// A pool whose process has taken its memory when the neighbour takes so much.
    async fn loaded_while_the_neighbour_takes(&self, mib: u64, keys: &str, variables: &str) -> Pool {
        let gate = self.folder.path().join("gate");
        std::fs::write(&gate, "").unwrap();
        let free = self.free().await;
        let opened = async {
            let taken = async {
                while self.free().await != free - BASE_MIB * MIB {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            tokio::time::timeout(DEADLINE, taken).await.unwrap();
            self.device.holds(&self.neighbour, mib);
            std::fs::remove_file(&gate).unwrap();
        };
        let more = format!("{keys}\nenv = {{ {} {variables} }}", environment(&gate));
        tokio::join!(self.env.probe(&more), opened).0
    }

    async fn free(&self) -> u64 {
        self.env.account.snapshot().await.unwrap().reading.free
    }
}

fn environment(gate: &Path) -> String {
    format!("BASE_MIB = \"{BASE_MIB}\", LOAD = \"holds-while-file\", FILE = {gate:?},")
}

/// The neighbour keeps what it took, so the slot and the next process would wait for it.
#[tokio::test]
async fn memory_that_a_neighbour_takes_during_a_load_is_not_waited_for() {
    for (mib, keys, variables) in [
        // Nothing but the difference is known.
        (300, "", ""),
        // The device has no room for the difference.
        (1500, "", "WEIGHTS_MIB = \"300\""),
        (1500, "vram = { base_mib = 400 }", ""),
    ] {
        let shared = Shared::new();
        let pool = shared.loaded_while_the_neighbour_takes(mib, keys, variables).await;
        let difference = (BASE_MIB + mib) * MIB;
        assert_eq!((pool.status().held_bytes(), pool.resident()), (difference, Some(difference)));
        let (_, end) = ended(&pool, &["kill"]).await;
        assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
        assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
        // What came back with the death was measured better.
        let told = (pool.status().held_bytes(), pool.resident());
        assert_eq!(told, (BASE_MIB * MIB, Some(BASE_MIB * MIB)), "{keys} {variables}");
        shared.env.close(pool).await;
    }
}

/// An earlier process took less than this one seems to have taken.
#[tokio::test]
async fn earlier_loads_tell_what_is_a_neighbours() {
    let mut shared = Shared::new();
    let first = shared.env.probe(&format!("env = {{ BASE_MIB = \"{BASE_MIB}\" }}")).await;
    shared.env.learned = first.learned();
    first.close().await;
    let pool = shared.loaded_while_the_neighbour_takes(1000, "", "").await;
    ended(&pool, &["kill"]).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    shared.env.close(pool).await;
}

#[tokio::test]
async fn memory_that_stays_is_waited_for_even_if_a_neighbour_took_some_during_the_load() {
    let shared = Shared::new();
    let pool = shared.loaded_while_the_neighbour_takes(1000, "", "WEIGHTS_MIB = \"300\"").await;
    let stranger = Stranger::start();
    ended(&pool, &[&format!("bequeath {BASE_MIB} {}", stranger.pid())]).await;
    until("the slot is withheld", || state(&pool, 0) == "withheld").await;
    let waiting = run(&pool, &["echo a"]);
    drop(stranger);
    assert!(matches!(waiting.finish().await.1, PassEnd::Done { .. }));
    shared.env.close(pool).await;
}

/// The program takes less than is declared. Others hold more than the rest.
#[tokio::test]
async fn a_declaration_of_too_much_withholds_nothing() {
    let shared = Shared::new();
    shared.device.holds(&shared.neighbour, 1000);
    let keys = format!("vram = {{ base_mib = 1000 }}\nenv = {{ BASE_MIB = \"{BASE_MIB}\" }}");
    let pool = shared.env.probe(&keys).await;
    assert_eq!((pool.status().held_bytes(), pool.resident()), (BASE_MIB * MIB, Some(1000 * MIB)));
    ended(&pool, &["kill"]).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    shared.env.close(pool).await;
}

/// What a neighbour took during the load is free again before the process ends: it cannot come back with the process.
#[tokio::test]
async fn memory_that_is_free_before_the_end_is_not_waited_for() {
    let shared = Shared::new();
    let resident = Stranger::start();
    // Others were there before, and stay.
    shared.device.holds(&resident, 1000);
    let pool = shared.loaded_while_the_neighbour_takes(1500, "recycle_after = 1", "").await;
    shared.device.holds(&shared.neighbour, 0);
    done(&pool, &["echo a"]).await;
    assert_eq!(done(&pool, &["echo b"]).await, [json!("b")]);
    assert_eq!(pool.status().slots[0].starts, 2);
    shared.env.close(pool).await;
}

/// The device tells processes apart, and the program takes its memory in a daemon, which is none of its processes.
#[tokio::test]
async fn memory_in_a_daemon_is_the_programs_as_long_as_it_is_loaded() {
    let mut shared = Shared::on(true);
    let gate = shared.folder.path().join("gate");
    std::fs::write(&gate, "").unwrap();
    let keys = format!(
        "vram = {{ base_mib = {BASE_MIB}, mib_per_unit = 1, learn = false }}\nenv = {{ LOAD = \"holds-while-file\", FILE = {gate:?} }}"
    );
    let opened = async {
        // The snapshot of the device before the load is from before there is a scratch folder.
        until("it loads", || shared.env.scratch_folders() == 1).await;
        shared.device.holds(&shared.neighbour, BASE_MIB);
        std::fs::remove_file(&gate).unwrap();
    };
    let pool = tokio::join!(shared.env.probe(&keys), opened).0;
    assert_eq!(pool.status().held_bytes(), BASE_MIB * MIB);
    // After trimming the worker looks again, and sees nothing at the program's own processes.
    done(&pool, &["echo a"]).await;
    until("it has trimmed", || {
        pool.trim();
        let status = pool.status();
        status.slots[0].passes == 1 && !status.keeps_memory_idle()
    })
    .await;
    assert_eq!(pool.status().held_bytes(), BASE_MIB * MIB);
    // The daemon keeps the memory, so the slot is withheld until it does not.
    let (_, end) = ended(&pool, &["kill"]).await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    until("the slot is withheld", || state(&pool, 0) == "withheld").await;
    shared.neighbour = Stranger::start();
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    shared.env.close(pool).await;
}

/// What passes take is measured, too, as long as nobody else takes or frees memory.
#[tokio::test]
async fn a_pass_needs_what_the_device_loses_while_nothing_else_changes() {
    let shared = Shared::new();
    let pool = shared.env.probe(&format!("env = {{ BASE_MIB = \"{BASE_MIB}\" }}")).await;
    let take = || {
        let mut request = texts(&["take 200"]);
        request.params.insert("hold".to_owned(), json!(0.5));
        pool.run(request).unwrap()
    };
    // A neighbour takes memory during the first passes.
    for mib in [500, 1000, 1500] {
        let (free, pass) = (shared.free().await, take());
        while shared.free().await == free {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        shared.device.holds(&shared.neighbour, mib);
        assert!(matches!(pass.finish().await.1, PassEnd::Done { .. }));
    }
    assert_eq!(pool.need_of(1.0), Need::Unknown);
    // A machine that stands still for a moment may miss what a pass takes.
    let (mut measured, mut missed) = (0, 0);
    while measured < 3 {
        match take().finish().await.1 {
            PassEnd::Done { peak: Some(peak) } => {
                assert_eq!(peak, 200 * MIB);
                measured += 1;
            }
            end => {
                assert_eq!(end, PassEnd::Done { peak: None });
                missed += 1;
                assert!(missed < 10, "no pass is measured");
            }
        }
    }
    let Need::Bytes(need) = pool.need_of(1.0) else { panic!("not learned") };
    assert!((200 * MIB..220 * MIB).contains(&need), "{need}");
    shared.env.close(pool).await;
}

/// It may run its passes in the memory that it keeps.
#[tokio::test]
async fn a_pass_that_takes_nothing_is_not_measured_where_its_program_may_keep_memory() {
    let shared = Shared::new();
    let pool = shared.env.probe(&format!("env = {{ BASE_MIB = \"{BASE_MIB}\" }}")).await;
    for item in ["leak 500", "echo x", "echo x", "echo x"] {
        let (_, end) = ended(&pool, &[item]).await;
        assert_eq!(end, PassEnd::Done { peak: None }, "{item}");
    }
    assert_eq!(pool.need_of(1.0), Need::Unknown);
    shared.env.close(pool).await;
}

/// Otherwise its program would give its caches back before each of them.
#[tokio::test]
async fn after_many_passes_that_could_not_be_measured_the_next_ones_are_not() {
    /// As many as are tried in a row.
    const TRIED: usize = 16;
    let shared = Shared::new();
    let pool = shared.env.probe(&format!("env = {{ BASE_MIB = \"{BASE_MIB}\" }}")).await;
    for item in std::iter::once("leak 500").chain(std::iter::repeat_n("echo x", TRIED - 1)) {
        let (_, end) = ended(&pool, &[item]).await;
        assert_eq!(end, PassEnd::Done { peak: None }, "{item}");
    }
    // From then on it counts the passes until the next try.
    let learned = serde_json::to_value(pool.learned()).unwrap();
    let buckets = learned["buckets"].as_object().unwrap();
    assert!(buckets.len() == 1 && buckets.values().all(|bucket| bucket["since"] == 0), "{learned}");
    shared.env.close(pool).await;
}
