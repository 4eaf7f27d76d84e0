//! The jobs that callers can ask for: all unfinished jobs, and finished ones within limits of bytes and time.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::entry::Entry;
use crate::problem::Problem;

/// The memory of a finished job without its results: entry, events, names. In bytes.
const ENTRY_BYTES: usize = 4 * 1024;

/// The owner, and the id or key that the owner gave. Callers never see each other's jobs.
type Key = (String, String);

/// Invariant: unfinished jobs are bounded by the requests in flight and by the followed jobs of other gateways; finished ones by
/// `bytes_max` and `keep`. Beyond `bytes_max`, jobs of the caller with the most bytes are dropped, so that large results of one caller do
/// not push out those of others.
#[derive(Debug)]
pub struct Jobs {
    bytes_max: usize,
    keep: Duration,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<Key, Arc<Entry>>,
    by_idempotency_key: HashMap<Key, Arc<Entry>>,
    /// The jobs of each caller that have ended. No caller has an empty queue.
    finished: HashMap<String, FinishedOf>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct FinishedOf {
    /// In the order in which they ended.
    jobs: VecDeque<Finished>,
    bytes: usize,
}

#[derive(Debug)]
struct Finished {
    entry: Arc<Entry>,
    idempotency_key: Option<String>,
    bytes: usize,
    at: Instant,
}

/// A job that is to be kept.
#[derive(Debug)]
pub enum Added {
    New,
    /// The same request was made before.
    Existing(Arc<Entry>),
}

impl Kept {
    /// As [`Jobs::same`].
    fn same(
        &self,
        owner: &str,
        id: &str,
        idempotency_key: Option<&str>,
        fingerprint: &[u8; 32],
    ) -> Result<Option<Arc<Entry>>, Problem> {
        let named = |name: &str| (owner.to_owned(), name.to_owned());
        let by_key = idempotency_key.and_then(|key| self.by_idempotency_key.get(&named(key)));
        match by_key.or_else(|| self.by_id.get(&named(id))) {
            Some(before) if before.fingerprint == *fingerprint => Ok(Some(Arc::clone(before))),
            Some(_) => Err(Problem::reused(if idempotency_key.is_some() { "Idempotency-Key" } else { "id" })),
            None => Ok(None),
        }
    }
}

impl Jobs {
    pub fn new(bytes_max: usize, keep: Duration) -> Self {
        Self { bytes_max, keep, kept: Mutex::default() }
    }

    /// Adds a job under its id and, if it has one, its idempotency key.
    ///
    /// # Errors
    /// The id or key stands for another request.
    pub fn add(&self, entry: &Arc<Entry>, idempotency_key: Option<&str>) -> Result<Added, Problem> {
        let mut kept = self.kept();
        self.evict_old(&mut kept, &entry.owner, Instant::now());
        if let Some(before) = kept.same(&entry.owner, &entry.id, idempotency_key, &entry.fingerprint)? {
            return Ok(Added::Existing(before));
        }
        let id = (entry.owner.clone(), entry.id.clone());
        let key = idempotency_key.map(|key| (entry.owner.clone(), key.to_owned()));
        kept.by_id.insert(id, Arc::clone(entry));
        if let Some(key) = key {
            kept.by_idempotency_key.insert(key, Arc::clone(entry));
        }
        Ok(Added::New)
    }

    /// The job that a caller's id or idempotency key already stands for. To answer with it, neither a worker nor the inputs are needed.
    ///
    /// # Errors
    /// The id or key stands for another request.
    pub fn same(
        &self,
        owner: &str,
        id: &str,
        idempotency_key: Option<&str>,
        fingerprint: &[u8; 32],
    ) -> Result<Option<Arc<Entry>>, Problem> {
        let mut kept = self.kept();
        self.evict_old(&mut kept, owner, Instant::now());
        kept.same(owner, id, idempotency_key, fingerprint)
    }

    pub fn find(&self, owner: &str, id: &str) -> Option<Arc<Entry>> {
        let mut kept = self.kept();
        self.evict_old(&mut kept, owner, Instant::now());
        kept.by_id.get(&(owner.to_owned(), id.to_owned())).cloned()
    }

