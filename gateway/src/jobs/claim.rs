//! Claims on job names, in a result store that gateways share. If several gateways get the same request at the same moment, the one with
//! the claim publishes the job. A gateway holds its claim until it has recorded the job, or has failed to publish it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use uuid::Uuid;

use super::in_time::{STORED_WITHIN, in_time};
use crate::folder_store::CLAIM_SUFFIX;
use crate::keys::is_name;

/// How often a gateway renews a claim. Publishing may take longer than this if the broker does not answer.
const RENEW_EVERY: Duration = Duration::from_secs(3);

/// A claim that nobody has renewed for so long is abandoned: its gateway is gone, or stood still. Seen by the clock of the gateway that
/// waits: those of other machines may differ.
pub const ABANDONED_AFTER: Duration = Duration::from_secs(15);

/// A claim of this age by the store's clock is abandoned even for a gateway that has not waited.
const OLD: Duration = Duration::from_secs(300);

/// The most claims that are read: the first one and its successors. A sweep removes old ones.
const LOOKED_AT_MAX: usize = 8;

/// The nonce of a claim that has none: a power cut may leave a file empty.
const DAMAGED: &str = "damaged";

/// A claim of this gateway. Released when it is dropped.
#[derive(Debug)]
pub struct Claim {
    held: oneshot::Sender<()>,
}

impl Claim {
    /// Whether the claim is still renewed. If not, this process or the store stood still, and another gateway may have the successor.
    pub fn is_held(&self) -> bool {
        !self.held.is_closed()
    }
}

/// Tries to claim a job's name.
#[derive(Debug)]
pub struct Claimant {
    objects: Arc<dyn ObjectStore>,
    owner: String,
    id: String,
    nonce: String,
    /// The claims of other gateways, the first one and then its successors. With the time since when each is unchanged.
    seen: Vec<(Seen, Instant)>,
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
        Self { objects, owner: owner.to_owned(), id: id.to_owned(), nonce: new_nonce(), seen: Vec::new() }
    }

    /// The claim; `None` while another gateway has it.
    ///
    /// # Errors
    /// The store fails, or does not support creating an object only if it does not exist.
    pub async fn claim(&mut self) -> object_store::Result<Option<Claim>> {
        let mut own = path(&self.owner, &self.id);
        let mut abandoned = Vec::new();
        while abandoned.len() < LOOKED_AT_MAX {
            if self.create(&own).await? {
                return self.hold_as_successor(abandoned, own).await;
            }
            let Some(found) = self.look(&own).await? else { return Ok(None) };
            if found.nonce == self.nonce {
                // An earlier attempt created the claim, but its answer was lost.
                return self.hold_as_successor(abandoned, own).await;
            }
            if !self.is_abandoned(abandoned.len(), &found) {
                return Ok(None);
            }
            // Create the successor, which only one gateway can do. Removing the abandoned claim could remove a younger one that has
            // replaced it.
            let next = successor(&self.owner, &self.id, &found.nonce);
            abandoned.push((own, found));
            own = next;
        }
        Ok(None)
    }

    /// Holds the created claim `own`, as the successor of the abandoned ones, if those are unchanged. If they have changed, another gateway was
    /// the successor before, and has published the job.
    async fn hold_as_successor(
        &mut self,
        abandoned: Vec<(Path, Seen)>,
        own: Path,
    ) -> object_store::Result<Option<Claim>> {
        let unchanged = self.are_unchanged(&abandoned).await;
        if !matches!(unchanged, Ok(true)) {
            drop(self.hold(vec![own]));
            // The claim is being removed. With a new nonce, the next attempt does not take it for its own.
            self.nonce = new_nonce();
            return unchanged.map(|_| None);
        }
        if !abandoned.is_empty() {
            tracing::warn!(
                job = self.id,
                "the gateway that was to publish a job is gone: publishing it here"
            );
        }
        let paths = abandoned.into_iter().map(|(path, _)| path).chain([own]).collect();
        Ok(Some(self.hold(paths)))
    }

    async fn are_unchanged(&self, claims: &[(Path, Seen)]) -> object_store::Result<bool> {
        for (path, seen) in claims {
            let found = self.look(path).await?;
            if found.as_ref() != Some(seen) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Like [`claim`](Self::claim), in a task that goes on if the caller is dropped, so that no claim is left behind. `None`: the store did
    /// not answer in time.
    pub async fn claim_in_time(mut self) -> Option<(Self, object_store::Result<Option<Claim>>)> {
        let claiming = tokio::spawn(async move {
            let job = self.id.clone();
            let claimed = in_time(&job, "cannot claim the name of a job", self.claim()).await?;
            Some((self, claimed))
        });
        claiming.await.ok().flatten()
    }

    /// How long the claim of another gateway has been unchanged. With several claims, the last one.
    pub fn silent_for(&self) -> Duration {
        self.seen.last().map_or(Duration::ZERO, |(_, since)| since.elapsed())
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

    /// Whether the claim behind `before` others is abandoned.
    fn is_abandoned(&mut self, before: usize, found: &Seen) -> bool {
        if self.seen.get(before).is_none_or(|(seen, _)| seen != found) {
            // The successors of the claim that was here do not count any more.
            self.seen.truncate(before);
            self.seen.push((found.clone(), Instant::now()));
        }
        let silent_for = self.seen.get(before).map_or(Duration::ZERO, |(_, since)| since.elapsed());
        let age = SystemTime::now().duration_since(found.renewed_at).unwrap_or_default();
        silent_for >= ABANDONED_AFTER || age >= OLD
    }

    /// Renews these objects until the claim is dropped, then removes them in their order. The abandoned ones are renewed, too: a sweep that
    /// removed the first would make the name free.
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
                    // This process or the store stood still, and others may have the successor. A sweep removes the claim.
                    return;
                }
                if is_held {
                    let renewing = async {
                        // The own one first.
                        for path in paths.iter().rev() {
                            objects.put(path, PutPayload::from(nonce.clone())).await?;
                        }
                        Ok::<(), object_store::Error>(())
                    };
                    if let Ok(Ok(())) = timeout(STORED_WITHIN, renewing).await {
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
        Claim { held }
    }
}

fn new_nonce() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Names of callers and ids of jobs are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
fn path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}{CLAIM_SUFFIX}")])
}

