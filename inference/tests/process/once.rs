//! One-shot programs, which know nothing of the protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use tokio::time::timeout;
use vramq_inference::process::child::KeeperProgram;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::{
    DeviceView, HostView, Item, Learned, PassEnd, PassRequest, Pool, PoolOptions, Reading,
};
use vramq_schemas::Output;

use crate::env::{DEADLINE, Env, ended, is_alive, processes_of, python, run, state, texts, until};

async fn program(env: &Env, command: &[&str], more: &str) -> Pool {
    env.start(env.config_of(command, &format!("mode = \"once\"\n{more}"))).await.unwrap()
}

pub async fn script(env: &Env, script: &str, more: &str) -> Pool {
    program(env, &[python().to_str().unwrap(), "-c", script, "{input}"], more).await
}

#[tokio::test]
async fn a_program_that_writes_a_file() {
    let env = Env::new();
    let more = "once = { input_suffix = \".txt\", output_suffix = \".sorted\", media_type = \"text/plain\" }";
    let pool =
        program(&env, &["/usr/bin/sort", "-k{params.column}", "-o", "{output}", "{input}"], more).await;
    let mut request = texts(&["a 2\nb 1\n", "z 9\ny 8\n"]);
    request.params.insert("column".to_owned(), json!(2));
    let (outputs, end) = pool.run(request).unwrap().finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let sorted = |text: &str| Output::Bytes { media_type: "text/plain".to_owned(), bytes: text.into() };
    assert_eq!(outputs, [sorted("b 1\na 2\n"), sorted("y 8\nz 9\n")]);
    let (_, end) = ended(&pool, &["no parameter"]).await;
    let PassEnd::Failed { kind: FailureKind::Input, item: Some(0), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "params.column is missing");
    env.close(pool).await;
}

#[tokio::test]
async fn a_program_that_prints() {
    let env = Env::new();
    let pool = program(
        &env,
        &["/usr/bin/gzip", "-n", "-c", "{input}"],
        "once = { media_type = \"application/gzip\" }",
    )
    .await;
    let items = vec![Item::Bytes { media_type: None, bytes: vec![b'x'; 3 << 20] }];
    let (outputs, _) = pool.run(PassRequest { items, ..PassRequest::default() }).unwrap().finish().await;
    let [Output::Bytes { media_type, bytes }] = &outputs[..] else { panic!("{outputs:?}") };
    assert_eq!(media_type, "application/gzip");
    assert!(bytes.starts_with(&[0x1F, 0x8B]) && bytes.len() < 10_000);
    env.close(pool).await;
}

/// The program ignores SIGTERM, and waits for a reader.
#[tokio::test]
async fn a_program_that_prints_without_end_is_ended() {
    let env = Env::new();
    let pool = script(
        &env,
        "import signal, sys\nsignal.signal(15, signal.SIG_IGN)\nwhile True: sys.stdout.write('y' * 65536)",
        "",
    )
    .await;
    let (outputs, end) = ended(&pool, &["a"]).await;
    let PassEnd::Failed { kind: FailureKind::Output, item: Some(0), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert!(detail.contains("printed more than 67108864 bytes") && detail.contains("{output}"), "{detail}");
    assert!(outputs.is_empty());
    env.close(pool).await;
    let pool = script(&env, "print('y' * (40 << 20))", "").await;
    assert_eq!(ended(&pool, &["a"]).await.0.len(), 1);
    env.close(pool).await;
}

#[tokio::test]
async fn an_output_of_another_name_is_named() {
    let env = Env::new();
    let code = "import sys; open(sys.argv[1].replace('.jpg', '-0.jpg'), 'w')";
    let command = [python().to_str().unwrap(), "-c", code, "{output}"];
    let pool = program(&env, &command, "once = { output_suffix = \".jpg\" }").await;
    let (_, end) = ended(&pool, &["two pages"]).await;
    let PassEnd::Failed { kind: FailureKind::Output, item: Some(0), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert!(detail.contains("\"output.jpg\"") && detail.contains("output-0.jpg"), "{detail}");
    env.close(pool).await;
}

/// What of a program's text is in a dead letter.
fn in_dead_letter(text: &str) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(2048))..]
}

