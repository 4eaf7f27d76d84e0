//! Stores results and uploads in a folder, or in an object store of a cloud.

mod owners;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path as FsPath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore};
use tokio::task::spawn_blocking;
use url::Url;
use vramq_stores::cloud::CloudStore;
use vramq_stores::reference::{origin, segments};

use crate::folder_store::FolderStore;

/// The least time between two sweeps of an object store, because listing costs money for every thousand objects. A folder is swept whenever
/// the gateway sweeps.
const CLOUD_SWEEP: Duration = Duration::from_secs(600);

/// Old objects that are removed together: the most that S3 takes in one request.
const REMOVED_TOGETHER: usize = 1000;

/// A place of the configuration.
#[derive(Clone, Debug)]
pub enum Place {
    Folder(PathBuf),
    Cloud(Arc<CloudStore>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => write!(f, "{}", folder.display()),
            Self::Cloud(cloud) => write!(f, "{}", cloud.url()),
        }
    }
}

impl Place {
    /// Whether one is inside the other, or the same.
    pub fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Folder(one), Self::Folder(other)) => {
                let (one, other) = (whole(one), whole(other));
                one.starts_with(&other) || other.starts_with(&one)
            }
            (Self::Cloud(one), Self::Cloud(other)) => one.overlaps(other),
            _ => false,
        }
    }
}

/// Whether a URL is of a place, or of something in it.
pub fn covers(base: &Url, url: &Url) -> bool {
    origin(base) == origin(url) && segments(url).starts_with(&segments(base))
}

/// The absolute path of a folder. Links are resolved as far as the path exists.
fn whole(folder: &FsPath) -> PathBuf {
    let path = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let found = path.ancestors().find_map(|known| {
        let rest = path.strip_prefix(known).ok()?;
        Some(std::fs::canonicalize(known).ok()?.join(rest))
    });
    found.unwrap_or(path)
}

/// A place that is open.
pub struct Storage {
    pub objects: Arc<dyn ObjectStore>,
    /// What the URLs of its objects begin with.
    base: Url,
    /// Where a folder is, and which one it was when it was last looked at. `None` for an object store.
    folder: Option<Arc<KnownFolder>>,
    sweep_every: Duration,
    /// When it was last looked through.
    swept: Mutex<Option<Instant>>,
}

/// A folder, to be recognised.
struct KnownFolder {
    path: PathBuf,
    /// `None` while there is no folder.
    identity: Mutex<Option<Identity>>,
}

/// A folder's file system, its number there, and when it was made, because a number is given again.
type Identity = (u64, u64, Option<SystemTime>);

impl KnownFolder {
    fn new(path: PathBuf) -> Self {
        let identity = Mutex::new(identity_of(&path));
        Self { path, identity }
    }

    /// What has become of the folder since the last look, if it is no longer the same.
    fn loss(&self) -> Option<&'static str> {
        let now = identity_of(&self.path);
        let mut known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *known, now);
        let is_same = before.is_none() || before == now;
        (!is_same).then_some(if now.is_some() { "was replaced by another one" } else { "is gone" })
    }
}

fn identity_of(folder: &FsPath) -> Option<Identity> {
    let metadata = std::fs::metadata(folder).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

/// Omits the cloud client, whose `Debug` would show its key.
impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage").field("base", &self.base.as_str()).finish_non_exhaustive()
    }
}

