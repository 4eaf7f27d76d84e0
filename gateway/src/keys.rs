//! The API keys: SHA-256 digests in a file that is read again when it changes.

mod file;
mod stable_file;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};
use tokio::task::spawn_blocking;

use stable_file::{StableFile, TextDigest, digest_of};

use crate::in_flight::InFlight;

/// How often the file is checked. A key that was removed from the file works for two checks at most.
const RELOAD_EVERY: Duration = Duration::from_millis(500);

const NAME_BYTES_MAX: usize = 64;

/// The caller of a gateway without keys.
const LOCAL: &str = "local";

/// One caller and what it may do.
#[derive(Debug)]
pub struct Caller {
    /// Owns jobs, files and idempotency keys; shown in logs.
    pub name: String,
    /// `None`: all models.
    pub models: Option<Vec<String>>,
    /// The most requests in flight; `None`: the gateway's default.
    pub in_flight: Option<usize>,
    pub requests_per_minute: Option<u32>,
    pub priority: Option<u8>,
    /// The tenant whose jobs these are when workers share passes between callers.
    pub tenant: Option<String>,
    /// Whether the caller may see dead letters.
    pub operator: bool,
    /// Kept when the file is read again.
    pub usage: Arc<Usage>,
}

/// What a caller is using.
#[derive(Debug, Default)]
pub struct Usage {
    pub in_flight: InFlight,
    /// Withdrawn jobs that have not ended, apart from those in flight.
    pub withdrawn: InFlight,
    /// Requests that read results; they do not count as in flight.
    pub readers: InFlight,
    /// Event streams and downloads, until their last byte is sent.
    pub streams: InFlight,
    bucket: Mutex<Option<Bucket>>,
}

/// A token bucket for requests, which refills over a minute.
#[derive(Debug)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Usage {
    /// Takes one request from the bucket. An `Err` is the time until there is one.
    pub fn take_request(&self, per_minute: u32, now: Instant) -> Result<(), Duration> {
        if per_minute == 0 {
            return Err(Duration::from_secs(60));
        }
        let most = f64::from(per_minute);
        // Nothing panics while it holds the lock.
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = bucket.get_or_insert(Bucket { left: most, at: now });
        let refilled = bucket.left + now.saturating_duration_since(bucket.at).as_secs_f64() * most / 60.0;
        *bucket = Bucket { left: refilled.min(most), at: now };
        if bucket.left >= 1.0 {
            bucket.left -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - bucket.left) * 60.0 / most))
    }
}

impl Caller {
    fn local() -> Self {
        Self {
            name: LOCAL.to_owned(),
            models: None,
            in_flight: None,
            requests_per_minute: None,
            priority: None,
            tenant: None,
            operator: true,
            usage: Arc::default(),
        }
    }

    pub fn may_use(&self, model: &str) -> bool {
        self.models.as_ref().is_none_or(|models| models.iter().any(|allowed| allowed == model))
    }
}

/// Callers by the digests of their keys.
#[derive(Debug, Default)]
struct KeyRing(Vec<([u8; 32], Arc<Caller>)>);

impl KeyRing {
    /// Logs that nobody has a key.
    fn warn_if_empty(&self, file: &Path) {
        if self.0.is_empty() {
            tracing::warn!(file = %file.display(), "the file of API keys has no key: every request that needs one gets 401");
        }
    }

    /// The caller whose digest `is_it` accepts. Compares all digests, so that the time does not reveal the position of the right one.
    fn find(&self, mut is_it: impl FnMut(&[u8; 32]) -> Choice) -> Option<Arc<Caller>> {
        let mut found = None;
        for (known, caller) in &self.0 {
            if bool::from(is_it(known)) {
                found = Some(Arc::clone(caller));
            }
        }
        found
    }
}

/// All keys, as last read from the file.
#[derive(Debug)]
pub struct Keys {
    /// `None`: every caller is the local one.
    file: Option<PathBuf>,
    local: Arc<Caller>,
    ring: RwLock<KeyRing>,
    /// The text that [`open`](Self::open) has read. The file may change before it is watched: a gateway first connects to the broker.
    first_text: Option<TextDigest>,
}

