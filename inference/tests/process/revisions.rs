//! The revision of a program's model: which changes of the model it shows.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use serde_json::json;
use vramq_inference::process::{Covers, NotTaken, PassEnd, Pool};
use vramq_schemas::Output;

use crate::env::{Env, done, ended, json, pid, python, run, state, texts, until};

/// The revision with these weights, and what it covers; of a process that was just loaded.
async fn revision(env: &Env, weights: &Path, content: &str, more: &str) -> (String, Covers) {
    std::fs::write(weights, content).unwrap();
    let pool = env.start(env.config("raw.py", more)).await.unwrap();
    let revision = (pool.revision(), pool.revision_covers());
    env.close(pool).await;
    revision
}

#[tokio::test]
async fn files_that_are_named_count_by_their_content() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let named = format!("revision_files = [{weights:?}]");
    let (one, covers) = revision(&env, &weights, "one", &named).await;
    assert_eq!((covers, &one[..8]), (Covers::Files(1), "program-"));
    assert_ne!(revision(&env, &weights, "two", &named).await.0, one);
    assert_eq!(revision(&env, &weights, "one", &named).await.0, one);
    // Where they are does not matter.
    let elsewhere = folder.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let there = format!("revision_files = [{:?}]", elsewhere.join("weights"));
    assert_eq!(revision(&env, &elsewhere.join("weights"), "one", &there).await.0, one);
    // Without the key nobody knows of them, and the worker says so.
    let (without, covers) = revision(&env, &weights, "one", "").await;
    assert_eq!(covers, Covers::Program);
    assert!(covers.to_string().contains("other weights do not change it: set revision_files"), "{covers}");
    assert_eq!(revision(&env, &weights, "two", "").await.0, without);
    assert_ne!(without, one);
}

#[tokio::test]
async fn the_revision_that_a_program_reports_counts_beside_its_files() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    // In a file: variables count for the revision, too.
    let says = |said: &str| {
        let ready = json!({"instead": 0, "header": {"type": "ready", "version": 1, "revision": said}});
        std::fs::write(folder.path().join("says"), ready.to_string()).unwrap();
        format!("env = {{ WISH_READY = {:?} }}", folder.path().join("says"))
    };
    let named = |said: &str| format!("{}\nrevision_files = [{weights:?}]", says(said));
    let keys = says("f16-mine");
    assert_eq!(revision(&env, &weights, "one", &keys).await, ("f16-mine".to_owned(), Covers::Said));
    let keys = named("f16-mine");
    let (mine, covers) = revision(&env, &weights, "one", &keys).await;
    assert_eq!(covers, Covers::Files(1));
    assert_ne!(revision(&env, &weights, "two", &keys).await.0, mine);
    let keys = named("f32-mine");
    assert_ne!(revision(&env, &weights, "one", &keys).await.0, mine);
    let keys = named("f16-mine");
    assert_eq!(revision(&env, &weights, "one", &keys).await.0, mine);
}

/// The weights are exchanged under a worker that runs. Which process loads them next is chance, so none serves.
#[tokio::test]
async fn a_process_with_another_revision_than_those_before_it_does_not_serve() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    std::fs::write(&weights, "one").unwrap();
    let pool = env.start(env.config("raw.py", &format!("revision_files = [{weights:?}]"))).await.unwrap();
    let one = pool.revision();
    replace(&pool).await;
    assert_eq!(pool.revision(), one);
    std::fs::write(&weights, "two").unwrap();
    // The process that is loaded has the old ones.
    done(&pool, &["{}"]).await;
    assert_eq!((pool.revision(), pool.other_revision()), (one.clone(), None));
    kill(&pool).await;
    let (_, end) = ended(&pool, &["{}"]).await;
    let two = pool.other_revision().expect("it has another revision");
    let said = format!("the model has the revision {two} by now, and this worker serves {one}: ");
    assert!(matches!(&end, PassEnd::NotRun { reason } if reason.starts_with(&said)), "{end:?}");
    assert_eq!((pool.revision(), &pool.status().slots[0].starts), (one.clone(), &2));
    env.close(pool).await;
    let pool = env.start(env.config("raw.py", &format!("revision_files = [{weights:?}]"))).await.unwrap();
    assert_eq!((pool.revision(), pool.other_revision()), (two, None));
    // Files that are gone are said, and nothing runs under a revision that nobody knows.
    std::fs::remove_file(&weights).unwrap();
    kill(&pool).await;
    let (_, end) = ended(&pool, &["{}"]).await;
    assert!(
        matches!(&end, PassEnd::NotRun { reason } if reason.contains("(revision_files): No such file")),
        "{end:?}"
    );
    env.close(pool).await;
}