impl Storage {
    /// Opens a place. A folder that is missing is made; an object store is not asked.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn open(place: &Place) -> Result<Self, String> {
        let explained = |error: &dyn fmt::Display| format!("{place}: {error}");
        let (objects, base, folder, sweep_every): (Arc<dyn ObjectStore>, _, _, _) = match place {
            Place::Folder(folder) => {
                std::fs::create_dir_all(folder).map_err(|e| explained(&e))?;
                let folder = std::fs::canonicalize(folder).map_err(|e| explained(&e))?;
                let objects = FolderStore::new(&folder).map_err(|e| explained(&e))?;
                let base = Url::from_directory_path(&folder).map_err(|()| explained(&"has no URL"))?;
                (Arc::new(objects), base, Some(Arc::new(KnownFolder::new(folder))), Duration::ZERO)
            }
            Place::Cloud(cloud) => (cloud.objects(), cloud.url().clone(), None, CLOUD_SWEEP),
        };
        Ok(Self { objects, base, folder, sweep_every, swept: Mutex::new(None) })
    }

    /// The URL of an object, as workers take it for a reference.
    pub fn url_of(&self, path: &Path) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty();
            for part in path.parts() {
                segments.push(part.as_ref());
            }
        }
        url
    }

    /// Whether a URL is of the place, or of something in it.
    pub fn covers(&self, url: &Url) -> bool {
        covers(&self.base, url)
    }

    /// Lists the store. Removes objects that `is_ours` and that are old, and returns the bytes of the others by owner. Each owner has a
    /// folder. In a folder it also removes what was never written to its end, and goes on with the next owner behind what it cannot list.
    ///
    /// # Errors
    /// The listing ended early. What it had listed so far was handled.
    pub async fn sweep(
        &self,
        is_ours: impl Fn(&Path) -> bool,
        mut is_old: impl FnMut(&ObjectMeta) -> bool,
    ) -> object_store::Result<HashMap<String, u64>> {
        let mut listed = match &self.folder {
            Some(folder) => self.list_folder(&folder.path, &is_ours).await?,
            None => self.objects.list(None),
        };
        let mut skipped = None;
        let (mut bytes, mut old, mut ended) = (HashMap::<String, u64>::new(), Vec::new(), Ok(()));
        while let Some(meta) = listed.next().await {
            match meta {
                Ok(meta) if !is_ours(&meta.location) => {}
                Ok(meta) if is_old(&meta) => old.push(meta.location),
                Ok(meta) => {
                    if let Some((owner, _)) = meta.location.as_ref().split_once('/') {
                        *bytes.entry(owner.to_owned()).or_default() += meta.size;
                    }
                }
                Err(error) if self.folder.is_some() => {
                    skipped.get_or_insert(error);
                }
                Err(error) => {
                    ended = Err(error);
                    break;
                }
            }
            if old.len() >= REMOVED_TOGETHER {
                self.remove(std::mem::take(&mut old)).await;
            }
        }
        self.remove(old).await;
        if let Some(error) = skipped {
            tracing::warn!(place = self.base.as_str(), %error, "cannot list a part of the folder: it is neither counted nor removed");
        }
        ended.map(|()| bytes)
    }

    /// Lists the objects of all owners. First removes the unfinished files that killed gateways have left.
    async fn list_folder(
        &self,
        folder: &FsPath,
        is_ours: impl Fn(&Path) -> bool,
    ) -> object_store::Result<BoxStream<'static, object_store::Result<ObjectMeta>>> {
        let path = folder.to_owned();
        let looked = spawn_blocking(move || owners::look(&path)).await.map_err(io::Error::other);
        let found = looked.flatten().map_err(|error| object_store::Error::Generic {
            store: "folder",
            source: format!("{}: {error}", folder.display()).into(),
        })?;
        for left in found.unfinished {
            if is_ours(&Path::from_iter([left.owner.as_str(), left.name.as_str()])) {
                // Another gateway may have removed it.
                let _ = tokio::fs::remove_file(&left.file).await;
            }
        }
        let objects = Arc::clone(&self.objects);
        let lists = stream::iter(found.names).map(move |owner| objects.list(Some(&Path::from(owner))));
        Ok(lists.flatten().boxed())
    }

    async fn remove(&self, old: Vec<Path>) {
        let mut removed = self.objects.delete_stream(stream::iter(old.into_iter().map(Ok)).boxed());
        let (mut failed, mut first) = (0_usize, None);
        while let Some(removed) = removed.next().await {
            match removed {
                // Another gateway may have removed it.
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => {
                    failed += 1;
                    first.get_or_insert(error);
                }
            }
        }
        if let Some(error) = first {
            tracing::warn!(place = self.base.as_str(), %error, failed, "cannot remove old objects: trying again at the next sweep");
        }
    }

    /// Logs that the folder is gone, or is another one than before: storing something makes a missing folder again, so nothing else
    /// would tell. Each loss is logged once.
    pub async fn check_folder(&self) {
        let Some(folder) = &self.folder else { return };
        let looked = Arc::clone(folder);
        // A file system that hangs holds a thread of its own.
        let Ok(Some(what)) = spawn_blocking(move || looked.loss()).await else { return };
        tracing::warn!(
            folder = %folder.path.display(),
            "the folder {what} while the gateway runs: what was stored in it cannot be read any more. New objects are stored in a folder \
             at the same path: check its mount"
        );
    }

    /// The listing ended early: list again.
    pub fn sweep_again(&self) {
        *self.swept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whether a sweep is due. If so, the next one is due only after a while.
    pub fn is_to_be_swept(&self) -> bool {
        let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = swept.is_none_or(|at| at.elapsed() >= self.sweep_every);
        if is_due {
            *swept = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt as _;

    use super::*;

    #[tokio::test]
    async fn a_folder_that_goes_is_noticed_once_also_if_storing_makes_it_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("results");
        let storage = Storage::open(&Place::Folder(path.clone())).unwrap();
        let folder = storage.folder.as_ref().unwrap();
        let store = async || storage.objects.put(&Path::from("a/b"), vec![1].into()).await.unwrap();
        store().await;
        assert_eq!(folder.loss(), None);
        std::fs::remove_dir_all(&path).unwrap();
        assert_eq!(folder.loss(), Some("is gone"));
        assert_eq!(folder.loss(), None);
        store().await;
        assert_eq!(folder.loss(), None);
        std::fs::remove_dir_all(&path).unwrap();
        store().await;
        assert_eq!(folder.loss(), Some("was replaced by another one"));
        assert_eq!(folder.loss(), None);
    }

    #[tokio::test]
    async fn a_folder_with_a_part_that_cannot_be_listed_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        let storage = Storage::open(&Place::Folder(parent.path().to_owned())).unwrap();
        for name in ["a/old", "a/new", "b/new"] {
            storage.objects.put(&Path::from(name), vec![1; 3].into()).await.unwrap();
        }
        std::fs::create_dir(parent.path().join("c")).unwrap();
        // Loops, one of them beside the owners, where a file system may have folders of its own.
        for link in ["loop+", "c/loop"] {
            std::os::unix::fs::symlink(".", parent.path().join(link)).unwrap();
        }
        let long_ago = SystemTime::now() - Duration::from_secs(25 * 3600);
        for (left, written) in
            [("a/new#1", long_ago), ("a/new#2", SystemTime::now()), ("a/other#1", long_ago)]
        {
            let file = std::fs::File::create(parent.path().join(left)).unwrap();
            file.set_modified(written).unwrap();
        }
        let is_ours = |path: &Path| path.as_ref().ends_with("old") || path.as_ref().ends_with("new");
        let bytes = storage.sweep(is_ours, |meta| meta.location.as_ref() == "a/old").await.unwrap();
        assert_eq!(bytes, HashMap::from([("a".to_owned(), 3), ("b".to_owned(), 3)]));
        let is_there = |name| parent.path().join(name).exists();
        assert_eq!(["a/old", "a/new", "b/new"].map(is_there), [false, true, true]);
        assert_eq!(["a/new#1", "a/new#2", "a/other#1"].map(is_there), [false, true, true]);
    }

    #[test]
    fn a_place_knows_its_own_urls() {
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(&Place::Folder(folder.path().join("new"))).unwrap();
        let url = storage.url_of(&Path::from_iter(["owner", "file-1"]));
        assert!(url.path().ends_with("/new/owner/file-1") && url.scheme() == "file", "{url}");
        assert!(storage.covers(&url));
        assert!(storage.is_to_be_swept() && storage.is_to_be_swept());
        let base = "s3://bucket/results/".parse().unwrap();
        let storage =
            Storage { base, folder: None, sweep_every: CLOUD_SWEEP, swept: Mutex::default(), ..storage };
        assert!(storage.is_to_be_swept() && !storage.is_to_be_swept());
        storage.sweep_again();
        assert!(storage.is_to_be_swept() && !storage.is_to_be_swept());
        let covered =
            ["s3://bucket/results/a/job.json", "s3://bucket/%72esults/a", "s3://bucket/in/../results/a"];
        for url in covered {
            assert!(storage.covers(&url.parse().unwrap()), "{url}");
        }
        for url in
            ["s3://bucket/resultsx/a", "s3://other/results/a", "gs://bucket/results/a", "s3://bucket/in"]
        {
            assert!(!storage.covers(&url.parse().unwrap()), "{url}");
        }
        assert_eq!(storage.url_of(&Path::from("a/b")).as_str(), "s3://bucket/results/a/b");
    }
}