    /// Marks the job as finished: from now on it counts against the bounds, with so many bytes of results.
    pub fn finish(&self, entry: &Arc<Entry>, idempotency_key: Option<&str>, results: usize) {
        let bytes = ENTRY_BYTES + results;
        let mut kept = self.kept();
        let now = Instant::now();
        kept.bytes += bytes;
        let of_owner = kept.finished.entry(entry.owner.clone()).or_default();
        of_owner.bytes += bytes;
        of_owner.jobs.push_back(Finished {
            entry: Arc::clone(entry),
            idempotency_key: idempotency_key.map(str::to_owned),
            bytes,
            at: now,
        });
        self.evict_old(&mut kept, &entry.owner, now);
        if kept.bytes > self.bytes_max {
            self.evict_all_old(&mut kept, now);
        }
        while kept.bytes > self.bytes_max
            && let Some(owner) = kept.largest_owner()
        {
            kept.remove_oldest(&owner);
        }
    }

    /// Forgets a job that this gateway does not answer for, and frees its name. The job was not published, or another gateway knows its
    /// end.
    pub fn forget(&self, entry: &Arc<Entry>, idempotency_key: Option<&str>) {
        self.kept().remove(entry, idempotency_key);
    }

    /// Forgets jobs that ended too long ago.
    pub fn sweep(&self) {
        self.evict_all_old(&mut self.kept(), Instant::now());
    }

    /// The number of known jobs, and the bytes of those that have ended.
    pub fn size(&self) -> (usize, usize) {
        let kept = self.kept();
        (kept.by_id.len(), kept.bytes)
    }

    /// Forgets a caller's jobs that ended too long ago, so that its requests never see them. Those of other callers wait for the next
    /// sweep.
    fn evict_old(&self, kept: &mut Kept, owner: &str, now: Instant) {
        let is_old = |job: &Finished| now.saturating_duration_since(job.at) >= self.keep;
        while kept.oldest(owner).is_some_and(is_old) {
            kept.remove_oldest(owner);
        }
    }