/// What the process that is loaded answers stays under its revision.
#[tokio::test]
async fn a_second_process_with_another_revision_does_not_serve_beside_the_first() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let (weights, gate) = (folder.path().join("weights"), folder.path().join("gate"));
    std::fs::write(&weights, "one").unwrap();
    let pool = env.probe(&format!("instances = 2\nrevision_files = [{weights:?}]")).await;
    let (one, first) = (pool.revision(), pid(&pool).await);
    let busy = run(&pool, &[&format!("until {}", gate.display())]);
    until("it runs", || state(&pool, 0) == "running").await;
    std::fs::write(&weights, "two").unwrap();
    let beside = run(&pool, &["pid"]);
    until("the second process has another revision", || pool.other_revision().is_some()).await;
    assert_eq!(pool.revision(), one);
    std::fs::write(&gate, "").unwrap();
    assert!(matches!(busy.finish().await.1, PassEnd::Done { .. }));
    let (outputs, end) = beside.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    assert_eq!(outputs.into_iter().map(json).collect::<Vec<_>>(), [json!(first)]);
    assert_eq!(pool.status().slots[1].starts, 0);
    env.close(pool).await;
}

async fn replace(pool: &Pool) {
    kill(pool).await;
    done(pool, &["{}"]).await;
}

async fn kill(pool: &Pool) {
    let (_, end) = ended(pool, &[&json!({"die": 0}).to_string()]).await;
    assert!(matches!(end, PassEnd::Crashed { .. }), "{end:?}");
}

/// Programs that are started for each item: their files are read when the worker starts, and when they have changed.
#[tokio::test]
async fn a_one_shot_program_has_the_revision_of_its_files_at_the_start() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let mut revisions = Vec::new();
    for content in ["one", "two"] {
        std::fs::write(&weights, content).unwrap();
        let more = format!("mode = \"once\"\nrevision_files = [{weights:?}]");
        let pool = env.start(env.config_of(&["/bin/cat", "{input}"], &more)).await.unwrap();
        revisions.push(pool.revision());
        assert_eq!(pool.revision_covers(), Covers::Files(1));
        env.close(pool).await;
    }
    assert_ne!(revisions[0], revisions[1]);
}

fn text(output: Output) -> String {
    match output {
        Output::Bytes { bytes, .. } => String::from_utf8(bytes).unwrap(),
        other => panic!("no bytes: {other:?}"),
    }
}

/// What a program prints for an item.
async fn printed(pool: &Pool, item: &str) -> String {
    let (outputs, end) = ended(pool, &[item]).await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    outputs.into_iter().map(text).collect()
}

