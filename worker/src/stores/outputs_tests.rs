//! Tests of large outputs: which are written, under which names, and what happens to those that cannot be.

use std::path::Path;
use std::pin::pin;

use futures_util::poll;
use vramq_schemas::BODY_BYTES_MAX;
use vramq_stores::reference::Reference;

use super::super::abandoned::{OfJob, OfThread};
use super::*;
use crate::run_outputs::RunOutputs;

fn store(folder: &Path, url: &str) -> Arc<OutputStore> {
    let destination = Destination::Folder(folder.to_owned());
    let write_max = Duration::from_secs(60);
    OutputStore::new(&OutputConfig { destination, url: url.parse().unwrap(), above: 4, write_max })
}

fn bytes(bytes: &[u8]) -> Output {
    Output::Bytes { media_type: "image/png; a=\"b&c\"".to_owned(), bytes: bytes.to_vec() }
}

fn in_a_minute() -> OutputReply {
    OutputReply { encoding: Encoding::Json, until: Instant::now() + Duration::from_secs(60) }
}

async fn stored(store: &OutputStore, owner: &OutputOwner, index: u32, output: Output) -> String {
    match store.offer(owner, index, output, in_a_minute()).await.unwrap() {
        Offered { output: Output::Uri(uri), unwritten: None } => uri,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn only_large_outputs_are_written_to_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), "https://files.example.com/out/");
    let owner = OutputOwner::new("m", Some("a"), "job");
    let small = store.offer(&owner, 0, bytes(b"1234"), in_a_minute()).await.unwrap();
    assert_eq!(small.output, bytes(b"1234"));
    let uri = stored(&store, &owner, 7, bytes(b"12345")).await;
    let reference = Reference::parse(&uri).unwrap();
    assert!(uri.starts_with("https://files.example.com/out/") && uri.contains("-7#sha256="), "{uri}");
    assert!(uri.ends_with("&type=image/png;%20a=%22b%26c%22"), "{uri}");
    let written = std::fs::read(folder.path().join(owner.name(7))).unwrap();
    assert_eq!((reference.check(&written), &written[..]), (Ok(()), &b"12345"[..]));
    let json = serde_json::json!({"b": [1, 2]});
    let uri = stored(&store, &owner, 8, Output::Json(json)).await;
    assert!(uri.ends_with("&type=application/json"), "{uri}");
    assert_eq!(std::fs::read(folder.path().join(owner.name(8))).unwrap(), br#"{"b":[1,2]}"#);
    assert!(uri.len() as u64 <= "https://files.example.com/out/".len() as u64 + REFERENCE_BYTES);
}

#[tokio::test]
async fn a_job_writes_over_its_own_files_and_over_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path(), "file:///srv/out");
    let owner = |caller, id| OutputOwner::new("m", caller, id);
    let first = stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first")).await;
    assert_eq!(stored(&store, &owner(Some("a"), "job"), 0, bytes(b"first")).await, first);
    for (caller, id) in
        [(None, "job"), (Some("b"), "job"), (Some("a"), "job2"), (Some("aj"), "ob"), (None, "ajob")]
    {
        let name = |uri: &str| uri.split('#').next().unwrap().to_owned();
        let other = stored(&store, &owner(caller, id), 0, bytes(b"other")).await;
        assert_ne!(name(&other), name(&first));
    }
    let path = Reference::parse(&first).unwrap().segments.pop().unwrap();
    let path = folder.path().join(String::from_utf8(path).unwrap());
    assert_eq!(std::fs::read(path).unwrap(), b"first");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 6);
}

#[tokio::test]
async fn an_output_that_cannot_be_written_goes_with_its_reply() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(&folder.path().join("missing"), "file:///srv/out");
    let owner = OutputOwner::new("m", None, "job");
    for output in [bytes(b"12345"), Output::Json(serde_json::json!([1, 2, 3, 4]))] {
        let offered = store.offer(&owner, 0, output.clone(), in_a_minute()).await.unwrap();
        assert_eq!(offered.output, output);
        assert!(offered.unwritten.is_some_and(|why| why.contains("No such file")));
    }
}

/// Waits for what must not wait for the folder.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(60), work).await.expect("it waits for the folder")
}

/// A store whose places for writes are taken, and the writes in them, which hang. The permits are those of their threads.
async fn taken(
    folder: &Path,
    write_max: Duration,
) -> (Arc<OutputStore>, OwnedSemaphorePermit, Vec<OfJob>, Vec<OfThread>) {
    let (destination, url) = (Destination::Folder(folder.to_owned()), "file:///srv/out".parse().unwrap());
    let store = OutputStore::new(&OutputConfig { destination, url, above: 4, write_max });
    let permits = Arc::clone(&store.writes).acquire_many_owned(WRITES_MAX as u32).await.unwrap();
    let (of_jobs, of_threads) = (0..WRITES_MAX).map(|_| store.abandoned.begin()).unzip();
    (store, permits, of_jobs, of_threads)
}