/// It may say anywhere why it failed. What it prints to standard output hides nothing that it said as an error.
#[tokio::test]
async fn standard_output_of_a_program_with_an_output_file_counts() {
    let env = Env::new();
    let oom = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.";
    let code = "import sys; print(sys.argv[1]); sys.stderr.write(sys.argv[2]); print('x' * 20000 if sys.argv[2] else 'end'); sys.exit(1)";
    for [stdout, stderr] in [[oom, ""], ["", oom]] {
        let command = [python().to_str().unwrap(), "-c", code, stdout, stderr, "{output}"];
        let pool = program(&env, &command, "item_s = 60").await;
        let (_, end) = ended(&pool, &["a"]).await;
        let PassEnd::OutOfMemory { report, stderr: text, .. } = end else { panic!("{end:?}") };
        assert_eq!(report.asked, Some(2 << 30));
        let seen = in_dead_letter(&text);
        assert!(seen.contains(oom) && (seen.contains("end\n") || seen.contains("xxx\n")), "{text}");
        env.close(pool).await;
    }
}

/// However it fails, both texts are told, and neither is pushed out by the other.
#[tokio::test]
async fn the_output_of_a_failed_program_with_a_file_is_in_the_error() {
    let env = Env::new();
    let code = "import sys, time\nprint('x' * 20000 + 'at half', flush=True)\nprint('cannot go on', file=sys.stderr, flush=True)\n\
                how = open(sys.argv[1]).read()\nif how == 'hangs': time.sleep(1000)\nsys.exit(int(how))";
    let command = [python().to_str().unwrap(), "-c", code, "{input}", "{output}"];
    for (how, item_s) in [("3", 60), ("0", 60), ("hangs", 2)] {
        let pool = program(&env, &command, &format!("item_s = {item_s}")).await;
        let (_, end) = ended(&pool, &[how]).await;
        let (PassEnd::Failed { stderr: text, .. } | PassEnd::TimedOut { stderr: text, .. }) = end else {
            panic!("{how}: {end:?}")
        };
        let seen = in_dead_letter(&text);
        assert!(seen.contains("xxat half\n") && seen.contains("cannot go on"), "{how}: {text}");
        env.close(pool).await;
    }
}

#[tokio::test]
async fn json_is_parsed() {
    let env = Env::new();
    let code = "import json, sys; print(json.dumps({{'length': len(open(sys.argv[1]).read())}}))";
    let pool = script(&env, code, "once = { media_type = \"application/json\" }").await;
    assert_eq!(crate::env::done(&pool, &["abc", "de"]).await, [json!({"length": 3}), json!({"length": 2})]);
    env.close(pool).await;
}

#[tokio::test]
async fn how_it_ends_is_judged_by_status_and_text() {
    let env = Env::new();
    // The item is the program's code; the first one succeeds. `item_s` is long enough to start an interpreter on a slow machine.
    let pool = script(&env, "import sys; exec(open(sys.argv[1]).read())", "item_s = 60").await;
    let end = async |code: &str| {
        let (outputs, end) = ended(&pool, &["print(1)", code, "print(2)"]).await;
        assert_eq!(outputs.len(), 1, "{code}");
        end
    };
    let torch = "sys.exit('torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …')";
    let PassEnd::OutOfMemory { item: Some(1), report, stderr, by_text: true } = end(torch).await else {
        panic!("{torch}")
    };
    assert_eq!((report.asked, report.source.as_str()), (Some(2 << 30), "torch"));
    assert!(stderr.contains("Tried to allocate"));
    assert_eq!(pool.status().slots[0].starts, 2, "the third item has not run");
    for (code, kind, what) in [
        ("sys.exit(3)", FailureKind::Model, "the program exited with status 3"),
        ("raise ValueError('no')", FailureKind::Model, "exited with status 1"),
        (
            "sys.exit(137)",
            FailureKind::HostMemory,
            "exited with status 137, as after SIGKILL: probably the host's memory ran out",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            FailureKind::HostMemory,
            "killed by signal 9: probably the host's memory ran out",
        ),
    ] {
        let PassEnd::Failed { kind: seen, item: Some(1), detail, .. } = end(code).await else {
            panic!("{code}")
        };
        assert_eq!(seen, kind, "{code}");
        assert!(detail.contains(what), "{code}: {detail}");
    }
    let segv = "import os; os.kill(os.getpid(), 11)";
    assert!(matches!(end(segv).await, PassEnd::Crashed { .. }));
    let hang = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)";
    assert!(matches!(end(hang).await, PassEnd::TimedOut { killed: true, .. }));
    env.close(pool).await;
}