/// The program is exchanged under a worker that runs. A pass that has begun goes on to its next item, and no program is started for that.
#[tokio::test]
async fn a_one_shot_program_that_was_exchanged_does_not_run() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let (script, gate) = (folder.path().join("script"), folder.path().join("gate"));
    let write = |version: u32| {
        let gate = gate.display();
        let waits = format!("while test -e {gate}; do : > {gate}.seen; sleep 0.01; done");
        let new = folder.path().join("new");
        std::fs::write(&new, format!("cat $1; echo {version}; {waits}")).unwrap();
        std::fs::rename(new, &script).unwrap();
    };
    write(1);
    let command = ["/bin/sh", script.to_str().unwrap(), "{input}"];
    let more = "mode = \"once\"\ninstances = 2";
    let pool = env.start(env.config_of(&command, more)).await.unwrap();
    let one = pool.revision();
    assert_eq!(printed(&pool, "a").await, "a1\n");
    // Another file with the same content is the same revision.
    write(1);
    assert_eq!((printed(&pool, "b").await.as_str(), pool.other_revision()), ("b1\n", None));
    // A pass runs when the program is exchanged. The output that it has is of the old program.
    std::fs::write(&gate, "").unwrap();
    let busy = run(&pool, &["c", "d"]);
    until("the program runs", || gate.with_extension("seen").exists()).await;
    write(2);
    let refused = run(&pool, &["e"]);
    until("the exchange is noticed", || pool.other_revision().is_some()).await;
    let refused = refused.finish().await;
    let two = pool.other_revision().expect("it has another revision");
    let said = format!("the model has the revision {two} by now, and this worker serves {one}: ");
    let names = format!("; exchanged: {}", script.display());
    let is_refused = |end: &PassEnd| match end {
        PassEnd::NotRun { reason } => reason.starts_with(&said) && reason.ends_with(&names),
        _ => false,
    };
    assert!(refused.0.is_empty() && is_refused(&refused.1), "{:?}", refused.1);
    assert!(
        matches!(pool.run(texts(&["f"])), Err(NotTaken::Unavailable(reason)) if reason.starts_with(&said))
    );
    std::fs::remove_file(&gate).unwrap();
    let (outputs, end) = busy.finish().await;
    assert!(is_refused(&end), "{end:?}");
    assert_eq!(outputs.into_iter().map(text).collect::<Vec<_>>(), ["c1\n"]);
    assert_eq!(pool.revision(), one);
    env.close(pool).await;
    let pool = env.start(env.config_of(&command, more)).await.unwrap();
    assert_eq!((pool.revision(), printed(&pool, "g").await.as_str()), (two, "g2\n"));
    env.close(pool).await;
}

/// A one-shot program with these weights as its `revision_files`.
async fn with_weights(env: &Env, weights: &Path, more: &str) -> Pool {
    std::fs::write(weights, "one").unwrap();
    let more = format!("mode = \"once\"\nrevision_files = [{weights:?}]\n{more}");
    env.start(env.config_of(&["/bin/cat", "{input}"], &more)).await.unwrap()
}

#[tokio::test]
async fn an_exchange_that_keeps_size_and_time_is_noticed() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let pool = with_weights(&env, &weights, "").await;
    assert_eq!(printed(&pool, "a").await, "a");
    let time = weights.metadata().unwrap().modified().unwrap();
    std::fs::write(&weights, "two").unwrap();
    let file = std::fs::File::options().write(true).open(&weights).unwrap();
    file.set_times(std::fs::FileTimes::new().set_modified(time)).unwrap();
    let (outputs, end) = ended(&pool, &["b"]).await;
    assert!(outputs.is_empty() && matches!(end, PassEnd::NotRun { .. }), "{end:?}");
    assert!(pool.other_revision().is_some());
    env.close(pool).await;
}

/// As by `rm` and `cp`: the program waits for the file, and the worker is not restarted.
#[tokio::test]
async fn a_file_that_is_removed_and_put_back_is_the_same_revision() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let pool = with_weights(&env, &weights, "").await;
    std::fs::remove_file(&weights).unwrap();
    let (_, end) = ended(&pool, &["a"]).await;
    assert!(
        matches!(&end, PassEnd::NotRun { reason } if reason.contains("(revision_files): No such file")),
        "{end:?}"
    );
    std::fs::write(&weights, "one").unwrap();
    until("it is tried again", || pool.status().unavailable.is_none()).await;
    assert_eq!((printed(&pool, "b").await.as_str(), pool.other_revision()), ("b", None));
    env.close(pool).await;
}

/// Makes opening a file hang, as on a file system that does not answer: until this is dropped, or for 45 s, the kernel's default.
struct Hang(Child);