impl Keys {
    /// Reads the file, if there is one.
    ///
    /// # Errors
    /// Everything that is wrong with the file, each with the file's name and without secrets.
    pub fn open(file: Option<&Path>) -> Result<Self, Vec<String>> {
        let (ring, first_text) = match file {
            Some(path) => {
                let text = file::read(path).map_err(|fault| vec![fault])?;
                let named = |fault| format!("{}, {fault}", path.display());
                let ring = ring(&text, &KeyRing::default());
                let ring = ring.map_err(|faults| faults.into_iter().map(named).collect::<Vec<_>>())?;
                ring.warn_if_empty(path);
                (ring, Some(digest_of(&text)))
            }
            None => (KeyRing::default(), None),
        };
        let (file, local) = (file.map(Path::to_owned), Arc::new(Caller::local()));
        Ok(Self { file, local, ring: RwLock::new(ring), first_text })
    }

    /// Whether callers need a key.
    pub fn required(&self) -> bool {
        self.file.is_some()
    }

    /// The caller with this key. All unknown keys take the same time.
    pub fn caller(&self, key: Option<&str>) -> Option<Arc<Caller>> {
        if self.file.is_none() {
            return Some(Arc::clone(&self.local));
        }
        let digest: [u8; 32] = Sha256::digest(key?).into();
        // Nothing panics while it holds the lock.
        let ring = self.ring.read().unwrap_or_else(PoisonError::into_inner);
        ring.find(|known| digest.ct_eq(known))
    }

    /// Reads the file again whenever it has changed since [`open`](Self::open). Ends only with the process.
    pub async fn watch(self: Arc<Self>) {
        self.watch_by(file::read).await;
    }

    async fn watch_by(&self, read: fn(&Path) -> Result<String, String>) {
        let Some(path) = self.file.clone() else { return };
        let mut stable = StableFile::new(self.first_text);
        loop {
            tokio::time::sleep(RELOAD_EVERY).await;
            let looked_at = path.clone();
            // A file system that hangs holds a thread of its own, and not one of the runtime's few.
            let found = match spawn_blocking(move || read(&looked_at)).await {
                Ok(found) => found,
                // Without its message, which may repeat what is in the file. The next look may succeed.
                Err(failed) if failed.is_panic() => {
                    Err(format!("{}: reading it panicked. Please report it", path.display()))
                }
                // The runtime ends.
                Err(_) => return,
            };
            let text = match found {
                Ok(text) if stable.is_new(&text) => text,
                Ok(_) => continue,
                Err(error) => {
                    // Log once, not at every check.
                    if stable.forget() {
                        tracing::error!(
                            error,
                            "cannot read the file of API keys: the gateway keeps the API keys that it has"
                        );
                    }
                    continue;
                }
            };
            let mut known = self.ring.write().unwrap_or_else(PoisonError::into_inner);
            match ring(&text, &known) {
                Ok(new) => {
                    tracing::info!(keys = new.0.len(), "read the changed file of API keys");
                    new.warn_if_empty(&path);
                    *known = new;
                }
                Err(faults) => tracing::error!(
                    error = faults.join("; "),
                    file = %path.display(),
                    "the changed file of API keys has faults: the gateway keeps the API keys that it has"
                ),
            }
        }
    }
}

/// The callers of the file's text. Those that were in `before` keep their usage.
fn ring(text: &str, before: &KeyRing) -> Result<KeyRing, Vec<String>> {
    let mut usages: HashMap<String, Arc<Usage>> =
        before.0.iter().map(|(_, caller)| (caller.name.clone(), Arc::clone(&caller.usage))).collect();
    let caller = |entry: file::Entry| {
        let usage = Arc::clone(usages.entry(entry.name.clone()).or_default());
        let caller = Caller {
            name: entry.name,
            models: entry.models,
            in_flight: entry.in_flight_max,
            requests_per_minute: entry.requests_per_minute,
            priority: entry.priority,
            tenant: entry.tenant,
            operator: entry.operator,
            usage,
        };
        (entry.digest, Arc::new(caller))
    };
    Ok(KeyRing(file::parse(text)?.into_iter().map(caller).collect()))
}

/// Whether a text can name a caller.
pub fn is_name(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed) && name != "." && name != ".."
}

