//! Tests of fetching references: limits of bytes and time, and what waits for what.

use std::path::Path;
use std::pin::pin;

use futures_util::poll;
use tempfile::TempDir;
use tokio::net::TcpListener;

use super::super::StoreConfig;
use super::*;

const KIB: u64 = 1024;

/// Stores of a folder's subfolders `a` and `b`, each with a file `large` of 8 KiB and a file `small` of 10 bytes, with 32 KiB of
/// memory.
fn stores() -> (Stores, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let config = |name: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("large"), [7; 8 * KIB as usize]).unwrap();
        std::fs::write(path.join("small"), [7; 10]).unwrap();
        StoreConfig {
            name: name.to_owned(),
            prefix: url(&path).parse().unwrap(),
            is_private: false,
            cloud: None,
            object_max: 16 * KIB,
            timeout: Duration::from_secs(60),
        }
    };
    let stores = Stores::new(&["a", "b"].map(config), 32 * KIB);
    (stores, folder)
}

fn url(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// A server that takes connections and never answers, a store on it, and the address of an object there.
async fn silent_store(object_max: u64) -> (TcpListener, StoreConfig, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let config = StoreConfig {
        name: "silent".to_owned(),
        prefix: url.parse().unwrap(),
        is_private: true,
        cloud: None,
        object_max,
        timeout: Duration::from_secs(60),
    };
    (listener, config, format!("{url}x"))
}

fn wanted(stores: &Stores, folder: &TempDir, paths: &[&str]) -> Vec<Wanted> {
    let find = |(item, path): (usize, &&str)| stores.find(item, &url(&folder.path().join(path))).unwrap();
    paths.iter().enumerate().map(find).collect()
}

/// The end of a fetch that ends before.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn free(stores: &Stores) -> u64 {
    stores.memory.available_permits() as u64 * MEMORY_UNIT
}

#[tokio::test]
async fn a_job_keeps_the_memory_that_its_inputs_take_and_no_more() {
    let (stores, folder) = stores();
    let fetched =
        stores.fetch(wanted(&stores, &folder, &["a/small", "b/large"]), 64 * KIB, later()).await.unwrap();
    assert_eq!(
        fetched.inputs.iter().map(|(item, bytes)| (*item, bytes.len())).collect::<Vec<_>>(),
        [(0, 10), (1, 8192)]
    );
    // 8,202 bytes are nine units.
    assert_eq!(free(&stores), 32 * KIB - 9 * KIB);
    drop(fetched);
    assert_eq!(free(&stores), 32 * KIB);
    for store in &stores.stores {
        assert_eq!(store.memory.available_permits() as u64 * MEMORY_UNIT, 16 * KIB);
    }
}

#[tokio::test]
async fn inputs_that_exceed_the_jobs_bound_are_not_kept() {
    let (stores, folder) = stores();
    let fault =
        stores.fetch(wanted(&stores, &folder, &["a/large", "b/large"]), 12 * KIB, later()).await.unwrap_err();
    assert_eq!((fault.rejection.reason, fault.is_transient), (Reason::TooLarge, false));
    assert!(fault.rejection.error.contains("fetch_mib_max"), "{fault:?}");
    let fault = stores.fetch(wanted(&stores, &folder, &["a/none"]), 12 * KIB, later()).await.unwrap_err();
    assert_eq!((fault.rejection.reason, fault.is_transient), (Reason::ReferenceMissing, false));
    assert_eq!(free(&stores), 32 * KIB);
}

/// A job may be held for less than a fetch may take.
#[tokio::test]
async fn a_fetch_ends_with_the_time_of_its_job_and_names_the_stores_that_did_not_answer() {
    let (_listener, silent, url) = silent_store(16 * KIB).await;
    let stores = Stores::new(&[silent], 32 * KIB);
    let wanted = vec![stores.find(0, &url).unwrap()];
    let may_take = Duration::from_millis(10);
    let fault = stores.fetch(wanted, 64 * KIB, Instant::now() + may_take).await.unwrap_err();
    assert_eq!((fault.is_transient, &fault.stores[..]), (true, &[StoreIndex(0)][..]));
    assert!(fault.took <= may_take, "{fault:?}");
    assert!(fault.rejection.error.ends_with("within 0 s; stores that did not answer: silent"), "{fault:?}");
}

