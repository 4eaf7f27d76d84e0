//! The life of processes: their user and environment, and that no process outlives its worker.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use vramq_inference::process::PassEnd;
use vramq_inference::process::keeper::Death;
use vramq_inference::process::warm::LoadError;

use crate::env::{
    Env, PROGRAM, done, ended, forked, is_alive, models, parent, pid, processes_of, python, repository, run,
    state, until,
};

#[tokio::test]
async fn descendants_end_with_the_process_wherever_they_went() {
    let env = Env::new();
    let pool = env.probe("").await;
    let pids = forked(&pool).await;
    // They hold the socket and ignore SIGTERM; the death of the process is reported anyway.
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
    let pass = run(&pool, &["sleep 100"]);
    until("it runs", || state(&pool, 0) == "running").await;
    // SAFETY: a number of a process of this test's own.
    unsafe { libc::kill(keeper, libc::SIGKILL) };
    let (_, end) = pass.finish().await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
    assert!(pids.iter().chain([&process]).all(|pid| !is_alive(*pid)));
    assert_eq!(done(&pool, &["echo a"]).await, [json!("a")]);
    env.close(pool).await;
}

#[test]
fn a_model_is_tried_without_a_broker() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("model.toml");
    std::fs::write(&config, trial(folder.path())).unwrap();
    let mut run_model = Command::new(PROGRAM)
        .args(["--params", "{\"size\": 7}"])
        .arg(&config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The second one is no text; those after it are items all the same.
    let mut input = run_model.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"echo a\necho \xff\nraise a bad day\n{\"json\": [1]}\nparams\n")
        .unwrap();
    drop(input);
    let output = run_model.wait_with_output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    let outputs: Vec<&str> = printed.lines().collect();
    assert_eq!(outputs[..2], ["{\"json\":\"a\"}", "{\"json\":[1]}"], "{printed}");
    assert!(outputs.len() == 3 && outputs[2].contains("\"params\":{\"size\":7}"), "{printed}");
    assert_eq!(output.status.code(), Some(1), "not all was done");
    let told = String::from_utf8(output.stderr).unwrap();
    let failed = "vramq-run-model: line 3: failed: ValueError: a bad day\n";
    assert!(told.contains("vramq-run-model: line 2: read an item: ") && told.contains(failed), "{told}");
    assert!(!told.contains('\u{1b}'), "colours in a pipe: {told}");
    assert!(processes_of(folder.path()).is_empty());
}

#[test]
fn a_trial_says_what_is_wrong_with_its_arguments() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("worker.toml");
    let models = "[model.a]\nengine = 'process'\n[model.b]\nengine = 'process'\n[model.e]\nengine = 'echo'\n";
    std::fs::write(&config, models).unwrap();
    let config = config.to_str().unwrap();
    for (arguments, said) in [
        (&["--fast", config][..], "`--fast` is not known"),
        (&[], "CONFIG is missing"),
        (&["--batch", "0", config], "--batch is `0`; it must be a number from 1"),
        (&["--params", "[1]", config], "--params is `[1]`, which is no JSON object"),
        (&[config, "a", "b"], "`b` is one argument too many"),
        (&[config], "has several models with engine = \"process\"; name one of a, b"),
        (&[config, "e"], "has no model `e` with engine = \"process\"; it has a, b"),
        (&[config, "a"], "command: is missing; it names the program and its arguments"),
    ] {
        let output = Command::new(PROGRAM).args(arguments).stdin(Stdio::null()).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && told.contains(said), "{arguments:?}: {told}");
    }
}

/// The configuration of `models/probe.py`, with its scratch folders in this folder.
fn trial(scratch: &std::path::Path) -> String {
    let python_path = format!("{}:{}", repository().join("python").display(), models().display());
    format!(
        "[model.probe]\nengine = \"process\"\ncommand = [{:?}, \"probe.py\"]\nfolder = {:?}\nscratch = {scratch:?}\nenv = {{ PYTHONPATH = {python_path:?} }}\n",
        python(),
        models(),
    )
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
    // What the worker has open is not the program's: this one is not closed by exec.
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
    // Besides these only what lists the folder.
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
