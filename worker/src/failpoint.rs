//! Failpoints: places where tests make the worker die, panic, fail or hang. Off unless `worker.drill` asks for one
//! (`VRAMQ__WORKER__DRILL`).
//!
//! `SITE=ACTION`, followed by options: `skip=N` (nothing happens the first N times), `times=N` (it happens N times; `crash` needs only one)
//! and `job=ID` (only for that job). A hang ends by `while=FILE` (when the file does not exist) or `tickets=PIPE` (when a byte can be read
//! from this named pipe, or no process has it open for writing any more).

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// How often a hang checks whether its file still exists.
const POLL: Duration = Duration::from_millis(10);

/// Places in a job's handling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Delivered; in the event loop.
    Received,
    /// About to be read, on a thread of the pool.
    Decode,
    /// On the device; in the executor.
    Pass,
    /// All outputs are there, the last are not published.
    Ran,
    /// Sent to the broker, not confirmed.
    SentPart,
    SentReply,
    SentJob,
    SentLetter,
    /// Confirmed, and nothing done after it.
    ConfirmedPart,
    ConfirmedReply,
    ConfirmedJob,
    ConfirmedLetter,
    /// The job is acknowledged.
    Acked,
}

/// What happens at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The process dies at once.
    Crash,
    /// The code at the site panics, as by a fault of its own or of a library.
    Panic,
    /// The pass fails, as if the engine had.
    Fail,
    /// The thread that reaches it stops there.
    Hang,
}

const SITES: [(&str, Site); 13] = [
    ("received", Site::Received),
    ("decode", Site::Decode),
    ("pass", Site::Pass),
    ("ran", Site::Ran),
    ("sent-part", Site::SentPart),
    ("sent-reply", Site::SentReply),
    ("sent-job", Site::SentJob),
    ("sent-letter", Site::SentLetter),
    ("confirmed-part", Site::ConfirmedPart),
    ("confirmed-reply", Site::ConfirmedReply),
    ("confirmed-job", Site::ConfirmedJob),
    ("confirmed-letter", Site::ConfirmedLetter),
    ("acked", Site::Acked),
];

const ACTIONS: [(&str, Action); 4] =
    [("crash", Action::Crash), ("panic", Action::Panic), ("fail", Action::Fail), ("hang", Action::Hang)];

/// A configured failpoint: an action at a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failpoint {
    site: Site,
    action: Action,
    skip: u64,
    times: u64,
    job: Option<String>,
    hang_while: Option<PathBuf>,
    tickets: Option<PathBuf>,
}

/// The failpoint that is in effect.
#[derive(Debug)]
struct Active {
    failpoint: Failpoint,
    reached: AtomicU64,
    /// The pipe of tickets, once it is open.
    pipe: Mutex<Option<File>>,
}

/// Set once, at start.
static FAILPOINT: OnceLock<Active> = OnceLock::new();

impl FromStr for Failpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = |names: &[&str]| names.join(", ");
        let expected = || {
            let sites = named(&SITES.map(|(name, _)| name));
            let actions = named(&ACTIONS.map(|(name, _)| name));
            format!(
                "`{text}` is not a failpoint: SITE=ACTION[,skip=N][,times=N][,job=ID][,while=FILE|,tickets=PIPE], with a SITE of {sites} and \
                 an ACTION of {actions}; `fail` only at `pass`, `hang` also at `received` and `decode`"
            )
        };
        let mut pairs = text.split(',').map(|pair| pair.split_once('=').ok_or_else(expected));
        let (site, action) = pairs.next().ok_or_else(expected)??;
        let find = SITES.iter().find(|(name, _)| *name == site);
        let (_, site) = *find.ok_or_else(expected)?;
        let (_, action) = *ACTIONS.iter().find(|(name, _)| *name == action).ok_or_else(expected)?;
        let possible = match action {
            Action::Crash | Action::Panic => true,
            Action::Fail => site == Site::Pass,
            Action::Hang => matches!(site, Site::Received | Site::Decode | Site::Pass),
        };
        if !possible {
            return Err(expected());
        }
        let mut failpoint =
            Self { site, action, skip: 0, times: u64::MAX, job: None, hang_while: None, tickets: None };
        for pair in pairs {
            match pair? {
                ("skip", n) => failpoint.skip = n.parse().map_err(|_| expected())?,
                ("times", n) => failpoint.times = n.parse().map_err(|_| expected())?,
                ("job", id) => failpoint.job = Some(id.to_owned()),
                ("while", file) if action == Action::Hang => failpoint.hang_while = Some(file.into()),
                ("tickets", pipe) if action == Action::Hang => failpoint.tickets = Some(pipe.into()),
                _ => return Err(expected()),
            }
        }
        Ok(failpoint)
    }
}

