//! Processes that are killed at a frame of each type: while they send it, and while it comes to them. Those of a usual pass are in
//! `faults.rs`. Whatever it was, the pass ends once, the outputs before it stay, and the next process serves the next pass.

use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vramq_inference::process::keeper::Death;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{Item, PassEnd, PassEvent, PassRequest, Pool};

use crate::env::{Env, done, ended, is_alive, parent, run, state, texts, until};

/// Nothing of the frame; a part of its length, of its header.
const CUTS: [usize; 3] = [0, 2, 20];

/// More than any of these frames has.
const WHOLE: usize = 4096;

/// A program that may be told to die, by a file.
struct Mortal {
    env: Env,
    folder: tempfile::TempDir,
}

impl Mortal {
    fn new() -> Self {
        Self { env: Env::new(), folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("wish")
    }

    fn wish(&self, wish: Value) {
        // At once: the program may look at any time.
        let fresh = self.folder.path().join("fresh");
        std::fs::write(&fresh, wish.to_string()).unwrap();
        std::fs::rename(fresh, self.file()).unwrap();
    }

    fn is_granted(&self) -> bool {
        !self.file().exists()
    }

    async fn start(&self, more: &str) -> Result<Pool, LoadError> {
        let more = format!("{more}\nenv = {{ WISH_FILE = {:?} }}", self.file());
        self.env.start(self.env.config("raw.py", &more)).await
    }

    /// Waits until the pool has noticed the death of a process after which it had started so many.
    async fn is_dead(&self, pool: &Pool, starts: u64) {
        let noticed = || {
            let slot = &pool.status().slots[0];
            slot.pid.is_none() || slot.starts > starts
        };
        until("its end is noticed", noticed).await;
    }

    /// The process that died is replaced by one that serves.
    async fn serves(&self, pool: &Pool) {
        until("there is a process again", || pool.status().unavailable.is_none()).await;
        assert_eq!(done(pool, &["{}", "7"]).await, [json!({}), json!(7)]);
    }

    /// Kills the idle process when it is at a frame of this type, which `cause` brings about.
    async fn dies_idle(&self, pool: &Pool, wish: Value, cause: impl Fn()) {
        self.serves(pool).await;
        until("it is idle", || state(pool, 0) == "idle").await;
        let (starts, what) = (pool.status().slots[0].starts, wish.to_string());
        self.wish(wish);
        cause();
        until(&what, || self.is_granted()).await;
        until("its end is noticed", || pool.status().slots[0].pid.is_none()).await;
        self.serves(pool).await;
        assert_eq!(pool.status().slots[0].starts, starts + 1, "{what}");
    }
}

fn is_killed(end: &PassEnd) -> bool {
    matches!(end, PassEnd::Crashed { death: Death::Killed(libc::SIGKILL), .. })
}

#[tokio::test]
async fn in_hello_and_ready_the_model_is_not_loaded() {
    let mortal = Mortal::new();
    for at in ["die_at", "die_in"] {
        for cut in CUTS {
            let kind = if at == "die_at" { "hello" } else { "ready" };
            let wish = json!({at: kind, "cut": cut});
            mortal.wish(wish.clone());
            let error = mortal.start("").await.unwrap_err();
            assert!(
                matches!(error, LoadError::Crashed { death: Death::Killed(libc::SIGKILL), .. }),
                "{wish}: {error:?}"
            );
            mortal.env.assert_clean();
        }
    }
    // It was loaded, and is dead: the next pass has another process.
    mortal.wish(json!({"die_in": "ready", "cut": WHOLE}));
    let pool = mortal.start("").await.unwrap();
    mortal.is_dead(&pool, 1).await;
    mortal.serves(&pool).await;
    mortal.env.close(pool).await;
}

/// The first process is there, and its successor dies while it is loaded.
#[tokio::test]
async fn in_hello_and_ready_of_a_later_process_the_model_waits_for_the_next_one() {
    let mortal = Mortal::new();
    let pool = mortal.start("").await.unwrap();
    for (at, kind) in [("die_at", "hello"), ("die_in", "ready")] {
        mortal.serves(&pool).await;
        mortal.wish(json!({at: kind, "cut": 20}));
        let (_, end) = ended(&pool, &[&json!({"die": 0}).to_string()]).await;
        assert!(is_killed(&end), "{end:?}");
        // No job is charged for what happens without it.
        let (outputs, end) = ended(&pool, &["{}"]).await;
        assert!(outputs.is_empty() && matches!(end, PassEnd::NotRun { .. }), "{kind}: {end:?}");
        assert!(mortal.is_granted());
    }
    mortal.serves(&pool).await;
    mortal.env.close(pool).await;
}

#[tokio::test]
async fn in_oom_and_failed_the_outputs_before_it_stay() {
    let mortal = Mortal::new();
    let pool = mortal.start("").await.unwrap();
    let oom = json!({"type": "oom", "pass": "PASS", "asked": 7, "where": "raw"});
    let failed = json!({"type": "failed", "pass": "PASS", "kind": "model", "detail": "a bad day"});
    for header in [oom, failed] {
        // Instead of the second output of three.
        for cut in CUTS.into_iter().chain([WHOLE]) {
            let wish = json!({"instead": 2, "header": header, "die": 2, "cut": cut});
            let starts = pool.status().slots[0].starts;
            let (outputs, end) = ended(&pool, &[&wish.to_string(), "1", "2"]).await;
            assert_eq!(outputs.len(), 1, "{wish}: {end:?}");
            match &end {
                // It was heard, whatever became of the process.
                PassEnd::OutOfMemory { report, .. } if cut == WHOLE => assert_eq!(report.asked, Some(7)),
                PassEnd::Failed { detail, .. } if cut == WHOLE => assert_eq!(detail, "a bad day"),
                end => assert!(cut != WHOLE && is_killed(end), "{wish}: {end:?}"),
            }
            mortal.is_dead(&pool, starts).await;
            mortal.serves(&pool).await;
        }
    }
    mortal.env.close(pool).await;
}

#[tokio::test]
async fn while_a_pass_comes_it_has_not_run() {
    let mortal = Mortal::new();
    let pool = mortal.start("").await.unwrap();
    // Beyond what the socket holds, and below what goes by files.
    let large = vec![b'1'; 3 << 20];
    for cut in CUTS.into_iter().chain([WHOLE, large.len() / 2]) {
        mortal.wish(json!({"die_at": "run", "cut": cut}));
        let items = vec![Item::Text("{}".to_owned()), Item::Bytes { media_type: None, bytes: large.clone() }];
        let (outputs, end) =
            pool.run(PassRequest { items, ..PassRequest::default() }).unwrap().finish().await;
        assert!(outputs.is_empty() && is_killed(&end), "{cut}: {end:?}");
        assert!(mortal.is_granted());
        mortal.serves(&pool).await;
    }
    mortal.env.close(pool).await;
}

#[tokio::test]
async fn at_a_cancel_the_pass_ends_at_once() {
    let mortal = Mortal::new();
    // Longer than the test may take: nothing else ends the pass.
    let pool = mortal.start("kill_s = 600").await.unwrap();
    for cut in CUTS {
        mortal.wish(json!({"die_at": "cancel", "cut": cut}));
        let mut pass = run(&pool, &[&json!({"linger": true}).to_string(), "1"]);
        assert!(matches!(pass.next().await, Some(PassEvent::Progress { .. })), "{cut}");
        pass.cancel();
        let (outputs, end) = pass.finish().await;
        assert!(outputs.is_empty() && is_killed(&end), "{cut}: {end:?}");
        assert!(mortal.is_granted());
        mortal.serves(&pool).await;
    }
    mortal.env.close(pool).await;
}

#[tokio::test]
async fn at_trim_and_ping_and_in_pong_an_idle_process_is_replaced() {
    let mortal = Mortal::new();
    let pool = mortal.start("").await.unwrap();
    for cut in CUTS {
        // A process that is to give its caches back is asked whether it is there, too.
        for (at, kind) in [("die_at", "trim"), ("die_at", "ping"), ("die_in", "pong")] {
            mortal.dies_idle(&pool, json!({at: kind, "cut": cut.min(8)}), || pool.trim()).await;
        }
    }
    // All of it was sent: the process was there when it was asked.
    mortal.dies_idle(&pool, json!({"die_in": "pong", "cut": WHOLE}), || pool.trim()).await;
    mortal.env.close(pool).await;
}

/// The next pass waits already, and must not be blamed.
#[tokio::test]
async fn right_after_a_pass_the_next_one_has_another_process() {
    let mortal = Mortal::new();
    let pool = mortal.start("").await.unwrap();
    let (gate, process) = (mortal.folder.path().join("gate"), pool.status().slots[0].pid.unwrap());
    // Frames of a pass of one item: progress, an output, `done`.
    let wish = json!({"until": gate, "die": 2, "cut": WHOLE});
    let mut first = run(&pool, &[&wish.to_string()]);
    assert!(matches!(first.next().await, Some(PassEvent::Progress { .. })));
    let second = run(&pool, &["{}"]);
    // The keeper says only later how the process died.
    let keeper = Pid::from_raw(parent(process)).unwrap();
    kill_process(keeper, Signal::STOP).unwrap();
    std::fs::write(&gate, "").unwrap();
    // Blocks the pool, too: it sees the end of the pass and that of the connection together.
    while is_alive(process) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let (_, end) = first.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    kill_process(keeper, Signal::CONT).unwrap();
    let (outputs, end) = second.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 1, "{end:?}");
    mortal.env.close(pool).await;
}

