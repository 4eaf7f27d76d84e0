//! Restarts: when a process is started again after its predecessor died, and what waits for that.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tokio::time::timeout;
use vramq_inference::process::{NotTaken, PassEnd};

use crate::env::{DEADLINE, Env, done, ended, pid, run, state, texts, until};

/// One job kills five processes before it is dead-lettered. Other jobs get a new process immediately after each death.
#[tokio::test]
async fn other_jobs_do_not_wait_after_the_crashes_of_one_job() {
    let env = Env::new();
    let pool = env.probe("").await;
    for _ in 0..5 {
        let (_, end) = ended(&pool, &["kill"]).await;
        assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    }
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    let status = pool.status();
    assert_eq!((status.slots.len(), status.slots[0].starts), (1, 6));
    env.close(pool).await;
}

#[tokio::test]
async fn a_model_whose_process_fails_again_and_again_takes_no_passes_until_it_is_loaded() {
    let env = Env::new();
    let pool = env.probe("").await;
    let mut crashes = 0;
    let reason = loop {
        match ended(&pool, &["kill"]).await.1 {
            PassEnd::Crashed { .. } => crashes += 1,
            PassEnd::NotRun { reason } => break reason,
            other => panic!("{other:?}"),
        }
        assert!(crashes < 20, "it is started again and again without a wait");
    };
    // One job may kill five processes, for which the others do not wait.
    assert!(crashes > 5, "{crashes}: {reason}");
    let said = format!("its process failed {crashes} times in a row");
    assert!(reason.starts_with(&said), "{reason}");
    let Err(refused) = pool.run(texts(&["echo a"])) else { panic!("it was taken") };
    // The process was loaded each time, so the reason must not be a failed load.
    let said = format!("no process can run the model: {said}");
    assert!(
        matches!(&refused, NotTaken::Unavailable(_)) && refused.to_string().starts_with(&said),
        "{refused}"
    );
    until("it is loaded", || pool.status().unavailable.is_none()).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[tokio::test]
async fn crashes_in_a_row_are_waited_out_and_a_model_that_does_not_come_back_is_unavailable() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights");
    std::fs::write(&file, "").unwrap();
    let more = format!("env = {{ LOAD = \"needs-file\", FILE = {file:?} }}");
    let pool = env.probe(&more).await;
    std::fs::remove_file(&file).unwrap();
    let (_, end) = ended(&pool, &["kill"]).await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    let (_, end) = ended(&pool, &["echo a"]).await;
    let PassEnd::NotRun { reason } = end else { panic!("{end:?}") };
    assert!(reason.contains("the file is not there"), "{reason}");
    let status = pool.status();
    assert!(status.unavailable.unwrap().stderr.contains("ValueError"));
    assert!(pool.run(texts(&["echo a"])).is_err());
    std::fs::write(&file, "").unwrap();
    until("the model is there again", || pool.status().unavailable.is_none()).await;
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[tokio::test]
async fn a_crash_costs_only_its_own_pass() {
    let env = Env::new();
    let pool = env.probe("instances = 2").await;
    let other = run(&pool, &["sleep 3", "echo a"]);
    until("it runs", || state(&pool, 0) == "running").await;
    for _ in 0..3 {
        let (_, end) = ended(&pool, &["kill"]).await;
        assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    }
    let (outputs, end) = other.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 2, "{end:?}");
    env.close(pool).await;
}

/// The worker is about to restart. Otherwise the pass would wait until the worker gives it up.
#[tokio::test]
async fn no_pass_waits_when_the_last_process_that_has_the_revision_is_gone() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    std::fs::write(&weights, "one").unwrap();
    let pool = env.probe(&format!("instances = 2\nrevision_files = [{weights:?}]")).await;
    let first = pid(&pool).await;
    let busy = run(&pool, &["sleep 1000"]);
    until("it runs", || state(&pool, 0) == "running").await;
    std::fs::write(&weights, "two").unwrap();
    let waits = run(&pool, &["pid"]);
    until("the second process has another revision, and is gone", || state(&pool, 1) == "unloaded").await;
    let (one, two) = (pool.revision(), pool.other_revision().unwrap());
    assert_eq!(pool.status().waiting, 1);
    kill_process(Pid::from_raw(first).unwrap(), Signal::KILL).unwrap();
    assert!(matches!(busy.finish().await.1, PassEnd::Crashed { .. }));
    let (outputs, end) = timeout(DEADLINE, waits.finish()).await.expect("it waits for a process");
    let said = format!("the model has the revision {two} by now, and this worker serves {one}: ");
    assert!(
        outputs.is_empty() && matches!(&end, PassEnd::NotRun { reason } if reason.starts_with(&said)),
        "{end:?}"
    );
    assert!(
        matches!(pool.run(texts(&["pid"])), Err(NotTaken::Unavailable(reason)) if reason.starts_with(&said))
    );
    env.close(pool).await;
}
