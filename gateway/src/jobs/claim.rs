//! Claims on the name of a job, in a store of results that gateways share: of the gateways that get the same request at the same moment,
//! one publishes the job. A claim lasts until its gateway has recorded the job, or has not published it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use uuid::Uuid;

use super::in_time::{STORED_WITHIN, in_time};
use crate::keys::is_name;

/// How often a gateway renews a claim: a broker that does not answer may keep it from publishing for long.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// A claim that nobody has renewed for so long is abandoned: its gateway is gone, or stood still. Seen by the clock of the gateway that
/// waits: those of other machines may differ.
pub const ABANDONED_AFTER: Duration = Duration::from_secs(15);

/// One that is so old by the clock of the store is abandoned for a gateway that has not waited, too.
const OLD: Duration = Duration::from_secs(300);

/// A claim of this gateway. Released when it is dropped.
#[derive(Debug)]
pub struct Claim {
    _held: oneshot::Sender<()>,
}

/// Tries to claim a job's name.
#[derive(Debug)]
pub struct Claimant {
    objects: Arc<dyn ObjectStore>,
    owner: String,
    id: String,
    nonce: String,
    /// The claim of another gateway, and since when it has been as it is.
    seen: Option<(Seen, Instant)>,
}

/// A claim as it is stored. Its time changes when its gateway renews it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    nonce: Bytes,
    renewed_at: SystemTime,
    e_tag: Option<String>,
}

impl Claimant {
    pub fn new(objects: Arc<dyn ObjectStore>, owner: &str, id: &str) -> Self {
        let nonce = Uuid::new_v4().simple().to_string();
        Self { objects, owner: owner.to_owned(), id: id.to_owned(), nonce, seen: None }
    }

    /// The claim; `None` while another gateway has it.
    ///
    /// # Errors
    /// The store fails, or cannot create an object only if there is none.
    pub async fn claim(&mut self) -> object_store::Result<Option<Claim>> {
        let first = path(&self.owner, &self.id);
        if self.create(&first).await? {
            return Ok(Some(self.hold(vec![first])));
        }
        let Some(before) = self.look(&first).await? else { return Ok(None) };
        if before.nonce == self.nonce {
            // It was created, and the answer was lost.
            return Ok(Some(self.hold(vec![first])));
        }
        if !self.is_abandoned(&before) {
            return Ok(None);
        }
        // Only one gateway can follow an abandoned claim. Removing it would also remove a younger one that came meanwhile.
        let Some(next) = successor(&self.owner, &self.id, &before.nonce) else { return Ok(None) };
        if !self.create(&next).await? {
            return Ok(None);
        }
        let found = self.look(&first).await;
        let is_followed = matches!(&found, Ok(Some(found)) if *found == before);
        // If not, another gateway has followed it before, and is through.
        let claim = self.hold(if is_followed { vec![first, next] } else { vec![next] });
        found?;
        if is_followed {
            tracing::warn!(
                job = self.id,
                "the gateway that was to publish a job is gone: publishing it here"
            );
        }
        Ok(is_followed.then_some(claim))
    }

    /// As [`claim`](Self::claim), and goes on if its caller is dropped: no claim is left behind. `None`: the store did not answer in time.
    pub async fn claim_in_time(mut self) -> Option<(Self, object_store::Result<Option<Claim>>)> {
        let claiming = tokio::spawn(async move {
            let job = self.id.clone();
            let claimed = in_time(&job, "cannot claim the name of a job", self.claim()).await?;
            Some((self, claimed))
        });
        claiming.await.ok().flatten()
    }

    /// How long the claim of another gateway has been as it is.
    pub fn silent_for(&self) -> Duration {
        self.seen.as_ref().map_or(Duration::ZERO, |(_, since)| since.elapsed())
    }