/// A pass that has the device for itself waits for programs that load.
#[tokio::test]
async fn while_a_pass_waits_for_a_load_it_has_not_run() {
    let mortal = Mortal::new();
    // Otherwise the death may be seen when the process gives its caches back for the measurement.
    let pool = mortal.start("vram = { learn = false, mib_per_unit = 0 }").await.unwrap();
    let process = pool.status().slots[0].pid.unwrap();
    // As for a program that loads.
    let reserved = mortal.env.account.admit(1, || false, |_, _| ()).await.unwrap();
    let pass = pool.run(PassRequest { exclusive: true, ..texts(&["{}"]) }).unwrap();
    until("its slot has it", || state(&pool, 0) == "running").await;
    kill_process(Pid::from_raw(process).unwrap(), Signal::KILL).unwrap();
    until("it is dead", || !is_alive(process)).await;
    drop(reserved);
    let (outputs, end) = pass.finish().await;
    assert!(outputs.is_empty() && matches!(end, PassEnd::NotRun { .. }), "{end:?}");
    mortal.serves(&pool).await;
    mortal.env.close(pool).await;
}

/// The worker asks for both before a pass that it measures, as the first ones are.
#[tokio::test]
async fn at_trim_and_ping_and_in_pong_before_a_pass_it_has_not_run() {
    let mortal = Mortal::new();
    for (at, kind) in [("die_at", "trim"), ("die_at", "ping"), ("die_in", "pong")] {
        let pool = mortal.start("").await.unwrap();
        mortal.wish(json!({at: kind, "cut": 0}));
        // No job is charged for what happens before it.
        let (outputs, end) = ended(&pool, &["{}"]).await;
        assert!(outputs.is_empty() && matches!(end, PassEnd::NotRun { .. }), "{kind}: {end:?}");
        assert!(mortal.is_granted());
        mortal.serves(&pool).await;
        mortal.env.close(pool).await;
    }
}

#[tokio::test]
async fn at_shutdown_nothing_is_left() {
    let mortal = Mortal::new();
    let pool = mortal.start("recycle_after = 1\nkill_s = 600").await.unwrap();
    for cut in CUTS {
        // A process that is replaced is asked to end.
        mortal.wish(json!({"die_at": "shutdown", "cut": cut}));
        let starts = pool.status().slots[0].starts;
        mortal.serves(&pool).await;
        until("it was asked to end", || mortal.is_granted()).await;
        mortal.serves(&pool).await;
        assert!(pool.status().slots[0].starts > starts, "{cut}");
    }
    mortal.wish(json!({"die_at": "shutdown", "cut": 2}));
    mortal.env.close(pool).await;
}