#[tokio::test]
async fn a_job_waits_for_the_memory_of_those_before_it() {
    let (stores, folder) = stores();
    let large = || wanted(&stores, &folder, &["a/large", "a/large"]);
    let (first, second) =
        (stores.fetch(large(), 64 * KIB, later()).await.unwrap(), stores.fetch(large(), 64 * KIB, later()));
    let mut second = pin!(second);
    assert_eq!(free(&stores), 16 * KIB);
    let third = stores.fetch(wanted(&stores, &folder, &["b/large"]), 17 * KIB, later());
    let mut third = pin!(third);
    // The second job takes its bound, 32 KiB, of which 16 are free; the third comes after it.
    assert!(poll!(second.as_mut()).is_pending() && poll!(third.as_mut()).is_pending());
    drop(first);
    assert_eq!(second.await.unwrap().inputs.len(), 2);
    assert_eq!(third.await.unwrap().inputs.len(), 1);
}

/// Otherwise further jobs for a folder that hangs would not count as such.
#[tokio::test]
async fn a_job_that_waits_for_memory_names_the_stores_whose_reads_hang() {
    let (listener, silent, url) = silent_store(16 * KIB).await;
    let stores = Stores::new(&[silent], 16 * KIB);
    let wanted = || vec![stores.find(0, &url).unwrap()];
    let mut first = Box::pin(stores.fetch(wanted(), 64 * KIB, later()));
    let _connection = tokio::select! {
        first = &mut first => panic!("{first:?}"),
        accepted = listener.accept() => accepted.unwrap(),
    };
    let no_time = || stores.fetch(wanted(), 64 * KIB, Instant::now());
    let fault = no_time().await.unwrap_err();
    assert!(fault.is_transient && fault.stores.is_empty(), "another job waits for its input: {fault:?}");
    // Its read goes on, and keeps the memory.
    drop(first);
    let fault = no_time().await.unwrap_err();
    assert_eq!((fault.is_transient, &fault.stores[..]), (true, &[StoreIndex(0)][..]), "{fault:?}");
    let taken =
        "the host memory for fetched inputs (worker.fetch_mib) is taken; stores that did not answer: silent";
    assert!(fault.rejection.error.ends_with(taken), "{fault:?}");
}

#[tokio::test]
async fn a_store_that_does_not_answer_leaves_the_others_their_part() {
    let (stores, folder) = stores();
    // As jobs do whose store does not answer.
    let [hung, _] = &stores.stores[..] else { panic!("two stores") };
    let memory = Arc::clone(&hung.memory).acquire_many_owned(hung.memory_max).await.unwrap();
    let waiting = stores.fetch(wanted(&stores, &folder, &["a/small"]), 8 * KIB, later());
    let mut waiting = pin!(waiting);
    assert!(poll!(waiting.as_mut()).is_pending());
    let other = stores.fetch(wanted(&stores, &folder, &["b/small"]), 8 * KIB, later()).await.unwrap();
    assert_eq!(other.inputs.len(), 1);
    drop(memory);
    assert_eq!(waiting.await.unwrap().inputs.len(), 1);
}

/// As when a folder hangs: the job's time is over, or it is withdrawn, and its read goes on.
#[tokio::test]
async fn a_read_that_its_job_has_given_up_keeps_memory_for_its_object_of_its_stores_part() {
    let (listener, silent, url) = silent_store(4 * KIB).await;
    let other = StoreConfig {
        name: "other".to_owned(),
        prefix: "file:///srv/in".parse().unwrap(),
        is_private: false,
        ..silent.clone()
    };
    let stores = Stores::new(&[silent, other], 32 * KIB);
    let of_both = ["file:///srv/in/x", &url].map(|text| stores.find(0, text).unwrap());
    let [silent, other] = &stores.stores[..] else { panic!("two stores") };
    let left = |store: &Store| store.memory.available_permits() as u64 * MEMORY_UNIT;

    // Only the input of the silent store is read; the other one's part is reserved with it.
    let held = stores.reserve(&of_both, 8 * KIB).await.unwrap();
    assert_eq!((left(silent), left(other), free(&stores)), (8 * KIB, 8 * KIB, 24 * KIB));
    let [_, wanted] = of_both;
    let (part, reservation) = (held.part(silent.index), Arc::clone(&held.reservation));
    let mut read = Box::pin(fetch_one(wanted, part, reservation, 8 * KIB));
    let connection = tokio::select! {
        read = &mut read => panic!("{read:?}"),
        accepted = listener.accept() => accepted.unwrap(),
    };
    assert!(!silent.has_abandoned_reads(), "its job waits");
    drop(read);
    drop(held);
    assert!(silent.has_abandoned_reads() && !other.has_abandoned_reads());
    assert_eq!((left(silent), left(other), free(&stores)), (12 * KIB, 16 * KIB, 28 * KIB));

    drop((listener, connection));
    let ended = async {
        while free(&stores) < 32 * KIB {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), ended).await.expect("the read did not end");
    assert!(!silent.has_abandoned_reads());
    assert_eq!((left(silent), left(other)), (16 * KIB, 16 * KIB));
}
