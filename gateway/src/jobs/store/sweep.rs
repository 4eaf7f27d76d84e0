//! Sweeps of the result store: what is too old is removed, and the rest is counted.

use std::time::SystemTime;

use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt as _};

use super::{ResultStore, path};
use crate::files::is_id;
use crate::jobs::entry::State;
use crate::jobs::{claim, record, view};
use crate::keys::is_name;
use crate::off_runtime::off_runtime;

/// The age from which a sweep checks whether a record's job has ended. By then most jobs have ended, and their records are gone.
const RECORD_OLD_S: u64 = 600;

/// The age from which a claim was left behind: a gateway renews its claims every few seconds.
const CLAIM_OLD_S: u64 = 600;

impl ResultStore {
    /// Removes results, records and claims that are too old, and counts the others. Other objects are left alone.
    ///
    /// # Errors
    /// The listing ended early. What it had listed so far was handled.
    pub async fn sweep(&self) -> object_store::Result<()> {
        let mut records = Vec::new();
        let is_old = |meta: &ObjectMeta| {
            let is_old = self.is_old(meta);
            if !is_old && age_s(meta) >= RECORD_OLD_S && record::named(&meta.location).is_some() {
                records.push(meta.clone());
            }
            is_old
        };
        self.used.counted(self.storage.sweep(is_ours, is_old).await?);
        for left in records {
            self.remove_if_ended(&left).await;
        }
        Ok(())
    }

    /// Removes a record that was left behind: its job's end was stored later than the record.
    async fn remove_if_ended(&self, left: &ObjectMeta) {
        let Some((owner, id)) = record::named(&left.location) else { return };
        let removed = match self.has_ended(owner, id, left).await {
            Ok(true) => record::remove(&self.storage, owner, id).await,
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(job = id, %error, "cannot remove the record of a job that has ended: the next sweep tries again");
        }
    }

    /// Whether the job of a record has ended since the record was written. A stored withdrawal does not count, because it is stored before
    /// the job ends, and the gateway that repeats the withdrawal needs the record until then.
    async fn has_ended(&self, owner: &str, id: &str, record: &ObjectMeta) -> object_store::Result<bool> {
        let path = path(owner, id);
        match self.storage.objects.head(&path).await {
            Ok(end) if end.last_modified > record.last_modified => {}
            Ok(_) | Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        let written = self.storage.objects.get(&path).await?.bytes().await?;
        let end = off_runtime(written.len(), move || view::end_of(&written)).await;
        Ok(end.is_some_and(|(state, _)| state != State::Withdrawn.as_str()))
    }

    pub(super) fn is_old(&self, meta: &ObjectMeta) -> bool {
        if claim::is_named(&meta.location) {
            return age_s(meta) >= CLAIM_OLD_S;
        }
        let keep = self.settings.keep;
        let is_record = record::named(&meta.location).is_some();
        let keep = if is_record { keep.max(record::KEPT_LEAST) } else { keep };
        age_s(meta) >= keep.as_secs()
    }
}

fn age_s(meta: &ObjectMeta) -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let stored = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
    now.saturating_sub(stored)
}

/// Whether a path is that of a result, a record or a claim. The description of an upload is not: another sweep handles it.
pub(super) fn is_ours(path: &Path) -> bool {
    if record::named(path).is_some() || claim::is_named(path) {
        return true;
    }
    let Some((owner, name)) = path.as_ref().split_once('/') else { return false };
    is_name(owner) && name.strip_suffix(".json").is_some_and(|id| is_name(id) && !is_id(id))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::tests::{entry, store};
    use super::*;
    use crate::jobs::Failure;
    use crate::problem::Problem;

    #[test]
    fn objects_that_the_gateway_did_not_write_are_known_by_their_names() {
        assert!(is_ours(&path("a", "job")) && is_ours(&path("a.b", "file-1")));
        assert!(is_ours(&record::path("a", "job")));
        let upload = format!("a/file-{}.json", "0a".repeat(16));
        for other in ["job.json", "a/b/job.json", "a/job", "a/.json", "a/b c.json", "a", "", &upload] {
            assert!(!is_ours(&Path::from(other)), "{other}");
        }
        for other in ["job.open", "a/.open", "a/b/job.open", "a/b c.open"] {
            assert!(!is_ours(&Path::from(other)), "{other}");
        }
    }

    #[tokio::test]
    async fn others_objects_outlive_a_sweep() {
        let folder = tempfile::tempdir().unwrap();
        let (theirs, old) = (folder.path().join("a/theirs.txt"), folder.path().join("a/old.json"));
        std::fs::create_dir(folder.path().join("a")).unwrap();
        for file in [&theirs, &old] {
            std::fs::write(file, "x").unwrap();
        }
        let forgetful = store(folder.path(), 200, 0).await;
        assert!(theirs.exists() && !old.exists());
        assert_eq!(forgetful.used.sum().stored, 0);
    }

    #[tokio::test]
    async fn a_record_beside_a_younger_end_goes_with_a_sweep() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), 1 << 20, 3_600).await;
        let failed = || {
            let failure =
                Failure { problem: Problem::invalid("why"), outputs: Vec::new(), is_published: true };
            State::Failed(Arc::new(failure))
        };
        for (id, end) in
            [("ended", failed()), ("withdrawn", State::Withdrawn), ("again", failed()), ("just", failed())]
        {
            store.put(&entry(id), &end).await;
        }
        let minutes_ago = |name: &str, minutes: u64| {
            let path = folder.path().join("a").join(name);
            let file = std::fs::File::options().create(true).append(true).open(path).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(60 * minutes)).unwrap();
        };
        // One whose gateway died before it removed the record; one that was withdrawn, and may still run; one that runs again; one that
        // runs; one that has just ended.
        for (name, minutes) in [
            ("ended.open", 30),
            ("ended.json", 20),
            ("withdrawn.open", 30),
            ("withdrawn.json", 20),
            ("again.open", 20),
            ("again.json", 30),
            ("running.open", 30),
            ("just.open", 2),
            ("just.json", 1),
            ("left.claim", 20),
            ("held.claim", 1),
        ] {
            minutes_ago(name, minutes);
        }
        store.sweep().await.unwrap();
        let is_there = |name: &str| folder.path().join("a").join(name).exists();
        assert!(!is_there("left.claim") && is_there("held.claim"));
        assert!(!is_there("ended.open") && is_there("ended.json"));
        assert!(["withdrawn.open", "again.open", "running.open", "just.open"].into_iter().all(is_there));
    }
}
