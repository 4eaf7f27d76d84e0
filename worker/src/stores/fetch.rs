//! Fetches the inputs that a job refers to. Memory for all of them is reserved before the first is read.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use tokio::sync::OwnedSemaphorePermit;
use vramq_core::event::FetchFault;
use vramq_core::ids::StoreIndex;
use vramq_core::rejection::Rejection;
use vramq_core::units::Mib;
use vramq_schemas::Reason;
use vramq_stores::Fault;

use super::{MEMORY_UNIT, Place, Store, Stores, Wanted, of_item, stores_of};

/// The most inputs of one job that are fetched at a time, so that a job with many does not block a store's other fetches.
const FETCHES_PER_JOB: usize = 4;

/// How long fetching all inputs of a job may take, including the wait for memory and for other jobs' fetches. After it another worker may
/// be faster.
const JOB_MAX: Duration = Duration::from_secs(300);

/// How many bytes are read at a time.
const PIECE_BYTES: usize = 64 * 1024;

/// The fetched inputs of a job, with the host memory that they take until the job ends.
#[derive(Debug)]
pub struct Fetched {
    /// Index within the job, and bytes.
    pub inputs: Vec<(usize, Vec<u8>)>,
    pub memory: OwnedSemaphorePermit,
}

/// Host memory that is reserved for a job, in permits.
struct Reserved(Mutex<OwnedSemaphorePermit>);

impl Reserved {
    fn new(permits: OwnedSemaphorePermit) -> Arc<Self> {
        Arc::new(Self(Mutex::new(permits)))
    }

    /// Removes and returns memory for so many bytes; `None` if there is less.
    fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        self.permits().split(permits_of(bytes) as usize)
    }

    /// Returns all but the memory for so many bytes to the other jobs.
    fn keep(&self, bytes: u64) {
        let mut permits = self.permits();
        let excess = permits.num_permits().saturating_sub(permits_of(bytes) as usize);
        drop(permits.split(excess));
    }

    fn permits(&self) -> MutexGuard<'_, OwnedSemaphorePermit> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the reads of a job share.
struct Reservation {
    /// Reserved bytes that are not used yet.
    left: AtomicU64,
    memory: Arc<Reserved>,
}

impl Reservation {
    fn take(&self, bytes: u64) -> bool {
        let taken = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).is_ok()
    }
}

/// What a job takes of the memory of one of its stores. Each of its reads from the store has it, too.
struct Part {
    object_max: u64,
    memory: Arc<Reserved>,
}

/// All memory of a job while its inputs are fetched. A read that hangs goes on when its job gives it up. It keeps memory for its object, of
/// its store's part, and leaves the rest to other jobs and other stores.
struct Held {
    parts: BTreeMap<StoreIndex, Part>,
    reservation: Arc<Reservation>,
}

impl Held {
    fn part(&self, store: StoreIndex) -> Option<Arc<Reserved>> {
        self.parts.get(&store).map(|part| Arc::clone(&part.memory))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut kept = 0_u64;
        for Part { object_max, memory } in self.parts.values() {
            let reads = Arc::strong_count(memory).saturating_sub(1) as u64;
            let bytes = reads.saturating_mul(*object_max);
            memory.keep(bytes);
            kept = kept.saturating_add(bytes);
        }
        self.reservation.memory.keep(kept);
    }
}

impl Stores {
    /// Fetches the inputs that a job refers to, at most `job_max` bytes together, and for no longer than `until`. May be dropped: fetches
    /// that have begun end by themselves.
    ///
    /// # Errors
    /// The fault of the first input that cannot be fetched.
    pub async fn fetch(
        &self,
        wanted: Vec<Wanted>,
        job_max: u64,
        until: Instant,
    ) -> Result<Fetched, FetchFault> {
        let stores = stores_of(&wanted);
        let began = Instant::now();
        let until = until.min(began + JOB_MAX);
        let longest = until.saturating_duration_since(began);
        // Reading from a folder has no limit of its own, so without other reasons all stores of the job are at fault.
        let late = |what: &str, stores: Vec<StoreIndex>| {
            let seconds = longest.as_secs_f64();
            let mut error = format!("the job's inputs were not fetched within {seconds:.0} s{what}");
            if !stores.is_empty() {
                let names: Vec<_> = stores.iter().map(|store| self.stores[store.0].name.as_str()).collect();
                error += &format!("; stores that did not answer: {}", names.join(", "));
            }
            let rejection = Rejection::new(Reason::StoreUnavailable, error);
            FetchFault { rejection, is_transient: true, stores, took: longest }
        };
        let until = tokio::time::Instant::from_std(until);
        let objects_max =
            wanted.iter().fold(0_u64, |sum, wanted| sum.saturating_add(wanted.store.object_max));
        let bound = objects_max.min(job_max);
        let reserved = tokio::time::timeout_at(until, self.reserve(&wanted, bound)).await;
        let Ok(Some(held)) = reserved else {
            // A wait behind other jobs is no fault of a store, but one behind reads that hang is.
            let hung = stores.into_iter().filter(|store| self.stores[store.0].has_abandoned_reads());
            let what = ": the host memory for fetched inputs (worker.fetch_mib) is taken";
            return Err(late(what, hung.collect()));
        };
        let fetches = stream::iter(wanted).map(|wanted| {
            let part = held.part(wanted.store.index);
            fetch_one(wanted, part, Arc::clone(&held.reservation), bound)
        });
        let inputs = fetches.buffered(FETCHES_PER_JOB).try_collect::<Vec<_>>();
        let Ok(inputs) = tokio::time::timeout_at(until, inputs).await else {
            return Err(late("", stores));
        };
        let inputs = inputs?;
        let Reservation { left, memory } = &*held.reservation;
        // Cannot be `None`: no more was used than is reserved.
        let Some(memory) = memory.take(bound.saturating_sub(left.load(Ordering::Acquire))) else {
            return Err(late("", Vec::new()));
        };
        // The inputs are here, so the rest is free for other jobs, and so are the stores' parts.
        drop(held);
        Ok(Fetched { inputs, memory })
    }
}