impl Hang {
    fn of(file: &Path) -> Self {
        let code = "import fcntl, signal, sys\nsignal.signal(signal.SIGIO, signal.SIG_IGN)\nfile = open(sys.argv[1], 'r+')\n\
                    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\nprint('held', flush=True)\nsys.stdin.read()";
        let mut command = Command::new(python());
        command.args(["-c", code]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        Self(holder)
    }

    /// Whether a program or thread waits for the file.
    fn is_waited_for(&self) -> bool {
        let holder = format!(" {} ", self.0.id());
        let locks = std::fs::read_to_string("/proc/locks").unwrap();
        locks.lines().any(|lock| lock.contains("BREAKING") && lock.contains(&holder))
    }
}

impl Drop for Hang {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Makes a file one that has to be read again, with the same content. Its time is not left to the kernel: older ones give a write so soon after
/// another one the same time.
fn touch(file: &Path) {
    let file = std::fs::File::options().append(true).open(file).unwrap();
    file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
}

#[tokio::test]
async fn a_file_that_cannot_be_read_holds_no_pass_for_longer_than_a_program_may() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let pool = with_weights(&env, &weights, "item_s = 3").await;
    touch(&weights);
    let hang = Hang::of(&weights);
    let (_, end) = ended(&pool, &["a"]).await;
    assert!(matches!(&end, PassEnd::NotRun { reason } if reason.contains("longer than 3 s")), "{end:?}");
    drop(hang);
    until("it is tried again", || pool.status().unavailable.is_none()).await;
    assert_eq!((printed(&pool, "b").await.as_str(), pool.other_revision()), ("b", None));
    env.close(pool).await;
}

#[tokio::test]
async fn a_pass_ends_while_such_a_file_is_read_for_another_one() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let [weights, script, gate] = ["weights", "script", "gate"].map(|name| folder.path().join(name));
    std::fs::write(&weights, "one").unwrap();
    let waits = format!("while test -e {0}; do : > {0}.seen; sleep 0.01; done", gate.display());
    std::fs::write(&script, format!("{waits}; cat $1")).unwrap();
    let command = ["/bin/sh", script.to_str().unwrap(), "{input}"];
    let more = format!("mode = \"once\"\ninstances = 2\nrevision_files = [{weights:?}]");
    let pool = env.start(env.config_of(&command, &more)).await.unwrap();
    std::fs::write(&gate, "").unwrap();
    let busy = run(&pool, &["a"]);
    until("the program runs", || gate.with_extension("seen").exists()).await;
    touch(&weights);
    let hang = Hang::of(&weights);
    let next = run(&pool, &["b"]);
    until("the file is read", || hang.is_waited_for()).await;
    std::fs::remove_file(&gate).unwrap();
    let (_, end) = busy.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    assert!(hang.is_waited_for(), "the pass waited for the file");
    drop(hang);
    let (_, end) = next.finish().await;
    assert!(matches!(end, PassEnd::Done { .. }), "{end:?}");
    env.close(pool).await;
}

#[tokio::test]
async fn a_file_that_the_program_writes_does_not_stop_it() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let [script, cache] = ["script", "cache"].map(|name| folder.path().join(name));
    std::fs::write(&script, "cat $2; echo $2 >> $1").unwrap();
    std::fs::write(&cache, "").unwrap();
    let command = ["/bin/sh", script.to_str().unwrap(), cache.to_str().unwrap(), "{input}"];
    let pool = env.start(env.config_of(&command, "mode = \"once\"")).await.unwrap();
    for item in ["a", "b"] {
        assert_eq!((printed(&pool, item).await.as_str(), pool.other_revision()), (item, None));
    }
    assert_eq!(std::fs::read_to_string(&cache).unwrap().lines().count(), 2);
    env.close(pool).await;
}

/// A file that would be read for minutes.
#[tokio::test]
async fn a_pass_can_be_cancelled_while_files_are_read() {
    let (env, folder) = (Env::new(), tempfile::tempdir().unwrap());
    let weights = folder.path().join("weights");
    let pool = with_weights(&env, &weights, "").await;
    let file = std::fs::File::options().write(true).open(&weights).unwrap();
    file.set_len(1 << 36).unwrap();
    let read = run(&pool, &["a"]);
    until("it runs", || state(&pool, 0) == "running").await;
    read.cancel();
    let (_, end) = read.finish().await;
    assert_eq!(end, PassEnd::Cancelled { killed: false });
    let read = run(&pool, &["b"]);
    until("it runs", || state(&pool, 0) == "running").await;
    env.close(pool).await;
    let (_, end) = read.finish().await;
    assert_eq!(end, PassEnd::Cancelled { killed: false });
    // The reader comes to the end.
    file.set_len(0).unwrap();
}
