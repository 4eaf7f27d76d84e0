//! Tests of uploaded files.

use object_store::memory::InMemory;

use super::*;
use crate::background_work::BackgroundWork;
use crate::until::until;

fn settings(folder: &std::path::Path, is_own: bool) -> Files {
    Files {
        place: Place::Folder(folder.to_owned()),
        is_own,
        file_bytes: 10,
        total_bytes: 16,
        owner_bytes: 12,
        keep: Duration::from_secs(60),
    }
}

async fn store(folder: &std::path::Path) -> FileStore {
    FileStore::open(settings(folder, false)).await.unwrap()
}

#[tokio::test]
async fn nobody_else_looks_into_the_default_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (is_there, is_new) = (folder.path().join("there"), folder.path().join("new/uploads"));
    std::fs::create_dir(&is_there).unwrap();
    std::fs::set_permissions(&is_there, std::fs::Permissions::from_mode(0o755)).unwrap();
    for own in [is_there, is_new] {
        FileStore::open(settings(&own, true)).await.unwrap();
        assert_eq!(std::fs::metadata(&own).unwrap().permissions().mode() & 0o777, 0o700);
    }
    let homeless = FileStore::open(settings(std::path::Path::new(""), true)).await.unwrap_err();
    assert!(homeless.contains("XDG_STATE_HOME"), "{homeless}");
}

fn pieces(texts: &[&'static str]) -> impl Stream<Item = Result<Bytes, Problem>> + use<> {
    let pieces: Vec<_> = texts.iter().map(|text| Ok(Bytes::from_static(text.as_bytes()))).collect();
    stream::iter(pieces)
}

/// Bytes that are there, and that are coming.
fn counted(store: &FileStore) -> (u64, u64) {
    let sum = store.used.sum();
    (sum.stored, sum.coming)
}

async fn until_none_is_coming(store: &FileStore) {
    until("uploads that failed are removed", || counted(store).1 == 0).await;
}

fn work() -> Work {
    BackgroundWork::default().begin()
}

#[tokio::test]
async fn a_file_is_its_owners() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path()).await;
    let view = store.put("a", "x.txt", "text/plain", pieces(&["ab", "cd"]), Box::new(())).await.unwrap();
    assert_eq!(store.view("a", &view.id).await.unwrap(), view);
    for (part, expected) in [(None, "abcd"), (Some(1..3), "bc"), (Some(3..4), "d")] {
        let content = store.content("a", &view.id, part).await.unwrap().bytes().await.unwrap();
        assert_eq!(&content[..], expected.as_bytes());
    }
    assert_eq!(view.bytes, 4);
    assert_eq!(store.view("b", &view.id).await.unwrap_err().status, 404);
    for odd in ["../a/x", "file-", "file-../../../../../../etc/passwd00000", ""] {
        assert_eq!(store.view("a", odd).await.unwrap_err().status, 404, "{odd}");
    }
    store.delete("a", &view.id, work()).await.unwrap();
    assert_eq!(store.view("a", &view.id).await.unwrap_err().status, 404);
    assert_eq!(counted(&store), (0, 0));
}

#[tokio::test]
async fn a_file_that_is_removed_twice_at_a_time_is_removed_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path()).await;
    // Like S3, it says of what is not there, too, that it has removed it.
    store.storage.objects = Arc::new(InMemory::new());
    let put =
        async |text: &'static str| store.put("a", "x", "", pieces(&[text]), Box::new(())).await.unwrap();
    let (view, _other) = (put("abcd").await, put("ef").await);
    let (first, second) =
        tokio::join!(store.delete("a", &view.id, work()), store.delete("a", &view.id, work()));
    assert!(first.is_ok(), "{first:?}");
    assert_eq!(second.unwrap_err().status, 404);
    assert_eq!(counted(&store), (2, 0));
}

#[tokio::test]
async fn too_much_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let store = store(folder.path()).await;
    let large = store.put("a", "x", "", pieces(&["01234", "567890"]), Box::new(())).await;
    assert_eq!(large.unwrap_err().status, 413);
    let broken = stream::iter([Ok(Bytes::from_static(b"0123")), Err(Problem::invalid("gone"))]);
    assert_eq!(store.put("a", "x", "", broken, Box::new(())).await.unwrap_err().status, 400);
    until_none_is_coming(&store).await;
    assert_eq!(counted(&store), (0, 0));
    store.put("a", "x", "", pieces(&["0123456789"]), Box::new(())).await.unwrap();
    for owner in ["a", "b"] {
        assert_eq!(
            store.put(owner, "x", "", pieces(&["0123456789"]), Box::new(())).await.unwrap_err().status,
            507
        );
    }
    until_none_is_coming(&store).await;
    assert_eq!(counted(&store), (10, 0));
    // Uploads by other gateways count from the next sweep on. Descriptions count, too.
    let other = self::store(folder.path()).await;
    assert_eq!(counted(&other).1, 0);
    assert!(counted(&other).0 > 10);
}