    async fn create(&self, path: &Path) -> object_store::Result<bool> {
        let options = PutOptions::from(PutMode::Create);
        match self.objects.put_opts(path, PutPayload::from(self.nonce.clone()), options).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn look(&self, path: &Path) -> object_store::Result<Option<Seen>> {
        match self.objects.get(path).await {
            Ok(found) => {
                let (renewed_at, e_tag) = (found.meta.last_modified.into(), found.meta.e_tag.clone());
                Ok(Some(Seen { nonce: found.bytes().await?, renewed_at, e_tag }))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_abandoned(&mut self, found: &Seen) -> bool {
        if self.seen.as_ref().is_none_or(|(seen, _)| seen != found) {
            self.seen = Some((found.clone(), Instant::now()));
        }
        let age = SystemTime::now().duration_since(found.renewed_at).unwrap_or_default();
        self.silent_for() >= ABANDONED_AFTER || age >= OLD
    }

    /// Renews the last of these objects until the claim is dropped, then removes all of them in their order.
    fn hold(&self, paths: Vec<Path>) -> Claim {
        let (held, mut dropped) = oneshot::channel();
        let (objects, nonce, job) = (Arc::clone(&self.objects), self.nonce.clone(), self.id.clone());
        tokio::spawn(async move {
            let mut ticks = interval(RENEW_EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks.tick().await;
            let mut renewed = Instant::now();
            let mut is_held = true;
            while is_held {
                tokio::select! {
                    _ = &mut dropped => is_held = false,
                    _ = ticks.tick() => {}
                }
                if renewed.elapsed() >= ABANDONED_AFTER {
                    // This process stood still, or the store: others may have followed the claim. A sweep removes it.
                    return;
                }
                if let (true, Some(path)) = (is_held, paths.last()) {
                    let renewing = objects.put(path, PutPayload::from(nonce.clone()));
                    if let Ok(Ok(_)) = timeout(STORED_WITHIN, renewing).await {
                        renewed = Instant::now();
                    }
                }
            }
            for path in paths {
                let removed = timeout(STORED_WITHIN, objects.delete(&path)).await;
                if let Ok(Err(error)) = removed
                    && !matches!(error, object_store::Error::NotFound { .. })
                {
                    tracing::warn!(job, %error, "cannot remove the claim on a job: a sweep removes it");
                }
            }
        });
        Claim { _held: held }
    }
}

/// Names of callers and ids of jobs are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
fn path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}.claim")])
}

/// The claim that follows an abandoned one.
fn successor(owner: &str, id: &str, nonce: &[u8]) -> Option<Path> {
    let nonce = std::str::from_utf8(nonce).ok().filter(|nonce| is_name(nonce))?;
    Some(Path::from_iter([owner, &format!("{id}.{nonce}.claim")]))
}

/// Whether something in the place has the name of a claim.
pub(super) fn is_named(path: &Path) -> bool {
    let Some((owner, name)) = path.as_ref().split_once('/') else { return false };
    is_name(owner) && name.strip_suffix(".claim").is_some_and(|id| is_name(id) || is_successor(id))
}

/// An id, and the nonce of the claim before.
fn is_successor(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(id, nonce)| is_name(id) && is_name(nonce))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Place, Storage};

    fn claimants(folder: &std::path::Path) -> impl Fn(&str, &str) -> Claimant {
        let storage = Storage::open(&Place::Folder(folder.to_owned())).unwrap();
        move |owner, id| Claimant::new(Arc::clone(&storage.objects), owner, id)
    }

    /// Waits until another claimant gets it.
    async fn claimed(claimant: &mut Claimant) -> Claim {
        loop {
            match claimant.claim().await.unwrap() {
                Some(claim) => return claim,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    #[tokio::test]
    async fn a_name_is_claimed_once_until_the_claim_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let claimant = claimants(folder.path());
        let [mut one, mut other] = [(); 2].map(|()| claimant("a", "job"));
        let claim = one.claim().await.unwrap().unwrap();
        assert!(other.claim().await.unwrap().is_none());
        assert!(claimant("b", "job").claim().await.unwrap().is_some());
        assert!(claimant("a", "job.2").claim().await.unwrap().is_some());
        drop(claim);
        drop(claimed(&mut other).await);
        drop(claimed(&mut one).await);
    }

    #[tokio::test]
    async fn one_claimant_follows_a_claim_that_nobody_renews() {
        let folder = tempfile::tempdir().unwrap();
        let claimant = claimants(folder.path());
        let left = folder.path().join("a/job.claim");
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(&left, "of-one-that-is-gone").unwrap();
        let mut waiting = [(); 4].map(|()| claimant("a", "job"));
        for claimant in &mut waiting {
            assert!(claimant.claim().await.unwrap().is_none());
            let (_, since) = claimant.seen.as_mut().unwrap();
            *since = since.checked_sub(ABANDONED_AFTER).unwrap();
        }
        let mut claims = Vec::new();
        for claimant in &mut waiting {
            claims.extend(claimant.claim().await.unwrap());
        }
        assert_eq!(claims.len(), 1);
        drop(claims);
        // What is left of the first goes with its successor, and the name is as any other.
        drop(claimed(&mut claimant("a", "job")).await);
        let mut names = std::fs::read_dir(folder.path().join("a")).unwrap();
        while names.next().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            names = std::fs::read_dir(folder.path().join("a")).unwrap();
        }
    }

    #[tokio::test]
    async fn a_claim_that_is_renewed_is_not_abandoned() {
        let folder = tempfile::tempdir().unwrap();
        let claimant = claimants(folder.path());
        let path = folder.path().join("a/job.claim");
        std::fs::create_dir(folder.path().join("a")).unwrap();
        std::fs::write(&path, "of-one-that-lives").unwrap();
        let mut waiting = claimant("a", "job");
        assert!(waiting.claim().await.unwrap().is_none());
        let (_, since) = waiting.seen.as_mut().unwrap();
        *since = since.checked_sub(ABANDONED_AFTER).unwrap();
        std::fs::write(&path, "of-one-that-lives").unwrap();
        assert!(waiting.claim().await.unwrap().is_none() && waiting.silent_for() < ABANDONED_AFTER);
        // Of an hour ago: nobody has to wait for it.
        let file = std::fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        assert!(claimant("a", "job").claim().await.unwrap().is_some());
    }

    #[test]
    fn claims_are_known_by_their_names() {
        let long = "j".repeat(64);
        let nonce = Uuid::new_v4().simple().to_string();
        for claim in [path("a", "job"), path("a", &long), successor("a", &long, nonce.as_bytes()).unwrap()] {
            assert!(is_named(&claim), "{claim}");
        }
        for other in ["job.claim", "a/.claim", "a/job.json", "a/b/job.claim", "a/b c.claim"] {
            assert!(!is_named(&Path::from(other)), "{other}");
        }
        for nonce in [&b""[..], b"..", b"a/b", b"\xff"] {
            assert_eq!(successor("a", "job", nonce), None);
        }
    }
}