impl Stores {
    /// Reserves memory for the inputs of a job: first each store's part, where jobs for a store that does not answer wait for each other,
    /// then the common part. Always in the order of the stores, so that two jobs cannot deadlock.
    async fn reserve(&self, wanted: &[Wanted], bound: u64) -> Option<Held> {
        let permits = permits_of(bound);
        let mut parts = BTreeMap::new();
        for store in &self.stores {
            if wanted.iter().any(|wanted| Arc::ptr_eq(&wanted.store, store)) {
                let permits = permits.min(store.memory_max);
                let memory = Arc::clone(&store.memory).acquire_many_owned(permits).await.ok()?;
                let memory = Reserved::new(memory);
                parts.insert(store.index, Part { object_max: store.object_max, memory });
            }
        }
        let memory = Arc::clone(&self.memory).acquire_many_owned(permits).await.ok()?;
        let reservation = Reservation { left: AtomicU64::new(bound), memory: Reserved::new(memory) };
        Some(Held { parts, reservation: Arc::new(reservation) })
    }
}

/// Memory for so many bytes, at least one unit.
fn permits_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(MEMORY_UNIT)).unwrap_or(u32::MAX).max(1)
}

async fn fetch_one(
    wanted: Wanted,
    part: Option<Arc<Reserved>>,
    reservation: Arc<Reservation>,
    bound: u64,
) -> Result<(usize, Vec<u8>), FetchFault> {
    let Wanted { item, reference: _, store } = &wanted;
    let (item, index, store) = (*item, store.index, Arc::clone(store));
    let fetch = async {
        // Never closed.
        let permit = Arc::clone(&store.fetches).acquire_owned().await.ok();
        let (_of_job, of_thread) = store.abandoned.begin();
        let began = Instant::now();
        let fetch = tokio::task::spawn_blocking(move || {
            // They stay with the thread, even if it hangs and the job has given it up.
            let (_permit, _part, _of_thread) = (permit, part, of_thread);
            read(&wanted, &reservation, bound)
        });
        let result = fetch.await.unwrap_or_else(|_| {
            Err(Fault::Unavailable("the fetch panicked; see the worker's log".to_owned()))
        });
        result.map_err(|fault| of_item(fault, item, index, began.elapsed()))
    };
    fetch.await.map(|bytes| (item, bytes))
}

/// Reads an object. Blocks.
fn read(wanted: &Wanted, reservation: &Reservation, bound: u64) -> Result<Vec<u8>, Fault> {
    let Wanted { reference, store, .. } = wanted;
    let (mut reader, length): (Box<dyn Read + Send>, _) = match &store.place {
        Place::Folder(folder) => {
            let (file, length) = folder.open(&reference.segments[store.segments.len()..])?;
            (Box::new(file), Some(length))
        }
        Place::Http(http) => http.get(reference)?,
        Place::Cloud(cloud) => {
            let (body, length) = cloud.get(reference)?;
            (Box::new(body), Some(length))
        }
    };
    if let Some(length) = length
        && length > store.object_max
    {
        return Err(too_large(wanted, store, &format!("has {}", Mib(length))));
    }
    // Allocates at once if the length is known: growing would take twice the reserved memory.
    let length = length.unwrap_or(0).min(reservation.left.load(Ordering::Acquire));
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let count = match reader.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(Fault::Unavailable(format!("read {}: {error}", reference.shown())));
            }
        };
        if (bytes.len() + count) as u64 > store.object_max {
            return Err(too_large(wanted, store, "has more"));
        }
        if !reservation.take(count as u64) {
            let shown = reference.shown();
            let what = format!("with {shown} the job's inputs take more than {} (fetch_mib_max)", Mib(bound));
            return Err(Fault::TooLarge(what));
        }
        bytes.extend_from_slice(&piece[..count]);
    }
    reference.check(&bytes).map_err(Fault::Mismatch)?;
    Ok(bytes)
}

fn too_large(wanted: &Wanted, store: &Store, has: &str) -> Fault {
    let (shown, name, most) = (wanted.reference.shown(), &store.name, Mib(store.object_max));
    Fault::TooLarge(format!("{shown} {has}; store `{name}` allows {most} (object_mib_max)"))
}

#[cfg(test)]
#[path = "fetch_tests.rs"]
mod tests;