/// The path of the claim that succeeds an abandoned one.
fn successor(owner: &str, id: &str, nonce: &[u8]) -> Path {
    let nonce = std::str::from_utf8(nonce).ok().filter(|nonce| is_name(nonce)).unwrap_or(DAMAGED);
    Path::from_iter([owner, &format!("{id}.{nonce}{CLAIM_SUFFIX}")])
}

/// Whether something in the place has the name of a claim.
pub(super) fn is_named(path: &Path) -> bool {
    let Some((owner, name)) = path.as_ref().split_once('/') else { return false };
    is_name(owner) && name.strip_suffix(CLAIM_SUFFIX).is_some_and(|id| is_name(id) || is_successor(id))
}

/// Whether a name is that of a successor: an id, and the nonce of the claim before.
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

    /// Makes the claim that the claimant saw last look old.
    fn has_waited(claimant: &mut Claimant) {
        let (_, since) = claimant.seen.last_mut().unwrap();
        *since = since.checked_sub(ABANDONED_AFTER).unwrap();
    }

    async fn wait_until_empty(folder: &std::path::Path) {
        while std::fs::read_dir(folder).unwrap().next().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// All try at a time, and what is claimed is released.
    async fn only_one_claims(waiting: &mut [Claimant]) {
        let mut claims = Vec::new();
        for claimant in waiting {
            claims.extend(claimant.claim().await.unwrap());
        }
        assert_eq!(claims.len(), 1);
    }

    #[tokio::test]
    async fn a_name_is_claimed_once_until_the_claim_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let claimant = claimants(folder.path());
        let [mut one, mut other] = [(); 2].map(|()| claimant("a", "job"));
        let claim = one.claim().await.unwrap().unwrap();
        assert!(claim.is_held() && other.claim().await.unwrap().is_none());
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
        // The second is what a power cut may leave.
        for written in ["of-one-that-is-gone", ""] {
            std::fs::write(&left, written).unwrap();
            let mut waiting = [(); 4].map(|()| claimant("a", "job"));
            for claimant in &mut waiting {
                assert!(claimant.claim().await.unwrap().is_none());
                has_waited(claimant);
            }
            only_one_claims(&mut waiting).await;
            // What is left of the first claim is removed with its successor. Then the name is like any other.
            drop(claimed(&mut claimant("a", "job")).await);
            wait_until_empty(&folder.path().join("a")).await;
        }
    }

    #[tokio::test]
    async fn one_claimant_follows_a_follower_that_is_gone_too() {
        let folder = tempfile::tempdir().unwrap();
        let claimant = claimants(folder.path());
        let own = folder.path().join("a");
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("job.claim"), "gone-1").unwrap();
        std::fs::write(own.join("job.gone-1.claim"), "gone-2").unwrap();
        let mut waiting = [(); 4].map(|()| claimant("a", "job"));
        for claimant in &mut waiting {
            // For the first, and for its follower.
            for seen in 1..=2 {
                assert!(claimant.claim().await.unwrap().is_none());
                assert_eq!(claimant.seen.len(), seen);
                has_waited(claimant);
            }
        }
        only_one_claims(&mut waiting).await;
        drop(claimed(&mut claimant("a", "job")).await);
        wait_until_empty(&own).await;
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
        has_waited(&mut waiting);
        // Renewed. Older kernels give a write so soon after another one the same time.
        let file = std::fs::File::options().append(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(1)).unwrap();
        assert!(waiting.claim().await.unwrap().is_none() && waiting.silent_for() < ABANDONED_AFTER);
        // An hour old, so nobody has to wait.
        file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        assert!(claimant("a", "job").claim().await.unwrap().is_some());
    }

    #[test]
    fn claims_are_known_by_their_names() {
        let long = "j".repeat(64);
        let nonce = Uuid::new_v4().simple().to_string();
        for claim in [path("a", "job"), path("a", &long), successor("a", &long, nonce.as_bytes())] {
            assert!(is_named(&claim), "{claim}");
        }
        for other in ["job.claim", "a/.claim", "a/job.json", "a/b/job.claim", "a/b c.claim"] {
            assert!(!is_named(&Path::from(other)), "{other}");
        }
        for nonce in [&b""[..], b"..", b"a/b", b"\xff"] {
            assert_eq!(successor("a", "job", nonce), path("a", "job.damaged"));
        }
    }
}