impl Failpoint {
    /// Puts the failpoint into effect. Later calls have no effect.
    pub fn start(self) {
        tracing::warn!(failpoint = ?self, "a failpoint is set (worker.drill): the worker dies, panics, fails or hangs there");
        let _ = FAILPOINT.set(Active { failpoint: self, reached: AtomicU64::new(0), pipe: Mutex::default() });
    }

    fn covers(&self, nth: u64) -> bool {
        (self.skip..self.skip.saturating_add(self.times)).contains(&nth)
    }
}

/// Must be called where a job reaches a site. Dies, panics or hangs there, if configured. For a pass, returns the action, which the executor
/// carries out.
pub fn reach<'a>(site: Site, jobs: impl IntoIterator<Item = Option<&'a str>>) -> Option<Action> {
    let Active { failpoint, reached, .. } = FAILPOINT.get()?;
    if failpoint.site != site
        || !failpoint.job.as_deref().is_none_or(|id| jobs.into_iter().any(|job| job == Some(id)))
    {
        return None;
    }
    if !failpoint.covers(reached.fetch_add(1, Ordering::Relaxed)) {
        return None;
    }
    match failpoint.action {
        action if site == Site::Pass => return Some(action),
        Action::Crash => std::process::abort(),
        Action::Panic => panic(),
        Action::Hang => hang(),
        Action::Fail => {}
    }
    None
}

#[allow(clippy::panic, reason = "somebody has asked for it")]
fn panic() -> ! {
    panic!("made to panic by a failpoint")
}

/// Hangs: for ever, while the failpoint's file exists, or until there is a ticket.
fn hang() {
    let Some(Active { failpoint, pipe, .. }) = FAILPOINT.get() else { return };
    if let Some(path) = &failpoint.tickets {
        return take_ticket(path, pipe);
    }
    let file = failpoint.hang_while.as_deref();
    while file.is_none_or(|file| file.exists()) {
        std::thread::sleep(POLL);
    }
}

/// Waits for a byte in a named pipe. Returns at once if the pipe cannot be read or has no writer any more.
fn take_ticket(path: &Path, opened: &Mutex<Option<File>>) {
    let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
    if opened.is_none() {
        *opened = File::open(path).ok();
    }
    if let Some(pipe) = opened.as_mut() {
        let _ = pipe.read_exact(&mut [0]);
    }
}

/// Carries out the action that [`reach`] returned for a pass.
///
/// # Errors
/// The pass must fail.
pub fn act(action: Option<Action>) -> Result<(), String> {
    match action {
        None => Ok(()),
        Some(Action::Fail) => Err("made to fail by a failpoint".to_owned()),
        Some(Action::Crash) => std::process::abort(),
        Some(Action::Panic) => panic(),
        Some(Action::Hang) => {
            hang();
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failpoints_are_read_and_everything_else_is_rejected() {
        let failpoint: Failpoint = "confirmed-part=crash,skip=2,times=3,job=a".parse().unwrap();
        assert_eq!((failpoint.site, failpoint.action), (Site::ConfirmedPart, Action::Crash));
        assert_eq!(failpoint.job.as_deref(), Some("a"));
        assert_eq!((0..8).filter(|nth| failpoint.covers(*nth)).collect::<Vec<_>>(), [2, 3, 4]);
        let failpoint: Failpoint = "pass=fail".parse().unwrap();
        assert!(failpoint.covers(0) && failpoint.covers(u64::MAX - 1));
        let failpoint: Failpoint = "decode=panic".parse().unwrap();
        assert_eq!((failpoint.site, failpoint.action), (Site::Decode, Action::Panic));
        let failpoint: Failpoint = "received=hang,while=/tmp/a b".parse().unwrap();
        assert_eq!((failpoint.site, failpoint.hang_while), (Site::Received, Some("/tmp/a b".into())));
        let failpoint: Failpoint = "pass=hang,tickets=/tmp/a".parse().unwrap();
        assert_eq!(failpoint.tickets, Some("/tmp/a".into()));
        for text in [
            "",
            "pass",
            "pass=explode",
            "nowhere=crash",
            "ran=hang",
            "decode=fail",
            "pass=fail,skip=x",
            "pass=fail,x=1",
            "pass=crash,while=x",
            "pass=crash,tickets=x",
        ] {
            assert!(text.parse::<Failpoint>().unwrap_err().contains("SITE=ACTION"), "{text}");
        }
    }
}