    fn evict_all_old(&self, kept: &mut Kept, now: Instant) {
        let owners: Vec<_> = kept.finished.keys().cloned().collect();
        for owner in owners {
            self.evict_old(kept, &owner, now);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Nothing panics while it holds the lock.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn oldest(&self, owner: &str) -> Option<&Finished> {
        self.finished.get(owner)?.jobs.front()
    }

    /// The caller whose finished jobs have most bytes.
    fn largest_owner(&self) -> Option<String> {
        self.finished.iter().max_by_key(|(_, of_owner)| of_owner.bytes).map(|(owner, _)| owner.clone())
    }

    fn remove_oldest(&mut self, owner: &str) {
        let Some(of_owner) = self.finished.get_mut(owner) else { return };
        let Some(Finished { entry, idempotency_key, bytes, .. }) = of_owner.jobs.pop_front() else { return };
        of_owner.bytes -= bytes;
        if of_owner.jobs.is_empty() {
            self.finished.remove(owner);
        }
        self.bytes -= bytes;
        self.remove(&entry, idempotency_key.as_deref());
    }

    /// Removes exactly this job: its names may stand for a younger one by now.
    fn remove(&mut self, entry: &Arc<Entry>, idempotency_key: Option<&str>) {
        let remove = |map: &mut HashMap<Key, Arc<Entry>>, name: &str| {
            let key = (entry.owner.clone(), name.to_owned());
            if map.get(&key).is_some_and(|found| Arc::ptr_eq(found, entry)) {
                map.remove(&key);
            }
        };
        remove(&mut self.by_id, &entry.id);
        if let Some(key) = idempotency_key {
            remove(&mut self.by_idempotency_key, key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::State;
    use serde_json::json;

    fn entry(owner: &str, id: &str, body: u8) -> Arc<Entry> {
        Arc::new(Entry::new(id.to_owned(), id.to_owned(), owner.to_owned(), "m".to_owned(), 1, [body; 32]))
    }

    fn end(jobs: &Jobs, entry: &Arc<Entry>) {
        entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        jobs.finish(entry, Some("key"), 0);
    }

    #[test]
    fn names_belong_to_their_owner() {
        let jobs = Jobs::new(1 << 20, Duration::from_secs(60));
        assert!(matches!(jobs.add(&entry("a", "1", 0), Some("key")), Ok(Added::New)));
        assert!(matches!(jobs.add(&entry("b", "1", 1), Some("key")), Ok(Added::New)));
        assert!(jobs.find("c", "1").is_none() && jobs.find("a", "1").is_some());
    }

    #[test]
    fn the_same_key_is_the_same_job_and_another_body_a_mistake() {
        let jobs = Jobs::new(1 << 20, Duration::from_secs(60));
        let first = entry("a", "1", 0);
        jobs.add(&first, Some("key")).unwrap();
        match jobs.add(&entry("a", "2", 0), Some("key")).unwrap() {
            Added::Existing(found) => assert!(Arc::ptr_eq(&found, &first)),
            Added::New => panic!("a second job"),
        }
        assert_eq!(jobs.add(&entry("a", "3", 1), Some("key")).unwrap_err().status, 422);
        assert_eq!(jobs.add(&entry("a", "1", 1), None).unwrap_err().status, 422);
    }

    #[test]
    fn a_caller_with_many_results_pushes_out_its_own() {
        let jobs = Jobs::new(4 * ENTRY_BYTES, Duration::from_secs(60));
        let finish = |owner: &str, id: &str| {
            let entry = entry(owner, id, 0);
            jobs.add(&entry, None).unwrap();
            entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
            jobs.finish(&entry, None, 0);
        };
        finish("small", "first");
        for id in 0..100 {
            finish("large", &id.to_string());
        }
        finish("small", "second");
        let is_kept = |owner: &str, id: &str| jobs.find(owner, id).is_some();
        assert!(is_kept("small", "first") && is_kept("small", "second"));
        assert!(!is_kept("large", "97") && is_kept("large", "98") && is_kept("large", "99"));
        assert_eq!(jobs.size(), (4, 4 * ENTRY_BYTES));
        let of_owner = |owner: &str| jobs.kept().finished.get(owner).map(|of_owner| of_owner.bytes);
        assert_eq!((of_owner("small"), of_owner("large")), (Some(2 * ENTRY_BYTES), Some(2 * ENTRY_BYTES)));
    }

    #[test]
    fn jobs_beyond_their_time_go_before_younger_jobs_and_with_a_sweep() {
        let jobs = Jobs::new(3 * ENTRY_BYTES, Duration::from_secs(60));
        for (owner, id) in [("a", "1"), ("b", "1"), ("b", "2")] {
            let entry = entry(owner, id, 0);
            jobs.add(&entry, None).unwrap();
            end(&jobs, &entry);
        }
        let age = |owner: &str| {
            let mut kept = jobs.kept();
            let oldest = kept.finished.get_mut(owner).unwrap().jobs.front_mut().unwrap();
            oldest.at = oldest.at.checked_sub(Duration::from_secs(60)).unwrap();
        };
        age("a");
        let third = entry("b", "3", 0);
        jobs.add(&third, None).unwrap();
        end(&jobs, &third);
        assert_eq!(jobs.size(), (3, 3 * ENTRY_BYTES));
        assert!(jobs.find("a", "1").is_none() && jobs.find("b", "1").is_some());
        age("b");
        jobs.sweep();
        assert_eq!(jobs.size(), (2, 2 * ENTRY_BYTES));
    }

    #[test]
    fn finished_jobs_go_by_bytes_and_by_time() {
        let jobs = Jobs::new(2 * ENTRY_BYTES, Duration::from_secs(60));
        for id in ["1", "2", "3"] {
            let entry = entry("a", id, 0);
            jobs.add(&entry, None).unwrap();
            end(&jobs, &entry);
        }
        assert!(jobs.find("a", "1").is_none() && jobs.find("a", "3").is_some());
        assert_eq!(jobs.size(), (2, 2 * ENTRY_BYTES));
        let jobs = Jobs::new(1 << 20, Duration::ZERO);
        let old = entry("a", "1", 0);
        jobs.add(&old, Some("key")).unwrap();
        assert!(jobs.find("a", "1").is_some(), "unfinished jobs stay");
        end(&jobs, &old);
        assert!(jobs.find("a", "1").is_none());
        assert!(jobs.kept().finished.is_empty());
        assert!(
            matches!(jobs.add(&entry("a", "2", 1), Some("key")), Ok(Added::New)),
            "the key is free again"
        );
    }
}
