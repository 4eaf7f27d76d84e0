//! Programs that misuse the SDK: this fails at most their own pass, and not the process that other passes wait for.

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vramq_inference::process::keeper::Death;
use vramq_inference::process::protocol::FailureKind;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{Item, PassEnd, PassEvent, PassRequest, Pool};
use vramq_testkit::not_run::not_run;

use crate::env::{Env, done, ended, pid, python, run, until};

async fn rough(env: &Env, load: &str) -> Result<Pool, LoadError> {
    env.start(env.config("rough.py", &format!("env = {{ LOAD = {load:?} }}"))).await
}

#[tokio::test]
async fn raising_something_else_than_an_exception_fails_the_pass_and_not_the_process() {
    let env = Env::new();
    let pool = rough(&env, "").await.unwrap();
    let before = pid(&pool).await;
    for (item, what) in [
        ("exit", "SystemExit: no such option: --fast"),
        ("panic", "PanicException: index out of bounds: the len is 3 but the index is 7"),
        // Nobody cancelled it.
        ("cancelled", "Cancelled"),
        ("unprintable", "Unprintable: its text cannot be shown: ValueError"),
        ("frozen", "Frozen: a caption"),
        ("looks_up", "LooksUp: a body"),
        // Half of a surrogate pair is no JSON.
        ("name", "FileNotFoundError: no file a?b"),
        ("elsewhere", "ValueError: progress of item 7; the pass has the items 0 to 0"),
    ] {
        let (_, end) = ended(&pool, &[item]).await;
        let PassEnd::Failed { kind: FailureKind::Model, item: Some(0), detail, .. } = end else {
            panic!("{item}: {end:?}")
        };
        assert_eq!(detail, what);
    }
    // Classes derived from the SDK's exceptions need not call their constructors.
    let (_, end) = ended(&pool, &["too_many", "pid"]).await;
    let PassEnd::Failed { kind: FailureKind::Input, item: None, detail, .. } = end else { panic!("{end:?}") };
    assert_eq!(detail, "7 words");
    let (_, end) = ended(&pool, &["pid", "too_long"]).await;
    let PassEnd::Failed { kind: FailureKind::Input, item: Some(1), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "a long text");
    let (_, end) = ended(&pool, &["no_room"]).await;
    let PassEnd::OutOfMemory { item: None, report, .. } = end else { panic!("{end:?}") };
    assert_eq!((report.source.as_str(), report.asked), ("model", None));
    // A model may change the list of its items.
    assert_eq!(done(&pool, &["taken", "pid"]).await, [json!(0), json!(1)]);
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn a_process_lives_on_after_what_it_does_to_its_own_library() {
    let env = Env::new();
    let pool = rough(&env, "").await.unwrap();
    let before = pid(&pool).await;
    for (item, output) in [
        // The connection has no time limit, even if other sockets have a default one.
        ("doze", json!(null)),
        ("spawn", json!(0)),
        // The forked copy that returns from `run` sends nothing.
        ("fork", json!(true)),
        ("fork_raise", json!(null)),
        ("fork_amid_progress", json!(null)),
        // No frame follows the last one of its pass, and none goes to another pass.
        ("late", json!(null)),
        ("join", json!(null)),
        ("flush", json!(null)),
    ] {
        assert_eq!(done(&pool, &[item]).await, [output], "{item}");
    }
    // `flush` has replaced standard error, so the traceback is lost.
    let (_, end) = ended(&pool, &["exit"]).await;
    assert!(matches!(end, PassEnd::Failed { .. }), "{end:?}");
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

#[tokio::test]
async fn a_note_that_is_no_text_arrives_and_a_fraction_that_is_no_number_does_not() {
    let env = Env::new();
    let pool = rough(&env, "").await.unwrap();
    let mut pass = run(&pool, &["note"]);
    let mut events = Vec::new();
    while let Some(event) = pass.next().await {
        events.push(event);
    }
    let [PassEvent::Progress { item: 0, fraction, note }, PassEvent::Output { .. }, PassEvent::End(end)] =
        &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((*fraction, note.as_str()), (1.0, "a?b"));
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    env.close(pool).await;
}

#[tokio::test]
async fn an_output_that_the_disk_has_no_room_for_leaves_nothing_there() {
    let env = Env::new();
    let pool = rough(&env, "").await.unwrap();
    let (_, end) = ended(&pool, &["full"]).await;
    let PassEnd::Failed { kind: FailureKind::Model, detail, .. } = end else { panic!("{end:?}") };
    assert!(detail.contains("File too large"), "{detail}");
    let left: Vec<Value> = done(&pool, &["scratch"]).await;
    assert_eq!(left, [json!([])]);
    env.close(pool).await;
}

/// `/dev/full` fails like a kernel limit, or like another full file system.
///
/// The scratch folder is in memory, which has room. The machine's own disk may be nearly full, and would then be blamed.
#[tokio::test]
async fn no_room_on_another_file_system_is_a_failure_of_the_program() {
    let mut env = Env::new();
    env.scratch = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = env.probe("").await;
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["echo a", "write /dev/full", "echo b"]).await;
    let PassEnd::Failed { kind: FailureKind::Model, item: Some(1), detail, .. } = end else {
        panic!("{end:?}")
    };
    assert_eq!(detail, "OSError: [Errno 28] No space left on device");
    assert_eq!(outputs.len(), 1);
    assert_eq!(pid(&pool).await, before);
    env.close(pool).await;
}

/// Whether programs can have a file system of their own here, which nobody else sees. Elsewhere the test says that it did not run.
fn can_mount(env: &Env) -> bool {
    let mount = ["-rm", "mount", "-t", "tmpfs", "none"];
    let tried = Command::new(UNSHARE).args(mount).arg(env.scratch.path()).output();
    let can = tried.as_ref().is_ok_and(|tried| tried.status.success());
    if !can {
        not_run(format!("programs can mount nothing here: {tried:?}"));
    }
    can
}

const UNSHARE: &str = "/usr/bin/unshare";

#[tokio::test]
async fn a_disk_that_is_full_for_the_program_is_no_failure_of_it() {
    let env = Env::new();
    if !can_mount(&env) {
        return;
    }
    // The program's scratch folder is a disk of 1 MiB.
    let serve = "mount -t tmpfs -o size=1m none \"$VRAMQ_SCRATCH\" && exec \"$0\" probe.py";
    let command = [UNSHARE, "-rm", "/bin/sh", "-c", serve, python().to_str().unwrap()];
    let pool = env.start(env.config_of(&command, "")).await.unwrap();
    let before = pid(&pool).await;
    let (outputs, end) = ended(&pool, &["echo a", "fill 2", "echo b"]).await;
    let PassEnd::DiskFull { asked: None, detail } = end else { panic!("{end:?}") };
    for words in ["OSError: [Errno 28] No space left on device", "MiB are free"] {
        assert!(detail.contains(words), "{detail}");
    }
    assert_eq!(outputs.len(), 1);
    assert_eq!(pid(&pool).await, before, "it has no files that are in the way");
    env.close(pool).await;
}

/// As on a full disk: the folder does not take the file of an item.
#[tokio::test]
async fn items_that_cannot_be_written_cost_a_process_only_if_its_files_are_in_the_way() {
    let env = Env::new();
    let pool = env.probe("").await;
    let large = || {
        let items = vec![Item::Bytes { media_type: None, bytes: vec![1; 5 << 20] }];
        pool.run(PassRequest { items, ..PassRequest::default() }).unwrap()
    };
    let refused = async || {
        let (_, end) = large().finish().await;
        let PassEnd::DiskFull { detail, .. } = end else { panic!("{end:?}") };
        assert!(
            detail.starts_with("write the items to the scratch folder: ")
                && detail.contains("they have 5 MiB"),
            "{detail}"
        );
    };
    let runs = async || {
        let (outputs, end) = large().finish().await;
        assert!(matches!(end, PassEnd::Done { .. }) && outputs.len() == 1, "{end:?}");
    };
    let first = done(&pool, &["pid", "scratch"]).await;
    let scratch = Path::new(first[1].as_str().unwrap());
    // A folder has the name of the second pass's file.
    std::fs::create_dir(scratch.join("input-2-0")).unwrap();
    refused().await;
    assert_eq!(json!(pid(&pool).await), first[0], "another process would have no more room");
    std::fs::create_dir(scratch.join("input-4-0")).unwrap();
    std::fs::write(scratch.join("cache"), vec![1; 6 << 20]).unwrap();
    refused().await;
    runs().await;
    let second = done(&pool, &["pid", "scratch"]).await;
    assert_ne!(second[0], first[0]);
    assert!(!scratch.exists());
    // As a cleaner of temporary folders does.
    std::fs::remove_dir_all(second[1].as_str().unwrap()).unwrap();
    // Small items need no file.
    assert_eq!(json!(pid(&pool).await), second[0]);
    refused().await;
    runs().await;
    env.close(pool).await;
}

#[tokio::test]
async fn mistakes_in_load_are_reported_or_harmless() {
    let env = Env::new();
    for (load, said) in [
        ("exit", "SystemExit: no such option: --models"),
        (
            "no-model",
            "TypeError: vramq.serve takes a class derived from vramq.Model, or an object of one; it got NoModel",
        ),
        ("no-run", "NotImplementedError: NoRun has no run(self, items, params)"),
        (
            "no-params",
            "TypeError: NoParams.run is called as run(items, params): too many positional arguments",
        ),
        ("no-device", "TypeError: NoDevice.load is called as load(device): too many positional arguments"),
    ] {
        let error = rough(&env, load).await.unwrap_err();
        assert!(matches!(&error, LoadError::Failed { detail, .. } if detail == said), "{load}: {error:?}");
    }
    let error = rough(&env, "not-served").await.unwrap_err().to_string();
    let said = "the program exited with status 0 before the model was loaded: it did not serve one";
    assert!(error.starts_with(said), "{error}");
    let pool = rough(&env, "weights").await.unwrap();
    pid(&pool).await;
    env.close(pool).await;
    let pool = rough(&env, "progress").await.unwrap();
    pid(&pool).await;
    env.close(pool).await;
    let pool = rough(&env, "accepts").await.unwrap();
    assert_eq!(serde_json::to_value(pool.accepts()).unwrap(), json!(["text"]));
    env.close(pool).await;
}

#[tokio::test]
async fn a_handler_of_sigterm_ends_the_process_as_it_says() {
    let env = Env::new();
    let pool = rough(&env, "handler").await.unwrap();
    let process = Pid::from_raw(pid(&pool).await).unwrap();
    let pass = run(&pool, &["sleep"]);
    until("it runs", || pool.status().slots[0].state.as_str() == "running").await;
    kill_process(process, Signal::TERM).unwrap();
    let (_, end) = pass.finish().await;
    assert!(matches!(end, PassEnd::Crashed { death: Death::Exited(1), .. }), "{end:?}");
    env.close(pool).await;
}