/// A new key, and its entry for the file.
pub fn new_key(name: &str) -> (String, String) {
    let key = format!("vramq-{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
    let digest: String = Sha256::digest(&key).iter().map(|byte| format!("{byte:02x}")).collect();
    (key, format!("[[key]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n"))
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_key_is_its_callers_and_no_other() {
        let (key, entry) = new_key("team-a");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("{entry}models = [\"minilm\"]\noperator = true\n")).unwrap();
        let keys = Keys::open(Some(file.path())).unwrap();
        let caller = keys.caller(Some(&key)).unwrap();
        assert_eq!((caller.name.as_str(), caller.operator), ("team-a", true));
        assert!(caller.may_use("minilm") && !caller.may_use("other"));
        for wrong in ["", "vramq-", &key[1..], &format!("{key} ")] {
            assert!(keys.caller(Some(wrong)).is_none());
        }
        assert!(keys.caller(None).is_none());
    }

    #[test]
    fn every_key_is_compared_wherever_the_right_one_is() {
        let entries: String = ["a", "b", "c"].map(|name| new_key(name).1).concat();
        let ring = ring(&entries, &KeyRing::default()).unwrap();
        let digests: Vec<_> = ring.0.iter().map(|(digest, _)| *digest).collect();
        for (digest, name) in digests.iter().zip([Some("a"), Some("b"), Some("c")]).chain([(&[0; 32], None)])
        {
            let mut compared = 0;
            let found = ring.find(|known| {
                compared += 1;
                digest.ct_eq(known)
            });
            assert_eq!((found.map(|caller| caller.name.clone()).as_deref(), compared), (name, 3));
        }
    }

    #[test]
    fn a_reload_keeps_what_callers_use() {
        let (_, entry) = new_key("a");
        let first = ring(&entry, &KeyRing::default()).unwrap();
        let held = first.0[0].1.usage.in_flight.enter(1, Instant::now()).unwrap();
        let second = ring(&new_key("a").1, &first).unwrap();
        assert!(
            second.0[0].1.usage.in_flight.enter(1, Instant::now()).is_err()
                && second.0[0].1.usage.readers.enter(1, Instant::now()).is_ok()
        );
        drop(held);
        assert!(second.0[0].1.usage.in_flight.enter(1, Instant::now()).is_ok());
    }

    #[tokio::test]
    async fn a_file_that_changes_before_it_is_watched_is_read_again() {
        is_read_again(file::read).await;
    }

    #[tokio::test]
    async fn a_look_at_the_file_that_panics_is_not_the_last_one() {
        is_read_again(|path| {
            static HAS_PANICKED: AtomicBool = AtomicBool::new(false);
            assert!(HAS_PANICKED.swap(true, Ordering::Relaxed), "a fault of the gateway");
            file::read(path)
        })
        .await;
    }

    /// The runtime of this test has one thread, and a look ends once another task runs.
    #[tokio::test]
    async fn a_look_at_a_file_system_that_hangs_holds_up_nobody() {
        static LOOKS: AtomicBool = AtomicBool::new(false);
        static GOES_ON: AtomicBool = AtomicBool::new(false);
        tokio::spawn(async {
            while !LOOKS.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            GOES_ON.store(true, Ordering::Relaxed);
        });
        is_read_again(|path| {
            LOOKS.store(true, Ordering::Relaxed);
            let began = Instant::now();
            while !GOES_ON.load(Ordering::Relaxed) {
                assert!(began.elapsed() < Duration::from_secs(30), "the runtime waits");
                std::thread::sleep(Duration::from_millis(1));
            }
            file::read(path)
        })
        .await;
    }

    async fn is_read_again(read: fn(&Path) -> Result<String, String>) {
        const DEADLINE: Duration = Duration::from_secs(90);
        let file = tempfile::NamedTempFile::new().unwrap();
        let [(removed, first), (added, second)] = [(); 2].map(|()| new_key("a"));
        std::fs::write(file.path(), first).unwrap();
        let keys = Arc::new(Keys::open(Some(file.path())).unwrap());
        std::fs::write(file.path(), second).unwrap();
        let watched = Arc::clone(&keys);
        let watching = tokio::spawn(async move { watched.watch_by(read).await });
        let is_read = async {
            while keys.caller(Some(&added)).is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(DEADLINE, is_read).await.unwrap();
        assert!(keys.caller(Some(&removed)).is_none());
        watching.abort();
    }

    #[test]
    fn requests_come_back_over_a_minute() {
        let usage = Usage::default();
        let start = Instant::now();
        assert!(usage.take_request(2, start).is_ok() && usage.take_request(2, start).is_ok());
        assert_eq!(usage.take_request(2, start), Err(Duration::from_secs(30)));
        assert!(usage.take_request(2, start + Duration::from_secs(30)).is_ok());
        assert!(usage.take_request(2, start + Duration::from_secs(31)).is_err());
    }
}