#[tokio::test]
async fn its_forked_processes_end_with_it_and_cancelling_kills_it() {
    let env = Env::new();
    let code = "import os, sys, time\npid = os.fork()\nif pid == 0:\n  os.setsid()\n  time.sleep(1000)\nprint(pid, flush=True)\nif open(sys.argv[1]).read() == 'wait': time.sleep(1000)";
    let pool = script(&env, code, "").await;
    let (outputs, end) = ended(&pool, &["go"]).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    let [Output::Bytes { bytes, .. }] = &outputs[..] else { panic!("{outputs:?}") };
    let forked: i32 = String::from_utf8_lossy(bytes).trim().parse().unwrap();
    assert!(!is_alive(forked));
    let pass = run(&pool, &["wait"]);
    until("it runs", || processes_of(env.scratch.path()).len() >= 2).await;
    pass.cancel();
    assert!(matches!(pass.finish().await.1, PassEnd::Cancelled { killed: true }));
    env.close(pool).await;
}

#[tokio::test]
async fn several_run_at_the_same_time() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    // No program ends before all three have started.
    let code = format!(
        "import os, time\nfolder = {:?}\nopen(os.path.join(folder, str(os.getpid())), 'w').close()\n\
         while len(os.listdir(folder)) < 3: time.sleep(0.01)\nprint(1)",
        folder.path()
    );
    let pool = script(&env, &code, "instances = 3\nitem_s = 60").await;
    let passes: Vec<_> = (0..3).map(|_| run(&pool, &["x"])).collect();
    for pass in passes {
        let (_, end) = pass.finish().await;
        assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    }
    env.close(pool).await;
}

#[tokio::test]
async fn a_disk_that_is_full_for_the_program_is_no_failure_of_it() {
    let env = Env::new();
    // Of a quota nobody but the program can know.
    let pool =
        program(&env, &["/bin/sh", "-c", "echo 'cat: write: Disk quota exceeded' >&2; exit 1"], "").await;
    let (_, end) = ended(&pool, &["a"]).await;
    let PassEnd::DiskFull { asked: None, detail } = end else { panic!("{end:?}") };
    assert!(
        detail.contains("the program exited with status 1: ") && detail.contains("Disk quota exceeded"),
        "{detail}"
    );
    env.close(pool).await;
}

/// The scratch folder is in memory, which has room. The machine's own disk may be nearly full, and would then be blamed.
#[tokio::test]
async fn a_program_that_finds_another_disk_full_than_that_of_its_folder_has_failed() {
    let mut env = Env::new();
    env.scratch = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = program(&env, &["/bin/sh", "-c", "cat {input} > /dev/full"], "").await;
    let (_, end) = ended(&pool, &["a"]).await;
    let PassEnd::Failed { kind: FailureKind::Model, stderr, .. } = end else { panic!("{end:?}") };
    assert!(stderr.contains("No space left on device"), "{stderr}");
    env.close(pool).await;
}

#[tokio::test]
async fn a_disk_that_takes_no_files_costs_no_job() {
    let env = Env::new();
    let pool = program(&env, &["/usr/bin/cat", "{input}"], "").await;
    std::fs::remove_dir(env.scratch.path()).unwrap();
    let (_, end) = ended(&pool, &["a"]).await;
    let PassEnd::NotRun { reason } = end else { panic!("{end:?}") };
    assert!(reason.contains("make the scratch folder"), "{reason}");
    std::fs::create_dir(env.scratch.path()).unwrap();
    until("it is tried again", || pool.status().unavailable.is_none()).await;
    assert_eq!(ended(&pool, &["a"]).await.0.len(), 1);
    env.close(pool).await;
}

#[tokio::test]
async fn a_program_that_is_gone_takes_no_passes_until_it_is_back() {
    let env = Env::new();
    let folder = tempfile::tempdir().unwrap();
    let (program_file, away) = (folder.path().join("program"), folder.path().join("away"));
    std::fs::copy("/usr/bin/cat", &program_file).unwrap();
    let pool = program(&env, &[program_file.to_str().unwrap(), "{input}"], "instances = 2").await;
    for pass in [run(&pool, &["a"]), run(&pool, &["b"])] {
        assert_eq!(pass.finish().await.0.len(), 1);
    }
    until("two slots are idle", || [0, 1].map(|slot| state(&pool, slot)) == ["idle"; 2]).await;
    std::fs::rename(&program_file, &away).unwrap();
    let (_, end) = ended(&pool, &["a"]).await;
    let PassEnd::NotRun { reason } = end else { panic!("{end:?}") };
    assert!(reason.contains("No such file or directory"), "{reason}");
    assert!(pool.status().unavailable.is_some());
    std::fs::rename(&away, &program_file).unwrap();
    until("it is tried again", || pool.status().unavailable.is_none()).await;
    assert_eq!(ended(&pool, &["a"]).await.0.len(), 1);
    env.close(pool).await;
}

