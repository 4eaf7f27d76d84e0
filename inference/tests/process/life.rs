//! The life of processes: their user and environment, and that no process outlives its worker.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use vramq_inference::process::PassEnd;
use vramq_inference::process::keeper::Death;
use vramq_inference::process::warm::LoadError;

use crate::env::{
    Env, PROGRAM, done, ended, forked, is_alive, models, parent, pid, processes_of, run, state, until,
};
use crate::trials::trial;

#[tokio::test]
async fn descendants_end_with_the_process_wherever_they_went() {
    let env = Env::new();
    let pool = env.probe("").await;
    let pids = forked(&pool).await;
    // The forked processes hold the socket and ignore SIGTERM, but the death of the process is reported.
    let (_, end) = ended(&pool, &["kill"]).await;
    assert!(matches!(end, PassEnd::Crashed { death: Death::Killed(libc::SIGKILL), .. }), "{end:?}");
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    let pids = forked(&pool).await;
    env.close(pool).await;
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

#[tokio::test]
async fn a_killed_keeper_takes_everything_along() {
    let env = Env::new();
    let pool = env.probe("").await;
    let pids = forked(&pool).await;
    let process = pid(&pool).await;
    let keeper = parent(process);
    let folder = tempfile::tempdir().unwrap();
    let begun = folder.path().join("begun");
    let pass = run(&pool, &[&format!("write {}", begun.display()), "sleep 100"]);
    until("it has begun", || begun.exists()).await;
    // SAFETY: a number of a process of this test's own.
    unsafe { libc::kill(keeper, libc::SIGKILL) };
    let (_, end) = pass.finish().await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    assert!(pids.iter().chain([&process]).all(|pid| !is_alive(*pid)));
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

/// The parent is a real process, killed with SIGKILL.
#[test]
fn a_killed_worker_leaves_neither_processes_nor_folders() {
    let scratch = tempfile::tempdir().unwrap();
    let config = scratch.path().join("model.toml");
    let root = scratch.path().join("scratch");
    std::fs::create_dir(&root).unwrap();
    std::fs::write(&config, trial(&root)).unwrap();
    let mut worker =
        Command::new(PROGRAM).arg(&config).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = worker.stdin.take().unwrap();
    let mut lines = BufReader::new(worker.stdout.take().unwrap()).lines();
    std::io::Write::write_all(&mut input, b"fork\nscratch\n").unwrap();
    let pids: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    let pids: Vec<i32> = serde_json::from_value(pids["json"].clone()).unwrap();
    let folder: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert!(std::path::Path::new(folder["json"].as_str().unwrap()).join("left-behind").exists());
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    worker.kill().unwrap();
    worker.wait().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(until("everything is gone", || {
        processes_of(&root).is_empty() && std::fs::read_dir(&root).unwrap().count() == 0
    }));
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

#[tokio::test]
async fn a_process_has_what_it_is_given_and_nothing_else() {
    // Descriptors that the worker has open are not passed on, even one that is not closed by exec.
    let kept = std::fs::File::open("/proc/self/status").unwrap();
    // SAFETY: clears a flag of an open descriptor.
    unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&kept), libc::F_SETFD, 0) };
    let env = Env::new();
    let pool = env.probe("env = { OWN = \"7\" }").await;
    let seen = done(&pool, &["env", "self", "scratch"]).await;
    let variables = seen[0].as_object().unwrap();
    let scratch = seen[2].as_str().unwrap();
    assert_eq!(variables["OWN"], "7");
    for own in ["HOME", "TMPDIR", "VRAMQ_SCRATCH"] {
        assert_eq!(variables[own], scratch);
    }
    let allowed = [
        "PATH",
        "LANG",
        "LD_LIBRARY_PATH",
        "OWN",
        "HOME",
        "TMPDIR",
        "VRAMQ_SCRATCH",
        "VRAMQ_FD",
        "PYTHONPATH",
        "LC_CTYPE",
    ];
    for name in variables.keys() {
        assert!(allowed.contains(&name.as_str()), "{name} came from the worker");
    }
    let process = &seen[1];
    assert_eq!(process["sid"], process["pid"]);
    assert_eq!(process["pgid"], process["pid"]);
    assert_eq!(process["core"], json!([0, 0]));
    assert_eq!(process["ignored"], json!([]));
    assert_eq!(process["folder"], json!(models()));
    let descriptors = process["descriptors"].as_object().unwrap();
    assert_eq!(descriptors["0"], "/dev/null");
    assert!(descriptors["3"].as_str().unwrap().starts_with("socket:"));
    // Besides these only the descriptor with which the program lists the folder.
    assert!(descriptors.keys().all(|name| name.parse::<u32>().unwrap() <= 4), "{descriptors:?}");
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_is_replaced_after_its_passes() {
    let env = Env::new();
    let pool = env.probe("recycle_after = 2").await;
    let mut pids = Vec::new();
    for _ in 0..5 {
        pids.push(pid(&pool).await);
    }
    assert!(pids[0] == pids[1] && pids[2] == pids[3], "{pids:?}");
    assert!(pids[1] != pids[2] && pids[3] != pids[4], "{pids:?}");
    env.close(pool).await;
}

#[tokio::test]
async fn an_idle_process_is_ended_and_comes_back_with_work() {
    let env = Env::new();
    let pool = env.probe("idle_s = 0.2").await;
    let before = pid(&pool).await;
    until("it is unloaded", || state(&pool, 0) == "unloaded").await;
    assert!(!is_alive(before));
    env.assert_clean();
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_above_its_limit_of_host_memory_is_killed() {
    let env = Env::new();
    let pool = env.probe("host_memory_mib = 200").await;
    let (_, end) = ended(&pool, &["host 400"]).await;
    let PassEnd::Crashed { death: Death::HostMemory(bytes), .. } = end else { panic!("{end:?}") };
    assert!(bytes > 200 << 20);
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[tokio::test]
async fn a_start_does_not_wait_for_a_process_that_does_not_end() {
    let env = Env::new();
    let marks = tempfile::tempdir().unwrap();
    let mark = marks.path().join("loading");
    let more = format!("load_s = 30\nkill_s = 0.5\nenv = {{ LOAD = \"hang\", FILE = {mark:?} }}");
    let config = env.config("probe.py", &more);
    let stop = async {
        // The worker sends `hello`, upon which the model loads, once the keeper has reported the start.
        until("the model loads", || mark.exists()).await;
        let keeper = Pid::from_raw(parent(processes_of(env.scratch.path())[0])).unwrap();
        kill_process(keeper, Signal::STOP).unwrap();
        keeper
    };
    let (started, keeper) = tokio::join!(env.start(config), stop);
    assert!(matches!(started, Err(LoadError::TimedOut { .. })), "{started:?}");
    assert!(!processes_of(env.scratch.path()).is_empty());
    kill_process(keeper, Signal::CONT).unwrap();
    env.cleaned().await;
}