#[tokio::test]
async fn an_output_that_is_not_written_in_time_goes_with_its_reply() {
    let folder = tempfile::tempdir().unwrap();
    let (store, permits, of_jobs, of_threads) = taken(folder.path(), Duration::from_millis(1)).await;
    let owner = OutputOwner::new("m", None, "job");
    let unwritten = async |output: Output| {
        let offered = store.offer(&owner, 0, output.clone(), in_a_minute()).await.unwrap();
        assert_eq!(offered.output, output);
        offered.unwritten.expect("it is not written")
    };
    let late = "others took longer than 10ms (10 × timeout_s)";
    assert_eq!(unwritten(bytes(b"12345")).await, late);
    // Their jobs have given them up: the folder hangs, and outputs that fit a reply do not wait for it.
    drop(of_jobs);
    assert_eq!(unwritten(bytes(b"12345")).await, "16 earlier writes have not ended");
    assert_eq!(unwritten(bytes(&vec![0; BODY_BYTES_MAX])).await, late);
    drop((of_threads, permits));
    assert!(!store.hangs());
}

/// All threads for writes are taken, and for minutes nobody gives up.
#[tokio::test]
async fn an_output_whose_job_has_no_time_left_goes_with_its_reply() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _permits, _of_jobs, _of_threads) = taken(folder.path(), Duration::from_secs(60)).await;
    let owner = OutputOwner::new("m", None, "job");
    let reply = OutputReply { until: Instant::now(), ..in_a_minute() };
    let offered = in_time(store.offer(&owner, 0, bytes(b"12345"), reply)).await.unwrap();
    assert_eq!(offered.output, bytes(b"12345"));
    assert_eq!(offered.unwritten.as_deref(), Some(NO_TIME_LEFT));
}

#[tokio::test]
async fn an_output_that_waits_when_the_folder_begins_to_hang_waits_no_longer() {
    let folder = tempfile::tempdir().unwrap();
    // With this limit it would wait for ten minutes.
    let (store, _permits, of_jobs, _of_threads) = taken(folder.path(), Duration::from_secs(60)).await;
    let prepared = Prepared::of(bytes(b"12345"), 4).unwrap();
    let mut write = pin!(store.write_unless_hung("name", &prepared, false));
    assert!(poll!(write.as_mut()).is_pending());
    drop(of_jobs);
    assert_eq!(in_time(write).await, None);
}

/// The first output goes with the reply at once. The second one would end the job.
#[tokio::test]
async fn an_output_that_fits_no_reply_waits_for_the_folder_also_after_one_that_did_not_wait() {
    let folder = tempfile::tempdir().unwrap();
    let (store, permits, of_jobs, of_threads) = taken(folder.path(), Duration::from_secs(60)).await;
    drop(of_jobs);
    let outputs = vec![bytes(b"12345"), bytes(&vec![0; BODY_BYTES_MAX])];
    let owner = OutputOwner::new("m", None, "job");
    let stored = RunOutputs { outputs, tokens: None }.stored(0, &store, &owner, in_a_minute());
    let mut stored = pin!(stored);
    assert!(poll!(stored.as_mut()).is_pending());
    drop((of_threads, permits));
    let (run, unwritten) = stored.await.unwrap();
    assert!(matches!(run.outputs[..], [Output::Bytes { .. }, Output::Uri(_)]));
    assert_eq!(unwritten.as_deref(), Some("16 earlier writes have not ended"));
}

#[tokio::test]
async fn the_log_says_once_that_a_folder_hangs_and_once_that_it_works_again() {
    let folder = tempfile::tempdir().unwrap();
    let (store, permits, of_jobs, of_threads) = taken(folder.path(), Duration::from_secs(60)).await;
    drop(of_jobs);
    let said = || store.is_said_to_hang.load(Ordering::Relaxed);
    let owner = OutputOwner::new("m", None, "job");
    store.offer(&owner, 0, bytes(b"12345"), in_a_minute()).await.unwrap();
    assert!(said());
    drop((of_threads, permits));
    stored(&store, &owner, 0, bytes(b"12345")).await;
    assert!(!said());
}

#[test]
fn a_reply_with_references_is_small() {
    let store = store(Path::new("/srv/out"), "file:///srv/out");
    assert_eq!(store.bound(OutputMax::Bytes(4)), OutputMax::Bytes(4));
    assert!(matches!(store.bound(OutputMax::Bytes(1 << 30)), OutputMax::Uri(bytes) if bytes < 1100));
}