#[tokio::test]
async fn the_reason_why_a_program_did_not_start_is_in_the_error() {
    let env = Env::new();
    for (keeper, what) in [
        ("/no/such/keeper", "start a keeper: No such file or directory"),
        // It takes the argument for the name of a script, and prints that there is none.
        ("/bin/sh", "__keeper"),
    ] {
        let config = env.config_of(&["/bin/cat", "{input}"], "mode = \"once\"");
        let launcher = Launcher { keeper: KeeperProgram { path: keeper.into() }, ..Launcher::default() };
        let (account, learned) = (Arc::clone(&env.account), Learned::default());
        let options = PoolOptions { launcher, account, budget: 0, learned, shares_device: false };
        let pool = Pool::start(config, options).await.unwrap();
        let (_, end) = ended(&pool, &["a"]).await;
        let PassEnd::NotRun { reason } = end else { panic!("{end:?}") };
        assert!(reason.contains(what), "{reason}");
        env.close(pool).await;
    }
}

/// A device that panics when it is first asked for variables, on a thread of its own, and when it is first asked a question by a slot's task.
#[derive(Debug, Default)]
struct PanicsOnce {
    variables: AtomicBool,
    question: AtomicBool,
}

impl DeviceView for PanicsOnce {
    fn name(&self) -> &str {
        "cpu"
    }

    fn memory(&self, programs: &[i32]) -> Option<Reading> {
        HostView.memory(programs)
    }

    fn held_by(&self, pids: &[i32]) -> Option<u64> {
        HostView.held_by(pids)
    }

    fn shows_what_is_left(&self) -> bool {
        assert!(self.question.swap(true, Ordering::Relaxed), "a panic of this test");
        false
    }

    fn env(&self) -> Vec<(String, String)> {
        assert!(self.variables.swap(true, Ordering::Relaxed), "a panic of this test");
        Vec::new()
    }
}

/// A pass that causes a panic must not count as one that did not run: no attempt would be counted, and it would be retried for
/// ever.
#[tokio::test]
async fn a_panic_in_the_pool_fails_its_pass_and_the_next_one_runs() {
    let env = Env::on(Arc::new(PanicsOnce::default()));
    let pool = program(&env, &["/bin/cat", "{input}"], "once = { media_type = \"text/plain\" }").await;
    for item in ["a", "b"] {
        let (outputs, end) = ended(&pool, &[item]).await;
        assert!(outputs.is_empty(), "{outputs:?}");
        assert!(
            matches!(end, PassEnd::Failed { kind: FailureKind::Model, item: None, .. }),
            "{item}: {end:?}"
        );
    }
    let (outputs, end) = ended(&pool, &["c"]).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    assert_eq!(outputs.len(), 1);
    // The scratch folder of the first start remains. The pool's next start removes it.
    pool.close().await;
}

/// As where a disk hangs: nothing is written.
#[test]
fn a_pass_whose_item_is_not_written_can_be_cancelled_and_is_limited() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let env = Env::new();
        for limit in ["", "item_s = 3"] {
            let pool = program(&env, &["/bin/cat", "{input}"], limit).await;
            // The only thread for files is busy.
            let (go_on, waits) = std::sync::mpsc::channel::<()>();
            tokio::task::spawn_blocking(move || waits.recv());
            let pass = run(&pool, &["a"]);
            until("its slot has it", || state(&pool, 0) == "running").await;
            if limit.is_empty() {
                pass.cancel();
            }
            let (_, end) = timeout(DEADLINE, pass.finish()).await.expect("it waits for the disk");
            match end {
                PassEnd::Cancelled { killed: false } => assert!(limit.is_empty()),
                PassEnd::DiskFull { detail, .. } => {
                    assert!(detail.contains("took longer than 3 s (item_s)"), "{detail}");
                }
                other => panic!("{other:?}"),
            }
            // The item may be too large for the disk: other jobs are run.
            assert!(pool.status().unavailable.is_none());
            go_on.send(()).unwrap();
            assert_eq!(ended(&pool, &["b"]).await.0.len(), 1);
            env.close(pool).await;
        }
    });
}
